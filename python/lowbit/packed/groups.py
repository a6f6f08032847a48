"""Groups of consecutive inputs that share a scale; the last group of a row may be shorter."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def in_groups(values: Tensor, group_size: int | None) -> Tensor:
    """Reshapes [n, k] to [n, groups, group size], padding a short last group with zeros; None: one group per row."""
    n, k = values.shape
    size = group_size or k
    missing = -k % size
    return (pad(values, (0, missing)) if missing else values).reshape(n, (k + missing) // size, size)


def per_input(values: Tensor, group_size: int | None, k: int) -> Tensor:
    """Repeats the values of groups, [n, groups], for each input: [n, k]."""
    return values.repeat_interleave(group_size or k, 1)[:, :k]
