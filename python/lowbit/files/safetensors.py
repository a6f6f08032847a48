"""Reads and writes safetensors files: their headers, and headers of packed weights; needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from .. import _C
from ..packed.header import PackedInfo
from .config_json import refuse_gguf
from .io import read_into, write_all
from .replace import check_utf8, sync
from .untrusted import check_regular, read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PACKED_SUFFIX = ".packed_weight"
ORDER_SUFFIX = ".input_order"  # int32 [inputs], for layers with an act-order permutation

_ALIGNMENT = 64  # of the data in a file, in bytes: a cache line. Sizes of packed weights are multiples of it


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    name: str
    path: Path
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    bytes: int


def read_file(path: Path) -> dict[str, Stored]:
    """The tensors of one file; only its header is read.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: not a complete safetensors file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"safetensors is not installed: {error}. Install it with `pip install safetensors`.") from error
    check_utf8(path)
    check_regular(path)
    try:
        with safe_open(path, framework="numpy"):  # validates the header and the file's size
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: {error}. It has {os.path.getsize(path)} bytes; copy it again."
        ) from error
    size, header = _header(path)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = Stored(name, path, entry["dtype"], tuple(entry["shape"]), 8 + size + begin, end - begin)
    return tensors


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return size, json.loads(file.read(size))


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file that :func:`read_file` has accepted."""
    return _header(path)[1].get("__metadata__") or {}


def files_of(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a checkpoint, and the index's map from tensor names to file names, or None without an index.

    Raises:
        OSError: no such directory, or a file is missing.
        ValueError: the index is invalid, or there are weights beside it that it does not name.
    """
    if not directory.is_dir():
        refuse_gguf(directory)
        raise NotADirectoryError(f"{directory} is not a directory; expected one with config.json and {WEIGHTS}")
    refuse_two_checkpoints(directory)
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS], None
    if not (directory / INDEX).exists():
        present = ", ".join(sorted(entry.name for entry in directory.iterdir())) or "nothing"
        raise FileNotFoundError(f"{directory} has neither {WEIGHTS} nor {INDEX}; found {present}")
    names, weight_map = _indexed(directory)
    for name in names:
        if not (directory / name).exists():
            count = sum(file == name for file in weight_map.values())
            raise FileNotFoundError(f"{directory / name} is missing: {INDEX} says that it holds {count} tensors; copy it too")
    return [directory / name for name in names], weight_map


def refuse_two_checkpoints(directory: Path) -> None:
    """Raises ValueError if a directory has a single file of weights and an index of other files: one of them is a leftover."""
    if (directory / WEIGHTS).exists() and (directory / INDEX).exists():
        names, _ = _indexed(directory)
        # An index of files that are gone is a leftover: transformers deletes old shards, but not their index.
        other = next((name for name in names if name != WEIGHTS and (directory / name).exists()), None)
        if other is not None:
            raise ValueError(
                f"{directory} has {WEIGHTS}, and {INDEX} of other files, {other} for example; expected one "
                "of them: delete the one of an older save"
            )


def _indexed(directory: Path) -> tuple[list[str], dict[str, str]]:
    """The files that the index names, sorted, and its map from tensor names to them."""
    index = directory / INDEX
    try:
        weight_map = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
        plain = all(Path(name).name == name and name.isprintable() for name in names)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{index} is not an index: {error!r}; expected {{"weight_map": {{tensor: file}}}}') from error
    if not names or not plain:
        raise ValueError(f"{index} names the files {names}; expected files of the same directory")
    return names, weight_map


def float_name(packed: str, shape: tuple[int, ...]) -> str:
    """The name of the float tensor that a packed one replaces: a layer's weight, or the parameter with all experts.

    Files also contain an empty tensor of this name, the guard. Without it, a program that does not know lowbit would find no
    float weight and continue with random values; the guard's shape makes it stop.
    """
    name = packed.removesuffix(PACKED_SUFFIX)
    return f"{name}.weight" if len(shape) == 1 else name


