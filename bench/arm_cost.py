"""Counts the instructions of every Arm kernel row under QEMU, and writes docs/arm_cost.md and docs/arm_cost.json.

    python3 bench/arm_cost.py                            cross-builds, counts everything, writes both files
    python3 bench/arm_cost.py --check [--program P] [PART...]
                                                         counts the rows whose names contain PART (^ISA: but no rows of
                                                         that ISA); fails when one needs over 3 % more than in the JSON

Needs cmake, ninja, a C compiler, aarch64-linux-gnu-g++ and a qemu-aarch64 that takes plugins.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT, DATA = ROOT / "docs/arm_cost.md", ROOT / "docs/arm_cost.json"
CPUS = ("cortex-a53", "cortex-a76", "max,sve=off")  # a row is counted on the first that runs it
CHECK_CPU = "cortex-a76"
GROWTH = 1.03
SKIPPED = 77
MAIN_ROWS = (" m1", " m16", " m64")  # of the tables by width
EVERY_ROWS = 33
PACKAGES = {"qemu-aarch64": "qemu-user", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "cc": "gcc",
            "cmake": "cmake", "ninja": "ninja-build"}


def tool(name: str) -> str:
    beside = pathlib.Path(sys.executable).parent / name  # a virtual environment has its own cmake and ninja
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        sys.exit(f"arm_cost: {name} is missing (Debian: apt-get install {PACKAGES[name]})")
    return path


def run(command: list, what: str) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"arm_cost: {what} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def version(name: str) -> str:
    return run([tool(name), "--version"], name).splitlines()[0]


def build(directory: pathlib.Path) -> pathlib.Path:
    tool("aarch64-linux-gnu-g++")
    run([tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-S", ROOT, "-B", directory,
         "-DLOWBIT_BUILD_BENCH=ON", f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/aarch64-linux-gnu.cmake'}"], "cmake")
    run([tool("cmake"), "--build", directory, "--target", "arm_cost"], "the build")
    return directory / "bench/arm_cost"


class Counter:
    """Runs the counting program under QEMU with the plugin."""

    def __init__(self, program: pathlib.Path, scratch: str):
        self.program, self.counts = program, pathlib.Path(scratch) / "counts"
        self.plugin = pathlib.Path(scratch) / "libicount.so"
        run([tool("cc"), "-O2", "-shared", "-fPIC", ROOT / "bench/icount.c", "-o", self.plugin], "building the plugin")

    def count(self, cpu: str, arguments: list[str]) -> dict:
        """{row: {task: instructions per unit}}"""
        self.counts.write_text("")
        text = run([tool("qemu-aarch64"), "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu, "-plugin",
                    f"{self.plugin},out={self.counts}", self.program, *arguments],
                   f"counting on {cpu} (a statically linked qemu-aarch64 takes no plugins)")
        calls, counts = text.splitlines(), self.counts.read_text().split()
        if len(calls) != len(counts):
            sys.exit(f"arm_cost: {len(calls)} calls but {len(counts)} counts on {cpu}")
        found: dict = {}
        for call, count in zip(calls, counts):
            name, task, units = call.split("\t")
            found.setdefault(name, {})[task] = round(int(count) / int(units), 2)
        return found


def count_all(counter: Counter) -> dict:
    found: dict = {}
    for cpu in CPUS:
        known = sorted({name.rsplit("_", 1)[1] for name in found})
        found |= counter.count(cpu, [f"^{isa}" for isa in known])
    return found


def table(header: list[str], rows: dict) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for first, cells in rows.items():
        lines.append("| " + " | ".join([first] + [f"{cells[c]:.1f}" if c in cells else "" for c in header[1:]]) + " |")
    return lines + [""]


def small_m(counts: dict) -> list[str]:
    """Every m: the row that is chosen there, and what it takes."""
    lines = ["### Every number of rows", "",
             "4 bits, symmetric, groups of 32: instructions per 128 weights and row, and which kernel row is chosen.", "",
             "| m | neon | neondot | i8mm |", "|---|---|---|---|"]
    found: dict = {}
    for name, tasks in counts.items():
        if match := re.fullmatch(r"linear_a8w4_((\d+)x\d+_(\w+))", name):
            for task, value in tasks.items():
                if at := re.fullmatch(r"symmetric g32 m(\d+)", task):
                    found.setdefault((match[3], int(at[1])), []).append((int(match[2]), match[1], value))
    for m in range(1, EVERY_ROWS + 1):
        cells = []
        for isa, less in (("neon", None), ("neondot", None), ("i8mm", "neondot")):
            _, row, value = max(found.get((isa, m)) or found[less, m])
            cells.append(f"{value:.1f} ({row})")
        lines.append(f"| {m} | " + " | ".join(cells) + " |")
    return lines + [""]


def document(data: dict) -> str:
    counts = data["counts"]
    lines = [
        "# Instructions of the Arm kernels", "",
        "Counted under QEMU: exact and repeatable. No Arm hardware was used, and a count is not a time.",
        f"Compiler: {data['compiler']}. Emulator: {data['emulator']}.",
        "Written by `python3 bench/arm_cost.py`; `docs/arm_cost.json` has the same numbers for the test that no kernel",
        "grows.",
        "", "## Linear", "",
        "Instructions per 128 weights and row of activations, everything included that one call of the kernel does:",
        "128 outputs (a kernel for many rows copies the activations once for as many), 1024 inputs, float32 output.",
        "g: inputs per group. m: rows of activations. Columns: bits.", "",
    ]
    widths = [str(bits) for bits in range(1, 9)]
    linear: dict = {}
    for name, tasks in counts.items():
        if match := re.fullmatch(r"linear_a8w(\d)_(\w+)", name):
            for task, value in tasks.items():
                if task.endswith(MAIN_ROWS):
                    linear.setdefault(match[2], {}).setdefault(task, {})[match[1]] = value
    for kernel, rows in linear.items():
        lines += [f"### {kernel}", ""] + table(["", *widths], rows)
    lines += small_m(counts)
    lines += ["## Activations to int8", "", "Instructions per value, group sums included; 1024 values.", ""]
    quantize = {name: tasks for name, tasks in counts.items() if name.startswith("quantize_")}
    lines += table(["", *dict.fromkeys(task for tasks in quantize.values() for task in tasks)], quantize)
    lines += ["## Embedding", "", "Instructions per value of a row of 1024, groups of 32. Columns: bits.", ""]
    embedding: dict = {}
    for name, tasks in counts.items():
        if match := re.fullmatch(r"embedding_w(\d)_(\w+)", name):
            for task, value in tasks.items():
                embedding.setdefault(f"{match[2]}, {task}", {})[match[1]] = value
    return "\n".join(lines + table(["", *widths], embedding)).rstrip() + "\n"


def growth(committed: dict, found: dict) -> list[str]:
    """What needs too many instructions, or is counted for the first time."""
    bad = []
    for name, tasks in found.items():
        for task, value in tasks.items():
            before = committed.get(name, {}).get(task)
            if before is None:
                bad.append(f"{name}, {task}: not in {DATA.name}; run bench/arm_cost.py")
            elif value > before * GROWTH:
                bad.append(f"{name}, {task}: {value} instructions, {before} committed")
    return bad


def check_that_it_can_fail() -> None:
    assert not growth({"row": {"task": 10.0}}, {"row": {"task": 10.2}})
    assert growth({"row": {"task": 10.0}}, {"row": {"task": 10.4}}) and growth({}, {"row": {"task": 1.0}})


def check(counter: Counter, parts: list[str]) -> int:
    check_that_it_can_fail()
    found = counter.count(CHECK_CPU, parts)
    bad = growth(json.loads(DATA.read_text(encoding="utf-8"))["counts"], found)
    print("\n".join(bad))
    print(f"{len(bad)} of {sum(len(tasks) for tasks in found.values())} counts have grown, or are new")
    return 1 if bad or not found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/arm_cost", help="where to build")
    parser.add_argument("--program", type=pathlib.Path, help="a counting program that is built already")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("parts", nargs="*", metavar="PART")
    args = parser.parse_args()
    compiler, emulator = version("aarch64-linux-gnu-g++"), version("qemu-aarch64")
    if args.check:
        if os.environ.get("QEMU_CPU", CHECK_CPU) != CHECK_CPU:
            print(f"skipped: checked where QEMU_CPU is {CHECK_CPU}")
            return SKIPPED
        if json.loads(DATA.read_text(encoding="utf-8"))["compiler"] != compiler:
            print(f"skipped: {DATA.name} was counted with another compiler than {compiler}")
            return SKIPPED
    elif args.parts:
        parser.error("the document is about all rows: PART is for --check")
    program = args.program or build(args.build)
    with tempfile.TemporaryDirectory() as scratch:
        counter = Counter(program, scratch)
        if args.check:
            return check(counter, args.parts)
        data = {"compiler": compiler, "emulator": emulator, "counts": count_all(counter)}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    DOCUMENT.write_text(document(data), encoding="utf-8")
    print(f"{len(data['counts'])} kernel rows: {DOCUMENT.relative_to(ROOT)}, {DATA.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
