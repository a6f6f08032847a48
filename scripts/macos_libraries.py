"""The macOS libraries that a cross build links and checks against: read from Mach-O files, without a Mac.

    python scripts/macos_libraries.py libc++ OUTPUT LIBRARY...   what LIBRARYs import from macOS's libc++, as OUTPUT (.tbd)
    python scripts/macos_libraries.py check MINIMUM SYSTEM_TBD BUILT... -- LIBRARY...

`check`: every symbol that the BUILT libraries import is there: in the libraries of torch and executorch (LIBRARY), in each
other, in SYSTEM_TBD (zig's libSystem), or in libc++, of which LIBRARYs import it too. Each is arm64, names only libraries
that a Mac or the packages have, and needs no newer system than MINIMUM, for example 11.0.

Zig has no libc++ of macOS to link with, only one of its own, and a process must not have two.
"""

import re
import sys
from pathlib import Path

from macholib.MachO import MachO
from macholib.mach_o import CPU_TYPE_NAMES
from macholib.SymbolTable import SymbolTable

# In every libc++, and not among what torch happens to use: operators new[] and delete, and std::bad_alloc.
STANDARD = {"__ZnamRKSt9nothrow_t", "__ZdlPvm", "__ZNSt9bad_allocC2Ev", "__ZNSt9bad_allocD2Ev"}
LOADS = ("LC_LOAD_DYLIB", "LC_LOAD_WEAK_DYLIB", "LC_REEXPORT_DYLIB")  # in the order of their numbers
LIBCXX = "/usr/lib/libc++.1.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
TEXT = """--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos, arm64e-macos ]
install-name: '{name}'
exports:
  - targets: [ arm64-macos, arm64e-macos ]
    symbols: [ {symbols} ]
...
"""
# From a library that is looked for when the process runs: the interpreter's.
DYNAMIC_LOOKUP = 0xFE


class Library:
    """What one Mach-O file imports, exports and needs."""

    def __init__(self, path: str):
        self.name = Path(path).name
        (header,) = MachO(path).headers
        self.processor = CPU_TYPE_NAMES[header.header.cputype]
        commands = [(load.get_cmd_name(), command, data) for load, command, data in header.commands]
        self.needs = [data.rstrip(b"\0").decode() for name, _, data in commands if name in LOADS]
        (build,) = (command for name, command, _ in commands if name == "LC_BUILD_VERSION")
        self.minimum = (build.minos >> 16, build.minos >> 8 & 255)
        table = SymbolTable(MachO(path))
        self.exports = {name.decode() for _, name in table.extdefsyms}
        self.imports = []
        for entry, name in table.undefsyms:
            ordinal = entry.n_desc >> 8 & 255
            known = 0 < ordinal <= len(self.needs)
            self.imports.append((name.decode(), self.needs[ordinal - 1] if known else ordinal))


def of_libcxx(libraries: list[Library]) -> set[str]:
    return STANDARD | {name for library in libraries for name, origin in library.imports if origin == LIBCXX}


def problems(built: list[Library], libraries: list[Library], system: set[str], minimum: tuple[int, int]) -> list[str]:
    exports = {library.name: library.exports for library in built + libraries}
    exports |= {"libc++.1.dylib": of_libcxx(libraries), "libSystem.B.dylib": system}
    found = []
    for library in built:
        if library.processor != "ARM64":
            found.append(f"{library.name} is for {library.processor}; expected ARM64")
        if library.minimum > minimum:
            found.append(f"{library.name} needs macOS {library.minimum}; expected {minimum} or less")
        for need in library.needs:
            if need not in (LIBCXX, LIBSYSTEM) and not (need.startswith("@rpath/") and Path(need).name in exports):
                found.append(f"{library.name} needs {need}, which nobody has")
        for name, origin in library.imports:
            if origin == DYNAMIC_LOOKUP and re.match("_?_Py", name):
                continue
            if not isinstance(origin, str) or name not in exports.get(Path(origin).name, ()):
                found.append(f"{library.name} imports {name} from {origin}, which has no such symbol")
    return found


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "libc++":
        output, *paths = arguments
        symbols = sorted(of_libcxx([Library(path) for path in paths]))
        Path(output).write_text(TEXT.format(name=LIBCXX, symbols=", ".join(f"'{name}'" for name in symbols)))
        return
    minimum, tbd, *paths = arguments
    split = paths.index("--")
    built, libraries = [Library(path) for path in paths[:split]], [Library(path) for path in paths[split + 1 :]]
    # A list of names is all that is needed of the text.
    system = set(re.findall(r"[\w$.]+", Path(tbd).read_text(encoding="utf-8")))
    found = problems(built, libraries, system, tuple(map(int, minimum.split("."))))
    for line in found:
        print(line)
    count = sum(len(library.imports) for library in built)
    print(f"{len(built)} libraries, {count} imported symbols: {len(found)} problems")
    sys.exit(bool(found) or not count)


if __name__ == "__main__":
    main()
