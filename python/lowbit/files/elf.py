"""Clears the executable-stack flag of compiled libraries (ELF)."""

from __future__ import annotations

import os
import struct

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_GNU_STACK, _EXECUTABLE = 0x6474E551, 1


def without_executable_stack(path: str | os.PathLike[str]) -> None:
    """Clears the executable-stack flag of a library, in place; ignores files that are not ELF.

    torch emits weights as assembly without a .note.GNU-stack section. Linkers for x86-64 then set the flag, and glibc 2.41
    and later refuse to load the library ("cannot enable executable stack as shared object requires"). Compiled models do not
    need an executable stack.
    """
    with open(path, "r+b") as file:
        header = file.read(64)
        if len(header) < 64 or not header.startswith(_MAGIC):
            return
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        for at in range(table, table + size * count, size):
            file.seek(at)
            entry = file.read(8)
            if len(entry) < 8:
                return
            kind, flags = struct.unpack("<II", entry)
            if kind == _GNU_STACK and flags & _EXECUTABLE:
                file.seek(at + 4)
                file.write(struct.pack("<I", flags & ~_EXECUTABLE))
