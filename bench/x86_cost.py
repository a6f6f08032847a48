"""Measures the cost of the x86 kernels and writes docs/x86_cost.md and .json.

Counts the instructions of kernels and models their cycles with llvm-mca.

    python3 bench/x86_cost.py [--native]            builds, counts on this CPU and on emulated ones, writes both files;
                                                    --native: only kernels that this CPU can run, in minutes
    python3 bench/x86_cost.py --rows PART...        only kernels whose names contain a PART; the others keep their numbers
    python3 bench/x86_cost.py --check --program P   counts some kernels that this CPU runs; fails when one needs over 3 % more
                                                    than in the JSON

Needs cmake, ninja and a C++ compiler; without --check also objdump, llvm-mca 17 or newer, and build/x86-emulator for the
kernels that this CPU cannot run.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

from costs import growth, hot

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT, DATA = ROOT / "docs/x86_cost.md", ROOT / "docs/x86_cost.json"
SKIPPED = 77
ITERATIONS = 100
# Emulated CPU for an ISA that this CPU lacks.
EMULATED = {"avx512vnni": "sapphire_rapids", "avxvnni": "arrow_lake", "avxvnniint8": "arrow_lake", "amx": "sapphire_rapids"}
# LLVM's name of a core: its name in text, and the ISAs of the kernels that it runs. AVX-VNNI-INT8 came with Arrow Lake, for
# which LLVM has only this model.
CORES = {
    "alderlake": ("Alder Lake P", ("avx2", "avxvnni", "avxvnniint8")),
    "icelake-server": ("Ice Lake", ("avx2", "avx512vnni")),
    "sapphirerapids": ("Sapphire Rapids", ("avx2", "avx512vnni", "amx")),
    "znver4": ("Zen 4", ("avx2", "avx512vnni")),
}
OLDEST_LLVM = 17
# Cycles from one AMX instruction of a kind to the next, from Intel's optimization manual; LLVM 19 starts four per cycle.
TILE_CYCLES = {"tileload": 8, "tilestore": 16, "tdpb": 16}
Block = tuple[str, ...]  # instructions, as objdump writes them


def run(command: list, what: str, text: str | None = None) -> str:
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, input=text)
    if done.returncode != 0:
        sys.exit(f"x86_cost: {what} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def tool(name: str) -> pathlib.Path | str:
    beside = pathlib.Path(sys.executable).parent / name  # a virtual environment has cmake and ninja in its bin
    return beside if beside.exists() else name


def build(directory: pathlib.Path) -> pathlib.Path:
    run(
        [
            tool("cmake"),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            "-S",
            ROOT,
            "-B",
            directory,
            "-DLOWBIT_BUILD_BENCH=ON",
        ],
        "cmake",
    )
    run([tool("cmake"), "--build", directory, "--target", "x86_cost"], "the build")
    return directory / "bench/x86_cost"


def compiler_of(program: pathlib.Path) -> str:
    """Name of the compiler of the kernels, from the program's notes."""
    text = run(["readelf", "-p", ".comment", program], "reading the compiler's name")
    return max(re.findall(r"\]\s+(\S.*)", text), key=len).strip()


def parse(text: str) -> dict:
    """{kernel: {task: (units, instructions, {address: times})}}"""
    found: dict = {}
    for line in text.splitlines():
        name, task, units, instructions, *addresses = line.split("\t")
        times = {int(address, 16): int(count) for address, _, count in (each.partition("*") for each in addresses)}
        found.setdefault(name, {})[task] = int(units), int(instructions), times
    return found


def per_unit(traced: dict) -> dict:
    return {
        name: {task: round(instructions / units, 3) for task, (units, instructions, _) in tasks.items()}
        for name, tasks in traced.items()
    }


def disassemble(program: pathlib.Path) -> dict[int, str]:
    found = {}
    text = run(["objdump", "-d", "--no-show-raw-insn", program], "objdump")
    for line in text.splitlines():
        if match := re.match(r"\s*([0-9a-f]+):\t(.*)", line):
            found[int(match[1], 16)] = re.sub(r"\s*(#|<).*", "", match[2]).strip()
    return found


