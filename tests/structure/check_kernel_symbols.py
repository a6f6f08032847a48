"""Fails unless every kernel object exports only its tables: no functions, weak symbols or static initializers.

Kernel files are compiled for instructions that other CPUs lack. The linker could keep a weak symbol of one, such as an inline
function, for the whole library, which would be an illegal instruction on other machines.

Usage: check_kernel_symbols.py --nm <nm> --sources <kernel sources...> --objects <objects of the library...>
"""

import argparse
import pathlib
import subprocess
import sys

WEAK = set("WwVvu")
LOCAL = set("abdnrstN?")
FUNCTIONS = set("TI")


def problems(symbols: list[tuple[str, str]]) -> list[str]:
    """Problems with the defined symbols (type letter of nm, name) of a kernel object."""
    weak = [name for kind, name in symbols if kind in WEAK]
    external = [name for kind, name in symbols if kind not in WEAK | LOCAL]
    functions = [name for kind, name in symbols if kind in FUNCTIONS]
    initializers = [name for _, name in symbols if "_GLOBAL__sub_I" in name]
    found = [f"weak symbol {name}" for name in weak] + [f"static initializer {name}" for name in initializers]
    if functions or not external:
        found.append(f"external symbols {', '.join(functions) or 'none'}; expected tables")
    return found


def defined_symbols(nm: str, path: str) -> list[tuple[str, str]]:
    listing = subprocess.run([nm, "--defined-only", "--format=posix", path], check=True, capture_output=True, text=True)
    symbols = []
    for line in listing.stdout.splitlines():
        name, kind = line.split()[:2]
        symbols.append((kind, name))
    return symbols


def check_that_it_can_fail() -> None:
    table = ("D", "kLinearX")
    assert not problems([table, ("t", "run"), ("r", "rows")])
    assert problems([table, ("W", "std::fma")]) and problems([table, ("V", "inline_constant")])
    assert problems([table, ("u", "unique")]) and problems([table, ("T", "helper")])
    assert problems([("t", "run")]) and problems([table, ("t", "_GLOBAL__sub_I_x.cpp")])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", required=True)
    parser.add_argument("--sources", nargs="+", required=True)
    parser.add_argument("--objects", nargs="+", required=True)
    args = parser.parse_args()
    check_that_it_can_fail()

    bad = 0
    for source in args.sources:
        path = pathlib.PurePath(source)
        ending = f"kernels/{path.parent.name}/{path.name}"
        objects = [o for o in args.objects if pathlib.PurePath(o).as_posix().endswith((ending + ".o", ending + ".obj"))]
        if len(objects) == 1:
            found = problems(defined_symbols(args.nm, objects[0]))
        else:
            found = [f"{len(objects)} objects, expected one"]
        for text in found:
            print(f"{ending}: {text}")
        bad += bool(found)
    print(f"{len(args.sources) - bad} of {len(args.sources)} kernel objects are right")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
