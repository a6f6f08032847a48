"""Models SME2 units together with the cores' vector units on an Apple M4.

The M4 has 4 fast and 6 slow cores, and a matrix unit for each kind. Nothing was measured: the model combines counted
instructions (docs/arm_cost.json), modeled cycles and published rates. It shows which choice is better, not how fast either is.

    python3 bench/arm_sme2_model.py      writes a table

A layer of 4096 x 4096, 4 bits, groups of 32. Threads claim panels as in ops/schedule.h.

  a core       cycles per 128 weights and row of the i8mm kernels (m = 1: dot product), by LLVM's models of Neoverse V2 for a
               fast core (4.4 GHz) and of V1, with fewer pipes, for a slow one (2.9 GHz)
  a unit       the larger of: products at 4000 and 700 int8 GOPS, one unit per cluster (Remke and Breuer, "Hello SME!", 2024);
               counted instructions at a given number per cycle of its core
  memory       80 % of 120 GB/s, shared by all cores
"""

import heapq
import json
import pathlib

COUNTS = json.loads((pathlib.Path(__file__).resolve().parent.parent / "docs/arm_cost.json").read_text(encoding="utf-8"))
N = K = 4096
FAST, SLOW = 4.4e9, 2.9e9
GOPS = {FAST: 4000e9, SLOW: 700e9}
BANDWIDTH = 0.8 * 120e9
PANELS, BAND_ROWS, MOST = N // 16, 32, 8
UNITS = K * 16 / 128  # of 128 weights, in a panel


def core_seconds(clock: float, rows: int) -> float:
    """Seconds of one panel times some rows on a core's vector units."""
    core = "neoverse-v2" if clock == FAST else "neoverse-v1"
    row = "linear_a8w4_1x16_neondot" if rows == 1 else "linear_a8w4_2x16_i8mm"
    return UNITS * rows * COUNTS["cycles"][core][row][f"symmetric g32 m{1 if rows == 1 else 16}"] / clock


def unit_seconds(clock: float, rows: int, panels: int, per_cycle: float) -> float:
    """Seconds of several panels times some rows on a matrix unit."""
    name, m = ("1x64", 1) if rows == 1 else ("5x32", 16 if rows <= 16 else 64)
    count = COUNTS["SME2"]["counts"][f"linear_a8w4_{name}_sme2"][f"symmetric g32 m{m}"]
    if rows == 1:
        panels = -(-panels // 4) * 4
    instructions = panels * UNITS * rows * count / per_cycle / clock
    products = panels * UNITS * 128 * (4 if rows == 1 else -(-rows // 16) * 16) / (GOPS[clock] / 2)
    return max(instructions, products)


def seconds(m: int, threads: list[tuple[float, bool]], per_cycle: float) -> float:
    """Seconds of a layer. `threads`: clock of each, and whether it uses a unit. A free thread takes the next claim."""
    bands = [min(BAND_ROWS, m - first) for first in range(0, m, BAND_ROWS)]
    least = 4 if m == 1 and any(unit for _, unit in threads) else 1
    free = [(0.0, i) for i in range(len(threads))]
    for b, rows in enumerate(bands):
        left = PANELS
        while left > 0:
            share = (left + (len(bands) - 1 - b) * PANELS) // (2 * len(threads))
            claim = min(left, max(least, min(share, MOST)))
            at, i = heapq.heappop(free)
            clock, unit = threads[i]
            cost = unit_seconds(clock, rows, claim, per_cycle) if unit else claim * core_seconds(clock, rows)
            heapq.heappush(free, (at + cost, i))
            left -= claim
    return max(max(at for at, _ in free), N * K * 4.5 / 8 / BANDWIDTH)


def main() -> None:
    cores = [(FAST, False)] * 4 + [(SLOW, False)] * 6
    choices = {
        "10 threads, none on a unit": cores,
        "10 threads, 2 on the units (the default)": [(FAST, True), *cores[1:4], (SLOW, True), *cores[5:]],
        "2 threads, on the units": [(FAST, True), (SLOW, True)],
        "1 thread, on the fast unit": [(FAST, True)],
    }
    print("Modeled, not measured: microseconds of a layer of 4096 x 4096, 4 bits, groups of 32.\n")
    print("| unit's instructions per cycle | | m = 1 | m = 16 | m = 512 |\n|---|---|---|---|---|")
    for per_cycle in (1.0, 2.0, 4.0):
        for name, threads in choices.items():
            cells = " | ".join(f"{1e6 * seconds(m, threads, per_cycle):.0f}" for m in (1, 16, 512))
            print(f"| {per_cycle:.0f} | {name} | {cells} |")


if __name__ == "__main__":
    main()
