"""Models decoding with tensor parallelism over several machines, and checks the model.

    python bench/scaling.py [--bandwidth 11.4 --memory 8 --network 1 --latency 0.1]     # GB/s, GB, Gbit/s, ms
    sudo .venv/bin/python bench/scaling.py --check            # two network namespaces, cables of known latency

For a token, each machine reads its part of the packed weights once. A layer gathers four times (lowbit.tensor_parallel, exact):
the heads' outputs, the output of the projection after them, the products in the MLP, and the output of its last matrix; the
head gathers the logits. A gather among n machines takes n - 1 steps in a ring. A step of gloo takes two latencies: one for
"ready" from the receiver, one for the data.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lowbit.llm.shapes import shape_config

ROOT = Path(__file__).parents[1]
BITS = 4.5  # 4 bits, groups of 32
MESSAGES_PER_STEP = 2  # gloo's: "ready", and the data
SHARE = 0.7  # share of the bandwidth that decoding reaches: docs/measurements/llm.md has 0.71 to 0.87 on x86


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    hidden: int
    heads: int  # outputs of all query heads
    keys: int  # outputs of all KV heads
    mlp: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """Weights that a token reads: all except a table of embeddings that is not also the head."""
        layer = self.hidden * (2 * self.heads + 2 * self.keys + 3 * self.mlp)
        return self.layers * layer + self.hidden * self.vocabulary

    def gathers(self) -> list[int]:
        """Number of values in each gather of a token."""
        return self.layers * [self.heads, self.hidden, self.mlp, self.hidden] + [self.vocabulary]


@dataclass(frozen=True)
class Machine:
    name: str
    bandwidth: float  # of reading memory, GB/s
    memory: float  # GB
    network: float  # Gbit/s
    latency: float  # one way, ms


def of_config(name: str, config) -> Model:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Model(
        name, config.num_hidden_layers, config.hidden_size, head * config.num_attention_heads,
        head * config.num_key_value_heads, config.intermediate_size, config.vocab_size,
    )  # fmt: skip


def exchanged(model: Model, machines: int, network: float, latency: float) -> float:
    """Seconds of all gathers of a token."""
    steps = machines - 1
    return sum(
        steps * (MESSAGES_PER_STEP * latency / 1e3 + 4 * numbers / machines / (network * 1e9 / 8))
        for numbers in model.gathers()
    )


def token_seconds(model: Model, machine: Machine, machines: int) -> float:
    """Seconds per token on equal machines, packed at BITS per weight, with a short context."""
    read = model.weights * BITS / 8 / machines / (SHARE * machine.bandwidth * 1e9)
    return read + exchanged(model, machines, machine.network, machine.latency)


MODELS = [
    of_config("llama-3.2-1b", shape_config("llama-3.2-1b")),
    of_config("llama-3.1-8b", shape_config("llama-3.1-8b")),
    Model("llama-3.3-70b", 80, 8192, 8192, 1024, 28672, 128256),
]
# Bandwidth: published measurements for the Raspberry Pi 5 (docs/scaling.md), 0.8 of the nominal rate for the other two.
MACHINES = [
    Machine("Raspberry Pi 5, Gigabit Ethernet", 11.4, 8, 1, 0.1),
    Machine("Mac mini M4, 10 Gbit Ethernet", 96, 16, 10, 0.05),
    Machine("Graviton4, 96 cores, 40 Gbit network", 430, 384, 40, 0.03),
]
COUNTS = (1, 2, 4, 8)


def table(machines: list[Machine]) -> None:
    for machine in machines:
        print(
            f"\n### {machine.name}\n\n{machine.memory:g} GB of memory, read at {machine.bandwidth:g} GB/s; network with "
            f"{machine.network:g} Gbit/s and {machine.latency:g} ms one way.\n"
        )
        print("| Model | " + " | ".join(f"{count} machine{'s' * (count > 1)}, tokens/s" for count in COUNTS) + " |")
        print("|---|" + "---|" * len(COUNTS))
        for model in MODELS:
            cells = []
            for count in COUNTS:
                # Each machine has the whole table of embeddings, at the same bits; 1 GB is reserved for everything else.
                part = (model.weights / count + model.hidden * model.vocabulary) * BITS / 8 / 1e9
                fits = part + 1 <= machine.memory
                cells.append(f"{1 / token_seconds(model, machine, count):.1f}" if fits else "too large")
            print(f"| {model.name} | {' | '.join(cells)} |")


def node_rate(nodes: int, link: float, placement: str) -> float:
    """Read rate of all threads together, in units of one node's memory; `link`: rate of reads from other nodes, likewise.

    one node: all pages are in one node's memory. interleave: a share of each node's reads comes over the link. local: no reads
    come over the link.
    """
    remote = (nodes - 1) / nodes
    return {"one node": 1.0, "interleave": nodes * min(1.0, link / remote), "local": float(nodes)}[placement]


def node_table() -> None:
    print("\n### Several nodes of memory in one machine\n")
    print("| Nodes | Link | All pages on one node | Interleaved | A part on each node |")
    print("|---|---|---|---|---|")
    for nodes, link in ((2, 0.25), (2, 0.5), (4, 0.25), (4, 0.5), (8, 0.25)):
        cells = [f"{node_rate(nodes, link, placement):.2g}" for placement in ("one node", "interleave", "local")]
        print(f"| {nodes} | {link:g} | {' | '.join(cells)} |")


def run(delay: float, packed: Path, tokens: int) -> float:
    """Seconds per token in two namespaces with a cable of this latency (ms)."""
    environment = {**os.environ, "DELAY_MS": str(delay), "MBIT": "1000", "OMP_NUM_THREADS": "1"}
    command = [ROOT / "examples/two_machines/namespaces.sh", sys.executable, packed, "Return the number of"]
    said = subprocess.run(
        [*map(str, command), "--tokens", str(tokens)], env=environment, capture_output=True, text=True, check=True
    )
    count, seconds = re.search(r"(\d+) tokens in ([0-9.]+) s", said.stdout).groups()
    return float(seconds) / int(count)


def check(rounds: int, tokens: int) -> None:
    import lowbit
    import transformers

    source = ROOT / "examples/tiny_llama/model"
    model = of_config("tiny_llama", transformers.AutoConfig.from_pretrained(source))
    delays = (0.0, 1.0, 2.0, 5.0)
    found: dict[float, list[float]] = {delay: [] for delay in delays}
    with tempfile.TemporaryDirectory() as directory:
        packed = Path(directory) / "packed"
        lowbit.quantize_checkpoint(source, packed, lowbit.LowBitConfig(bits=4))
        for _ in range(rounds):
            for delay in delays:
                found[delay].append(run(delay, packed, tokens))
    gathers = len(model.gathers())
    print(f"{model.name}, {gathers} gathers a token, {tokens} tokens, {rounds} rounds in turns, medians\n")
    print("| Latency one way, ms | Time per token, ms | Added by the latency, ms | Added according to the model, ms |")
    print("|---|---|---|---|")
    without = statistics.median(found[0.0])
    for delay in delays:
        seconds = statistics.median(found[delay])
        more = statistics.median(a - b for a, b in zip(found[delay], found[0.0], strict=True))
        print(f"| {delay:g} | {seconds * 1e3:.0f} | {more * 1e3:.0f} | {gathers * MESSAGES_PER_STEP * delay:.0f} |")
    print(f"\nWithout latency {1 / without:.0f} tokens/s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bandwidth", type=float, help="memory bandwidth of a machine, GB/s; `lowbit doctor` prints it")
    parser.add_argument("--memory", type=float, default=8.0, help="memory of a machine, GB")
    parser.add_argument("--network", type=float, default=1.0, help="Gbit/s")
    parser.add_argument("--latency", type=float, default=0.1, help="one-way latency of a message, ms: half of ping's time")
    parser.add_argument("--check", action="store_true", help="compare with runs in two network namespaces; needs root")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    if options.check:
        check(options.rounds, options.tokens)
    elif options.bandwidth:
        own = Machine("Your machines", options.bandwidth, options.memory, options.network, options.latency)
        table([own])
    else:
        table(MACHINES)
        node_table()


if __name__ == "__main__":
    main()
