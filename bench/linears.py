"""Compares `lowbit.linears` with a call of `lowbit.linear` for each matrix.

    python bench/linears.py [--rounds N]

Prints a table: the median of the ratios of runs that took turns, and the time of the single calls. Also compares the results.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import lowbit
import torch
from lowbit.machine.facts import cpu_name

# Outputs of the matrices, and their inputs: SmolLM 135M and Llama 3.2 1B.
SHAPES = {
    "q, k, v of 135M": ((576, 192, 192), 576),
    "gate, up of 135M": ((1536, 1536), 576),
    "q, k, v of 1B": ((2048, 512, 512), 2048),
    "gate, up of 1B": ((8192, 8192), 2048),
}
ROWS, THREADS, BITS = (1, 8, 512), (1, 2), 4
SECONDS = 0.01  # of one measurement


def seconds(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def measure(outputs: tuple[int, ...], inputs: int, rows: int, rounds: int) -> tuple[float, float]:
    """Time of `linears` relative to single calls, and the time of single calls in seconds."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(inputs, n, bias=False) for n in outputs))
    lowbit.quantize_(layers, lowbit.LinearConfig(bits=BITS))
    packed = [layer.packed_weight for layer in layers]
    x = torch.randn(rows, inputs)

    def single() -> list[torch.Tensor]:
        return [lowbit.linear(x, matrix, n) for matrix, n in zip(packed, outputs, strict=True)]

    def together() -> tuple[torch.Tensor, ...]:
        return lowbit.linears(x, packed, outputs)

    assert all(torch.equal(a, b) for a, b in zip(single(), together(), strict=True))
    calls = max(2, int(SECONDS / seconds(single, 3)))
    times = [(seconds(together, calls), seconds(single, calls)) for _ in range(rounds)]
    return statistics.median(a / b for a, b in times), statistics.median(b for _, b in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(f"{cpu_name()}, torch {torch.__version__}, {BITS} bits, float32; one call over a call for each, in turns\n")
    print("| matrices | rows | " + " | ".join(f"{n} threads" if n > 1 else "1 thread" for n in THREADS) + " |")
    print("|---|---|" + "---|" * len(THREADS))
    with torch.inference_mode():
        for name, (outputs, inputs) in SHAPES.items():
            for rows in ROWS:
                cells = []
                for threads in THREADS:
                    torch.set_num_threads(threads)
                    ratio, single = measure(outputs, inputs, rows, rounds)
                    cells.append(f"{ratio:.2f} of {single * 1e6:.0f} us")
                print(f"| {name} | {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
