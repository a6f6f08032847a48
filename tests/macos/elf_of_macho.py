"""Converts a macOS dynamic library for Arm to one that Linux on Arm loads, so that QEMU can run the macOS wheel's code.

    python tests/macos/elf_of_macho.py liblowbit.dylib liblowbit.so --needs libmacos_system.so

Code and data do not change and keep their distances. dyld's lists become ELF relocations and symbols:
* an exported C++ function gets its Linux name, where int64_t is long instead of long long;
* an imported function keeps its macOS name, with the leading underscore. The library of --needs must define it (system.cpp), so
  that no function of Linux is used by accident.

Features without a Linux counterpart are refused: thread-local variables, initializers, chained fixups (macOS 12 and later).
Exceptions cannot be unwound through the library.
"""

import argparse
import re
import struct
import sys
from pathlib import Path
from typing import NamedTuple

PAGE = 0x4000  # of macOS
MAGIC, ARM64, DYLIB = 0xFEEDFACF, 0x0100000C, 6
SEGMENT, SYMTAB, ID_DYLIB = 0x19, 0x2, 0xD
DYLD_INFO, CHAINED_FIXUPS = (0x22, 0x80000022), 0x80000034
READ_ONLY_AFTER = 0x10  # a segment's flag
INITIALIZERS, THREAD_VARIABLES = (0x9, 0x16), range(0x11, 0x16)  # kinds of sections
EXTERNAL, DEFINED = 0x1, 0xE  # of a symbol
LINKER = ("___dso_handle", "__mh_dylib_header")  # defined by each system's linker
ABS64, RELATIVE = 257, 1027  # relocations of ELF for Arm


class Unsupported(ValueError):
    """The file is not a library that can be converted; the message says why."""


class Segment(NamedTuple):
    name: str
    address: int
    size: int  # in memory
    offset: int
    file_size: int
    protection: int  # ELF has the same bits in another order
    flags: int


