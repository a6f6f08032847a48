"""Where packed weights lie in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")


def _huge_page_bytes() -> int | None:
    """The size of a huge page where the system gives them to those who ask; None where it gives none, or to all."""
    try:
        if "[madvise]" not in (_SYSTEM / "enabled").read_text():
            return None
        return int((_SYSTEM / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return None


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy of packed weights, uint8, in huge pages; itself if it fills none or the system has none to ask for."""
    page = _huge_page_bytes()
    if page is None or tensor.numel() < page or tensor.device.type != "cpu":
        return tensor
    size = tensor.numel()
    try:
        memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # it is only about speed
        return tensor
    # Begins where a page does: not every system aligns the mapping itself. What is never touched takes no memory.
    offset = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % page
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).view(tensor.shape).copy_(tensor)
