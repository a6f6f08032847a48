"""Profiles a prompt and a token by parts of a language model with random weights, in eager mode.

    OMP_NUM_THREADS=1 python bench/parts.py [--shape NAME] [--layers N] [--prompt N...] [--pieces N...] [--rounds N]

Each module is timed; a part is the time in modules of its kind, minus the time in the modules inside them. Times are CPU times
of one thread, medians over the rounds. --pieces: tokens of a prompt that are computed at a time, in turns.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lowbit
import torch
import transformers
from lowbit.hf import decoding
from lowbit.llm import Decoder, random_model, shape_config, texts_call
from lowbit.llm.sampling import most_likely

# Ending of a module's class name, and the part that its own time belongs to.
PARTS = {
    "Linear": "linear layers",
    "attend": "attention",
    "Attention": "rotary embeddings, layout",
    "Norm": "norms",
    "RowWise": "activation",
    "MLP": "gate times up",
    "DecoderLayer": "residual sums",
}
REST = "the rest"


class Clock:
    """Adds up the CPU time of parts; one part at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.stack = [REST]
        self.last = 0.0

    def switch(self) -> None:
        now = time.thread_time()
        self.seconds[self.stack[-1]] += now - self.last
        self.last = now

    def enter(self, part: str) -> None:
        self.switch()
        self.stack.append(part)

    def leave(self) -> None:
        self.switch()
        self.stack.pop()

    def around(self, module: torch.nn.Module, part: str) -> None:
        module.register_forward_pre_hook(lambda *_: self.enter(part))
        module.register_forward_hook(lambda *_: self.leave())

    def measure(self, run: Callable[[], None]) -> dict[str, float]:
        """Seconds of each part, and the page faults."""
        self.seconds.clear()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.last = time.thread_time()
        run()
        self.switch()
        return dict(self.seconds) | {"page faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}


def table(columns: dict[str, list[dict[str, float]]]) -> str:
    """A Markdown table: milliseconds of each part, medians over the rounds, and its share."""
    totals = {
        name: [sum(value for part, value in each.items() if part != "page faults") for each in rounds]
        for name, rounds in columns.items()
    }
    lines = ["| CPU time, ms | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for part in [*PARTS.values(), REST]:
        cells = []
        for name, rounds in columns.items():
            seconds = [each.get(part, 0.0) for each in rounds]
            share = statistics.median(one / total for one, total in zip(seconds, totals[name], strict=True))
            cells.append(f"{1e3 * statistics.median(seconds):.1f} ({100 * share:.1f} %)")
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    lines.append("| all | " + " | ".join(f"{1e3 * statistics.median(total):.1f}" for total in totals.values()) + " |")
    faults = (statistics.median(each["page faults"] for each in rounds) for rounds in columns.values())
    lines.append("| page faults | " + " | ".join(f"{count:.0f}" for count in faults) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="layers to run; fewer than the shape has take less time")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--pieces", type=int, nargs="+", default=[texts_call.PIECE])
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", help="type of the KV caches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = shape_config(options.shape)
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    model = random_model(config, lowbit.LinearConfig(4, 32), lowbit.EmbeddingConfig(4, 32))
    decoder = Decoder(model, -(-(max(options.prompt) + options.new) // 16) * 16, options.cache)
    clock = Clock()
    for module in model.modules():
        for end, part in PARTS.items():
            if type(module).__name__.endswith(end):
                clock.around(module, part)

    def attend(*arguments: Any, **named: Any) -> Any:
        clock.enter(PARTS["attend"])
        try:
            return decoding.attend(*arguments, **named)
        finally:
            clock.leave()

    transformers.AttentionInterface.register(decoding.ATTENTION, attend)
    columns: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for length in options.prompt:
            prompt = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
            for piece in options.pieces:
                texts_call.PIECE = piece

                def read(prompt: torch.Tensor = prompt) -> None:
                    most_likely(decoder(prompt, torch.tensor([0]))[0])

                def decode(length: int = length) -> None:
                    for i in range(options.new):
                        most_likely(decoder(torch.tensor([[0]]), torch.tensor([length + i]))[0])

                with torch.inference_mode():
                    columns[f"prompt of {length}, {min(piece, length)} at a time"].append(clock.measure(read))
            with torch.inference_mode():
                found = clock.measure(decode)
            columns[f"token after {length}"].append({part: each / options.new for part, each in found.items()})
    print(table(columns))


if __name__ == "__main__":
    main()