def blocks_of(times: dict[int, int], code: dict[int, str]) -> dict[Block, int]:
    """The basic blocks of a call and how often each ran: adjacent instructions with equal counts, up to a branch."""
    found: dict[Block, int] = {}
    block: list[str] = []
    last = 0
    listed = sorted(code)
    behind = dict(zip(listed, listed[1:]))

    def close() -> None:
        if block:
            found[tuple(block)] = found.get(tuple(block), 0) + last
            block.clear()

    before = None
    for address in sorted(times):
        if before is None or behind.get(before) != address or times[address] != last:
            close()
        last = times[address]
        text = code[address]
        block.append(text)
        if re.match(r"(j\w+|call|ret|bnd)", text):
            close()
        before = address
    close()
    return found


def plain(instruction: str) -> str:
    """Gives each branch its own label; calls and returns become jumps, because llvm-mca assumes 100 cycles for a call."""
    if re.match(r"(bnd )?(call|ret|jmp)", instruction):
        return "jmp 0f"
    if match := re.match(r"(j\w+)", instruction):
        return f"{match[1]} 0f"
    return instruction


def llvm_mca() -> tuple[str, str]:
    """The newest llvm-mca, and its version."""
    found = {}
    for name in ["llvm-mca", *(f"llvm-mca-{major}" for major in range(OLDEST_LLVM, 40))]:
        try:
            text = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
        except FileNotFoundError:
            continue
        if match := re.search(r"LLVM version (\d+)\.(\d+)\.(\d+)", text):
            found[tuple(map(int, match.groups()))] = name
    if max(found, default=(0,))[0] < OLDEST_LLVM:
        sys.exit(f"x86_cost: llvm-mca {OLDEST_LLVM} or newer is missing (Debian: scripts/need.sh arm-cost)")
    return found[max(found)], ".".join(map(str, max(found)))


def cycles_of(mca: str, core: str, blocks: Iterable[Block]) -> dict[Block, float]:
    """Cycles of each block when it repeats forever."""
    blocks = list(blocks)
    if not blocks:
        return {}
    lines = []
    for number, block in enumerate(blocks):
        lines += [f"# LLVM-MCA-BEGIN {number}", *map(plain, block), "0:", f"# LLVM-MCA-END {number}"]
    output = run(
        [
            mca,
            "--mtriple=x86_64-linux-gnu",
            f"--mcpu={core}",
            f"--iterations={ITERATIONS}",
            "--json",
            "--instruction-info=0",
            "--resource-pressure=0",
        ],
        f"llvm-mca for {core}",
        "\n".join(lines) + "\n",
    )
    return {
        blocks[int(region["Name"])]: region["SummaryView"]["TotalCycles"] / ITERATIONS
        for region in json.loads(output)["CodeRegions"]
    }


def tile_cycles(block: Block) -> int:
    """Cycles of a block's tile instructions, as if nothing overlapped with them."""
    return sum(cycles for text in block for name, cycles in TILE_CYCLES.items() if text.startswith(name))


def model(traced: dict, code: dict[int, str]) -> dict:
    """{"llvm": version, core: {row: {task: cycles per unit}}}"""
    mca, version = llvm_mca()
    calls = {
        (row, task): (units, *hot(blocks_of(times, code)))
        for row, tasks in traced.items()
        for task, (units, _, times) in tasks.items()
    }
    of_core: dict = {core: {} for core in CORES}
    for (row, _), (_, blocks, _) in calls.items():
        for core, (_, isas) in CORES.items():
            if row.rsplit("_", 1)[1] in isas:
                of_core[core] |= dict.fromkeys(blocks)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        cycles = dict(zip(CORES, pool.map(lambda core: cycles_of(mca, core, of_core[core]), CORES)))
    found: dict = {"llvm": version} | {core: {} for core in CORES}
    for (row, task), (units, blocks, share) in calls.items():
        for core, (_, isas) in CORES.items():
            if row.rsplit("_", 1)[1] in isas:
                total = sum(times * (cycles[core][block] + tile_cycles(block)) for block, times in blocks.items()) / share
                found[core].setdefault(row, {})[task] = round(total / units, 2)
    return found


