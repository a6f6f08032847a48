"""Joins and cuts packed matrices exactly, for fused layers and tensor parallelism."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _C
from .packed import check_packed, info


def concat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Joins packed matrices: along the outputs (dim 0) or the inputs (dim 1).

    Codes, scales and row scales stay as they are, so :func:`lowbit.linear` gives with ``dim=0`` the results of the parts
    next to each other, with the same bits. ``concat`` of slices gives the bytes of what was cut.

    Args:
        parts: from :func:`lowbit.pack`: uint8 [bytes], all of one width, mapping, table of levels and group size, with as
            many inputs (dim 0) or rows (dim 1) as the first.
        dim: 1 wants row scales that agree, as those of :func:`slice_columns` do.

    Returns:
        uint8 [bytes]. With dim 0 it has a bias if one of them has, zeros for the others; with dim 1 that of the first.

    Raises:
        TypeError: not tensors.
        ValueError: the matrices do not fit together, one is invalid or in a vendor's format, or its checksum is wrong.
    """
    parts = list(parts)
    if dim not in (0, 1):
        raise ValueError(f"dim is {dim!r}; expected 0 (rows) or 1 (inputs)")
    if not parts:
        raise ValueError("there are no parts; expected one packed weight or more")
    total = 0
    for part in parts:
        found = info(part)
        total += found.in_features if dim else found.out_features
    return _splice(parts, dim, 0, total)


def slice_rows(packed: Tensor, begin: int, end: int) -> Tensor:
    """Rows ``begin`` to ``end - 1`` of a packed matrix, with their bias: some outputs of a layer, with the same bits.

    Whole panels of 16 rows are copied as they are: begin at a multiple of 16 where speed counts.

    Args:
        packed: from :func:`lowbit.pack`, uint8 [bytes].

    Returns:
        uint8 [bytes].

    Raises:
        TypeError: not a tensor, or not integers.
        ValueError: no such rows, or the packed weight is invalid, in a vendor's format, or its checksum is wrong.
    """
    return _splice([packed], 0, begin, end)


def slice_columns(packed: Tensor, begin: int, end: int) -> Tensor:
    """Inputs ``begin`` to ``end - 1`` of a packed matrix: a layer for a part of the activations.

    The results of all slices add up to those of the whole, but for rounding: each slice's activations are quantized for
    themselves. So that the sum has the bias once, only a slice that begins at 0 keeps it.

    Args:
        packed: from :func:`lowbit.pack`, uint8 [bytes].
        begin, end: multiples of the group size, or for ``end`` the number of inputs; anything with one group per row.

    Returns:
        uint8 [bytes]. Codes, scales and row scales are those of the whole.

    Raises:
        TypeError: not a tensor, or not integers.
        ValueError: no such inputs, a cut inside a group, or as :func:`slice_rows`.
    """
    return _splice([packed], 1, begin, end)


def _splice(parts: list[Tensor], dim: int, begin: int, end: int) -> Tensor:
    for name, value in (("begin", begin), ("end", end)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}; expected an int")
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} is {value}; expected a number of rows or inputs")
    for part in parts:
        check_packed(part)
    matrices = [(part.data_ptr(), part.numel()) for part in parts]
    out = torch.empty(_C.spliced_bytes(matrices, dim, begin, end), dtype=torch.uint8, device="cpu")
    _C.splice(matrices, dim, begin, end, out.data_ptr(), out.numel())
    return out
