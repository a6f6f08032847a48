"""Reads and writes GGUF files: metadata and the offsets of tensors.

Every number in a file is checked against the file's size before it is used. Files are read, not mapped: if another process
truncates a mapped file, the reader is killed by SIGBUS.
"""

from __future__ import annotations

import math
import os
import re
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .io import Header, write_all
from .untrusted import check_regular, printable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_ALIGNMENT = 32  # unless general.alignment says otherwise
_MOST_ALIGNMENT = 1 << 20
_MOST_METADATA = 256 << 20  # bytes: a vocabulary of 262,144 tokens with merges and scores has 15 million
_MOST_NAME = 256  # bytes of a key or the name of a tensor; ggml allows 64 for a tensor
_MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 4
_MOST_FILES = 1000
_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class TensorType:
    """How ggml stores a tensor: each row in blocks of `block` inputs and `bytes` bytes; `tail` bytes follow the last row."""

    name: str
    block: int
    bytes: int
    tail: int = 0


TYPES = {
    0: TensorType("F32", 1, 4), 1: TensorType("F16", 1, 2), 2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20), 6: TensorType("Q5_0", 32, 22), 7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34), 9: TensorType("Q8_1", 32, 36), 10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110), 12: TensorType("Q4_K", 256, 144), 13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210), 15: TensorType("Q8_K", 256, 292), 16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74), 18: TensorType("IQ3_XXS", 256, 98), 19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18), 21: TensorType("IQ3_S", 256, 110), 22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136), 24: TensorType("I8", 1, 1), 25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4), 27: TensorType("I64", 1, 8), 28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56), 30: TensorType("BF16", 1, 2), 34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66), 36: TensorType("I2_S", 64, 16, tail=32), 39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36), 41: TensorType("Q1_0", 128, 18), 42: TensorType("Q2_0", 64, 18),
}  # fmt: skip

# Further types of bitnet.cpp. TL1 is divided into tiles whose sizes are not stored in the file.
_REFUSED_TYPES = {37: "I8_S", 38: "TL1"}

# Type of a metadata value -> its numpy dtype, little-endian.
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class StoredBlocks:
    """A tensor in a GGUF file, stored in blocks."""

    name: str
    path: Path
    type: TensorType
    shape: tuple[int, ...]  # slowest dimension first, as in torch: [n, k] for a matrix
    offset: int  # from the start of the file
    bytes: int  # of all rows, without the tail


@dataclass(frozen=True)
class Gguf:
    """The content of a model's GGUF file, or of all parts of a split one."""

    paths: list[Path]
    metadata: dict[str, Any]  # int, float, bool, str, a list of str, or a numpy array
    tensors: dict[str, StoredBlocks]


