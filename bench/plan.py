"""A token's time with a plan, with the model's Python code, in an ExecuTorch program, and in llama.cpp on the same GGUF file.

    python bench/plan.py MODEL [--threads 1 2] [--gguf FILE --llama PYTHON] [--pte FILE...] [--operators]

MODEL is a packed model (`lowbit import FILE MODEL`) or the name of a shape, which gets random weights of 4 bits. PYTHON is an
interpreter with llama-cpp-python (`make bench-peers` builds one). All take turns: in every round each reads a prompt and
decodes tokens greedily. The table has medians over the tokens of all rounds, with the share of the read bandwidth that a
token's packed weights take. --operators adds the least time of each of the plan's operators in a token, which other programs
hardly change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = [(31 * i * i + 7 * i + 3) % 30011 for i in range(128)]


def serve_llama(file: str, threads: int) -> None:
    """In the interpreter with llama-cpp-python: reads numbers of tokens from stdin, and prints seconds."""
    import numpy
    from llama_cpp import Llama

    model = Llama(file, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    for line in sys.stdin:
        model.reset()
        seconds, tokens = [], PROMPT
        for _ in range(int(line) + 1):
            begin = time.perf_counter()
            model.eval(tokens)
            tokens = [int(numpy.argmax(model._ctx.get_logits_ith(-1)[: model.n_vocab()]))]
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


class Llama:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, file: str, threads: int):
        command = [python, __file__, "--serve-llama", file, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, new: int) -> list[float]:
        print(new, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("llama.cpp's process ended")
        return json.loads(answer)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def print_operators(decoder: Any, position: int, tokens: int) -> None:
    """A table of the least time of each operator of a plan in a token."""
    import torch

    def step() -> None:
        decoder(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([position]))

    with torch.inference_mode():
        times = [decoder.plan_times(step) for _ in range(tokens)]
    least = {name: min(each[name] for each in times) for name, seconds in times[0].items() if seconds > 0}
    print(f"\n| operator | least time of {tokens} tokens, ms |\n|---|---|")
    for name, seconds in sorted(least.items(), key=lambda item: -item[1]):
        print(f"| {name} | {1e3 * seconds:.3f} |")
    print(f"| sum | {1e3 * sum(least.values()):.3f} |\n")


def measure(arguments: argparse.Namespace, threads: int) -> list[tuple[str, float, float, float]]:
    """Rows of the table: name, milliseconds of a token and of the prompt, share of the bandwidth."""
    import lowbit
    import lowbit.llm
    import torch
    from lowbit.llm.loading import load_model
    from lowbit.machine.memory import ReadBandwidth
    from lowbit.tools import model_speed

    torch.set_num_threads(threads)
    if Path(arguments.model).is_dir():
        model = load_model(arguments.model)
    else:
        model = lowbit.llm.random_model(arguments.model, lowbit.LinearConfig(4, 32), lowbit.EmbeddingConfig(4, 32))
    touched, bandwidth = model_speed.bytes_per_token(model), ReadBandwidth()
    decoder = lowbit.llm.Decoder(model, 512)
    prompt = torch.tensor([PROMPT]) % decoder.vocabulary

    def of(step: Any) -> Any:
        def run(new: int) -> list[float]:
            first, later = model_speed.measure(step, prompt, new)
            return [first, *later]

        return run

    ways = {mode: of(model_speed.make_step(decoder, mode)) for mode in ("plan", "eager")}
    ways |= {file: of(lowbit.llm.load_decoder(file)) for file in arguments.pte}
    llama = Llama(arguments.llama, arguments.gguf, threads) if arguments.gguf else None
    if llama is not None:
        ways["llama.cpp"] = llama
    taken: dict[str, list[float]] = {name: [] for name in ways}
    prompts: dict[str, list[float]] = {name: [] for name in ways}
    roofs = []
    for turn in range(arguments.rounds + 1):
        for name, run in ways.items():
            roofs.append(bandwidth(threads))
            first, *later = run(arguments.new)
            if turn:  # the first one warms up
                taken[name] += later
                prompts[name].append(first)
    if llama is not None:
        llama.end()
    roof = max(roofs)
    if arguments.operators:
        print_operators(decoder, len(PROMPT), arguments.rounds * arguments.new)
    print(f"{threads} threads, {touched / 1e6:.1f} MB of packed weights a token, memory read at up to {roof / 1e9:.1f} GB/s")
    return [
        (name, 1e3 * (token := statistics.median(taken[name])), 1e3 * statistics.median(prompts[name]), touched / token / roof)
        for name in ways
    ]


def main() -> None:
    if sys.argv[1:2] == ["--serve-llama"]:
        serve_llama(sys.argv[2], int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--new", type=int, default=48, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", help="the file that MODEL was imported from")
    parser.add_argument("--llama", default=sys.executable, help="a Python with llama-cpp-python")
    parser.add_argument("--operators", action="store_true", help="a table of the plan's operators, too")
    parser.add_argument("--pte", nargs="*", default=[], help="programs of lowbit export --to pte")
    arguments = parser.parse_args()
    for threads in arguments.threads:
        rows = measure(arguments, threads)
        print("\n| | token, ms | tokens/s | of the bandwidth | prompt of 128, ms |\n|---|---|---|---|---|")
        for name, token, prompt, share in rows:
            print(f"| {name} | {token:.2f} | {1e3 / token:.1f} | {share:.2f} | {prompt:.0f} |")
        print()


if __name__ == "__main__":
    main()
