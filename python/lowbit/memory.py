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
    """A copy of a packed weight, uint8 [bytes], in huge pages; itself if it fills none or the system has none to ask for."""
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
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).copy_(tensor)


def use_huge_pages(model: torch.nn.Module) -> int:
    """Moves the packed weights of a model into huge pages, where Linux gives them on request.

    Then a matrix that is read from memory comes faster: the CPU looks up a five-hundredth of the addresses, and fetches
    ahead beyond 4 KiB. :func:`lowbit.quantize_` does it by itself; call this for weights that were loaded, and above all
    for those mapped from a file, which then take memory of their own.

    Args:
        model: any; what it shares, such as the table of a tied head, stays shared.

    Returns:
        How many bytes were moved. Only weights of a huge page (2 MiB, usually) or more are. 0 where the system gives no huge
        pages, or gives them unasked.
    """
    from . import nn  # nn needs this file

    moved: dict[tuple[int, int], Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn._Packed):
            weight = module.packed_weight
            key = (weight.data_ptr(), weight.numel())
            if key not in moved:
                moved[key] = in_huge_pages(weight)
            module.packed_weight = moved[key]
    return sum(tensor.numel() for (address, _), tensor in moved.items() if tensor.data_ptr() != address)
