"""Makes stand-ins for CUDA's libraries, so that a CUDA build of torch can be imported to use its CPU part.

    python scripts/cuda_stand_ins.py SITE DIRECTORY [COMPILER]

SITE has torch. DIRECTORY gets a stand-in for every library that torch needs and that neither torch nor this system has; its
functions return zero. PyPI's wheels of torch for Linux are CUDA builds, which need gigabytes of libraries.
"""

import re
import subprocess
import sys
from pathlib import Path

SYSTEM = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC|GOMP|OMP|GFORTRAN)_|^_?Py")
# The C and C++ libraries, which every system has; the rest is CUDA's.
SYSTEM_LIBRARIES = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp|z|util)|ld-linux.*)\.so(\.\d+)?")
ZERO = {"x86_64": "xor %eax, %eax; ret", "aarch64": "mov x0, #0; ret"}


def lines(*command) -> list[str]:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    site, directory = Path(sys.argv[1]), Path(sys.argv[2])
    compiler = sys.argv[3] if len(sys.argv) > 3 else "gcc"
    (zero,) = (text for name, text in ZERO.items() if name in lines(compiler, "-dumpmachine")[0])
    libraries = [path for path in (site / "torch/lib").iterdir() if ".so" in path.name]
    libraries += list(site.glob("*.libs/*.so*"))  # libraries that auditwheel added to torch
    own = {path.name for path in libraries}
    needed, defined, undefined = set(), set(), set()
    versions = {}  # symbol version -> library
    for path in libraries:
        needed |= {match[1] for line in lines("readelf", "-d", path) if (match := re.search(r"NEEDED.*\[(.*)\]", line))}
        for line in lines("readelf", "-VW", path):
            if match := re.search(r"File: (\S+)", line):
                file = match[1]
            elif match := re.search(r"Name: (\S+) +Flags: .* Version: ", line):
                versions[match[1]] = file
        for line in lines("nm", "-D", path):
            *_, kind, symbol = line.split()
            if kind not in "Uwv":
                defined.add(symbol.split("@")[0])
            elif kind == "U" and not SYSTEM.search(symbol):
                undefined.add(symbol)
    missing = sorted(name for name in needed - own if not SYSTEM_LIBRARIES.fullmatch(name))
    directory.mkdir(parents=True, exist_ok=True)
    stood_in = {symbol for symbol in undefined if symbol.split("@")[0] not in defined}
    for number, name in enumerate(missing):
        # A symbol without a version may be in any library.
        symbols = sorted(s for s in stood_in if (versions.get(s.split("@")[1]) == name if "@" in s else number == 0))
        names = [symbol.split("@")[0] for symbol in symbols]
        source, script = directory / "stand_in.s", directory / "versions.map"
        source.write_text(
            ".text\n"
            + "".join(f".globl {symbol}\n.type {symbol}, %function\n{symbol}:\n" for symbol in names)
            + zero.replace("; ", "\n")
            + '\n.section .note.GNU-stack,"",%progbits\n'
        )
        its_versions = [version for version, file in versions.items() if file == name]
        sets = {version: [s for s in symbols if s.endswith(f"@{version}")] for version in its_versions}
        script.write_text("".join(f"{v} {{ {' '.join(s.split('@')[0] + ';' for s in has)} }};\n" for v, has in sets.items()))
        scripts = [f"-Wl,--version-script={script}"] if sets else []
        lines(compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", *scripts, source, "-o", directory / name)
        source.unlink()
        script.unlink()
    print(f"{len(missing)} stand-ins, {len(stood_in)} functions")


if __name__ == "__main__":
    main()
