"""Measures the cost of the Arm kernels and writes docs/arm_cost.md and .json.

Counts the instructions of every kernel and of KleidiAI's 4-bit layer under QEMU, models the cycles with llvm-mca, and projects
tokens per second.

    python3 bench/arm_cost.py                            cross-builds, does all of it, writes both files
    python3 bench/arm_cost.py --sme2                     counts only the SME2 kernels again (arm_sme2.py), writes both files
    python3 bench/arm_cost.py --check [--program P] [PART...]
                                                         counts the kernels whose names contain PART (^ISA: leaves out that
                                                         ISA); fails when one needs over 3 % more than in the JSON

Needs cmake, ninja, a C compiler, aarch64-linux-gnu-g++ and a qemu-aarch64 that takes plugins; without --check also
llvm-mc and llvm-mca, and for KleidiAI the emulated Arm Python of scripts/arm_python.sh in build/arm-python.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

import arm_cycles
import arm_page
import arm_peer
import arm_project
import arm_sme2
from arm_cycles import CORES
from arm_tools import run, tool, version
from costs import growth

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT, DATA = ROOT / "docs/arm_cost.md", ROOT / "docs/arm_cost.json"
CPUS = ("cortex-a53", "cortex-a76", "max,sve=off")  # a kernel is counted on the first of these that runs it
CHECK_CPU = "cortex-a76"
SKIPPED = 77


def build(directory: pathlib.Path, target: str = "arm_cost") -> pathlib.Path:
    tool("aarch64-linux-gnu-g++")
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
            f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/aarch64-linux-gnu.cmake'}",
        ],
        "cmake",
    )
    run([tool("cmake"), "--build", directory, "--target", target], "the build")
    return directory / "bench" / target


class Counter:
    """Runs the counting program under QEMU with the plugin."""

    def __init__(self, program: pathlib.Path, scratch: str):
        self.program, self.counts = program, pathlib.Path(scratch) / "counts"
        self.emulator = [tool("qemu-aarch64"), "-L", "/usr/aarch64-linux-gnu"]
        self.plugin = pathlib.Path(scratch) / "libicount.so"
        run([tool("cc"), "-O2", "-shared", "-fPIC", ROOT / "bench/icount.c", "-o", self.plugin], "building the plugin")

    def count(self, cpu: str, arguments: list[str]) -> dict:
        """{kernel: {task: instructions per unit}}"""
        return per_unit(self.trace(cpu, arguments, blocks=False))

    def trace(self, cpu: str, arguments: list[str], blocks: bool) -> dict:
        """{kernel: {task: (units, instructions, {block: times})}}; the blocks are empty unless `blocks` is set."""
        self.counts.write_text("")
        text = run(
            [
                *self.emulator,
                "-cpu",
                cpu,
                "-plugin",
                f"{self.plugin},out={self.counts}{',blocks=on' if blocks else ''}",
                self.program,
                *arguments,
            ],
            f"counting on {cpu} (a statically linked qemu-aarch64 takes no plugins)",
        )
        calls, counts = text.splitlines(), arm_cycles.Trace(self.counts.read_text()).calls
        if len(calls) != len(counts):
            sys.exit(f"arm_cost: {len(calls)} calls but {len(counts)} counts on {cpu}")
        found: dict = {}
        for call, count in zip(calls, counts):
            name, task, units = call.split("\t")
            found.setdefault(name, {})[task] = int(units), *count
        return found

    def packed_bytes(self, n: int, k: int) -> dict:
        """{(bits, mapping, group size): bytes of an n x k matrix}"""
        rows = map(str.split, run([*self.emulator, self.program, "--bytes", n, k], "asking for sizes").splitlines())
        return {(int(bits), mapping, int(group_size)): int(size) for bits, mapping, group_size, size in rows}


def per_unit(traced: dict) -> dict:
    return {
        name: {task: round(instructions / units, 2) for task, (units, instructions, _) in tasks.items()}
        for name, tasks in traced.items()
    }


def trace_all(counter: Counter, parts: list[str]) -> dict:
    found: dict = {}
    for cpu in CPUS:
        known = sorted({name.rsplit("_", 1)[1] for name in found})
        found |= counter.trace(cpu, [*parts, *(f"^{isa}" for isa in known)], blocks=True)
    return found


def bytes_per_weight(counter: Counter, n: int = 1024, k: int = 1024) -> dict:
    found: dict = {}
    for (bits, mapping, group_size), size in counter.packed_bytes(n, k).items():
        found.setdefault(f"{mapping} g{group_size}", {})[str(bits)] = size / (n * k)
    return found


def check_that_it_can_fail() -> None:
    assert not growth({"row": {"task": 10.0}}, {"row": {"task": 10.2}})
    assert growth({"row": {"task": 10.0}}, {"row": {"task": 10.4}}) and growth({}, {"row": {"task": 1.0}})


def check(counter: Counter, parts: list[str]) -> int:
    check_that_it_can_fail()
    found = counter.count(CHECK_CPU, parts)
    bad = growth(json.loads(DATA.read_text(encoding="utf-8"))["counts"], found)
    print("\n".join(bad))
    print(f"{len(bad)} of {sum(len(tasks) for tasks in found.values())} counts have grown or are new")
    return 1 if bad or not found else 0


def write(data: dict) -> int:
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    DOCUMENT.write_text(arm_page.document(data), encoding="utf-8")
    rows = len(data["counts"]) + (len(data["SME2"]["counts"]) if data["SME2"] else 0)
    print(f"{rows} kernels: {DOCUMENT.relative_to(ROOT)}, {DATA.relative_to(ROOT)}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/arm_cost", help="build directory")
    parser.add_argument("--program", type=pathlib.Path, help="use this counting program instead of building one")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sme2", action="store_true")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="only kernels whose names contain it; the others keep their numbers"
    )
    args = parser.parse_args()
    compiler, emulator = version("aarch64-linux-gnu-g++"), version("qemu-aarch64")
    if args.check:
        if os.environ.get("QEMU_CPU", CHECK_CPU) != CHECK_CPU:
            print(f"skipped: checked where QEMU_CPU is {CHECK_CPU}")
            return SKIPPED
        if json.loads(DATA.read_text(encoding="utf-8"))["compiler"] != compiler:
            print(f"skipped: {DATA.name} was counted with another compiler than {compiler}")
            return SKIPPED
    if args.sme2:
        data = json.loads(DATA.read_text(encoding="utf-8"))
        data["SME2"] = arm_sme2.count(args.program or build(args.build, "arm_cost_static"))
        return write(data)
    program = args.program or build(args.build)
    with tempfile.TemporaryDirectory() as scratch:
        counter = Counter(program, scratch)
        if args.check:
            return check(counter, args.parts)
        traced = trace_all(counter, args.parts)
        cycles = arm_cycles.model(traced)
        if args.parts:  # all other kernels keep their numbers
            data = json.loads(DATA.read_text(encoding="utf-8"))
            data["counts"] |= per_unit(traced)
            for core in CORES:
                data["cycles"][core] |= cycles[core]
            return write(data)
        data = {
            "compiler": compiler,
            "emulator": emulator,
            "counts": per_unit(traced),
            "cycles": cycles,
            "bytes per weight": bytes_per_weight(counter),
            "tokens per second": arm_project.project(cycles, counter.packed_bytes),
            "KleidiAI": arm_peer.count(counter.plugin, pathlib.Path(scratch)) if arm_peer.available() else None,
            "SME2": json.loads(DATA.read_text(encoding="utf-8")).get("SME2"),
        }
    return write(data)


if __name__ == "__main__":
    sys.exit(main())
