"""The macOS libraries that a cross build links and checks against: read from Mach-O files, without a Mac.

    python scripts/macos_libraries.py libc++ --minimum 11.0 OUTPUT LIBRARY...
    python scripts/macos_libraries.py check --minimum 11.0 --system TBD [--python-headers DIRECTORY]
      --libraries LIBRARY... --built BUILT...
    python scripts/macos_libraries.py static --minimum 14.0 --system TBD --libraries LIBRARY... --built ARCHIVE...

`libc++`: writes a linker file (.tbd) with symbols of the libc++ of the macOS version --minimum: those that LIBRARYs for that
version, or an older one, import.

`check`: checks that every symbol that the BUILT libraries import exists: in the libraries of torch and executorch (LIBRARY), in
each other, in TBD (zig's libSystem), in that version's libc++ (as above), or in Python's headers. Each must be arm64 with a
valid signature, need no newer macOS than the minimum, and find the others relative to itself. liblowbit must have the kernels
for every instruction set.

`static`: the same for archives for iOS (.a). Each import must be defined by another object, executorch or the system. The
symbols of the system are those of macOS 11, which has the C and C++ libraries of iOS 14.

Zig can link only with its own libc++, not with macOS's, and a process must not have two.
"""

import argparse
import hashlib
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# In every libc++, but not used by torch: operators new[] and delete, exceptions of C++11 and before, stream buffers.
STANDARD = {"__ZnamRKSt9nothrow_t", "__ZdlPvm", "__ZNSt9bad_allocC2Ev", "__ZNSt9bad_allocD2Ev"}
STANDARD |= {"__ZTISt12domain_error", "__ZTISt14overflow_error", "__ZTISt16nested_exception"}
STANDARD |= {"__ZTVNSt3__115basic_streambufIcNS_11char_traitsIcEEEE"}
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
LINKER = {"___dso_handle"}  # made by every linker
IOS = 2  # Apple's number of the platform
MACOS_OF_IOS_14 = (11, 0)
# Looked up in the interpreter when the process runs.
DYNAMIC_LOOKUP = 0xFE
# For each instruction set with kernels: instructions (mask, bits) that no other set has; one of them must occur.
INSTRUCTIONS = {
    # sdot v.4s, v.16b, v.4b[i]; without LLVM's passes sdot v.4s, v.16b, v.16b
    "neondot": ((0xBFC0F400, 0x0F80E000), (0xBFE0FC00, 0x0E809400)),
    "i8mm": ((0xFFE0FC00, 0x4E80A400),),  # smmla v.4s, v.16b, v.16b
    "sme2": ((0xFFFFF9FF, 0xD503417F),),  # smstart, of streaming mode, of ZA or of both
}


class Library:
    """What one Mach-O file imports, exports and needs."""

    def __init__(self, path: str):
        # Only in build/wheel-tools (scripts/wheels.txt); tests of the functions below need no file.
        from macholib.mach_o import CPU_TYPE_NAMES
        from macholib.MachO import MachO
        from macholib.SymbolTable import SymbolTable

        self.path = Path(path)
        self.name = self.path.name
        (header,) = MachO(path).headers
        self.processor = CPU_TYPE_NAMES[header.header.cputype]
        commands = [(load.get_cmd_name(), command, data) for load, command, data in header.commands]

        def names(kinds) -> list[str]:
            return [data.rstrip(b"\0").decode() for name, _, data in commands if name in kinds]

        self.needs = names(LOADS)
        self.own_names = names(("LC_ID_DYLIB",))
        self.search = names(("LC_RPATH",))
        (build,) = (command for name, command, _ in commands if name == "LC_BUILD_VERSION")
        self.minimum = (build.minos >> 16, build.minos >> 8 & 255)
        signature = [command for name, command, _ in commands if name == "LC_CODE_SIGNATURE"]
        self.signature = (signature[0].dataoff, signature[0].datasize) if signature else None
        table = SymbolTable(MachO(path))
        self.exports = {name.decode() for _, name in table.extdefsyms}
        # Zig names the library only in the loader's data, not in the list of symbols as torch's libraries do.
        origins = {name.decode(): entry.n_desc >> 8 & 255 for entry, name in table.undefsyms}
        for command in (command for name, command, _ in commands if name == "LC_DYLD_INFO_ONLY"):
            data = self.path.read_bytes()
            for start, size in (
                (command.bind_off, command.bind_size), (command.lazy_bind_off, command.lazy_bind_size)
            ):  # fmt: skip
                origins |= bound(data[start : start + size])
        self.imports = [
            (name, self.needs[origin - 1] if 0 < origin <= len(self.needs) else origin) for name, origin in origins.items()
        ]


