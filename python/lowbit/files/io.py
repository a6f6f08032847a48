"""Exact reads and complete writes of files that other processes may change, and reads of untrusted headers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Place(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def read_into(view: memoryview, stored: Place, begin: int = 0) -> None:
    """Fills a buffer with the bytes of a tensor from ``begin`` on.

    Raises:
        OSError: the file ends earlier.
    """
    with open(stored.path, "rb", buffering=0) as file:
        file.seek(stored.offset + begin)
        done = 0
        while done < len(view):
            read = file.readinto(view[done:])
            if not read:
                raise OSError(f"{stored.path} ended in the middle of {stored.name}: it was changed while being read")
            done += read


def read_bytes(stored: Place, begin: int = 0, end: int | None = None) -> Tensor:
    """A copy of bytes [begin, end) of a tensor, uint8. Pages of a mapped file would count as memory of this process.

    Raises:
        OSError: the file ends earlier.
    """
    import torch

    count = (stored.bytes if end is None else end) - begin
    buffer = torch.empty(count, dtype=torch.uint8, device="cpu")  # a loader may have set another default device
    read_into(memoryview(buffer.numpy()), stored, begin)
    return buffer


def read_row_bytes(stored: Place, begin: int, end: int) -> Tensor:
    """Rows [begin, end) of a tensor, uint8 [end - begin, bytes per row]."""
    row = stored.bytes // stored.shape[0]
    return read_bytes(stored, begin * row, end * row).view(end - begin, row)


def write_all(file: BinaryIO | Any, data: Any) -> None:
    """Writes a whole buffer to an unbuffered file."""
    view = memoryview(data)
    if not view.nbytes:
        return
    view = view.cast("B")
    while len(view):
        view = view[file.write(view) :]


class Header:
    """Reads the header of an untrusted file. Every size is checked against the file's size before it is used.

    Args:
        most: largest size of the header in bytes; None: that of the file.
    """

    def __init__(self, file: BinaryIO, path: Path, most: int | None = None):
        self.file, self.path, self.at = file, path, file.tell()
        self.size = os.fstat(file.fileno()).st_size
        self._end = self.size if most is None else min(self.size, most)

    def need(self, count: int, what: str) -> None:
        """Raises ValueError unless ``count`` more bytes follow."""
        available = self._end - self.at
        if count > available:
            end = "the file ends" if self._end == self.size else "a header may end"
            raise ValueError(
                f"{self.path}: {what} would take {count} bytes at byte {self.at}; {end} {max(available, 0)} bytes later"
            )

    def bytes(self, count: int, what: str) -> bytes:
        self.need(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise OSError(f"{self.path} ended in the middle of its header: it was changed while being read")
        self.at += count
        return data

    def number(self, size: int, what: str) -> int:
        """An unsigned integer of ``size`` bytes, little-endian."""
        return int.from_bytes(self.bytes(size, what), "little")

    def skip(self, count: int, what: str) -> int:
        """Skips ``count`` bytes; returns their offset."""
        self.need(count, what)
        begin = self.at
        self.at += count
        self.file.seek(self.at)
        return begin
