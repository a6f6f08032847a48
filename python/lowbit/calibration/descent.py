"""Coordinate descent over the codes and scales of a quantized matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from .float_products import outputs
from .grid import Quantized, stored, table_in

SWEEPS = 2
_COLUMNS = 128  # inputs that are rounded before their changes are propagated to the other inputs


def descend(start: Quantized, square: Tensor, wanted: Tensor, sweeps: int = SWEEPS) -> Quantized:
    """Improves a matrix from GPTQ: returns one with a smaller error of the layer's outputs.

    In each sweep the codes of a group are rounded one by one, each to the best value given all other codes, including later
    ones, which GPTQ could not know (QuantEase; Behdin et al.: "QuantEase: Optimization-based Quantization for Language
    Models", 2023). Then the group's scale (and minimum) is refitted to its codes.

    Args:
        start: [n, k].
        square: the damped second moments H of the inputs, float32 [k, k], symmetric.
        wanted: the float weights with the least error, float32 [n, k].
    """
    config, table = start.config, table_in(start.config)
    k = start.levels.shape[1]
    group = config.group_size or k
    sorted_levels = None if table is None else table.levels
    levels, scales = _transposed(start.levels), _transposed(start.scales)  # an input, or a group, is a row
    mins = None if start.mins is None else _transposed(start.mins)
    values = start.dequantize().T.contiguous()
    largest = (scales if mins is None else torch.maximum(scales.abs(), mins.abs())).abs().amax(0)[:, None]
    gradient = outputs(square, (values.T - wanted).contiguous())  # half of the error's

    def round_codes(first: int, last: int, at: slice) -> Tensor:
        """Rounds the inputs of group ``at`` one by one; returns half of the gradient with respect to them."""
        slope = gradient[first:last].clone()
        for begin in range(first, last, _COLUMNS):
            run = slice(begin, min(begin + _COLUMNS, last))
            part = slice(run.start - first, run.stop - first)
            own = square[run, run] / square[run, run].diagonal()[:, None]
            earlier = own.tril(-1)
            old = values[run].clone()
            # The operator takes values and errors, and rounds their difference.
            _, levels[run], _ = torch.ops.lowbit.error_feedback(
                old - slope[part] / square[run, run].diagonal()[:, None] + earlier @ old,
                torch.eye(len(own), dtype=torch.float32) - earlier,
                -earlier,
                scales[at],
                None if mins is None else mins[at],
                sorted_levels,
                config.bits,
            )
            values[run] = levels[run] * scales[at] + (0.0 if mins is None else mins[at])
            slope.addmm_(square[first:last, run], values[run] - old)
        return slope

    width = group * max(1, _COLUMNS // group)  # inputs whose changes are propagated to the others together
    for sweep in range(sweeps):
        for begin in range(0, k, width):
            block = slice(begin, min(begin + width, k))
            unchanged = values[block].clone()
            for first in range(begin, block.stop, group):
                at, inputs = slice(first // group, first // group + 1), slice(first, min(first + group, k))
                before = values[inputs].clone()
                slope = round_codes(first, inputs.stop, at)
                step, shift = _steps(levels[inputs], square[inputs, inputs], slope, mins is not None)
                scales[at] = stored((scales[at] + step).T, largest).T
                if mins is not None:
                    mins[at] = stored((mins[at] + shift).T, largest).T
                values[inputs] = levels[inputs] * scales[at] + (0.0 if mins is None else mins[at])
                gradient[block].addmm_(square[block, inputs], values[inputs] - before)
            change = (values[block] - unchanged).T.contiguous()
            # In the last sweep only inputs that are still to be rounded need their gradient.
            for rest in (slice(0, begin if sweep + 1 < sweeps else 0), slice(block.stop, k)):
                gradient[rest] += outputs(square[rest, block].contiguous(), change)
    return Quantized(_transposed(levels), _transposed(scales), None if mins is None else _transposed(mins), config)


def _transposed(matrix: Tensor) -> Tensor:
    """The transpose as a contiguous copy, also for a single row."""
    return matrix.T.clone(memory_format=torch.contiguous_format)


def _steps(levels: Tensor, square: Tensor, slope: Tensor, affine: bool) -> tuple[Tensor, Tensor]:
    """The changes of a group's scales and minimums, float32 [n] each, that minimize the error.

    Args:
        levels, slope: [inputs, n], the group's levels, and half the gradient of the error.
        square: [inputs, inputs], the group's block of the second moments.
    """
    changed = square @ levels
    by_scale, to_scale = (levels * changed).sum(0), -(levels * slope).sum(0)
    if not affine:
        return torch.where(by_scale > 0, to_scale / by_scale.clamp(min=1e-30), 0.0), torch.zeros_like(to_scale)
    by_both, by_min, to_min = changed.sum(0), square.sum(), -slope.sum(0)
    determinant = by_scale * by_min - by_both * by_both
    usable = determinant > 1e-6 * by_scale * by_min  # if all levels are equal, the scale is undetermined
    determinant = torch.where(usable, determinant, 1.0)
    step = torch.where(usable, (by_min * to_scale - by_both * to_min) / determinant, 0.0)
    return step, (to_min - by_both * step) / by_min