class MachO:
    """A library, and what dyld would do with it."""

    def __init__(self, data: bytes):
        self.data = data
        magic, processor, _, kind, count, _, _, _ = self.unpack("<8I", 0, "the header")
        if (magic, processor, kind) != (MAGIC, ARM64, DYLIB):
            raise Unsupported(
                f"is not a dynamic library for macOS on Arm: magic {magic:#x}, processor {processor:#x}, kind {kind}"
            )
        self.segments: list[Segment] = []
        self.rebases: list[int] = []
        self.binds: list[tuple[int, str, int]] = []  # address, symbol, addend
        self.exports: dict[str, tuple[int, bool]] = {}  # address, whether it is a function
        self.name = ""
        code: list[tuple[int, int]] = []
        lists: list[tuple[int, ...]] = []
        symbols: list[tuple[int, ...]] = []
        at = 32
        for _ in range(count):
            command, size = self.unpack("<2I", at, "a load command")
            self.slice(at, size, "a load command")
            if command == SEGMENT:
                name, *numbers = self.unpack("<16s4Q4I", at + 8, "a segment")
                address, memory, offset, file_size, _, protection, sections, flags = numbers
                self.slice(offset, file_size, "a segment")
                self.segments.append(Segment(text_of(name), address, memory, offset, file_size, protection, flags))
                for section in range(sections):
                    code += self.section(at + 72 + 80 * section)
            elif command == SYMTAB:
                symbols.append(self.unpack("<4I", at + 8, "the symbols"))
            elif command in DYLD_INFO:
                lists.append(self.unpack("<10I", at + 8, "dyld's lists"))
            elif command == ID_DYLIB:
                self.name = text_of(data[at + self.unpack("<I", at + 8, "the name")[0] : at + size])
            elif command == CHAINED_FIXUPS:
                raise Unsupported("has chained fixups; expected dyld's older lists, as in libraries for macOS 11")
            at += size
        for rebase, rebase_size, bind, bind_size, weak, weak_size, lazy, lazy_size, _, _ in lists:
            self.rebase(self.slice(rebase, rebase_size, "the list of rebases"))
            self.bind(self.slice(bind, bind_size, "the list of binds"), False)
            self.bind(self.slice(weak, weak_size, "the list of weak binds"), False)
            self.bind(self.slice(lazy, lazy_size, "the list of lazy binds"), True)
        for table, number, strings, strings_size in symbols:
            self.symbols(table, number, self.slice(strings, strings_size, "the names"), code)

    def slice(self, offset: int, size: int, what: str) -> bytes:
        if offset + size > len(self.data):
            raise Unsupported(f"is cut: {what} ends at byte {offset + size}, the file at {len(self.data)}")
        return self.data[offset : offset + size]

    def unpack(self, form: str, offset: int, what: str) -> tuple:
        return struct.unpack(form, self.slice(offset, struct.calcsize(form), what))

    def section(self, at: int) -> list[tuple[int, int]]:
        """Address range of the section's code, if it has any."""
        name, _, address, size, _, _, _, _, flags = self.unpack("<16s16s2Q5I", at, "a section")
        if flags & 0xFF in INITIALIZERS and size:
            raise Unsupported(f"has initializers ({text_of(name)}); expected none")
        if flags & 0xFF in THREAD_VARIABLES:
            raise Unsupported(f"has variables of threads ({text_of(name)}); expected none")
        return [(address, address + size)] if flags & 0x80000000 else []

    def in_segment(self, number: int, offset: int) -> int:
        segment = self.segments[number]
        if offset + 8 > segment.size:
            raise Unsupported(f"has a pointer at {offset:#x} of {segment.name}, which has {segment.size:#x} bytes")
        return segment.address + offset

    def pointer(self, address: int) -> int:
        """The pointer in the file at an address, or 0 if the file has no data there."""
        for segment in self.segments:
            at = address - segment.address
            if 0 <= at <= segment.file_size - 8:
                return struct.unpack_from("<Q", self.data, segment.offset + at)[0]
        return 0

    def rebase(self, code: bytes) -> None:
        at = segment = offset = 0
        while at < len(code):
            operation, value = code[at] & 0xF0, code[at] & 15
            at += 1
            count, skip = 0, 0
            if operation == 0x00:
                break
            elif operation == 0x10:
                if value != 1:
                    raise Unsupported(f"has rebases of kind {value}; expected pointers, kind 1")
            elif operation == 0x20:
                segment = value
                offset, at = leb(code, at)
            elif operation == 0x30:
                more, at = leb(code, at)
                offset += more
            elif operation == 0x40:
                offset += 8 * value
            elif operation == 0x50:
                count = value
            elif operation == 0x60:
                count, at = leb(code, at)
            elif operation == 0x70:
                count, (skip, at) = 1, leb(code, at)
            elif operation == 0x80:
                count, at = leb(code, at)
                skip, at = leb(code, at)
            else:
                raise Unsupported(f"has the operation {operation:#x} in its list of rebases")
            for _ in range(count):
                self.rebases.append(self.in_segment(segment, offset))
                offset += 8 + skip

    def bind(self, code: bytes, lazy: bool) -> None:
        at = segment = offset = addend = 0
        name = ""
        while at < len(code):
            operation, value = code[at] & 0xF0, code[at] & 15
            at += 1
            count, skip = 0, 0
            if operation == 0x00 and not lazy:  # each lazy bind ends with it
                break
            elif operation in (0x00, 0x10, 0x30):  # the library, which is ignored: system.cpp has all symbols
                pass
            elif operation == 0x20:
                _, at = leb(code, at)
            elif operation == 0x40:
                end = code.index(0, at)
                name, at = code[at:end].decode(), end + 1
            elif operation == 0x50:
                if value != 1:
                    raise Unsupported(f"binds {name} as kind {value}; expected a pointer, kind 1")
            elif operation == 0x60:
                addend, at = leb(code, at)
            elif operation == 0x70:
                segment = value
                offset, at = leb(code, at)
            elif operation == 0x80:
                more, at = leb(code, at)
                offset = (offset + more) & 0xFFFFFFFFFFFFFFFF  # the offset may be negative
            elif operation == 0x90:
                count = 1
            elif operation == 0xA0:
                count, (skip, at) = 1, leb(code, at)
            elif operation == 0xB0:
                count, skip = 1, 8 * value
            elif operation == 0xC0:
                count, at = leb(code, at)
                skip, at = leb(code, at)
            else:
                raise Unsupported(f"has the operation {operation:#x} in its list of binds")
            for _ in range(count):
                self.binds.append((self.in_segment(segment, offset), name, addend))
                offset = (offset + 8 + skip) & 0xFFFFFFFFFFFFFFFF

    def symbols(self, table: int, number: int, strings: bytes, code: list[tuple[int, int]]) -> None:
        for index, kind, _, _, value in struct.iter_unpack("<I2BHQ", self.slice(table, 16 * number, "the symbols")):
            if kind & ~1 == DEFINED and kind & EXTERNAL:
                name = strings[index : strings.index(0, index)].decode()
                if name in LINKER:
                    continue
                self.exports[name] = (value, any(begin <= value < end for begin, end in code))


def text_of(padded: bytes) -> str:
    return padded.split(b"\0")[0].decode()


def leb(code: bytes, at: int) -> tuple[int, int]:
    """A number with seven bits per byte, and the position after it."""
    value = shift = 0
    while True:
        if at >= len(code):
            raise Unsupported("is cut: a number of dyld's lists has no end")
        value |= (code[at] & 127) << shift
        shift += 7
        at += 1
        if code[at - 1] < 128:
            return value, at