class Object:
    """What one object file of an archive imports and defines."""

    def __init__(self, name: str, data: bytes):
        from macholib.mach_o import CPU_TYPE_NAMES
        from macholib.MachO import MachO
        from macholib.SymbolTable import SymbolTable

        self.name = name
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            (header,) = MachO(file.name).headers
            table = SymbolTable(MachO(file.name))
        self.processor = CPU_TYPE_NAMES[header.header.cputype]
        builds = [command for load, command, _ in header.commands if load.get_cmd_name() == "LC_BUILD_VERSION"]
        self.platforms = {(build.platform, build.minos >> 16, build.minos >> 8 & 255) for build in builds}
        self.exports = {name.decode() for _, name in table.extdefsyms}
        self.imports = {name.decode() for _, name in table.undefsyms}
        # A function that runs before main; it registers operators.
        self.begins = b"__mod_init_func" in data or b"__init_offsets" in data


def members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """The files in an archive of Apple's tools, without its list of symbols.

    Raises:
        ValueError: the data is not an archive.
    """
    if archive[:8] != b"!<arch>\n":
        raise ValueError(f"an archive begins with {archive[:8]!r}; expected b'!<arch>\\n'")
    at = 8
    while at < len(archive):
        name, size = archive[at : at + 16].decode().strip(), int(archive[at + 48 : at + 58])
        data = archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
        if name.startswith("#1/"):  # a long name is stored at the start of the data
            length = int(name[3:])
            name, data = data[:length].rstrip(b"\0").decode(), data[length:]
        if not name.startswith("__.SYMDEF"):
            yield name, data


