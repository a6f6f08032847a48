"""tests/macos/elf_of_macho.py on a small library: Linux's loader is told to do what dyld would do."""

import importlib.util
import struct
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("elf_of_macho", ROOT / "tests/macos/elf_of_macho.py")
elf_of_macho = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(elf_of_macho)
PAGE = elf_of_macho.PAGE


def command(number: int, form: str, *values) -> bytes:
    body = struct.pack(form, *values)
    return struct.pack("<2I", number, 8 + len(body)) + body


def library(section_kind: int = 0, other: bytes = b"") -> bytes:
    """Code at 0x1000; data with a pointer to it, one to an imported function, and a lazy one to that function plus 8."""
    # one pointer in segment 1, at 0; the list ends
    rebase = bytes([0x11, 0x21, 0, 0x51, 0])
    bind = bytes([0x11, 0x40]) + b"_malloc\0" + bytes([0x51, 0x71, 8, 0x90, 0])
    lazy = bytes([0x71, 16, 0x11, 0x40]) + b"_free\0" + bytes([0x60, 8, 0x51, 0x90, 0])
    names = b"\0__ZN6lowbit4packExy\0___dso_handle\0"
    symbols = struct.pack("<I2BHQ", 1, 0xF, 1, 0, 0x1000) + struct.pack("<I2BHQ", 21, 0xF, 2, 0, PAGE)
    link = 2 * PAGE
    text = struct.pack("<16s4Q4I", b"__TEXT", 0, PAGE, 0, PAGE, 5, 5, 1, 0)
    text += struct.pack("<16s16s2Q8I", b"__text", b"__TEXT", 0x1000, 16, 0x1000, 2, 0, 0, 0x80000000 | section_kind, 0, 0, 0)
    data = struct.pack("<16s4Q4I", b"__DATA", PAGE, 2 * PAGE, PAGE, PAGE, 3, 3, 0, 0)
    end = struct.pack("<16s4Q4I", b"__LINKEDIT", 3 * PAGE, PAGE, link, 256, 1, 1, 0, 0)
    lists = (link, len(rebase), link + 16, len(bind), 0, 0, link + 64, len(lazy), 0, 0)
    commands = [command(0x19, f"<{len(each)}s", each) for each in (text, data, end)]
    commands += [
        command(0x80000022, "<10I", *lists),
        command(0x2, "<4I", link + 96, 2, link + 160, len(names)),
        *([other] if other else []),
    ]
    head = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, len(commands), sum(map(len, commands)), 0, 0) + b"".join(commands)
    content = bytearray(2 * PAGE + 256)
    content[: len(head)] = head
    struct.pack_into("<3Q", content, PAGE, 0x1000, 0, 0)
    for at, part in ((0, rebase), (16, bind), (64, lazy), (96, symbols), (160, names)):
        content[link + at : link + at + len(part)] = part
    return bytes(content)


def test_pointers_and_names_are_those_of_the_library():
    found = elf_of_macho.MachO(library())
    assert found.rebases == [PAGE]
    assert found.binds == [(PAGE + 8, "_malloc", 0), (PAGE + 16, "_free", 8)]
    assert found.exports == {"__ZN6lowbit4packExy": (0x1000, True)}
    made = elf_of_macho.elf(found, "made.so", ["other.so"])
    segments = [struct.unpack_from("<2I6Q", made, 64 + 56 * each) for each in range(struct.unpack_from("<H", made, 56)[0])]
    loaded = [each for each in segments if each[0] == 1]
    assert [(each[1], each[3], each[6]) for each in loaded[:2]] == [(5, 0, PAGE), (6, PAGE, 2 * PAGE)]
    assert all(offset % PAGE == address % PAGE and not address % PAGE for _, _, offset, address, *_ in loaded)

    def at(address: int) -> int:
        (_, _, offset, start, *_) = next(each for each in loaded if each[3] <= address < each[3] + each[6])
        return offset + address - start

    (dynamic,) = (each for each in segments if each[0] == 2)
    tags = dict(struct.iter_unpack("<2Q", made[dynamic[2] : dynamic[2] + dynamic[5]]))
    strings = made[at(tags[5]) : at(tags[5]) + tags[10]]
    count = struct.unpack_from("<2I", made, at(tags[4]))[1]
    symbols = [struct.unpack_from("<IBBHQQ", made, at(tags[6]) + 24 * each) for each in range(count)]
    names = [strings[each[0] :].split(b"\0")[0].decode() for each in symbols]
    # int64_t is `long long` there and `long` here
    assert names == ["", "_malloc", "_free", "_ZN6lowbit4packElm"]
    assert symbols[3][3] != 0 and symbols[3][4] == 0x1000 and symbols[1][3] == 0
    relocations = list(struct.iter_unpack("<2Qq", made[at(tags[7]) : at(tags[7]) + tags[8]]))
    assert relocations == [(PAGE, 1027, 0x1000), (PAGE + 8, 1 << 32 | 257, 0), (PAGE + 16, 2 << 32 | 257, 8)]


@pytest.mark.parametrize("kept", [0, 31, 33, 100, 200, 500, PAGE, 2 * PAGE, 2 * PAGE + 40, 2 * PAGE + 255])
def test_a_cut_library_is_refused(kept):
    with pytest.raises(elf_of_macho.Unsupported, match=r"^is cut: .* the file at \d+$"):
        elf_of_macho.MachO(library()[:kept])


@pytest.mark.parametrize(
    "content, message",
    [
        (library(section_kind=0x9), "has initializers (__text); expected none"),
        (library(section_kind=0x13), "has variables of threads (__text); expected none"),
        (library(other=command(0x80000034, "<2I", 0, 0)), "has chained fixups; expected dyld's older lists"),
        (b"\x7fELF" + bytes(60), "is not a dynamic library for macOS on Arm: magic 0x464c457f"),
    ],
)  # fmt: skip
def test_what_linux_has_no_counterpart_of_is_refused(content, message):
    with pytest.raises(elf_of_macho.Unsupported) as caught:
        elf_of_macho.MachO(content)
    assert str(caught.value).startswith(message)


def test_names_on_linux():
    name = elf_of_macho.name_on_linux
    assert name("__ZN6lowbit6linearERKNS_10TensorViewES2_xS2_RKNS_8ParallelE") == (
        "_ZN6lowbit6linearERKNS_10TensorViewES2_lS2_RKNS_8ParallelE"
    )
    assert name("__ZN6lowbit4sealERKNS_6LayoutEPKyPv") == "_ZN6lowbit4sealERKNS_6LayoutEPKmPv"
    assert name("_exp") == "exp"