def trace(program: pathlib.Path, native: bool, parts: list[str]) -> dict:
    """All kernels, or those with a part in their names: natively if this CPU can run them, otherwise emulated."""
    found = parse(run([program, "--blocks", *parts], "counting"))
    for isa, cpu in EMULATED.items():
        names = [f"_{isa}"]
        if parts:
            counts = json.loads(DATA.read_text(encoding="utf-8"))["counts"]
            names = [name for name in counts if name.endswith(f"_{isa}") and any(part in name for part in parts)]
            names += [part for part in parts if part.endswith(f"_{isa}")]  # kernels that the JSON lacks
        if names and not native and not any(name.endswith(f"_{isa}") for name in found):
            found |= parse_emulated(
                run(
                    [ROOT / "scripts/emulate_x86.sh", cpu, program, "--blocks", *names],
                    f"counting on an emulated {cpu} (make build/x86-emulator)",
                )
            )
    return found


def merged(data: dict) -> dict:
    """The content of the JSON, updated with the kernels that were counted now."""
    before = json.loads(DATA.read_text(encoding="utf-8"))
    for what, old, new in (
        ("compiler", before["compiler"], data["compiler"]),
        ("llvm-mca", before["cycles"]["llvm"], data["cycles"]["llvm"]),
    ):
        if old != new:
            sys.exit(f"x86_cost: {DATA.name} was counted with {what} {old}, this is {new}: count all kernels")
    before["counts"] |= data["counts"]
    for core in CORES:
        before["cycles"][core] |= data["cycles"][core]
    return before


def parse_emulated(text: str) -> dict:
    """Like `parse`, without the system's messages around the output."""
    return parse("\n".join(line.rstrip("\r") for line in text.splitlines() if line.count("\t") >= 3))


WIDTHS = [str(bits) for bits in range(1, 9)]


def table(header: list[str], rows: dict, digits: int = 1) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for first, cells in rows.items():
        found = [f"{cells[column]:.{digits}f}" if column in cells else "" for column in header[1:]]
        lines.append("| " + " | ".join([first, *found]) + " |")
    return [*lines, ""]


def linear_rows(numbers: dict) -> dict:
    """{kernel: {task: {width: number}}}; two or four panels are interleaved, depending on the width."""
    found: dict = {}
    for name, tasks in numbers.items():
        if match := re.fullmatch(r"linear_a8w(\d)_(\d+)x(\d+)_(\w+)", name):
            what = "tiles of rows" if match[2] != "1" else "one row" if match[3] == "16" else "one row, interleaved panels"
            what = "two rows, interleaved panels" if match[2] == "2" and match[3] == "32" else what
            for task, value in tasks.items():
                found.setdefault(f"{match[4]}, {what}", {}).setdefault(task, {})[match[1]] = value
    return found


def counted(data: dict, isa: str) -> bool:
    return any(name.endswith(f"_{isa}") for name in data["counts"])


