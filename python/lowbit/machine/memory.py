"""Huge pages for packed weights, and the read bandwidth of memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from .. import _C

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")


def huge_page_setting() -> str | None:
    """Linux's setting of huge pages: "madvise" (on request), "always" or "never"; None if unknown."""
    try:
        return (_SYSTEM / "enabled").read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return None


def _huge_page_bytes() -> int | None:
    """The size of a huge page if the system gives them on request; None if it gives none, or gives them without a request."""
    if huge_page_setting() != "madvise":
        return None
    try:
        return int((_SYSTEM / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return None


def _cpus_by_part(size: int, page: int) -> list[tuple[int, list[int]]]:
    """How memory of `size` bytes is divided among the nodes of memory: where each part ends, and its node's CPUs.

    Empty where there is one node, or ``LOWBIT_NUMA`` is off. Linux puts a page on the node of the CPU that first writes to it.
    """
    placement, nodes = _C.memory_placement()
    if len(nodes) < 2 or placement == "off":
        return []
    if placement == "interleave":
        return [(min(end, size), nodes[i % len(nodes)]) for i, end in enumerate(range(page, size + page, page))]
    # The operators cut a matrix in the same way (ops/schedule.h), but between panels.
    return [(size * (i + 1) // len(nodes) // page * page if i + 1 < len(nodes) else size, cpus) for i, cpus in enumerate(nodes)]


def _copy_by_node(to: Tensor, tensor: Tensor, page: int) -> None:
    """Copies bytes, each part on a CPU of its node."""
    before, begin = os.sched_getaffinity(0), 0
    try:
        for end, cpus in _cpus_by_part(tensor.numel(), page):
            with contextlib.suppress(OSError):  # CPUs taken from the process meanwhile: the part lies elsewhere
                os.sched_setaffinity(0, cpus)  # this thread alone, which then has to copy
            ctypes.memmove(to.data_ptr() + begin, tensor.data_ptr() + begin, end - begin)
            begin = end
    finally:
        os.sched_setaffinity(0, before)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy of packed weights, uint8, in huge pages; the tensor itself if it is too small or no huge pages are available.

    Where there are several nodes of memory, each gets its part (``LOWBIT_NUMA``).
    """
    page = _huge_page_bytes()
    if page is None or tensor.numel() < page or tensor.device.type != "cpu":
        return tensor
    size = tensor.numel()
    try:
        memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # huge pages change the speed only
        return tensor
    # Aligned to a page, as not every system aligns the mapping. Bytes that are never touched take no memory.
    offset = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % page
    moved = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).view(tensor.shape)
    if not _cpus_by_part(size, page):
        return moved.copy_(tensor)
    _copy_by_node(moved, tensor.contiguous(), page)
    return moved


def give_back(tensor: Tensor) -> None:
    """Releases a tensor's pages of a mapped file from this process's memory.

    Later reads get them from the page cache or the disk. Does nothing for tensors in other memory, for tensors that were
    written to, and on systems other than Linux.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return
    page = mmap.PAGESIZE
    begin, end = tensor.data_ptr() // page * page, -(-(tensor.data_ptr() + tensor.nbytes) // page) * page
    entries = torch.empty((end - begin) // page, dtype=torch.int64, device="cpu")  # one for each page
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(begin // page * entries.element_size())
            if file.readinto(memoryview(entries.numpy()).cast("B")) != entries.nbytes:
                return
    except OSError:  # a system without pagemap: nothing is released
        return
    # Bit 63: in memory, 62: swapped out, 61: of a file. Pages of no file would be lost.
    in_memory, swapped, of_file = ((entries >> bit & 1).bool() for bit in (63, 62, 61))
    if not (swapped | in_memory & ~of_file).any():
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


class ReadBandwidth:
    """Measures this machine's read bandwidth: one buffer, read in the fastest pattern.

    Args:
        size: of the buffer, in bytes; more than the caches hold.

    Raises:
        OSError: not enough memory.
    """

    def __init__(self, size: int = 1 << 30):
        # Private: pages of shared memory are not made huge.
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # an upper bound: without the cost of page walks
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8).fill_(1)

    def __call__(self, threads: int) -> float:
        """Bytes per second with this number of threads, from seven passes: about 0.2 s for 1 GiB."""
        return _C.read_bandwidth(self._buffer.data_ptr(), self._buffer.numel(), threads)
