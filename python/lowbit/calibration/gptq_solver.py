"""GPTQ with a correction for the error of the inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..packed.groups import in_groups
from ..packed.rotation import rotate, rotate_weight
from .descent import SWEEPS, descend
from .float_products import add_products, outputs
from .grid import MatrixConfig, Quantized, stored, table_in, with_table
from .importance import search, search_groups

_COLUMNS = 128  # columns whose errors are applied to later columns together (a whole group if that is longer)
_MOST_COLUMNS = 512
_ROWS_OF_SUMS = 256  # rows of a triangular matrix that are computed together
_LEAF = 128  # triangular matrices of at most this size are inverted by substitution
_TRIAL_ROWS = 256
_DESCENT_BITS = 5  # largest bit width at which coordinate descent is worth its time
_DESCENT_TOKENS = 2  # smallest number of tokens per input; with fewer, descent would overfit the text


@dataclass
class Moments:
    """Second moments of a layer's inputs over the tokens of a calibration text.

    ``square`` is the sum of ``x x^T`` over the layer's inputs x in the quantized model. ``drift``, if known, is the sum of
    ``(y - x) x^T``, where y are the same tokens' inputs in the float model; with a weight W it is the sum of ``W (y - x) x^T``,
    which is smaller if there are fewer outputs than inputs.
    """

    square: Tensor  # float32 [k, k], at least the upper triangle; or only the diagonal [k], for importance
    drift: Tensor | None  # float32 [k, k], or [n, k] with a weight
    tokens: int
    # Held-out inputs (x, y), float32 [tokens, k], to choose the weight of the correction.
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    weight: Tensor | None = None  # float32 [n, k], of the only layer with these inputs

    def join(self) -> None:
        """Adds the held-out tokens to the sums."""
        for x, y in self.held:
            self.add(x, y)
        self.held = []

    def add(self, x: Tensor, y: Tensor | None) -> None:
        """Adds inputs float32 [tokens, k]; if ``y`` is None, drift becomes unknown."""
        self.tokens += len(x)
        self.drift = None if y is None else self.drift
        if self.square.dim() == 1:
            self.square += x.square().sum(0)
            return
        by_input = x.T.contiguous()
        add_products(self.square, by_input, by_input, triangle=True)
        if self.drift is not None and y is not None:
            difference = y - x if self.weight is None else outputs(y - x, self.weight)
            add_products(self.drift, difference.T.contiguous(), by_input)

    def rotate(self, block: int) -> None:
        """Converts moments [k, k], in place, to those of inputs rotated in blocks; 0: no rotation."""
        if block == 0:
            return
        for first in range(0, len(self.square), _ROWS_OF_SUMS):  # restores the lower triangle, which is not stored
            rows = slice(first, first + _ROWS_OF_SUMS)
            self.square[rows, :first] = self.square[:first, rows].T
            square = self.square[rows, rows]
            square.copy_(square.triu() + square.triu(1).T)
        matrix = rotate(torch.eye(block), block)
        views = [self.square, self.square.T]
        if self.drift is not None:
            views += [self.drift] if self.weight is not None else [self.drift, self.drift.T]
        for view in views:
            for first in range(0, len(view), _ROWS_OF_SUMS):
                rows = slice(first, first + _ROWS_OF_SUMS)
                view[rows] = (view[rows].unflatten(1, (-1, block)) @ matrix).flatten(1)
        self.held = [(rotate(x, block), rotate(y, block)) for x, y in self.held]
        self.weight = None if self.weight is None else rotate_weight(self.weight, block)

    def importance(self) -> Tensor:
        """The mean square of each input, float32 [k], plus a small constant for unused inputs."""
        square = self.square if self.square.dim() == 1 else self.square.diagonal()
        mean = square / max(1, self.tokens)
        return mean + 1e-4 * mean.mean()


def finite(values: Tensor) -> bool:
    """Whether all values are finite, in one pass."""
    return not values.numel() or all(bool(torch.isfinite(end)) for end in values.aminmax())


def _check(moments: Moments) -> None:
    if moments.square.dim() != 2:
        raise ValueError(f"the moments have shape {list(moments.square.shape)}; expected [k, k]")
    if not finite(moments.square):
        raise ValueError("the inputs of the layer have NaN or infinite values; expected finite activations")
    if moments.drift is not None and not finite(moments.drift):
        raise ValueError("the inputs of the layer in the float model have NaN or infinite values; expected finite ones")
    if moments.tokens < 1:
        raise ValueError("the layer saw no tokens; expected at least one")


def _damped(square: Tensor, damping: float, dtype: torch.dtype) -> Tensor:
    """[k, k] in a dtype, plus ``damping`` times the mean of its diagonal, so that it is positive definite.

    Only the upper triangle of ``square`` is read.
    """
    result = (square.triu() + square.triu(1).T).to(dtype)
    mean = float(result.diagonal().mean())
    result.diagonal().add_(damping * mean if mean > 0 else 1.0)
    return result


def _root(square: Tensor) -> Tensor:
    """The upper triangular V, float32, with V V^T = ``square``."""
    try:
        return torch.linalg.cholesky(square.flip(0, 1)).flip(0, 1).float()
    except torch.linalg.LinAlgError as error:
        raise ValueError(f"the moments are not positive definite ({error}); expected a larger damping") from None


def _inverse_of_upper(matrix: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix, by recursive halving."""
    n = len(matrix)
    if n <= _LEAF:
        return torch.linalg.solve_triangular(matrix, torch.eye(n, dtype=matrix.dtype), upper=True)
    first, second = slice(0, n // 2), slice(n // 2, n)
    result = torch.zeros_like(matrix)
    for half in (first, second):
        result[half, half] = _inverse_of_upper(matrix[half, half])
    turned = outputs(matrix[first, second].T.contiguous(), result[first, first].contiguous())  # [second, first]
    result[first, second] = -outputs(turned.T.contiguous(), result[second, second].T.contiguous())
    return result


class Solver:
    """GPTQ for layers with the same inputs, some rows at a time; :func:`gptq` describes the method.

    Args:
        moments: the moments of the inputs, without the held-out ones.
        damping, by_importance: as for :func:`gptq`.
        quick: compute the root in float32, which is enough for :func:`best_correction`, and in float64 only if that fails.

    Raises:
        ValueError: as :func:`gptq`.
    """

    def __init__(self, moments: Moments, damping: float = 0.01, by_importance: bool = False, quick: bool = False):
        _check(moments)
        k = len(moments.square)
        self.importance, self.tokens, self.by_importance = moments.importance(), moments.tokens, by_importance
        square = _damped(moments.square, damping, torch.float32 if quick else torch.float64)
        self.square, self.drift, self.weighted = square.float(), moments.drift, moments.weight is not None
        diagonal = square.diagonal()
        self.order = torch.argsort(diagonal, descending=True, stable=True) if by_importance else torch.arange(k)
        if by_importance:
            square = square[self.order][:, self.order]
        try:
            self.root = _root(square)
        except ValueError:
            if not quick:
                raise
            self.root = _root(square.double())
        # Cost of an error of an input after later inputs have compensated for it.
        self.costs = self.root.diagonal().square()

    @cached_property
    def factor(self) -> Tensor:
        """The upper triangular U with U^T U the inverse of the squares, in the order of rounding."""
        return _inverse_of_upper(self.root)

    def table(self, weight: Tensor, config: MatrixConfig) -> MatrixConfig:
        """The config with its table of levels fitted to a whole matrix, if it says "fit"."""
        return with_table(config, weight, self.importance)

    def shift(self, weight: Tensor, rows: slice = slice(None)) -> Tensor:
        """The change of a weight, float32, that brings outputs closest to the float model's in the least-squares sense.

        Args:
            weight: [n, k], or some rows of it.
            rows: which rows they are.
        """
        if self.drift is None:
            return torch.zeros_like(weight, dtype=torch.float32)
        toward = (self.drift[rows] if self.weighted else weight.float() @ self.drift)[:, self.order].T
        half = torch.linalg.solve_triangular(self.root, toward, upper=True)
        moved = torch.linalg.solve_triangular(self.root.T, half, upper=False).T
        return moved[:, self.order.argsort()]

    def quantize(
        self, weight: Tensor, config: MatrixConfig, correction: float, sweeps: int = SWEEPS, rows: slice = slice(None)
    ) -> Quantized:
        """Quantizes a matrix, float32 [n, k], as :func:`gptq`, or some rows of it; ``rows`` tells which."""
        config = self.table(weight, config)
        if weight.shape[1] != len(self.root):
            raise ValueError(f"the moments are of {len(self.root)} inputs; expected {weight.shape[1]}")
        wanted = weight.float()
        if correction and self.drift is not None:
            wanted = torch.add(wanted, self.shift(weight, rows), alpha=correction)
        result = self._in_order(wanted, config)
        if not sweeps or config.bits > _DESCENT_BITS or self.tokens < _DESCENT_TOKENS * len(self.root):
            return result
        return descend(result, self.square, wanted, sweeps)

    def _in_order(self, weight: Tensor, config: MatrixConfig) -> Quantized:
        """Rounds the inputs one after the other."""
        table = table_in(config)
        n, k = weight.shape
        group, factor, order = config.group_size or k, self.factor, self.order
        in_order = not self.by_importance and group <= _MOST_COLUMNS
        # An estimate of each row's largest scale or minimum; it only decides which scales become 0.
        largest = weight.abs().amax(1, keepdim=True).float()
        if config.mapping != "affine":
            largest /= 2 ** (config.bits - 1) if table is None else float(table.levels.abs().amax())
        # If inputs keep their order, a group's scales are searched once all earlier inputs are rounded.
        if in_order:
            scales = torch.empty(n, -(-k // group), dtype=torch.float32)
            mins = torch.empty_like(scales) if config.mapping == "affine" else None
        else:
            initial = search(weight, self.importance, config)
            scales, mins = initial.scales, initial.mins
        step = group if in_order else _COLUMNS
        width = step * max(1, _COLUMNS // step)
        sorted_levels = None if table is None else table.levels
        ordered = weight.float()[:, order] if self.by_importance else weight.float()
        # [k, n]: each input is a row. Cloned even if the transpose is already contiguous, as for transformers' Conv1D.
        work = ordered.T.clone(memory_format=torch.contiguous_format)
        levels = torch.empty_like(work)
        for begin in range(0, k, width):
            end = min(begin + width, k)
            errors = torch.empty_like(work[begin:end])
            for first in range(begin, end, step):
                last = min(first + step, end)
                run, groups = slice(first, last), order[first:last] // group
                if in_order:
                    groups = groups[:1]
                    scale, low = search_groups(in_groups(work[run].T, group), in_groups(self.costs[None, run], group), config)
                    scales[:, groups] = stored(scale, largest)
                    if mins is not None:
                        mins[:, groups] = stored(low, largest)
                _, levels[run], errors[first - begin : last - begin] = torch.ops.lowbit.error_feedback(
                    work[run],
                    factor[run, run].T.contiguous(),
                    None,
                    scales.T[groups].contiguous(),
                    None if mins is None else mins.T[groups].contiguous(),
                    sorted_levels,
                    config.bits,
                )
                self._compensate(work, errors[first - begin : last - begin], run, slice(last, end))
            self._compensate(work, errors, slice(begin, end), slice(end, k))
        rounded = levels.T.contiguous()
        return Quantized(rounded[:, order.argsort()] if self.by_importance else rounded, scales, mins, config)

    def _compensate(self, work: Tensor, errors: Tensor, run: slice, rest: slice) -> None:
        """Compensates in the inputs of ``rest`` for the errors [inputs, n] of the inputs of ``run``."""
        if rest.start < rest.stop:
            work[rest] -= outputs(self.factor[run, rest].T.contiguous(), errors.T.contiguous())


def gptq(
    weight: Tensor,
    moments: Moments,
    config: MatrixConfig,
    *,
    damping: float = 0.01,
    correction: float = 1.0,
    by_importance: bool = False,
    sweeps: int = SWEEPS,
    rows: slice = slice(None),
) -> Quantized:
    """Quantizes a matrix so that the layer's outputs on the calibration text change little.

    Inputs are rounded one after the other, and later inputs that are correlated compensate for the error of each: GPTQ
    (Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
    ICLR 2023), with its lazy block updates and Cholesky factor. Moments with a drift also correct the error of the inputs: the
    weights are first shifted, by least squares, so that the quantized model's inputs give the float model's outputs. GPTAQ
    (Li, Yin, Lee, Xiao, Panda: "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", ICML 2025) has the
    same aim and shifts them input by input.

    When the first input of a group is reached, its scale is chosen by :func:`search`, weighted with the cost of an error
    after compensation, and rounded as it is stored. Then the codes of the group are chosen. Up to 5 bits,
    with at least two tokens per input, :func:`lowbit.calibration.descent.descend` improves the result.

    Args:
        weight: float32 [n, k], finite.
        moments: the moments of the layer's inputs.
        config: bits, group size and mapping; ``scale`` is not used.
        damping: fraction of the mean of the diagonal to add to the diagonal.
        correction: weight of the shift, 0 to 1; :func:`best_correction` measures the best one.
        by_importance: round the inputs with the largest mean square first (act-order). Groups are still consecutive inputs,
            so their scales are chosen before the first code.
        sweeps: number of sweeps of the descent; 0: none.
        rows: which rows of the matrix ``weight`` has, for moments with a weight.

    Raises:
        ValueError: moments have another shape, are not finite, or have no tokens.
    """
    return Solver(moments, damping, by_importance).quantize(weight, config, correction, sweeps, rows)


def best_correction(solver: Solver, weight: Tensor, held: list[tuple[Tensor, Tensor]]) -> float:
    """The weight of the correction, 0 to 1, with the least error of the outputs on held-out tokens, before rounding.

    On a short text the full correction would overfit. Only some of the rows are evaluated.

    Args:
        weight: [n, k].
        held: inputs (x, y) in the quantized and in the float model, float32 [tokens, k].
    """
    some = slice(None, None, -(-len(weight) // _TRIAL_ROWS))
    rows = weight[some].float()
    shift = solver.shift(rows, some)
    gained = squares = 0.0
    for x, y in held:
        change = x @ shift.T
        gained += float((change * ((y - x) @ rows.T)).sum())
        squares += float(change.square().sum())
    return min(1.0, max(0.0, gained / squares)) if squares > 0 else 0.0