def bound(code: bytes) -> dict[str, int]:
    """Library that the loader takes each symbol from, decoded from its bind opcodes: a number, or one like DYNAMIC_LOOKUP."""
    found, at, origin, name = {}, 0, 0, ""

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte, at = code[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(code):
        operation, immediate = code[at] & 0xF0, code[at] & 15
        at += 1
        if operation == 0x10:
            origin = immediate
        elif operation == 0x20:
            origin = number()
        elif operation == 0x30:  # a negative number, of four bits
            origin = 0xF0 | immediate if immediate else 0
        elif operation == 0x40:
            end = code.index(0, at)
            name, at = code[at:end].decode(), end + 1
        elif operation in (0x60, 0x70, 0x80):  # where in memory
            number()
        elif operation in (0x90, 0xA0, 0xB0, 0xC0):
            found[name] = origin
            for _ in range({0xA0: 1, 0xC0: 2}.get(operation, 0)):
                number()
        elif operation not in (0x00, 0x50):
            raise ValueError(f"the loader has no operation {operation:#x}")
    return found


def of_libcxx(libraries: list[Library], minimum: tuple[int, int]) -> set[str]:
    """Symbols of the libc++ of a macOS version: those that libraries for that version, or an older one, import."""
    libraries = [library for library in libraries if library.minimum <= minimum]
    return STANDARD | {name for library in libraries for name, origin in library.imports if origin == LIBCXX}


def signature_is_right(data: bytes, signature: tuple[int, int] | None) -> bool:
    """Whether each page matches the signature, which may be "ad hoc"; otherwise an Arm Mac ends the process.

    The signature is a list of blobs with big-endian numbers; the first has the SHA-256 of each page before the signature.
    """
    if signature is None:
        return False
    start, size = signature
    blob = data[start : start + size]
    magic, _, count = struct.unpack_from(">3I", blob)
    if magic != 0xFADE0CC0:
        return False
    kinds = dict(struct.unpack_from(">2I", blob, 12 + 8 * each) for each in range(count))
    directory = kinds.get(0, 0)
    magic, _, _, _, hashes, _, _, pages, limit = struct.unpack_from(">9I", blob, directory)
    hash_size, hash_kind, _, page_bits = struct.unpack_from(">4B", blob, directory + 36)
    page = 1 << page_bits
    if magic != 0xFADE0C02 or (hash_size, hash_kind) != (32, 2) or limit != start or pages != -(-limit // page):
        return False
    return all(
        hashlib.sha256(data[number * page : min((number + 1) * page, limit)]).digest()
        == blob[directory + hashes + 32 * number :][:32]
        for number in range(pages)
    )


def missing_kernels(data: bytes) -> list[str]:
    """Instruction sets without a linear kernel for some width, or without any of their instructions."""
    words = memoryview(data[: len(data) // 4 * 4]).cast("I")
    found = []
    for isa, any_of in INSTRUCTIONS.items():
        widths = set(re.findall(rb"linear_a8w(\d)_\w*_%s\0" % isa.encode(), data))
        if len(widths) != 8 or not any(word & mask == bits for word in words for mask, bits in any_of):
            found.append(isa)
    return found


def of_python(headers: Path) -> set[str]:
    """Functions and objects that Python's public headers declare, by their macOS linker names."""
    declared = set()
    for path in [*headers.glob("*.h"), *(headers / "cpython").glob("*.h")]:
        text = path.read_text(encoding="utf-8")
        declared |= set(re.findall(r"PyAPI_(?:FUNC|DATA)\s*\([^)]*\)\s*(?:_Py_NO_RETURN\s+)?(\w+)", text))
    return {f"_{name}" for name in declared}


def problems(
    built: list[Library], libraries: list[Library], system: set[str], python: set[str], minimum: tuple[int, int]
) -> list[str]:
    exports = {library.name: library.exports for library in built + libraries}
    exports |= {"libc++.1.dylib": of_libcxx(libraries, minimum), "libSystem.B.dylib": system}
    found = []
    for library in built:
        if library.processor != "ARM64":
            found.append(f"{library.name} is for {library.processor}; expected ARM64")
        if library.minimum > minimum:
            found.append(f"{library.name} needs macOS {library.minimum}; expected {minimum} or less")
        if any(name != f"@rpath/{library.name}" for name in library.own_names):
            found.append(f"{library.name} calls itself {library.own_names}; expected @rpath/{library.name}")
        for place in library.search:
            if place != "@loader_path" and not place.startswith("@loader_path/"):
                found.append(f"{library.name} looks for libraries in {place}; expected a path relative to itself")
        for need in library.needs:
            if need not in (LIBCXX, LIBSYSTEM) and not (need.startswith("@rpath/") and Path(need).name in exports):
                found.append(f"{library.name} needs {need}, which no library has")
        if any(Path(need).name == other.name for need in library.needs for other in built):
            if "@loader_path" not in library.search:
                found.append(f"{library.name} does not look for libraries relative to itself")
        for name, origin in library.imports:
            if origin == DYNAMIC_LOOKUP and name in python:
                continue
            if origin == DYNAMIC_LOOKUP:
                origin = "the process"
            if not isinstance(origin, str) or name not in exports.get(Path(origin).name, ()):
                found.append(f"{library.name} imports {name} from {origin}, which lacks it")
        data = library.path.read_bytes()
        if not signature_is_right(data, library.signature):
            found.append(f"{library.name} has no valid signature")
        if library.name == "liblowbit.dylib":
            found += [f"{library.name} lacks kernels for {isa}" for isa in missing_kernels(data)]
    return found


def static_problems(objects: list[Object], others: set[str], minimum: tuple[int, int]) -> list[str]:
    """Problems of the object files of all archives; `others`: symbols of the other libraries."""
    defined = set().union(others, *(file.exports for file in objects))
    found = []
    for file in objects:
        if file.processor != "ARM64":
            found.append(f"{file.name} is for {file.processor}; expected ARM64")
        if file.platforms != {(IOS, *minimum)}:
            found.append(f"{file.name} is for (platform, version) {file.platforms}; expected {(IOS, *minimum)}")
        found += [f"{file.name} imports {name}, which no library has" for name in sorted(file.imports - defined)]
    return found


def check_static(
    archives: list[Path], libraries: list[Library], system: set[str], minimum: tuple[int, int]
) -> tuple[int, list[str]]:
    """Number of symbols that the archives import, and the problems found."""
    objects, found = [], []
    for path in archives:
        inside = list(members(path.read_bytes()))
        files = [Object(name, data) for name, data in inside]
        objects += files
        if path.name == "liblowbit.a":
            whole = b"".join(data + bytes(-len(data) % 4) for _, data in inside)
            found += [f"{path.name} lacks kernels for {isa}" for isa in missing_kernels(whole)]
        elif not any(file.begins for file in files):
            found.append(f"{path.name} registers nothing")
    others = set().union(LINKER, system, of_libcxx(libraries, MACOS_OF_IOS_14), *(library.exports for library in libraries))
    return sum(len(file.imports) for file in objects), found + static_problems(objects, others, minimum)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    libcxx = commands.add_parser("libc++")
    libcxx.add_argument("--minimum", required=True)
    libcxx.add_argument("output", type=Path)
    libcxx.add_argument("libraries", nargs="+")
    check = commands.add_parser("check")
    check.add_argument("--minimum", required=True)
    check.add_argument("--system", type=Path, required=True)
    check.add_argument("--python-headers", type=Path)
    check.add_argument("--libraries", nargs="+", required=True)
    check.add_argument("--built", nargs="+", required=True)
    static = commands.add_parser("static")
    static.add_argument("--minimum", required=True)
    static.add_argument("--system", type=Path, required=True)
    static.add_argument("--libraries", nargs="+", required=True)
    static.add_argument("--built", nargs="+", type=Path, required=True)
    arguments = parser.parse_args()
    libraries = [Library(path) for path in arguments.libraries]
    minimum = tuple(map(int, arguments.minimum.split(".")))
    if arguments.command == "libc++":
        symbols = sorted(of_libcxx(libraries, minimum))
        arguments.output.write_text(TEXT.format(name=LIBCXX, symbols=", ".join(f"'{name}'" for name in symbols)))
        return
    # Only the list of names is needed.
    system = set(re.findall(r"[\w$.]+", arguments.system.read_text(encoding="utf-8")))
    if arguments.command == "static":
        count, found = check_static(arguments.built, libraries, system, minimum)
        print(f"{len(arguments.built)} archives, {count} imported symbols: {len(found)} problems", *found, sep="\n")
        sys.exit(bool(found) or not count)
    built = [Library(path) for path in arguments.built]
    python = of_python(arguments.python_headers) if arguments.python_headers else set()
    found = problems(built, libraries, system, python, minimum)
    count = sum(len(library.imports) for library in built)
    print(f"{len(built)} libraries, {count} imported symbols: {len(found)} problems", *found, sep="\n")
    sys.exit(bool(found) or not count)


if __name__ == "__main__":
    main()
