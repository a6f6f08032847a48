"""The checks of `make wheels` and `make wheel-macos` detect faulty wheels."""

import base64
import hashlib
import re
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import macos_libraries
import wheel_macos
import wheels

EXTENSION = ".cpython-311-darwin.so"
NAME = "lowbit-0.1.0-cp311-cp311-macosx_11_0_arm64.whl"
INFORMATION = "lowbit-0.1.0.dist-info"
RECORD = f"{INFORMATION}/RECORD"


def contents() -> dict[str, bytes]:
    """The checked content of a macOS wheel, without its list of contents."""
    names = [f"_C{EXTENSION}", "liblowbit.dylib", "lowbit_torch.so", "lowbit_executorch.so"]
    names += ["__init__.py", "_C.pyi", "py.typed"]
    names += ["include/lowbit/ops/operators.h", "lib/cmake/lowbit/lowbit-config.cmake"]
    files = {f"lowbit/{name}": name.encode() for name in names} | {"lowbit_autoload/__init__.py": b"", "lowbit_entry.py": b""}
    files |= {f"{INFORMATION}/{name}": b"" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")}
    return files | {f"{INFORMATION}/WHEEL": b"Wheel-Version: 1.0\nTag: cp311-cp311-macosx_11_0_arm64\n"}


def written(directory: Path, files: dict[str, bytes], record: str | None = None, name: str = NAME) -> Path:
    if record is None:
        record = ""
        for path, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record += f"{path},sha256={digest},{len(data)}\n"
        record += f"{RECORD},,\n"
    with zipfile.ZipFile(directory / name, "w") as archive:
        for path, data in {**files, RECORD: record.encode()}.items():
            archive.writestr(path, data)
    return directory / name


def test_a_right_wheel(tmp_path):
    assert wheels.problems_of(written(tmp_path, contents()), EXTENSION) == []


@pytest.mark.parametrize(
    "change, name, found",
    [
        ({"lowbit/liblowbit.dylib": None}, NAME, "it has no lowbit/liblowbit.dylib"),
        ({"lowbit/liblowbit.so": b""}, NAME, "it has an unexpected file lowbit/liblowbit.so"),
        ({"lowbit/a.pyc": b""}, NAME, "it has lowbit/a.pyc"),
        ({"lowbit/lib/x.cmake": str(ROOT).encode()}, NAME, f"lowbit/lib/x.cmake has the path {ROOT} in it"),
        (
            {}, NAME.replace("11_0", "14_0"),
            "its name says ['cp311-cp311-macosx_14_0_arm64'], WHEEL says ['cp311-cp311-macosx_11_0_arm64']",
        ),
    ],
)  # fmt: skip
def test_contents(tmp_path, change, name, found):
    files = {path: data for path, data in (contents() | change).items() if data is not None}
    assert wheels.problems_of(written(tmp_path, files, name=name), EXTENSION) == [found]


def test_the_list_of_contents(tmp_path):
    files = contents()
    right = zipfile.ZipFile(written(tmp_path, files)).read(RECORD).decode()
    line = right.splitlines()[0]
    other = right.replace(line, line + "0")  # with ten times the size
    for record, found in (
        (other, f"RECORD has a wrong size or checksum of {line.split(',')[0]}"),
        (right.replace(line + "\n", ""), f"RECORD does not name {line.split(',')[0]}"),
        (right + "lowbit/gone.py,sha256=x,1\n", "RECORD names lowbit/gone.py, which is missing"),
    ):
        assert wheels.problems_of(written(tmp_path, files, record), EXTENSION) == [found]


def test_a_module_of_another_python(tmp_path):
    path = written(tmp_path, contents())
    assert "its name says cp311-cp311; the module is _C.cpython-312-darwin.so" in wheels.problems_of(
        path, EXTENSION.replace("311", "312")
    )


def test_the_configuration_of_cpython_for_macos_decides_all_that_headers_ask(tmp_path):
    ours = (ROOT / "cmake/macos_pyconfig.h").read_text(encoding="utf-8")
    (tmp_path / "cpython").mkdir()
    (tmp_path / "pyconfig.h").write_text("#define SIZEOF_VOID_P 8\n/* #undef HAVE_NEW */\n#define HAVE_OTHER 1\n")
    (tmp_path / "Python.h").write_text("#if SIZEOF_VOID_P == 8\n#  include <a.h>\n#endif\n// HAVE_OTHER\n")
    assert wheel_macos.undecided(tmp_path, ours) == []
    (tmp_path / "cpython/new.h").write_text("# ifdef HAVE_NEW\n#endif\n#if defined(A) && \\\n  HAVE_OTHER\n#endif\n")
    assert wheel_macos.undecided(tmp_path, ours) == ["HAVE_NEW", "HAVE_OTHER"]
    # Headers of the running interpreter, if it has them.
    found = wheels.headers_of_interpreter(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert found is None or wheel_macos.undecided(found, ours) == []


def signed(body: bytes) -> tuple[bytes, tuple[int, int]]:
    """A file with an ad-hoc signature like Apple's linker's: pages of 4096 bytes, SHA-256."""
    pages = [hashlib.sha256(body[at : at + 4096]).digest() for at in range(0, len(body), 4096)]
    identity = b"x\0"
    head = 44 + len(identity)
    directory = struct.pack(">9I", 0xFADE0C02, head + 32 * len(pages), 0x20400, 2, head, 44, 0, len(pages), len(body))
    directory += struct.pack(">4B I", 32, 2, 0, 12, 0) + identity + b"".join(pages)
    blob = struct.pack(">5I", 0xFADE0CC0, 20 + len(directory), 1, 0, 20) + directory
    return body + blob, (len(body), len(blob))


def test_signatures():
    data, signature = signed(bytes(range(256)) * 40)
    assert macos_libraries.signature_is_right(data, signature)
    assert not macos_libraries.signature_is_right(data, None)
    for at in (0, 5000, len(data) - 1):  # the first page, the second, the checksum of the last
        changed = bytearray(data)
        changed[at] ^= 1
        assert not macos_libraries.signature_is_right(bytes(changed), signature)


def test_kernels_are_found_by_name_and_instruction():
    words = {"neondot": 0x4F82E020, "i8mm": 0x4E82A420, "sme2": 0xD503477F}  # sdot, smmla, smstart
    names = b"".join(b"linear_a8w%d_1x16_%s\0" % (bits, isa.encode()) for isa in words for bits in range(1, 9))
    names += bytes(-len(names) % 4)
    assert macos_libraries.missing_kernels(names + struct.pack("<3I", *words.values())) == []
    for isa, word in words.items():
        without = struct.pack("<2I", *(other for other in words.values() if other != word))
        assert macos_libraries.missing_kernels(names + without) == [isa]
        short = re.sub(rb"linear_a8w3_1x16_%s\0" % isa.encode(), b"", names)
        short += bytes(-len(short) % 4)
        assert macos_libraries.missing_kernels(short + struct.pack("<3I", *words.values())) == [isa]


class Made:
    """A library in the form that macos_libraries.Library reads."""

    def __init__(self, path: Path, **changes):
        data, self.signature = signed(b"\0" * 5000)
        path.write_bytes(data)
        self.path, self.name, self.processor, self.minimum = path, path.name, "ARM64", (11, 0)
        self.own_names, self.search = [f"@rpath/{path.name}"], ["@loader_path"]
        self.needs, self.exports = ["@rpath/libc10.dylib"], set()
        self.imports = [("_f", "@rpath/libc10.dylib"), ("_PyX", 0xFE)]
        vars(self).update(changes)


@pytest.mark.parametrize(
    "changes, found",
    [
        ({}, None),
        ({"processor": "x86_64"}, "is for x86_64; expected ARM64"),
        ({"minimum": (14, 0)}, "needs macOS (14, 0); expected (11, 0) or less"),
        ({"own_names": ["/tmp/liba.dylib"]}, "calls itself ['/tmp/liba.dylib']; expected @rpath/liba.dylib"),
        ({"search": ["@loader_path", "/opt/lib"]}, "looks for libraries in /opt/lib; expected a path relative to itself"),
        ({"needs": ["/usr/local/lib/libx.dylib"], "imports": []}, "needs /usr/local/lib/libx.dylib, which no library has"),
        ({"imports": [("_g", "@rpath/libc10.dylib")]}, "imports _g from @rpath/libc10.dylib, which lacks it"),
        ({"imports": [("_PyY", 0xFE)]}, "imports _PyY from the process, which lacks it"),
        ({"signature": None}, "has no valid signature"),
        ({"needs": ["@rpath/liba.dylib"], "imports": [], "search": []}, "does not look for libraries relative to itself"),
    ],
)
def test_what_a_library_needs(tmp_path, changes, found):
    torch = Made(tmp_path / "libc10.dylib", exports={"_f"}, needs=[], imports=[])
    library = Made(tmp_path / "liba.dylib", **changes)
    said = macos_libraries.problems([library], [torch], set(), {"_PyX"}, (11, 0))
    assert said == ([] if found is None else [f"liba.dylib {found}"])


def test_where_the_loader_takes_symbols_from():
    code = b"\x12\x40_a\0\x51\x72\x80\x01\x90" + b"\x3e\x40_Py\0\xa0\x05" + b"\x20\x85\x01\x40_z\0\xc0\x02\x08\x00"
    assert macos_libraries.bound(code) == {"_a": 2, "_Py": macos_libraries.DYNAMIC_LOOKUP, "_z": 133}


def test_names_of_python(tmp_path):
    text = "PyAPI_FUNC(PyObject *) PyObject_Str(PyObject *v);\nPyAPI_DATA(int) Py_Flag;\nint PyNot(void);"
    (tmp_path / "a.h").write_text(text)
    assert macos_libraries.of_python(tmp_path) == {"_PyObject_Str", "_Py_Flag"}


def member(name: str, data: bytes) -> bytes:
    long = name.encode() + b"\0"
    whole = long + data
    head = f"#1/{len(long)}".ljust(16) + "0".ljust(12) + "0".ljust(6) * 2 + "644".ljust(8) + str(len(whole)).ljust(10)
    return head.encode() + b"`\n" + whole + b"\n" * (len(whole) % 2)


def test_members_of_an_archive():
    files = [("linear_kernels.o", b"12345"), ("a.o", b"12")]
    archive = b"!<arch>\n" + member("__.SYMDEF SORTED", b"list") + b"".join(member(*file) for file in files)
    assert list(macos_libraries.members(archive)) == files
    with pytest.raises(ValueError, match="an archive begins with b'!<thin>.n'; expected b'!<arch>"):
        list(macos_libraries.members(archive.replace(b"arch", b"thin")))


@pytest.mark.parametrize(
    "changes, found",
    [
        ({}, []),
        ({"processor": "x86_64"}, ["b.o is for x86_64; expected ARM64"]),
        ({"platforms": {(1, 14, 0)}}, ["b.o is for (platform, version) {(1, 14, 0)}; expected (2, 14, 0)"]),
        ({"platforms": {(2, 15, 0)}}, ["b.o is for (platform, version) {(2, 15, 0)}; expected (2, 14, 0)"]),
        ({"imports": {"_f", "_g"}}, ["b.o imports _g, which no library has"]),
    ],
)
def test_objects_for_ios(changes, found):
    facts = {"processor": "ARM64", "platforms": {(2, 14, 0)}}
    first = SimpleNamespace(name="a.o", exports={"_f"}, imports={"_malloc"}, **facts)
    second = SimpleNamespace(**({"name": "b.o", "exports": set(), "imports": {"_f"}} | facts | changes))
    assert macos_libraries.static_problems([first, second], {"_malloc"}, (14, 0)) == found
