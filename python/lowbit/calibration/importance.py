"""Searches scales and mins with the least rounding error, weighted by importance."""

from __future__ import annotations

import torch
from torch import Tensor

from ..levels import FACTORS, Table, best_scales, refit
from ..packed.groups import in_groups
from .grid import MatrixConfig, Quantized, nearest, stored, table_in, with_table

_FITS = 3
_CHUNK = 1 << 20  # weights processed at a time, to bound the memory


def search(weight: Tensor, importance: Tensor | None, config: MatrixConfig) -> Quantized:
    """Quantizes a matrix by round-to-nearest with searched scales (and mins).

    The search minimizes the sum of ``importance * (weight - rounded)^2`` in each group: it tries several ranges, refits the
    scale (and min) to the levels of each by weighted least squares, and refits the best one a few more times. With the mean
    square of each input as importance, this is the error of the layer's output for independent inputs, as in llama.cpp's
    importance matrices and k-quants.

    Args:
        weight: float32 [n, k], finite.
        importance: float32 [k] or [n, k], not negative; None: all equal.
        config: bits, group size and mapping; ``scale`` is not used. Levels "fit" are fitted to these rows; if the rows are
            part of a matrix, fit them first (:func:`lowbit.calibration.grid.with_table`).
    """
    config = with_table(config, weight, importance if importance is None or importance.dim() == 1 else None)
    counts = torch.ones(1, weight.shape[1]) if importance is None else importance.reshape(-1, weight.shape[1])
    scales, mins = [], []
    rows = max(1, _CHUNK // weight.shape[1])
    for begin in range(0, weight.shape[0], rows):
        chunk = slice(begin, begin + rows)
        scale, min = search_groups(
            in_groups(weight[chunk], config.group_size),
            in_groups(counts if len(counts) == 1 else counts[chunk], config.group_size),
            config,
        )
        scales.append(scale)
        mins.append(min)
    scale, min = stored_grid(torch.cat(scales), torch.cat(mins) if config.mapping == "affine" else None)
    return nearest(weight, scale, min, config)


def stored_grid(scales: Tensor, mins: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rounds scales and mins [n, groups] of a whole matrix as the format stores them."""
    largest = scales.abs().amax(1, keepdim=True)
    if mins is None:
        return stored(scales, largest), None
    largest = torch.maximum(largest, mins.abs().amax(1, keepdim=True))
    return stored(scales, largest), stored(mins, largest)


def search_groups(x: Tensor, importance: Tensor, config: MatrixConfig) -> tuple[Tensor, Tensor | None]:
    """Scales and mins, float32 [n, groups], for weights [n, groups, group size], before they are rounded for storage.

    Args:
        importance: [n, groups, group size], or [1, groups, group size] for all rows. Weights of importance 0 have no effect,
            unless all of a group are 0, so they can pad a group.
    """
    table = table_in(config)
    if table is not None:
        # Groups without importance are fitted with equal weights.
        total = importance.sum(2, keepdim=True)
        importance = torch.where(total > 0, importance / torch.where(total > 0, total, 1.0), 1.0 / x.shape[2])
        return _search_table(x, importance.expand(x.shape), table), None
    affine = config.mapping == "affine"
    rows, counts = (values.flatten(0, 1).float().contiguous() for values in (x, importance))
    scale, min = torch.ops.lowbit.search_groups(rows, counts, config.bits, affine)
    return scale.view(x.shape[:2]), min.view(x.shape[:2]) if affine else None


def _search_table(x: Tensor, w: Tensor, table: Table) -> Tensor:
    groups, counts = x.flatten(0, 1), w.flatten(0, 1)
    # Weights of importance 0 must not affect the range.
    scale = best_scales(torch.where(counts > 0, groups, 0.0), table, counts, FACTORS)
    for _ in range(_FITS):
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        scale = refit(groups, table.nearest(groups * inverse)[1], counts, scale)
    return scale.view(x.shape[:2])