class _Header(Header):
    def text(self, what: str, most: int | None = None) -> str:
        count = self.number(8, f"the length of {what}")
        if most is not None and count > most:
            raise ValueError(f"{self.path}: {what} has {count} bytes; expected at most {most}")
        data = self.bytes(count, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is not UTF-8 at its byte {error.start}") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.bytes(dtype.itemsize, what), dtype)[0].item()
        if kind == _BOOL:
            return self._bools(1, what)[0].item()
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        raise ValueError(f"{self.path}: {what} has the type {kind}; expected 0 to 12")

    def _bools(self, count: int, what: str) -> np.ndarray:
        data = np.frombuffer(self.bytes(count, what), np.uint8)
        if data.size and data.max() > 1:
            raise ValueError(f"{self.path}: {what} holds the byte {data.max()} for a truth value; expected 0 or 1")
        return data.astype(bool)

    def _array(self, what: str) -> Any:
        kind, count = self.number(4, what), self.number(8, what)
        if kind == _ARRAY:
            raise ValueError(f"{self.path}: {what} is an array of arrays; expected numbers or texts")
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            return np.frombuffer(self.bytes(count * dtype.itemsize, what), dtype)
        if kind == _BOOL:
            return self._bools(count, what)
        if kind != _STRING:
            raise ValueError(f"{self.path}: {what} is an array of type {kind}; expected 0 to 12")
        self.need(8 * count, what)
        return [self.text(f"an entry of {what}") for _ in range(count)]


def _quoted(name: str) -> str:
    return f"'{printable(name)}'"


def _read_metadata(header: _Header, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = header.text("a key of its metadata", _MOST_NAME)
        if key in metadata:
            raise ValueError(f"{header.path}: its metadata has the key {_quoted(key)} twice")
        kind = header.number(4, f"the type of {_quoted(key)}")
        metadata[key] = header.value(kind, f"the value of {_quoted(key)}")
    return metadata


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    value = metadata.get("general.alignment", _ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{path}: general.alignment is {value!r}; expected a number")
    if not 1 <= value <= _MOST_ALIGNMENT or value & (value - 1):
        raise ValueError(f"{path}: general.alignment is {value}; expected a power of two up to {_MOST_ALIGNMENT}")
    return value


def _read_tensor(header: _Header) -> tuple[str, tuple[int, ...], TensorType, int]:
    """Reads an entry of the tensor list: name, shape, type, and offset from the start of the data."""
    name = header.text("the name of a tensor", _MOST_NAME)
    what = f"the tensor {_quoted(name)}"
    dimensions = header.number(4, what)
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{header.path}: {what} has {dimensions} dimensions; expected 1 to {_MOST_DIMENSIONS}")
    shape = struct.unpack(f"<{dimensions}Q", header.bytes(8 * dimensions, what))
    if min(shape) < 1:
        raise ValueError(f"{header.path}: {what} has a dimension of 0")
    number, offset = header.number(4, what), header.number(8, what)
    if number in _REFUSED_TYPES:
        raise ValueError(
            f"{header.path}: {what} has the type {_REFUSED_TYPES[number]} of bitnet.cpp; expected I2_S, or the model's packed "
            "safetensors (quant_method bitnet)"
        )
    if number not in TYPES:
        raise ValueError(f"{header.path}: {what} has the type {number}, which this version of lowbit does not know")
    kind = TYPES[number]
    if shape[0] % kind.block:
        raise ValueError(
            f"{header.path}: {what} has rows of {shape[0]} values; expected a multiple of {kind.block}, the block of "
            f"{kind.name}"
        )
    return name, shape[::-1], kind, offset


def _read_file(path: Path) -> Gguf:
    check_regular(path)
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic != MAGIC:
            raise ValueError(f"{path} begins with {magic!r}; expected {MAGIC!r}: it is not a GGUF file")
        header = _Header(file, path, _MOST_METADATA)
        version = header.number(4, "its version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
                raise ValueError(f"{path} is a GGUF file of a big-endian machine; expected little-endian")
            raise ValueError(f"{path} is GGUF of version {version}; expected {' or '.join(map(str, VERSIONS))}")
        tensor_count, key_count = header.number(8, "its number of tensors"), header.number(8, "its number of keys")
        if tensor_count > _MOST_TENSORS:
            raise ValueError(f"{path} says that it has {tensor_count} tensors; expected at most {_MOST_TENSORS}")
        header.need(13 * key_count, f"its {key_count} keys")  # at least 8 bytes for a length, 4 for a type, 1 for a value
        header.need(13 * key_count + 32 * tensor_count, f"its {tensor_count} tensors and {key_count} keys")
        metadata = _read_metadata(header, key_count)
        alignment = _alignment(metadata, path)
        listed = [_read_tensor(header) for _ in range(tensor_count)]
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, StoredBlocks] = {}
    for name, shape, kind, offset in listed:
        if name in tensors:
            raise ValueError(f"{path} has the tensor {_quoted(name)} twice")
        if offset % alignment:
            raise ValueError(
                f"{path}: the tensor {_quoted(name)} begins at {offset}; expected a multiple of {alignment}, its alignment"
            )
        count = 1
        for dimension in shape:  # Python integers do not overflow
            count *= dimension
        size = count // kind.block * kind.bytes
        end = start + offset + size + kind.tail
        if end > header.size:
            raise ValueError(
                f"{path}: the tensor {_quoted(name)}, {kind.name} {list(shape)}, would end at byte "
                f"{end}; the file has {header.size}: copy it again"
            )
        tensors[name] = StoredBlocks(name, path, kind, shape, start + offset, size)
    end, last, unused = start, "", 0
    for stored in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if stored.offset < end:
            before = f"the tensor {_quoted(last)}" if last else "the header"
            raise ValueError(f"{path}: the tensor {_quoted(stored.name)} overlaps {before}")
        unused += max(0, stored.offset - -(-end // alignment) * alignment)
        end, last = stored.offset + stored.bytes + stored.type.tail, stored.name
    unused += max(0, header.size - -(-end // alignment) * alignment)
    if unused:
        warnings.warn(f"{path} has {unused} bytes that belong to no tensor; they are not read", stacklevel=3)
    return Gguf([path], metadata, tensors)


def parts_of(path: Path) -> Iterator[Path]:
    """All files of the split model that `path` is a part of.

    Raises:
        OSError: a part is missing.
        ValueError: the name has an invalid part number ("5 of 3"), or more than 1000 parts.
    """
    match = _SPLIT.match(path.name)
    if match is None:
        yield path
        return
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _MOST_FILES:
        raise ValueError(f"{path} is part {int(match[2])} of {count}; expected 1 to {_MOST_FILES} parts")
    for number in range(1, count + 1):
        part = path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        if not part.exists():
            raise FileNotFoundError(f"{part} is missing: the model has {count} parts; copy it too")
        yield part


def read_gguf(path: str | os.PathLike[str]) -> Gguf:
    """The metadata and the tensors of a model in a GGUF file, or in a split one given any of its parts.

    Reads little-endian files of versions 2 and 3, without the data of the tensors.

    Raises:
        OSError: a file is missing, or cannot be read.
        ValueError: not a complete GGUF file: an unsupported version, an invalid count, length, offset or alignment, an unknown
            type, overlapping tensors, a duplicate name, or parts of different models.
    """
    files = [_read_file(part) for part in parts_of(Path(path))]
    first = files[0]
    for number, file in enumerate(files):
        for key in ("split.count", "split.no", "split.tensors.count"):
            if not isinstance(file.metadata.get(key, 0), int):
                raise ValueError(f"{file.paths[0]} has a {type(file.metadata[key]).__name__} as {key}; expected a number")
        count, place = file.metadata.get("split.count", 1), file.metadata.get("split.no", 0)
        if (len(files) > 1 or (count != 0 and count != 1)) and (count != len(files) or place != number):
            raise ValueError(
                f"{file.paths[0]} says that it is part {place} (from 0) of {count}; expected part {number} of "
                f"{len(files)}, as its name says"
            )
    tensors: dict[str, StoredBlocks] = {}
    for file in files:
        for name, stored in file.tensors.items():
            if name in tensors:
                raise ValueError(f"{_quoted(name)} is in both {tensors[name].path} and {stored.path}; expected one")
            tensors[name] = stored
    for file in files:  # recorded in every part; a part of another model usually has another number
        total = file.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise ValueError(f"{file.paths[0]} says that its model has {total} tensors; found {len(tensors)} in all parts")
    return Gguf([path for file in files for path in file.paths], first.metadata, tensors)


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Encodes a metadata value with its type: a string, bool, number, or list of strings, float32 or int32."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    number, form = (6, "<f4") if any(isinstance(item, float) for item in value) else (5, "<i4")
    return struct.pack("<IIQ", _ARRAY, number, len(value)) + bytes(np.array(value, form))


class GgufWriter:
    """Writes a GGUF file of version 3: names, types and shapes of all tensors, then their data in the same order."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: list[tuple[str, TensorType, tuple[int, ...]]]):
        """
        Args:
            metadata: an int is written as uint32, in lists as int32; a float as float32.
            tensors: shapes have the slowest dimension first; rows consist of whole blocks.
        """
        numbers = {kind: number for number, kind in TYPES.items()}
        header = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata))
        header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
        at, self._ends = 0, []
        for name, kind, shape in tensors:
            header += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            header += struct.pack("<IQ", numbers[kind], at)
            end = at + math.prod(shape) // kind.block * kind.bytes + kind.tail
            self._ends.append(end)
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
        header += bytes(-len(header) % _ALIGNMENT)
        self._start, self._at = len(header), 0
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        write_all(self._file, header)

    def write(self, data: Any) -> None:
        """Appends data to the current tensor; once it is complete, the next one begins."""
        size = memoryview(data).nbytes
        if not self._ends or self._at + size > self._ends[0]:
            raise AssertionError(f"{size} bytes at {self._at} exceed the tensors that the header lists")
        write_all(self._file, data)
        self._at += size
        if self._at == self._ends[0]:
            del self._ends[0]
            padding = -self._at % _ALIGNMENT
            write_all(self._file, bytes(padding))
            self._at += padding

    def __enter__(self) -> GgufWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with self._file:
            if kind is None:
                if self._ends:
                    raise AssertionError(f"{len(self._ends)} tensors were not written")
                os.fsync(self._file.fileno())
