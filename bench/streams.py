"""Compares the ways in which a few rows of activations read weights (`lowbit.streams`), at each width.

    python bench/streams.py [--rounds N] [--group-size G] [--rows 1 2 4] [--shape OUTPUTS INPUTS] [--threads N]

Prints a table: the bytes per second that a call reads with one panel at a time, and the speed of the other ways relative to
that. Medians of CPU time; the ways take turns in one process. Weights do not fit the caches: each call uses the next of many
matrices, as decoding does. The program ends if results differ.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import lowbit
import torch
from lowbit.machine.facts import cpu_name
from lowbit.machine.memory import in_huge_pages

WEIGHT_BYTES = 160e6  # of all matrices of a width: several times the caches of most CPUs
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
WAYS = ("one", "ahead", "several")


def seconds(x: torch.Tensor, matrices: Sequence[torch.Tensor], outputs: int, way: str) -> float:
    """CPU time of a call with each matrix."""
    lowbit.streams(way)
    begin = time.process_time()
    for matrix in matrices:
        lowbit.linear(x, matrix, outputs)
    return time.process_time() - begin


def measure(bits: int, shape: tuple[int, int], group_size: int, rows: int, rounds: int) -> tuple[float, list[float]]:
    """Bytes per second of the first way, and the speed of each way relative to it."""
    layer = torch.nn.Sequential(torch.nn.Linear(shape[1], shape[0], bias=False))
    lowbit.quantize_(layer, lowbit.LinearConfig(bits=bits, group_size=group_size))
    packed = layer[0].packed_weight
    matrices = [in_huge_pages(packed.clone()) for _ in range(max(2, round(WEIGHT_BYTES / packed.nbytes)))]
    x = torch.randn(rows, shape[1])
    found = []
    for way in WAYS:
        lowbit.streams(way)
        found.append(lowbit.linear(x, packed, shape[0]))
    if not all(torch.equal(found[0], other) for other in found):
        raise SystemExit(f"{bits} bits, {rows} rows: results differ")
    times = [[seconds(x, matrices, shape[0], way) for way in WAYS] for _ in range(rounds)]
    rate = len(matrices) * packed.nbytes / statistics.median(turn[0] for turn in times)
    return rate, [statistics.median(turn[0] / turn[i] for turn in times) for i in range(len(WAYS))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--shape", type=int, nargs=2, default=[4096, 4096])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    outputs, inputs = options.shape
    print(f"{cpu_name()}, {options.threads} threads, {outputs} x {inputs}, groups of {options.group_size}\n")
    print("| rows, way | " + " | ".join(f"{bits} bits" for bits in WIDTHS) + " |")
    print("|---|" + "---|" * len(WIDTHS))
    with torch.inference_mode():
        for rows in options.rows:
            results = [measure(bits, (outputs, inputs), options.group_size, rows, options.rounds) for bits in WIDTHS]
            print(f"| {rows}, {WAYS[0]}, GB/s | " + " | ".join(f"{rate / 1e9:.1f}" for rate, _ in results) + " |")
            for i, way in enumerate(WAYS[1:], 1):
                cells = " | ".join(f"{ratios[i]:.2f}" for _, ratios in results)
                print(f"| {rows}, {way}, speed relative to that | {cells} |", flush=True)


if __name__ == "__main__":
    main()
