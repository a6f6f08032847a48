"""The page of arm_cost.py (docs/arm_cost.md), from the numbers of docs/arm_cost.json."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import arm_peer
import arm_project
import arm_sme2
from arm_cycles import CORES

MAIN_ROWS = (" m1", " m16", " m64")  # the rows of the tables by width
EVERY_ROWS = 33


def table(header: list[str], rows: dict) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for first, cells in rows.items():
        lines.append("| " + " | ".join([first] + [f"{cells[c]:.1f}" if c in cells else "" for c in header[1:]]) + " |")
    return lines + [""]


WIDTHS = [str(bits) for bits in range(1, 9)]


def linear_rows(numbers: dict) -> dict:
    """{kernel without its width: {task: {width: number}}}; the m of a kernel for several rows depend on the width."""
    found: dict = {}
    for name, tasks in numbers.items():
        if match := re.fullmatch(r"linear_a8w(\d)_(\d+)(x\d+_)(\w+)", name):
            kernel = f"1{match[3]}{match[4]}" if match[2] == "1" else f"Tiles of rows, {match[4]}"
            for task, value in tasks.items():
                if not task.endswith(MAIN_ROWS):
                    continue
                found.setdefault(kernel, {}).setdefault(task, {})[match[1]] = value
    return found


def embedding_rows(numbers: dict) -> dict:
    found: dict = {}
    for name, tasks in numbers.items():
        if match := re.fullmatch(r"embedding_w(\d)_(\w+)", name):
            for task, value in tasks.items():
                found.setdefault(f"{match[2]}, {task}", {})[match[1]] = value
    return found


def quantize_rows(numbers: dict) -> dict:
    return {name: tasks for name, tasks in numbers.items() if name.startswith("quantize_")}


def tasks_of(rows: dict) -> list[str]:
    """The tasks of all kernels, without repetition, in order."""
    return list(dict.fromkeys(task for tasks in rows.values() for task in tasks))


def attention_rows(numbers: dict) -> dict:
    return {name: tasks for name, tasks in numbers.items() if name.startswith("attention_")}


def kernels_by_rows(numbers: dict) -> dict:
    """{(ISA, m): (rows of its tile, kernel, number)} of the kernels for 4 bits, symmetric, in groups of 32."""
    found: dict = {}
    for name, tasks in numbers.items():
        if match := re.fullmatch(r"linear_a8w4_((\d+)x\d+_(\w+))", name):
            for task, value in tasks.items():
                if at := re.fullmatch(r"symmetric g32 m(\d+)", task):
                    key, kernel = (match[3], int(at[1])), (int(match[2]), match[1], value)
                    found[key] = max(found.get(key, kernel), kernel)
    return found


def small_m(counts: dict) -> list[str]:
    """For every m: the chosen kernel and its instructions."""
    lines = [
        "### Every number of rows",
        "",
        "4 bits, symmetric, groups of 32: instructions per 128 weights and row, and the chosen kernel.",
        "",
        "| m | neon | neondot | i8mm |",
        "|---|---|---|---|",
    ]
    found = kernels_by_rows(counts)
    for m in range(1, EVERY_ROWS + 1):
        cells = []
        for isa, less in (("neon", None), ("neondot", None), ("i8mm", "neondot")):
            _, row, value = found.get((isa, m)) or found[less, m]
            cells.append(f"{value:.1f} ({row})")
        lines.append(f"| {m} | " + " | ".join(cells) + " |")
    return lines + [""]


def planes(data: dict) -> list[str]:
    """Two int8 planes of a row (activations of 16 bits) compared with one plane, on every core."""
    lines = [
        "### A token with 16-bit activations",
        "",
        "4 bits, symmetric, groups of 32: modeled cycles per 128 weights, without the quantization. Two planes are",
        "two rows of a call. The last column is the rate at which the kernel reads weights with two planes. Where",
        "the memory gives a core fewer bytes per cycle, a token costs the same with either.",
        "",
        "| core | one plane | two planes | two planes / one | bytes per cycle, one plane | two planes |",
        "|---|---|---|---|---|---|",
    ]
    size = 128 * data["bytes per weight"]["symmetric g32"]["4"]
    for core, (name, _) in CORES.items():
        found = kernels_by_rows(data["cycles"][core])
        best = [next(found[isa, m] for isa in ("i8mm", "neondot", "neon") if (isa, m) in found) for m in (1, 2)]
        one, two = best[0][-1], 2 * best[1][-1]
        lines.append(f"| {name} | {one:.1f} | {two:.1f} | {two / one:.2f} | {size / one:.1f} | {size / two:.1f} |")
    return lines + [""]


class Pipes(NamedTuple):
    """Vector instructions of 128 bits that a core starts in a cycle: any, and those that multiply bytes to 16 bits."""

    any: int
    multiply: int


PIPES = {
    "cortex-a53": Pipes(1, 1),
    "cortex-a55": Pipes(1, 1),
    "cortex-a510": Pipes(2, 2),
    "neoverse-n1": Pipes(2, 1),
    "neoverse-v1": Pipes(4, 2),
    "neoverse-v2": Pipes(4, 2),
}
# Vector instructions per 128 products, at 4 bits: products and additions to int32.
PRODUCTS = {"neon": 18, "neondot": 8, "i8mm": 4}
UNPACKING = 8  # per 128 weights, at 4 bits


def bound(isa: str, m: int, group_size: int, pipes: Pipes) -> float:
    """The cycles per 128 weights and row that the required instructions take at least, at 4 bits, symmetric."""
    segments = max(1, group_size // 64)  # the first takes one float instruction per sum, the others two, a group one
    everything = PRODUCTS[isa] + 2 * segments / (group_size / 32) + UNPACKING / m
    multiplications = 16 if isa == "neon" else 0  # smull and smlal
    return max(everything / pipes.any, multiplications / pipes.multiply)


# Vector instructions per 128 products of attention over a prompt, half of them with keys, half with values: products, and
# conversions of values to floats, which serve a tile of 4 rows. 16 codes of int8 take 4 tbl and 4 scvtf, of int4 two more to
# look up levels. Keys of int8 are not converted.
ATTENTION_WORK = {
    ("attention_neon", "f32"): (32, 0),
    ("attention_neon", "bf16"): (32, 8),
    ("attention_neon", "int8"): (PRODUCTS["neon"] / 2 + 16, 8),
    ("attention_neon", "int4"): (32, 20),
    ("attention_neon", "int8,int4"): (PRODUCTS["neon"] / 2 + 16, 10),
    ("attention_neondot", "int8"): (PRODUCTS["neondot"] / 2 + 16, 8),
    ("attention_neondot", "int8,int4"): (PRODUCTS["neondot"] / 2 + 16, 10),
}


def attention_bound(kernel: str, cache: str, pipes: Pipes) -> float:
    """The same per 128 products of attention over a prompt."""
    return sum(ATTENTION_WORK[kernel, cache]) / pipes.any


def document_bounds(cycles: dict) -> list[str]:
    """How close the modeled cycles are to those of the required instructions."""
    lines = [
        "### Distance to the bound of the model",
        "",
        "4 bits, symmetric. The bound has only the instructions that the arithmetic and the format require: products, float",
        "operations of segments and groups, and unpacking (attention: products, and conversions for 4 rows at a time). In it,",
        "vector pipes are never idle (on Neoverse half of them multiply long, as NEON without dot products does), and loads,",
        "stores, broadcasts, starts of sums and loops cost nothing. A Cortex-A53 or A55 starts one vector instruction of 128",
        "bits per cycle, a Cortex-A510 two. Each column: cycles of the bound / modeled cycles per 128 weights and row, or",
        "products of attention.",
        "",
        "| | " + " | ".join(CORES[core][0] for core in PIPES) + " |",
        "|---|" + "---|" * len(PIPES),
    ]

    def row(what: str, kernel: str, task: str, least: Callable[[Pipes], float]) -> str:
        cells = []
        for core, pipes in PIPES.items():
            modeled = cycles[core].get(kernel, {}).get(task)
            cells.append(f"{least(pipes):.1f} / {modeled:.1f} = {least(pipes) / modeled:.2f}" if modeled else "")
        return f"| {what} | " + " | ".join(cells) + " |"

    for isa, tile in (("neon", "5x16"), ("neondot", "2x16"), ("i8mm", "2x16")):
        for m, kernel in ((1, "1x16"), (64, tile)):
            for group_size in (16, 32, 128):
                what = f"{isa}, {'one row' if m == 1 else f'{m} rows'}, groups of {group_size}"
                name, task = f"linear_a8w4_{kernel}_{isa}", f"symmetric g{group_size} m{m}"
                if isa != "i8mm" or m > 1:  # one row has no i8mm kernel
                    lines.append(row(what, name, task, functools.partial(bound, isa, m, group_size)))
    for kernel, cache in ATTENTION_WORK:
        least = functools.partial(attention_bound, kernel, cache)
        lines.append(row(f"{kernel}, {cache} cache, prompt", kernel, f"{cache} prompt", least))
    return [
        *lines,
        "",
        "One row usually waits for memory instead (Tokens per second, projected). With i8mm there are half as many products,",
        "so loads, start values and what is done once per call weigh twice as much as with dot products. Groups of 16 have",
        "twice as many starts, scales and broadcasts as groups of 32. For attention, the bound has none of the softmax, nor",
        "the additions of int8 keys without dot products.",
        "",
        "The in-order cores (Cortex-A53, A55, A510) mostly take more cycles than instructions: they wait. In LLVM's models of",
        "them instructions complete in order, so a short one waits for a longer one before it. Pairs of independent",
        "instructions in a loop of llvm-mca 19: `and` with `fmla` takes 4 cycles on a Cortex-A53 instead of 2, a load with",
        "`fmla` 6; `and` with `sdot` takes 4 on a Cortex-A55. Whether the cores wait as long only a board can say.",
        "",
    ]


def document(data: dict) -> str:
    counts = data["counts"]
    lines = [
        "# What the Arm kernels cost",
        "",
        "No Arm hardware was used. Instructions are counted under QEMU: exact and repeatable, but not times.",
        "Cycles and projections come from a model. Written by `make arm-cost`; `docs/arm_cost.json` has the",
        "same numbers, and more cycles. A test compares the instructions with it.",
        "",
        f"Compiler: {data['compiler']}. Emulator: {data['emulator']}. Cycles: llvm-mca {data['cycles']['llvm']}.",
        "",
        "## Linear",
        "",
        "Instructions per 128 weights and row of activations, for one whole call of the kernel:",
        "128 outputs (a kernel for many rows copies the activations once per 128 outputs), 1024 inputs, float32 output.",
        "g: inputs per group. m: rows of activations. Columns: bits.",
        "",
    ]
    for kernel, rows in linear_rows(counts).items():
        lines += [f"### {kernel}", ""] + table(["", *WIDTHS], rows)
    lines += small_m(counts) + planes(data)
    lines += ["## Quantization of activations", "", "Instructions per value, group sums included; 1024 values.", ""]
    quantize = quantize_rows(counts)
    lines += table(["", *tasks_of(quantize)], quantize)
    lines += ["## Embedding", "", "Instructions per value of a row of 1024, groups of 32. Columns: bits.", ""]
    lines += table(["", *WIDTHS], embedding_rows(counts))
    lines += [
        "## Attention",
        "",
        *ATTENTION,
        "Instructions per 128 products of a query with a key or of a weight with a value.",
        "",
    ]
    attention = attention_rows(counts)
    lines += table(["", *tasks_of(attention)], attention)
    lines += document_bytes(data["bytes per weight"]) + document_cycles(data["cycles"]) + document_bounds(data["cycles"])
    lines += IN_ORDER
    core_names = {core: name for core, (name, _) in CORES.items()}
    lines += arm_sme2.document(data["SME2"], table, linear_rows)
    lines += arm_peer.document(data["KleidiAI"], core_names)
    lines += arm_project.document(data["tokens per second"], core_names)
    return "\n".join(lines).rstrip() + "\n"


def document_bytes(sizes: dict) -> list[str]:
    lines = [
        "## Bytes per weight",
        "",
        "Of a packed matrix of 1024 x 1024, scales and heads included. Columns: bits.",
        "",
        "| | " + " | ".join(WIDTHS) + " |",
        "|---|" + "---|" * len(WIDTHS),
    ]
    for task, cells in sizes.items():
        lines.append(f"| {task} | " + " | ".join(f"{cells[bits]:.3f}" for bits in WIDTHS) + " |")
    return lines + [""]


def document_cycles(cycles: dict) -> list[str]:
    lines = [
        "## Modeled cycles",
        "",
        "The QEMU plugin records how often a call executed each basic block. llvm-mca models how many cycles a",
        "block needs when it repeats, on a given core. A call costs the sum of times x cycles. The model assumes that",
        "every load hits the L1 cache, every branch is predicted, and blocks neither overlap nor wait for each other.",
        "Symmetric weights; the JSON file also has affine ones. Cycles per 128 weights and row of activations.",
        "Columns: bits.",
        "",
    ]
    by_core = {name: cycles[core] for core, (name, _) in CORES.items()}

    def over_cores(rows_of, wanted=lambda task: True) -> dict:
        found: dict = {}
        for name, numbers in by_core.items():
            for kernel, tasks in rows_of(numbers).items():
                for task in filter(wanted, tasks):
                    found.setdefault(kernel, {}).setdefault(task, {})[name] = tasks[task]
        return found

    for kernel, tasks in over_cores(linear_rows, lambda task: task.startswith("symmetric ")).items():
        if kernel.startswith("1x"):
            tasks = {task: cores for task, cores in tasks.items() if task.endswith(" m1")}
        rows = {
            f"{task.removeprefix('symmetric ')}, {core}": cells
            for task, cores in tasks.items()
            for core, cells in cores.items()
        }
        lines += [f"### {kernel}", ""] + table(["", *WIDTHS], rows)
    for title, unit, rows_of in (
        ("Quantization of activations", "Cycles per value.", quantize_rows),
        ("Attention", "Cycles per 128 products.", attention_rows),
    ):
        kernels = over_cores(lambda numbers, rows_of=rows_of: {"": rows_of(numbers)})[""]
        rows = {f"{kernel}, {core}": cells for kernel, cores in kernels.items() for core, cells in cores.items()}
        lines += [f"### {title}", "", unit, ""] + table(["", *tasks_of(rows)], rows)
    lines += ["### Embedding", "", "Cycles per value, symmetric. Columns: bits.", ""]
    embedding = over_cores(lambda numbers: {"": embedding_rows(numbers)}, lambda task: ", symmetric " in task)[""]
    return lines + table(
        ["", *WIDTHS], {f"{task}, {core}": cells for task, cores in embedding.items() for core, cells in cores.items()}
    )


ATTENTION = [
    "Four query heads share one KV head, 64 wide. Queries: the last of 256 positions (token), or the last four (prompt).",
    "Columns: the type of the KV cache, int8,int4 with int8 keys and 4-bit values.",
]

# A result of earlier measurements; this program does not compute it.
IN_ORDER = [
    "### `-mtune` for in-order cores: tried, not used",
    "",
    "`-mtune=cortex-a53` and `-mtune=cortex-a510` for `kernels/linear/neon.cpp` and `neondot.cpp`",
    "(`cmake/isa.cmake`), with this program's model of both builds: 3 and 4 bits, every mapping, groups of 16, 32 and",
    "128, 1, 16 and 64 rows; GCC 12.",
    "Cycles relative to the tables above: median, and in brackets minimum and maximum.",
    "",
    "| | Cortex-A53 | Cortex-A55 | Cortex-A510 | Neoverse N1 | Neoverse V1 | Neoverse V2 |",
    "|---|---|---|---|---|---|---|",
    "| `cortex-a53`: NEON, one row | 1.00 (0.98-1.02) | 1.00 (0.92-1.00) | 1.00 (0.96-1.01) | 1.00 (1.00-1.04) | "
    "1.00 (0.98-1.01) | 1.00 (0.98-1.01) |",
    "| `cortex-a53`: NEON, tiles of rows | 1.00 (0.99-1.00) | 0.99 (0.97-1.00) | 1.00 (1.00-1.01) | 1.00 (1.00-1.07) | "
    "1.00 (0.99-1.01) | 1.00 (1.00-1.00) |",
    "| `cortex-a53`: dot product, one row |  | 1.00 (0.99-1.00) | 1.00 (0.99-1.01) | 1.00 (1.00-1.00) | "
    "1.00 (0.98-1.00) | 1.00 (1.00-1.00) |",
    "| `cortex-a53`: dot product, tiles of rows |  | 1.00 (1.00-1.00) | 1.00 (1.00-1.00) | 1.00 (1.00-1.00) | "
    "1.00 (1.00-1.00) | 1.00 (1.00-1.00) |",
    "| `cortex-a510`: NEON, one row | 1.55 (1.23-2.14) | 1.25 (1.11-1.68) | 1.52 (1.21-2.02) | 1.01 (0.97-1.04) | "
    "1.02 (0.99-1.08) | 1.01 (0.97-1.05) |",
    "| `cortex-a510`: NEON, tiles of rows | 1.26 (1.09-1.53) | 1.28 (1.10-1.47) | 1.27 (1.14-1.60) | "
    "1.00 (0.97-1.10) | 1.00 (0.97-1.01) | 1.00 (0.98-1.02) |",
    "| `cortex-a510`: dot product, one row |  | 1.01 (0.95-1.11) | 1.09 (0.99-1.17) | 1.00 (1.00-1.01) | "
    "1.00 (0.96-1.03) | 1.00 (1.00-1.01) |",
    "| `cortex-a510`: dot product, tiles of rows |  | 1.00 (1.00-1.00) | 1.00 (0.96-1.00) | 1.00 (1.00-1.00) | "
    "1.00 (1.00-1.00) | 1.00 (1.00-1.00) |",
    "",
    "Without `-mtune`, GCC 12 already schedules for the Cortex-A53: its `generic` has that schedule, with other costs",
    "and alignments than `cortex-a53`. `cortex-a55` gives the same code as `cortex-a53`",
    "(compared: `kernels/activation/neon.cpp`). GCC 12 accepts `cortex-a510`, but the NEON kernels become slower on every",
    "in-order core, including the A510. No option makes little cores faster without a loss elsewhere (NEON kernels also run",
    "on out-of-order cores such as the Cortex-A72), so there is no `-mtune`.",
    "",
    "**The model says nothing about prefetch.** Every load hits the first-level",
    "cache, so a prefetch is an instruction more and nothing else. Whether one helps an in-order core only a board can",
    "say.",
    "",
]
