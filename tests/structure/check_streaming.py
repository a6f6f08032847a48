"""Fails if an SME2 object has an SVE or SME instruction in a place where the CPU may not support it.

CPUs with SME2 need not have SVE: outside streaming mode, SVE instructions end the process. In streaming mode, ordinary vector
instructions do. So a function of such an object is one of two kinds:

    streaming  called only by run_streaming() and similar functions; calls nothing and never changes the mode
    ordinary   no instruction on z, p or ZA registers, except for reading the length of vectors (rdsvl). Only run_streaming()
               starts and stops the mode, with a single call in between. It has few instructions and no loop, so its
               instructions are the cost of a call

Usage: check_streaming.py --objdump <objdump that knows SME2> <objects...>
"""

import argparse
import re
import subprocess
import sys

SCALABLE = re.compile(r"\b(z\d+|p\d+|pn\d+)\b|\bza\d*|\bzt0\b|\bvl\b|\bmul\s+vl\b")
LENGTHS = {"cntb", "cnth", "cntw", "cntd", "rdvl", "addvl", "addpl", "addsvl", "addspl"}
NEON = re.compile(r"\bv\d+\.|\{\s*v\d+")
MODE = {"smstart", "smstop"}
ENTRY = "run_streaming"
ENTRY_INSTRUCTIONS = 60


def functions(listing: str) -> dict[str, list[tuple[str, str]]]:
    """{name: [(mnemonic, operands)]} of a disassembly."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in listing.splitlines():
        if match := re.match(r"^[0-9a-f]+ <(.+)>:$", line):
            current = found.setdefault(match[1], [])
        elif match := re.match(r"^\s+[0-9a-f]+:\s+(\S+)\s*(.*)$", line):
            current.append((match[1], match[2].split("//")[0]))
    return found


def problems(code: dict[str, list[tuple[str, str]]]) -> list[str]:
    wrong = []
    inside = streaming(code)
    for name, instructions in code.items():
        if ENTRY in name:
            body = [mnemonic for mnemonic, _ in instructions if mnemonic in MODE or mnemonic in ("bl", "blr")]
            if body != ["smstart", "blr", "smstop"]:
                wrong.append(f"{name}: {' '.join(body)}; expected smstart blr smstop")
            if len(instructions) > ENTRY_INSTRUCTIONS:
                wrong.append(f"{name}: {len(instructions)} instructions; expected {ENTRY_INSTRUCTIONS} at most")
        elif any(mnemonic in MODE for mnemonic, _ in instructions):
            wrong.append(f"{name} changes the mode")
        scalable = [f"{m} {o}" for m, o in instructions if SCALABLE.search(o) or m in LENGTHS]
        calls = [f"{m} {o}" for m, o in instructions if m == "blr" or m == "bl" and callee(o) not in inside]
        into = [f"{m} {o}" for m, o in instructions if m == "bl" and callee(o) in inside]
        if into and not scalable:
            wrong.append(f"{name} is ordinary and calls a streaming function: {into[0]}")
        neon = [f"{m} {o}" for m, o in instructions if NEON.search(o)]
        if scalable and (calls or neon):
            wrong.append(f"{name} is neither streaming nor ordinary: {scalable[0]}; {(calls + neon)[0]}")
    if not any(ENTRY in name for name in code):
        wrong.append(f"no {ENTRY}()")
    if not any(SCALABLE.search(o) for instructions in code.values() for _, o in instructions):
        wrong.append("no instruction on z registers: is this an objdump that knows SME2?")
    if unknown := [name for name, instructions in code.items() if any("unknown" in m + o for m, o in instructions)]:
        wrong.append(f"unknown instructions in {unknown[0]}")
    return wrong


def callee(operand: str) -> str:
    """Target of a call within the object; other calls have an offset that the linker fills in."""
    return operand.partition("<")[2].rstrip("> ")


def streaming(code: dict[str, list[tuple[str, str]]]) -> set[str]:
    return {name for name, instructions in code.items() if any(SCALABLE.search(o) for _, o in instructions)}


def check_that_it_can_fail() -> None:
    entry = {ENTRY: [("smstart", ""), ("blr", "x1"), ("smstop", "")]}
    body = {"body": [("ptrue", "p0.b"), ("usmopa", "za0.s, p0/m, p0/m, z0.b, z1.b"), ("ret", "")]}
    ordinary = {"run": [("rdsvl", "x0, #1"), ("fmla", "v0.4s, v1.4s, v2.4s"), ("bl", "0x40 ")]}
    assert not problems(entry | body | ordinary)
    assert problems(entry | body | {"run": ordinary["run"] + [("ptrue", "p0.b")]})
    assert problems(entry | body | {"run": ordinary["run"] + [("cntd", "x0")]})
    assert problems(entry | {"body": [*body["body"], ("bl", "0x50 <run>")]} | ordinary)
    assert problems(entry | {"body": [*body["body"], ("bl", "0x50 <body+0x50>")]})
    assert not problems(entry | body | {"other": [*body["body"], ("bl", "0x50 <body>")]})
    assert problems(entry | body | {"run": [*ordinary["run"], ("bl", "0x50 <body>")]})
    assert problems(entry | {"body": [*body["body"], ("add", "v0.4s, v0.4s, v1.4s")]})
    assert problems(entry | {"body": [("smstop", "sm"), *body["body"]]})
    assert problems({ENTRY: [*entry[ENTRY], *[("nop", "")] * ENTRY_INSTRUCTIONS]} | body)
    assert problems({ENTRY: [("smstart", ""), ("bl", "0x1"), ("blr", "x1"), ("smstop", "")]} | body)
    assert problems(entry | ordinary) and problems(body | ordinary)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objdump", required=True)
    parser.add_argument("objects", nargs="+")
    args = parser.parse_args()
    check_that_it_can_fail()

    bad = 0
    for path in args.objects:
        command = [args.objdump, "-d", "--no-show-raw-insn", "--mattr=+all", path]
        code = functions(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found = problems(code)
        for text in found:
            print(f"{path}: {text}")
        print(f"{path}: {len(streaming(code))} of {len(code)} functions are streaming")
        bad += bool(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