def document(data: dict) -> str:
    lines = [
        "# What the x86 kernels cost",
        "",
        "Instructions are counted one by one (`bench/x86_cost.cpp` switches the CPU's trap flag on): exact and repeatable, but",
        "not times. Kernels for instructions that the machine lacks are counted in an emulator. Cycles come from a model and",
        "were measured on no CPU. Written by `make x86-cost`; `docs/x86_cost.json` has the same numbers. A test compares",
        "the instructions with it.",
        "",
        f"Compiler: {data['compiler']}. Cycles: llvm-mca {data['cycles']['llvm']}.",
        *[f"Not counted in this run: the kernels for {isa}." for isa in EMULATED if not counted(data, isa)],
        "",
        "## Linear",
        "",
        "Per 128 weights and row of activations, for one whole call of the kernel: 64 outputs, 512",
        "inputs (tiles of rows: 256), float32 output. g: inputs per group. m: rows of activations. Columns: bits.",
        "",
    ]
    cycles = {name: linear_rows(data["cycles"][core]) for core, (name, _) in CORES.items()}
    for kernel, tasks in linear_rows(data["counts"]).items():
        lines += [f"### {kernel}", ""]
        rows = {f"{task}, instructions": cells for task, cells in tasks.items()}
        rows |= {
            f"{task}, cycles, {name}": found[kernel][task]
            for task in tasks
            for name, found in cycles.items()
            if kernel in found
        }
        lines += table(["", *(width for width in WIDTHS if any(width in cells for cells in rows.values()))], rows)
    lines += ["## Quantization of activations", "", "Per value, group sums included; 1024 values.", ""]
    quantize = {name: tasks for name, tasks in data["counts"].items() if name.startswith("quantize_")}
    header = list(dict.fromkeys(task for tasks in quantize.values() for task in tasks))
    rows = {}
    for kernel, tasks in quantize.items():
        rows[f"{kernel}, instructions"] = tasks
        rows |= {
            f"{kernel}, cycles, {name}": data["cycles"][core][kernel]
            for core, (name, _) in CORES.items()
            if kernel in data["cycles"][core]
        }
    lines += table(["", *header], rows, digits=2)
    lines += [
        "## Attention",
        "",
        "Per 128 products of queries and keys or of weights and values, for the whole call. Four query heads share",
        "one KV head, 64 wide, float32 queries and outputs, 256 positions: queries at the last four (16 rows,",
        "as in a prompt), or at the last one (a token). Columns: type of the KV cache.",
        "",
    ]
    attention = {name: tasks for name, tasks in data["counts"].items() if name.startswith("attention_")}
    caches = list(dict.fromkeys(task.split()[0] for tasks in attention.values() for task in tasks))
    rows = {}
    for kernel, tasks in attention.items():
        numbers = {"instructions": tasks} | {
            f"cycles, {name}": data["cycles"][core][kernel]
            for core, (name, _) in CORES.items()
            if kernel in data["cycles"][core]
        }
        for call in ("prompt", "token"):
            rows |= {
                f"{kernel}, {call}, {what}": {cache: of[f"{cache} {call}"] for cache in caches} for what, of in numbers.items()
            }
    lines += table(["", *caches], rows)
    lines += [
        "## Model of the cycles",
        "",
        "The counted addresses give the basic blocks of a call and how often each ran. llvm-mca models how many cycles a",
        "block needs on a core when it repeats forever; a call costs the sum of times x cycles. The model assumes that",
        "every load hits the first-level cache, every branch is predicted, and blocks neither overlap nor wait for each other.",
        "One row usually waits for memory: 128 weights at 4 bits are 64 bytes, which take some 10 cycles at 15 to 30 GB/s.",
        "",
        "Instructions of AMX are added with Intel's figures (16 cycles for a product or a store of a tile, 8 for a load),",
        "which LLVM lacks, as if nothing overlapped with them. So the cycles of AMX are an upper bound.",
        "",
        "Alder Lake lacks AVX-VNNI-INT8, but its model is also LLVM's model of Arrow Lake, which has it. In LLVM's model, an",
        "accumulation waits for a factor that the instruction reads from memory, so one row of avxvnniint8 may be",
        "faster than the table says; no such CPU was available.",
        "",
        "There are no columns for Zen 5, because this LLVM uses its model of Zen 4, which splits 512 bits in two.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def check(program: pathlib.Path) -> int:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    if data["compiler"] != compiler_of(program):
        print(f"skipped: {DATA.name} was counted with another compiler than {compiler_of(program)}")
        return SKIPPED
    found = per_unit(parse(run([program, "--check"], "counting")))
    if not found:
        print("skipped: this CPU runs none of the kernels")
        return SKIPPED
    bad = growth(data["counts"], found)
    print("\n".join(bad))
    print(f"{len(bad)} of {sum(len(tasks) for tasks in found.values())} counts have grown or are new")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/x86_cost", help="build directory")
    parser.add_argument("--program", type=pathlib.Path, help="use this counting program instead of building one")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--rows", nargs="+", default=[], metavar="PART")
    args = parser.parse_args()
    program = args.program or build(args.build)
    if args.check:
        return check(program)
    traced = trace(program, args.native, args.rows)
    data = {"compiler": compiler_of(program), "counts": per_unit(traced), "cycles": model(traced, disassemble(program))}
    if args.rows:
        data = merged(data)
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    DOCUMENT.write_text(document(data), encoding="utf-8")
    print(f"{len(data['counts'])} kernels: {DOCUMENT.relative_to(ROOT)}, {DATA.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
