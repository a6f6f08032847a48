"""Finds loads of AMX tile configurations that the library has not written: the fault of GCC's intrinsics that
scripts/amx_intrinsics.h works around. Such a load ends the process by signal 11, only on a CPU with AMX.

    objdump -d --no-show-raw-insn LIBRARY | python scripts/check_tile_config.py LIBRARY
"""

import re
import sys

BEFORE = 40  # instructions before the load that may write the configuration
ROWS = range(48, 64)  # bytes of a configuration that every use must set: the rows of each tile
SIZES = {"b": 1, "w": 2, "l": 4, "q": 8}


def address(operand: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"(-?0x[0-9a-f]+)?\((%\w+)\)", operand)
    return (found[2], int(found[1] or "0", 16)) if found else None


def stored(instruction: str) -> tuple[str, int, int] | None:
    """Register, first byte and size of what an instruction writes to memory."""
    name, _, operands = instruction.partition(" ")
    source, _, target = operands.strip().rpartition(",")
    at = address(target)
    if at is None or not name.startswith(("mov", "vmov")) or "(" in source:
        return None
    vector = re.match(r"%([xyz])mm", source)
    if vector:
        size = {"x": 16, "y": 32, "z": 64}[vector[1]]
        size = {"movq": 8, "vmovq": 8, "movd": 4, "vmovd": 4, "vmovlps": 8, "movlps": 8}.get(name, size)
    elif name[-1] in SIZES and name not in ("mov", "movabs"):
        size = SIZES[name[-1]]
    else:
        size = 8 if re.match(r"%r(?!\d+[dwb])", source) else 2 if re.match(r"%([a-ds][ix]|r\d+w)$", source) else 4
    return (*at, size)


def unwritten(disassembly: str) -> list[str]:
    """Functions that load a configuration with a palette whose tile rows are all zero or unwritten."""
    faulty, function, stores, zeros, count = [], "", [], set(), 0
    for line in disassembly.splitlines():
        if line.endswith(">:"):
            function, stores, zeros = line.partition("<")[2][:-2], [], set()
            continue
        _, separator, text = line.partition(":\t")
        if not separator:
            continue
        instruction, count = text.partition("#")[0].strip(), count + 1
        name, _, operands = instruction.partition(" ")
        if name == "ldtilecfg":
            at = address(operands.strip())
            near = [store for number, store, _ in stores if at and number >= count - BEFORE and store[0] == at[0]]
            written = {
                byte - at[1]
                for number, (register, first, size), is_zero in stores
                if at and not is_zero and number >= count - BEFORE and register == at[0]
                for byte in range(first, first + size)
            }
            # Skip configurations in a table or with an address computed elsewhere.
            if near and not written & set(ROWS):
                faulty.append(function)
        vectors = re.findall(r"%[xyz]mm(\d+)", operands)
        store = stored(instruction)
        if store:
            stores.append((count, store, bool(vectors) and vectors[0] in zeros))
        elif vectors:
            is_zero = "xor" in name and len(set(vectors)) == 1 and "(" not in operands
            (zeros.add if is_zero else zeros.discard)(vectors[-1])
    return faulty


def main() -> int:
    disassembly = sys.stdin.read()
    functions = sorted(set(unwritten(disassembly)))
    for function in functions:
        print(
            f"{sys.argv[1]}: {function} loads an AMX tile configuration whose rows it has not written; on a CPU with AMX "
            "the process would end by signal 11",
            file=sys.stderr,
        )
    return 1 if functions else 0


if __name__ == "__main__":
    sys.exit(main())
