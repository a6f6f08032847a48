"""Scales and mins that lose least where it counts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import in_groups
from ..levels import FACTORS, Table, best_scales, refit
from .grid import Config, Quantized, levels_near, nearest, stored, table_in, with_table

_FITS = 3
_CHUNK = 1 << 20  # weights that are searched at a time, which bounds the memory
# Ranges to try, as parts of the whole range of a group. Fewer levels gain from cutting off more.
_SHRINKS = {1: 24, 2: 24, 3: 20, 4: 16, 5: 12, 6: 10, 7: 8, 8: 8}
_STEP = 0.03


def search(weight: Tensor, importance: Tensor | None, config: Config) -> Quantized:
    """Chooses scales (and mins) by trial, and rounds to nearest.

    For each group the sum of ``importance * (weight - rounded)^2`` is made small: a number of ranges is tried, each
    with the scale (and min) refitted to the levels that it gives by weighted least squares, and the best one is
    refitted a few times more. With the mean square of each input as importance this is the error of the layer's output,
    if inputs were independent; llama.cpp's importance matrices are the same (its k-quants search scales like this too).

    Args:
        weight: float32 [n, k], finite.
        importance: float32 [k] or [n, k], not negative; None: all alike.
        config: bits, group size and mapping; its choice of scale does not count. A table that is to be fitted is fitted to
            these rows: fit it before where they are a part of a matrix (:func:`lowbit.calibration.grid.with_table`).

    Returns:
        The rounded matrix, with scales as they are stored.
    """
    config = with_table(config, weight, importance if importance is None or importance.dim() == 1 else None)
    if importance is not None and importance.dim() == 1:
        importance = importance.expand(weight.shape)
    scales, mins = [], []
    rows = max(1, _CHUNK // weight.shape[1])
    for begin in range(0, weight.shape[0], rows):
        chunk = slice(begin, begin + rows)
        scale, min = search_groups(
            in_groups(weight[chunk], config.group_size),
            in_groups(torch.ones_like(weight[chunk]) if importance is None else importance[chunk], config.group_size),
            config,
        )
        scales.append(scale)
        mins.append(min)
    scale, min = stored_grid(torch.cat(scales), torch.cat(mins) if config.mapping == "affine" else None)
    return nearest(weight, scale, min, config)


def stored_grid(scales: Tensor, mins: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales and mins [n, groups] of a whole matrix as the format stores them."""
    largest = scales.abs().amax(1, keepdim=True)
    if mins is None:
        return stored(scales, largest), None
    largest = torch.maximum(largest, mins.abs().amax(1, keepdim=True))
    return stored(scales, largest), stored(mins, largest)


def search_groups(x: Tensor, importance: Tensor, config: Config) -> tuple[Tensor, Tensor | None]:
    """Scales and mins, float32 [n, groups], of weights [n, groups, group size]; not yet rounded to what is stored.

    Weights without importance in a group in which others have some do not count at all: fill a group up with them.
    """
    # Groups that no input reaches are fitted as if all were alike.
    total = importance.sum(2, keepdim=True)
    importance = torch.where(total > 0, importance / torch.where(total > 0, total, 1.0), 1.0 / x.shape[2])
    if config.mapping == "affine":
        return _search_affine(x, importance, config.bits)
    table = table_in(config)
    if table is not None:
        return _search_table(x, importance, table), None
    return _search_symmetric(x, importance, config.bits), None


def _search_table(x: Tensor, w: Tensor, table: Table) -> Tensor:
    groups, counts = x.flatten(0, 1), w.flatten(0, 1)
    # A weight that does not count must not set the range either.
    scale = best_scales(torch.where(counts > 0, groups, 0.0), table, counts, FACTORS)
    for _ in range(_FITS):
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        scale = refit(groups, table.nearest(groups * inverse)[1], counts, scale)
    return scale.view(x.shape[:2])


def _search_symmetric(x: Tensor, w: Tensor, bits: int) -> Tensor:
    if bits == 1:
        return (w * x.abs()).sum(2)  # the best one (Rastegari et al., XNOR-Net, 2016)
    half = 2 ** (bits - 1)
    used = torch.where(w > 0, x, 0.0)
    low, high = used.amin(2, keepdim=True), used.amax(2, keepdim=True)
    wx = w * x

    def fit(scale: Tensor) -> tuple[Tensor, Tensor]:
        """The best scale for the levels that `scale` gives, and by how much the error is below that of zeros."""
        q = levels_near(x, scale, None, bits)
        xq, qq = (wx * q).sum(2, keepdim=True), (w * q * q).sum(2, keepdim=True)
        fitted = torch.where(qq > 0, xq / torch.where(qq > 0, qq, 1.0), 0.0)
        return fitted, xq * fitted

    best = torch.zeros_like(low)
    gain = torch.full_like(low, -1.0)
    # Levels reach from -half to half - 1: both signs of the scale are tried.
    for full in (torch.maximum(-low / half, high / (half - 1)), -torch.maximum(high / half, -low / (half - 1))):
        for step in range(_SHRINKS[bits] + 3):
            fitted, found = fit(full * (1 + _STEP * (2 - step)))
            better = found > gain
            best, gain = torch.where(better, fitted, best), torch.where(better, found, gain)
    for _ in range(_FITS):
        fitted, found = fit(best)
        better = found > gain
        best, gain = torch.where(better, fitted, best), torch.where(better, found, gain)
    return best.squeeze(2)


def _search_affine(x: Tensor, w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    top = 2**bits - 1
    middle = (w * x).sum(2, keepdim=True)  # weights sum up to 1
    centered = x - middle
    used = torch.where(w > 0, centered, 0.0)
    low, high = used.amin(2, keepdim=True), used.amax(2, keepdim=True)
    wx = w * centered

    def fit(scale: Tensor, min: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best scale and min for the levels of this grid, and by how much the error is below that of the mean."""
        q = levels_near(centered, scale, min, bits)
        mean = (w * q).sum(2, keepdim=True)
        q = q - mean
        xq, qq = (wx * q).sum(2, keepdim=True), (w * q * q).sum(2, keepdim=True)
        fitted = torch.where(qq > 0, xq / torch.where(qq > 0, qq, 1.0), 0.0)
        return fitted, -fitted * mean, xq * fitted

    best, best_min = torch.zeros_like(low), torch.zeros_like(low)
    gain = torch.full_like(low, -1.0)

    def keep(scale: Tensor, min: Tensor, found: Tensor) -> None:
        nonlocal best, best_min, gain
        better = found > gain
        best, best_min = torch.where(better, scale, best), torch.where(better, min, best_min)
        gain = torch.where(better, found, gain)

    # Each end of the range is cut off by itself.
    cuts = [1.0, 0.93, 0.86, 0.79, 0.72, 0.62, 0.5] if bits <= 3 else [1.0, 0.95, 0.9, 0.83, 0.75]
    for below in cuts:
        for above in cuts:
            keep(*fit((high * above - low * below) / top, low * below))
    for _ in range(_FITS):
        keep(*fit(best, best_min))
    return best.squeeze(2), (best_min + middle).squeeze(2)