def name_on_linux(symbol: str) -> str:
    """The Linux C++ symbol of the same declaration; `symbol` has macOS's underscore."""
    name = symbol.removeprefix("_")
    own = re.match(r"_ZN6lowbit\d+", name)
    if own is None:
        return name
    parts, at = [], 0
    while at < len(name):
        if length := re.match(r"\d+", name[at:]):  # an identifier, which does not change
            end = at + len(length[0]) + int(length[0])
            parts.append(name[at:end])
        elif earlier := re.match(r"S[0-9A-Z]*_", name[at:]):  # a substitution for an earlier type
            end = at + len(earlier[0])
            parts.append(earlier[0])
        else:
            end = at + 1
            parts.append({"x": "l", "y": "m"}.get(name[at], name[at]) if at > 1 else name[at])
        at = end
    return "".join(parts)


def aligned(number: int, to: int) -> int:
    return -(-number // to) * to


def elf(library: MachO, name: str, needs: list[str]) -> bytes:
    """The library as an ELF file: each segment unchanged, and another with the symbols and relocations."""
    segments = [each for each in library.segments if each.name != "__LINKEDIT"]
    strings, symbols = bytearray(b"\0"), [(0, 0, 0, 0)]

    def string(text: str) -> int:
        strings.extend(text.encode() + b"\0")
        return len(strings) - len(text.encode()) - 1

    imports: dict[str, int] = {}
    for _, symbol, _ in library.binds:
        if symbol not in imports:
            imports[symbol] = len(symbols)
            symbols.append((string(symbol), 0x10, 0, 0))  # global, without a section
    for symbol, (address, is_function) in library.exports.items():
        symbols.append((string(name_on_linux(symbol)), 0x12 if is_function else 0x11, 1, address))
    relocations = [(address, RELATIVE, library.pointer(address)) for address in library.rebases]
    bound = {address for address, _, _ in library.binds}
    relocations = [each for each in relocations if each[0] not in bound]  # lazy pointers are bound at load
    relocations += [(address, imports[symbol] << 32 | ABS64, addend) for address, symbol, addend in library.binds]
    tags = [(1, string(each)) for each in needs] + [(14, string(name))]
    if library.exports and library.segments[0].address != 0:
        raise Unsupported(f"begins at {library.segments[0].address:#x}; expected 0")

    start = aligned(max(each.address + each.size for each in segments), PAGE)
    count = len(symbols)
    hashes = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)  # one hash chain with all symbols
    parts = {
        5: bytes(strings), 6: b"".join(struct.pack("<IBBHQQ", n, i, 0, s, a, 0) for n, i, s, a in symbols),
        4: hashes, 7: b"".join(struct.pack("<2Qq", *each) for each in relocations),
    }  # fmt: skip
    body = bytearray()
    for tag, part in parts.items():
        body.extend(bytes(-len(body) % 16))
        tags.append((tag, start + len(body)))
        body.extend(part)
    body.extend(bytes(-len(body) % 16))
    tags += [(10, len(strings)), (11, 24), (8, len(parts[7])), (9, 24), (30, 8), (24, 0), (0, 0)]  # bind now
    dynamic = start + len(body)
    body.extend(b"".join(struct.pack("<2Q", *tag) for tag in tags))

    headers, content = [], bytearray(PAGE)
    for each in segments:
        protection = sum(to for of, to in ((1, 4), (2, 2), (4, 1)) if each.protection & of)
        headers.append((1, protection, len(content), each.address, each.file_size, each.size, PAGE))
        if each.flags & READ_ONLY_AFTER:
            headers.append((0x6474E552, 4, len(content), each.address, each.file_size, aligned(each.size, PAGE), 1))
        content.extend(library.data[each.offset : each.offset + each.file_size])
        content.extend(bytes(-len(content) % PAGE))
    headers.append((1, 6, len(content), start, len(body), len(body), PAGE))
    headers.append((2, 6, len(content) + dynamic - start, dynamic, 16 * len(tags), 16 * len(tags), 8))
    headers.append((0x6474E551, 6, 0, 0, 0, 0, 16))  # the stack is not executable
    content.extend(body)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    struct.pack_into("<16s2HI3QI6H", content, 0, ident, 3, 183, 1, 0, 64, 0, 0, 64, 56, len(headers), 64, 0, 0)
    for number, (kind, flags, offset, address, file_size, size, alignment) in enumerate(headers):
        struct.pack_into("<2I6Q", content, 64 + 56 * number, kind, flags, offset, address, address, file_size, size, alignment)
    return bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--needs", action="append", default=[], help="a library that defines what is imported")
    arguments = parser.parse_args()
    try:
        library = MachO(arguments.library.read_bytes())
        arguments.output.write_bytes(elf(library, arguments.output.name, arguments.needs))
    except Unsupported as error:
        sys.exit(f"{arguments.library} {error}")
    print(
        f"{arguments.output}: {len(library.exports)} exports, {len({name for _, name, _ in library.binds})} imports, "
        f"{len(library.rebases)} rebases"
    )


if __name__ == "__main__":
    main()
