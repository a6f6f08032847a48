"""Matrices in groups of inputs, each of which has one scale: runs of a row, the last of which may be shorter."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def in_groups(values: Tensor, group_size: int | None) -> Tensor:
    """[n, k] -> [n, groups, group size], with zeros behind a short last group; None: a group is a row."""
    n, k = values.shape
    size = group_size or k
    missing = -k % size
    return (pad(values, (0, missing)) if missing else values).reshape(n, (k + missing) // size, size)


def per_input(values: Tensor, group_size: int | None, k: int) -> Tensor:
    """What each group has, [n, groups], for each of its inputs: [n, k]."""
    return values.repeat_interleave(group_size or k, 1)[:, :k]
