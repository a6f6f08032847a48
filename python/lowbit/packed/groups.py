"""Groups of consecutive inputs that share a scale; the last group of a row may be shorter."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def in_groups(values: Tensor, group_size: int | None) -> Tensor:
    """[n, k] -> [n, groups, group size], a short last group padded with zeros; None: one group per row."""
    n, k = values.shape
    size = group_size or k
    missing = -k % size
    return (pad(values, (0, missing)) if missing else values).reshape(n, (k + missing) // size, size)


def per_input(values: Tensor, group_size: int | None, k: int) -> Tensor:
    """Values of groups, [n, groups], repeated for each input: [n, k]."""
    return values.repeat_interleave(group_size or k, 1)[:, :k]