def read_files(paths: Iterable[Path], weight_map: dict[str, str] | None = None) -> dict[str, Stored]:
    """The tensors of all files of a checkpoint, without the guards (:func:`float_name`).

    Raises:
        OSError, ValueError: as :func:`read_file`, or a duplicate name, or an index that disagrees with the files.
    """
    tensors: dict[str, Stored] = {}
    for path in paths:
        for name, stored in read_file(path).items():
            if name in tensors:
                raise ValueError(f"{name} is in both {tensors[name].path} and {path}; expected each name once")
            tensors[name] = stored
    for name, file in (weight_map or {}).items():
        if name not in tensors or tensors[name].path.name != file:
            actual = "nowhere" if name not in tensors else f"in {tensors[name].path.name}"
            raise ValueError(f"{INDEX} says that {name} is in {file}; found it {actual}: copy all files again")
    guards = {float_name(name, stored.shape) for name, stored in tensors.items() if name.endswith(PACKED_SUFFIX)}
    return {name: stored for name, stored in tensors.items() if name not in guards or stored.shape != (0,)}


def packed_info(stored: Stored) -> PackedInfo:
    """The header of a packed tensor in a file, or of its first expert; no other byte is read.

    Raises:
        ValueError: not a packed weight, an unsupported version, or a modified header.
    """
    try:
        if stored.dtype != "U8" or len(stored.shape) not in (1, 2) or 0 in stored.shape:
            raise ValueError(
                f"found dtype {stored.dtype} and shape {list(stored.shape)}; expected U8 and [bytes] or [experts, bytes]"
            )
        size = stored.shape[-1]
        header = numpy.empty(min(128, size), dtype=numpy.uint8)  # 128 bytes with levels, else 64
        read_into(memoryview(header), stored)
        info = PackedInfo(**_C.info(header.ctypes.data, size, False))
        return info if len(stored.shape) == 1 else replace(info, experts=stored.shape[0])
    except ValueError as error:
        raise ValueError(f"{stored.name} in {stored.path}: {error}") from error


def orders_of(tensors: Mapping[str, Stored]) -> set[str]:
    """The names of the packed weights of a checkpoint that have an act-order permutation.

    Raises:
        ValueError: a permutation without a packed weight, or of another shape or dtype.
    """
    permuted = set()
    for name, stored in tensors.items():
        if name.endswith(ORDER_SUFFIX):
            packed = name.removesuffix(ORDER_SUFFIX) + PACKED_SUFFIX
            if packed not in tensors:
                raise ValueError(f"{stored.path} has {name}, but there is no {packed}; a shard is missing")
            inputs = packed_info(tensors[packed]).in_features
            if stored.dtype != "I32" or stored.shape != (inputs,):
                raise ValueError(f"{name} in {stored.path} is {stored.dtype} {list(stored.shape)}; expected I32 [{inputs}]")
            permuted.add(packed)
    return permuted


def header_of(
    tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, int]:
    """The header of a file with tensors of these names, dtypes, shapes and sizes, and the size of its data in bytes.

    A guard without data is added for each packed weight (:func:`float_name`). ``metadata`` is added to the file's metadata.
    """
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, dtype, shape, size in tensors:
        if name.endswith(PACKED_SUFFIX):
            header[float_name(name, shape)] = {"dtype": dtype, "shape": [0], "data_offsets": [at, at]}
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, at


class Writer:
    """Writes a safetensors file: names, dtypes, shapes and sizes of all tensors, then their data in the same order."""

    def __init__(
        self, path: Path, tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
    ):
        header, size = header_of(tensors, metadata)
        # Unbuffered, so that closing the file after an error writes nothing more.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._end = len(header) + size
        self.write(header)

    def write(self, data: Any) -> int:
        """Appends a buffer; returns its offset."""
        at = self._file.tell()
        write_all(self._file, data)
        return at

    def write_at(self, at: int, data: Any) -> None:
        """Overwrites bytes from the offset ``at`` on."""
        end = self._file.tell()
        self._file.seek(at)
        self.write(data)
        self._file.seek(end)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with self._file:
            if kind is None:
                if self._file.tell() != self._end:
                    raise AssertionError(f"{self._file.tell()} bytes were written; the header says {self._end}")
                sync(self._file)
