"""Huge pages for packed weights, releasing mapped pages, and measuring read bandwidth."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .. import _C

if TYPE_CHECKING:
    from torch import Tensor

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")


def huge_page_setting() -> str | None:
    """Linux's setting of huge pages: "madvise" (on request), "always" or "never"; None if unknown."""
    try:
        return (_SYSTEM / "enabled").read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return None


def _huge_page_bytes() -> int | None:
    """The size of a huge page if the system provides them on request; None if it has none or needs no request."""
    if huge_page_setting() != "madvise":
        return None
    try:
        return int((_SYSTEM / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return None


def _cpus_by_part(size: int, page: int) -> list[tuple[int, list[int]]]:
    """How to divide memory of `size` bytes among the NUMA nodes: the end of each part, and the CPUs of its node.

    Empty with a single node, or if ``LOWBIT_NUMA`` is off. Linux places a page on the node of the CPU that first writes to it.
    """
    placement, nodes = _C.memory_placement()
    if len(nodes) < 2 or placement == "off":
        return []
    if placement == "interleave":
        return [(min(end, size), nodes[i % len(nodes)]) for i, end in enumerate(range(page, size + page, page))]
    # The operators split a matrix in the same way (ops/schedule.h), but between panels.
    return [(size * (i + 1) // len(nodes) // page * page if i + 1 < len(nodes) else size, cpus) for i, cpus in enumerate(nodes)]


def _copy_by_node(to: Tensor, tensor: Tensor, page: int) -> None:
    """Copies bytes, each part on a CPU of its NUMA node."""
    before, begin = os.sched_getaffinity(0), 0
    try:
        for end, cpus in _cpus_by_part(tensor.numel(), page):
            with contextlib.suppress(OSError):  # the process lost these CPUs: the part is placed elsewhere
                os.sched_setaffinity(0, cpus)  # affects this thread only, so it must do the copy
            ctypes.memmove(to.data_ptr() + begin, tensor.data_ptr() + begin, end - begin)
            begin = end
    finally:
        os.sched_setaffinity(0, before)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Copies packed weights, uint8, to huge pages; returns the tensor itself if it is too small or there are none.

    With several NUMA nodes, each gets its part (``LOWBIT_NUMA``).
    """
    import torch

    page = _huge_page_bytes()
    if page is None or tensor.numel() < page or tensor.device.type != "cpu":
        return tensor
    size = tensor.numel()
    try:
        memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # huge pages only affect speed
        return tensor
    # Align to a huge page, as not every system aligns the mapping. Bytes that are never touched take no memory.
    offset = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % page
    moved = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).view(tensor.shape)
    if not _cpus_by_part(size, page):
        return moved.copy_(tensor)
    _copy_by_node(moved, tensor.contiguous(), page)
    return moved


def read_in_huge_pages(files: Iterable[Path]) -> None:
    """Asks Linux to read files that this process has mapped into huge pages. What is in memory already stays as it is."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    names = {str(file.resolve()) for file in files}
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name in names:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def give_back(tensor: Tensor) -> None:
    """Drops the pages of a file-mapped tensor from this process's memory.

    Later reads get them from the page cache or the disk. Does nothing for tensors in other memory, for tensors that were
    written to, and on other systems than Linux.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return
    import torch

    page = mmap.PAGESIZE
    begin, end = tensor.data_ptr() // page * page, -(-(tensor.data_ptr() + tensor.nbytes) // page) * page
    entries = torch.empty((end - begin) // page, dtype=torch.int64, device="cpu")  # one for each page
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(begin // page * entries.element_size())
            if file.readinto(memoryview(entries.numpy()).cast("B")) != entries.nbytes:
                return
    except OSError:  # no pagemap: release nothing
        return
    # Bit 63: in memory, 62: swapped out, 61: mapped from a file. Dropping any other page would lose its content.
    in_memory, swapped, of_file = ((entries >> bit & 1).bool() for bit in (63, 62, 61))
    if not (swapped | in_memory & ~of_file).any():
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


class ReadBandwidth:
    """Measures this machine's read bandwidth: one buffer, read in the fastest pattern.

    Args:
        size: the size of the buffer, in bytes; larger than the caches.

    Raises:
        OSError: not enough memory.
    """

    def __init__(self, size: int = 1 << 30):
        import numpy

        # Private, because shared memory gets no huge pages.
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # avoids page walks, so that the result is an upper bound
        self._buffer = numpy.frombuffer(self._memory, dtype=numpy.uint8)
        self._buffer.fill(1)

    def __call__(self, threads: int) -> float:
        """Bytes per second with this number of threads, from seven passes: about 0.2 s for 1 GiB."""
        return _C.read_bandwidth(self._buffer.ctypes.data, self._buffer.size, threads)
