"""Compares the time of layers with 16-bit and with 8-bit activations, for a token and for a prompt, at each width.

    python bench/activation_bits.py [--rounds N] [--group-size G] [--rows 1 256]

Prints a table of medians of ratios of CPU time; calls with 8 and with 16 bits take turns. Weights do not fit the caches:
each call uses the next of many matrices, as decoding does. The last
row has the bytes per second that a token with 8-bit activations reads.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import lowbit
import torch
from lowbit.machine.facts import cpu_name

OUTPUTS = INPUTS = 4096
WEIGHT_BYTES = 160e6  # of all matrices of a width: several times the caches of most CPUs
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)


def seconds(x: torch.Tensor, matrices: Sequence[torch.Tensor]) -> float:
    """CPU time of a call with each matrix."""
    begin = time.process_time()
    for matrix in matrices:
        lowbit.linear(x, matrix, OUTPUTS)
    return time.process_time() - begin


def measure(bits: int, group_size: int, rows: int, rounds: int) -> tuple[float, float]:
    """Time with 16 bits relative to 8 bits, and the bytes of weights per second with 8 bits."""
    layer = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS, bias=False))
    lowbit.quantize_(layer, lowbit.LinearConfig(bits=bits, group_size=group_size))
    packed = layer[0].packed_weight
    copies = max(2, round(WEIGHT_BYTES / packed.nbytes)) if rows == 1 else 2
    once = [packed.clone() for _ in range(copies)]
    twice = [lowbit.with_activation_bits(packed, 16) for _ in range(copies)]
    x = torch.randn(rows, INPUTS)
    seconds(x, once), seconds(x, twice)
    times = [(seconds(x, once), seconds(x, twice)) for _ in range(rounds)]
    ratio = statistics.median(two / one for one, two in times)
    return ratio, copies * packed.nbytes / statistics.median(one for one, _ in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(
        f"{cpu_name()}, one thread, {OUTPUTS} x {INPUTS}, groups of {options.group_size}: CPU time with 16-bit activations "
        "relative to 8 bits\n"
    )
    print("| rows | " + " | ".join(f"{bits} bits" for bits in WIDTHS) + " |")
    print("|---|" + "---|" * len(WIDTHS))
    with torch.inference_mode():
        for rows in options.rows:
            results = [measure(bits, options.group_size, rows, options.rounds) for bits in WIDTHS]
            print(f"| {rows} | " + " | ".join(f"{ratio:.2f}" for ratio, _ in results) + " |")
            if rows == 1:
                print("| GB/s with 8 bits | " + " | ".join(f"{rate / 1e9:.1f}" for _, rate in results) + " |", flush=True)


if __name__ == "__main__":
    main()
