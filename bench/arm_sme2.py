"""Counts the instructions of the SME2 kernels, for arm_cost.py --sme2.

The QEMU of scripts/arm_emulator.sh does not support plugins. It writes a line for each instruction of the kernels and for the
markers of arm_cost.cpp."""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

from arm_tools import run, tool

ROOT = pathlib.Path(__file__).resolve().parent.parent
EMULATOR = ROOT / "build/arm-emulator/qemu-aarch64"
CPU = "max,sve=off,sme512=on"
KERNELS = "other_compiler/kernels/linear/sme2.cpp.o"
ENTRY = "run_streaming"
BEGIN, END = "#0x61", "#0x62"  # operands of the markers' hints


def symbols(path: pathlib.Path) -> dict[str, int]:
    lines = run([tool("aarch64-linux-gnu-nm"), path], "nm").splitlines()
    return {fields[2]: int(fields[0], 16) for fields in map(str.split, lines) if len(fields) == 3}


def kernel_code(program: pathlib.Path, objects: pathlib.Path) -> range:
    """Address range of the kernels' object in the program, which is contiguous."""
    text = run([tool("aarch64-linux-gnu-objdump"), "-h", objects], "objdump")
    size = int(re.search(r"\.text +([0-9a-f]+)", text)[1], 16)
    name, offset = next((name, at) for name, at in symbols(objects).items() if ENTRY in name)
    begin = symbols(program)[name] - offset
    return range(begin, begin + size)


def markers(program: pathlib.Path) -> dict[int, str]:
    """{address: hint's operand}"""
    text = run([tool("aarch64-linux-gnu-objdump"), "-d", program], "objdump")
    found = re.findall(r"^ *([0-9a-f]+):\t.*\thint\t(#0x6[12])$", text, re.M)
    return {int(address, 16): hint for address, hint in found}


def trace(program: pathlib.Path, arguments: list[str]) -> dict:
    """{row: {task: instructions per unit}}"""
    if not EMULATOR.exists():
        sys.exit(f"arm_cost: {EMULATOR.relative_to(ROOT)} is missing (make build/arm-emulator)")
    code, hints = kernel_code(program, program.parent.parent / KERNELS), markers(program)
    wanted = ",".join([f"0x{code.start:x}..0x{code.stop - 1:x}", *(f"0x{at:x}+4" for at in hints)])
    command = [EMULATOR, "-cpu", CPU, "-one-insn-per-tb", "-d", "exec,nochain", "-dfilter", wanted, program, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "QEMU_CPU"}
    counts, counting, instructions = [], False, 0
    with subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stderr:
            hint = hints.get(int(line.split("/", 2)[1], 16)) if line.startswith("Trace") else None
            if hint == BEGIN:
                counting, instructions = True, 0
            elif hint == END:
                counting = False
                counts.append(instructions)
            else:
                instructions += counting
        calls = process.stdout.read().splitlines()
    if process.returncode != 0 or not calls or len(calls) != len(counts):
        sys.exit(f"arm_cost: {len(calls)} calls but {len(counts)} counts; the program returned {process.returncode}")
    found: dict = {}
    for call, count in zip(calls, counts):
        name, task, units = call.split("\t")
        found.setdefault(name, {})[task] = round(count / int(units), 3)
    return found


def count(program: pathlib.Path) -> dict:
    compiler = run([tool("clang++-19"), "--version"], "clang++").splitlines()[0]
    emulator = run([EMULATOR, "--version"], "qemu-aarch64").splitlines()[0]
    return {"compiler": compiler, "emulator": emulator, "counts": trace(program, ["_sme2"])}


# Published by others; this program does not compute it.
PUBLISHED = [
    "### Published figures of KleidiAI's SME2 kernels",
    "",
    "The available packages export only KleidiAI's kernels with one scale per channel, and their counts were not repeatable,",
    "so this page has no counts of them. KleidiAI's authors measured prefill of a whole model in llama.cpp on an Apple M4 Pro",
    "(two matrix units), Llama 3.2 1B, 512 tokens. Q4_0 (groups of 32) has 295 tokens/s with one thread, 547 with two, 557",
    "with eight, and 1048 with eight if all but two use NEON (ggml-org/llama.cpp, pull request 20070). Q8_0, with one scale",
    "per channel, has 504 with one thread (pull request 16993). lowbit also uses both kinds of units in one call",
    "(`LOWBIT_SME_THREADS`), with the same bits. Its speed on an M4 has not been measured; `bench/arm_sme2_model.py` models",
    "one layer.",
    "",
]


def document(data: dict | None, table: Callable, linear_rows: Callable) -> list[str]:
    if data is None:
        return []
    lines = [
        "## SME2",
        "",
        f"Compiler: {data['compiler']}. Emulator: {data['emulator']}, `-cpu {CPU}`: vectors of 512 bits.",
        "Counted as above, by `make arm-cost-sme2`. LLVM has no model of a core with SME2, so there are no cycles,",
        "and an instruction of a matrix unit does more than one of a core: `smopa` counts as one for up to 1024 products.",
        "Rows of activations come in tiles of 16; a partial tile costs as much as a whole one. No test compares these counts.",
        "",
    ]
    for kernel, rows in linear_rows(data["counts"]).items():
        rows = {task: cells for task, cells in rows.items() if task.endswith(" m1") == kernel.startswith("1x")}
        lines += [f"### {kernel}", ""] + table(["", *map(str, range(1, 9))], rows)
    return lines + PUBLISHED
