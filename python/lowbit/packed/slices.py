"""Joins and slices packed matrices without requantizing, for fused layers and tensor parallelism."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from .matrix import check_packed, info


def concat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Joins packed matrices: along the outputs (dim 0) or the inputs (dim 1).

    Codes, scales and row scales stay the same: with ``dim=0`` :func:`lowbit.linear` returns the results of the parts side by
    side, with the same bits. ``concat`` of all slices of a matrix gives the bytes of the matrix.

    Args:
        parts: uint8 [bytes] from :func:`lowbit.pack`, with the same width, mapping, level table and group size, and the
            same number of inputs (dim 0) or rows (dim 1).
        dim: 0 or 1; 1 requires equal row scales, as the results of :func:`slice_columns` have.

    Returns:
        uint8 [bytes]. With dim 0 it has a bias if any part has one, zero for parts without; with dim 1 the first part's bias.

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
        header = info(part)
        total += header.in_features if dim else header.out_features
    return _splice(parts, dim, 0, total)


def slice_rows(packed: Tensor, begin: int, end: int) -> Tensor:
    """Returns rows ``begin`` to ``end - 1`` of a packed matrix, with their bias: some outputs of a layer, bit for bit.

    Panels of 16 rows are copied: a ``begin`` that is a multiple of 16 is fastest.

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
    """Returns inputs ``begin`` to ``end - 1`` of a packed matrix: a layer for part of the input features.

    The results of all slices add up to those of the whole matrix up to rounding, because each slice quantizes its
    activations separately. Only the slice that begins at 0 keeps the bias, so the sum has it once.

    Args:
        packed: from :func:`lowbit.pack`, uint8 [bytes].
        begin, end: multiples of the group size (``end`` also the number of inputs); any number with one group per row.

    Returns:
        uint8 [bytes], with the codes, scales and row scales of the whole matrix.

    Raises:
        TypeError: not a tensor, or not integers.
        ValueError: no such inputs, a cut inside a group, or as :func:`slice_rows`.
    """
    return _splice([packed], 1, begin, end)


def slice_of_rank(packed: Tensor, rank: int, count: int, *, inputs: bool = False, matrices: int = 1) -> Tensor:
    """Returns a rank's ``count`` inputs of a packed matrix, or its ``count`` rows of each of ``matrices`` stacked matrices.

    The last rank may have fewer rows.
    """
    begin, end = rank * count, (rank + 1) * count
    if inputs:
        return slice_columns(packed, begin, end)
    rows = info(packed).out_features // matrices
    parts = [slice_rows(packed, first + begin, first + min(rows, end)) for first in range(0, rows * matrices, rows)]
    return parts[0] if matrices == 1 else concat(parts)


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
