"""Damaged and malicious files to import: one sentence that names the error, and nothing is written."""

import json
import os
import random
import re
import resource
import struct
import subprocess
import sys
import warnings

import lowbit
import pytest
from gguf_files import ARRAY, STRING, file_bytes, tensor, text, value
from importing_files import METADATA, expert_file, i2s_file, layers_of_others, tensors
from lowbit.files import gguf_reader as reader
from lowbit.files.gguf_reader import read_gguf
from lowbit.importing import open_source
from lowbit.importing.gguf_source import open_gguf
from safetensors.torch import save

HUGE = [2**64 - 1, 2**63, 2**63 - 1, 2**61, 2**60 + 1, 2**40]


def header(tensor_count: int = 0, key_count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count)


def listing(*entries: bytes, data: bytes = bytes(4096), alignment: int = 32, metadata: bytes = b"", keys: int = 0) -> bytes:
    head = header(len(entries), keys) + metadata + b"".join(entries)
    return head + bytes(-len(head) % alignment) + data


def key(name: str, item) -> bytes:
    return text(name) + value(item)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text("k") + struct.pack("<IIQ", ARRAY, kind, count) + content


DAMAGED = {
    "no magic": (b"GGML" + bytes(64), "begins with b'GGML'; expected b'GGUF'"),
    "empty": (b"", "begins with b''"),
    "version 1": (header(version=1), "is GGUF of version 1; expected 2 or 3"),
    "version 4": (header(version=4), "is GGUF of version 4; expected 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of a big-endian machine"),
    "only magic": (b"GGUF", "its version would take 4 bytes at byte 4"),
    "no counts": (header()[:12], "its number of tensors would take 8 bytes"),
    "key twice": (header(0, 2) + key("a", 1) * 2, "has the key 'a' twice"),
    "key too long": (header(0, 1) + text("k" * 257) + value(1), "has 257 bytes; expected at most 256"),
    "key not text": (header(0, 1) + text(b"\xff\xfe") + value(1), "is not UTF-8 at its byte 0"),
    "type of value": (header(0, 1) + text("k") + struct.pack("<I", 13) + bytes(8), "has the type 13; expected 0 to 12"),
    "truth 2": (header(0, 1) + text("k") + struct.pack("<IB", 7, 2) + bytes(8), "holds the byte 2 for a truth value"),
    "nested arrays": (header(0, 1) + array(ARRAY, 1, bytes(12)), "is an array of arrays"),
    "type in array": (header(0, 1) + array(77, 1, bytes(12)), "is an array of type 77"),
    "text not text": (header(0, 1) + text("k") + struct.pack("<I", STRING) + text(b"\xc0"), "'k' is not UTF-8"),
    "dimensions 0": (listing(text("t") + struct.pack("<IIQ", 0, 0, 0)), "has 0 dimensions; expected 1 to 4"),
    "dimensions 5": (listing(tensor("t", (1,) * 5, 0, 0)), "has 5 dimensions; expected 1 to 4"),
    "dimension of 0": (listing(tensor("t", (0, 4), 0, 0)), "has a dimension of 0"),
    "unknown type": (listing(tensor("t", (32,), 43, 0)), "has the type 43, which this version of lowbit does not know"),
    "bitnet.cpp": (listing(tensor("t", (128,), 38, 0)), "has the type TL1 of bitnet.cpp; expected I2_S, or"),
    "removed type": (listing(tensor("t", (32,), 4, 0)), "has the type 4, which"),
    "partial block": (listing(tensor("t", (33,), 2, 0)), "has rows of 33 values; expected a multiple of 32"),
    "blocks across rows": (listing(tensor("t", (16, 2), 2, 0)), "has rows of 16 values; expected a multiple of 32"),
    "offset not aligned": (listing(tensor("t", (8,), 0, 8)), "begins at 8; expected a multiple of 32"),
    "name twice": (listing(tensor("t", (8,), 0, 0), tensor("t", (8,), 0, 32)), "has the tensor 't' twice"),
    "name too long": (listing(tensor("t" * 300, (8,), 0, 0)), "has 300 bytes; expected at most 256"),
    "overlap": (listing(tensor("a", (16,), 0, 0), tensor("b", (16,), 0, 32)), "the tensor 'b' overlaps the tensor 'a'"),
    "same place": (listing(tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 0)), "the tensor 'b' overlaps the tensor 'a'"),
    "beyond the end": (listing(tensor("t", (2048,), 0, 0)), "would end at byte"),
    "just beyond": (listing(tensor("t", (8,), 0, 0), data=bytes(31)), "would end at byte"),
    "control letters": (listing(tensor("\x1b[2J", (8,), 9, 0)), r"'\x1b[2J'"),
}
DAMAGED |= {f"{n} tensors": (header(n) + bytes(64), "tensors") for n in HUGE}
DAMAGED["tensors without entries"] = header(2**20) + bytes(64), "its 1048576 tensors and 0 keys would take 33554432 bytes at"
DAMAGED |= {f"{n} keys": (header(0, n) + bytes(64), "keys would take") for n in HUGE}
DAMAGED |= {f"a key of {n}": (header(0, 1) + struct.pack("<Q", n) + bytes(64), "expected at most 256") for n in HUGE}
DAMAGED |= {
    f"a text of {n}": (header(0, 1) + text("k") + struct.pack("<IQ", STRING, n) + bytes(64), f"would take {n} bytes")
    for n in HUGE
}
DAMAGED |= {
    f"{n} of type {kind} in an array": (header(0, 1) + array(kind, n, bytes(64)), "would take")
    for n in HUGE
    for kind in (0, 7, 8, 12)
}
DAMAGED |= {f"offset {n}": (listing(tensor("t", (8,), 0, n // 32 * 32)), "would end at byte") for n in HUGE}
DAMAGED |= {f"dimension {n}": (listing(tensor("t", (n,), 24, 0)), "would end at byte") for n in HUGE}
DAMAGED |= {  # whose product, or sum with the offset, overflows 64 bits to a small number
    f"product of {shape}": (listing(tensor("t", shape, 24, 0)), "would end at byte")
    for shape in [(2**32, 2**32), (2**33, 2**31), (2**63, 2), (2**16,) * 4, (2**62, 4, 1, 1), (2**61 + 1, 8)]
}
DAMAGED |= {
    f"alignment {n}": (listing(metadata=key("general.alignment", n), keys=1), "general.alignment is")
    for n in (0, 3, 33, 2**21, 2**31, -32, 32.0, True, "32", [32])
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_headers(tmp_path, what):
    content, message = DAMAGED[what]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        read_gguf(file)
    said = str(raised.value)
    assert message in said and str(file) in said and "\n" not in said and said.isprintable()


def test_the_least_alignment(tmp_path):
    """A tensor that begins directly after the header."""
    alignment = key("general.alignment", 1)
    (tmp_path / "m.gguf").write_bytes(listing(tensor("t", (3,), 24, 5), metadata=alignment, keys=1, alignment=1))
    assert read_gguf(tmp_path / "m.gguf").tensors["t"].bytes == 3


@pytest.mark.parametrize(
    "behind, between, unused", [(0, 0, 0), (31, 0, 0), (1, 0, 1), (5000, 0, 5000), (0, 64, 64), (7, 32, 39)]
)
def test_bytes_outside_of_tensors_give_a_warning(tmp_path, behind, between, unused):
    """Padding to the alignment gives none."""
    data = bytes(64 + between + (1 if behind == 31 else 32) + behind)
    entries = tensor("a", (33,), 24, 0), tensor("b", (1 if behind == 31 else 32,), 24, 64 + between)
    file = tmp_path / "m.gguf"
    file.write_bytes(listing(*entries, data=data))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert set(read_gguf(file).tensors) == {"a", "b"}
    expected = [f"{file} has {unused} bytes that belong to no tensor; they are not read"] if unused else []
    assert [str(each.message) for each in caught] == expected


def test_every_truncation(tmp_path):
    whole = file_bytes(METADATA, tensors())
    file = tmp_path / "m.gguf"
    file.write_bytes(whole)
    assert len(read_gguf(file).tensors) == 11
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError):
            read_gguf(file)


def test_a_large_count_allocates_nothing(tmp_path):
    """In a separate process with a memory limit: counts are refused before anything is allocated for them."""
    file = tmp_path / "m.gguf"
    file.write_bytes(header(0, 1) + array(12, 2**37, bytes(1 << 16)))
    program = (
        "import resource, sys\nfrom lowbit.files.gguf_reader import read_gguf\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)\n"
        "try:\n    read_gguf(sys.argv[1])\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, timeout=300)
    assert "would take 1099511627776 bytes" in done.stdout, done.stderr
    assert resource.RLIMIT_AS  # the limit exists on this system


def test_a_long_header_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_METADATA", 1000)
    file = tmp_path / "m.gguf"
    file.write_bytes(header(0, 1) + key("k", "x" * 2000))
    with pytest.raises(ValueError, match="would take 2000 bytes at byte .*; a header may end"):
        read_gguf(file)


def test_parts_of_different_models(tmp_path):
    listed = tensors()

    def write(number: int, found: list, place: int | None = None, total: int = 11) -> None:
        split = {"split.no": number if place is None else place, "split.count": 2, "split.tensors.count": total}
        content = file_bytes((METADATA if number == 0 else {"general.architecture": "llama"}) | split, found)
        (tmp_path / f"m-{number + 1:05}-of-00002.gguf").write_bytes(content)

    write(0, listed[:6])
    write(1, listed[6:])
    assert len(read_gguf(tmp_path / "m-00002-of-00002.gguf").tensors) == 11
    for options, message in (
        ({"found": listed[5:]}, f"'{listed[5][0]}' is in both"),
        ({"found": listed[7:]}, "says that its model has 11 tensors; found 10 in all parts"),
        ({"found": listed[6:], "total": 12}, "m-00002-of-00002.gguf says that its model has 12 tensors; found 11"),
        ({"found": listed[6:], "place": 0}, "says that it is part 0 (from 0) of 2; expected part 1"),
    ):
        write(1, **options)
        with pytest.raises(ValueError, match=re.escape(message)):
            lowbit.import_checkpoint(tmp_path / "m-00001-of-00002.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def mutated(whole: bytes, generator: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(generator.choice((1, 1, 1, 2, 5))):
        at = generator.randrange(len(data))
        what = generator.randrange(6)
        if what == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif what == 1:
            data[at : at + 8] = struct.pack("<Q", generator.choice((*HUGE, 0, 1, 31, 2**32, len(data))))
        elif what == 2:
            data[at : at + 4] = struct.pack("<I", generator.choice((0, 1, 7, 8, 9, 12, 13, 30, 2**31, 2**32 - 1)))
        elif what == 3:
            del data[at : at + generator.randrange(1, 40)]
        elif what == 4:
            data[at:at] = generator.randbytes(generator.randrange(1, 40))
        else:
            del data[at:]
        if not data:
            break
    return bytes(data)


def fuzz(directory, seed: int, count: int, step) -> int:
    """Runs `step` on mutants of three files; any exception must be one sentence. Returns the number of accepted ones."""
    wholes, generator = (file_bytes(METADATA, tensors()), expert_file(), i2s_file()), random.Random(seed)
    accepted = 0
    file = directory / "m.gguf"
    for number in range(count):
        file.write_bytes(mutated(wholes[number % 3], generator))
        try:
            step(file, number)
            accepted += 1
        except (ValueError, OSError) as error:
            assert str(error).isprintable(), (seed, number, error)
    return accepted


def test_mutants_of_a_file(tmp_path):
    count = int(os.environ.get("LOWBIT_FUZZ", 4000))
    seed = int(os.environ.get("LOWBIT_FUZZ_SEED", 1))
    accepted = fuzz(tmp_path, seed, count, lambda file, number: open_gguf(file, "x86"))
    assert 0 < accepted < count  # some were accepted and some refused


def test_mutants_of_directories(tmp_path):
    """Mutants of a format's own file or of config.json; accepted ones are read."""
    count = int(os.environ.get("LOWBIT_FUZZ", 4000)) // 4
    generator = random.Random(int(os.environ.get("LOWBIT_FUZZ_SEED", 1)))
    wholes = {}
    for name, (settings, tensors, metadata) in layers_of_others().items():
        made = {("model.a" + ("." + leaf)): tensor.contiguous() for leaf, tensor in tensors.items()}
        config = json.dumps({"model_type": "llama", "quantization_config": settings}).encode()
        wholes[name] = {"model.safetensors": save(made, metadata), "config.json": config}
    accepted = dict.fromkeys(wholes, 0)
    for number in range(count + len(wholes)):
        name = list(wholes)[number % len(wholes)]
        files = dict(wholes[name])
        if number >= len(wholes):  # the first of each is undamaged
            which = generator.choice(("model.safetensors", "model.safetensors", "config.json"))
            files[which] = mutated(files[which], generator)
        for file, data in files.items():
            (tmp_path / file).write_bytes(data)
        try:
            for matrix in open_source(tmp_path).tensors:
                matrix.read(0, min(2, matrix.shape[0]))
            accepted[name] += 1
        except (ValueError, OSError) as error:
            assert number >= len(wholes), (name, error)
            assert str(error).isprintable(), (number, error)
    assert min(accepted.values()) > 1 and sum(accepted.values()) < count


def test_mutants_are_imported_or_leave_nothing(tmp_path):
    (tmp_path / "out").mkdir()

    def step(file, number: int) -> None:
        try:
            lowbit.import_checkpoint(file, tmp_path / "out" / str(number), i2s_order="x86")
        except (ValueError, OSError):
            assert not (tmp_path / "out" / str(number)).exists()
            raise

    assert 0 < fuzz(tmp_path, 2, 100, step) == len(os.listdir(tmp_path / "out"))
