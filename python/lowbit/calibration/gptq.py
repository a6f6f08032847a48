"""Codes that make up for each other's errors: GPTQ, GPTAQ's correction, and coordinate descent."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..groups import in_groups
from .grid import Config, Quantized, levels_near, stored, table_in, with_table
from .importance import search, search_groups

_LEAST_COLUMNS = 64  # of a block whose errors are passed on together
_MOST_COLUMNS = 512
_TRIAL_ROWS = 256
CORRECTIONS = (0.0, 0.25, 0.5, 1.0)


@dataclass
class Moments:
    """Second moments of a layer's inputs over the tokens of a calibration text.

    ``square`` is the sum of ``x x^T`` for the inputs x that the layer gets in the quantized model. ``drift``, if known,
    is the sum of ``(y - x) x^T``, y being the same tokens' inputs in the float model.
    """

    square: Tensor  # float32 [k, k]; or [k], its diagonal, which is enough for importance
    drift: Tensor | None  # float32 [k, k]
    tokens: int
    # Some tokens' inputs (x, y), float32 [tokens, k], that are not in the sums yet: what GPTAQ's correction is chosen by.
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def join(self) -> None:
        """Adds the tokens that were held back to the sums."""
        for x, y in self.held:
            self.add(x, y)
        self.held = []

    def add(self, x: Tensor, y: Tensor | None) -> None:
        self.square += x.square().sum(0) if self.square.dim() == 1 else x.T @ x
        self.tokens += len(x)
        self.drift = None if self.drift is None or y is None else self.drift + (y - x).T @ x

    def importance(self) -> Tensor:
        """The mean square of each input, float32 [k]; inputs that were never used count a little."""
        square = self.square if self.square.dim() == 1 else self.square.diagonal()
        mean = square / max(1, self.tokens)
        return mean + 1e-4 * mean.mean()


def _check(moments: Moments) -> None:
    if moments.square.dim() != 2:
        raise ValueError(f"the moments have shape {list(moments.square.shape)}; expected [k, k]")
    if not bool(torch.isfinite(moments.square).all()):
        raise ValueError("the inputs of the layer have NaN or infinite values; expected finite activations")
    if moments.drift is not None and not bool(torch.isfinite(moments.drift).all()):
        raise ValueError("the inputs of the layer in the float model have NaN or infinite values; expected finite ones")
    if moments.tokens < 1:
        raise ValueError("the layer saw no tokens; expected at least one")


def _damped(square: Tensor, damping: float) -> Tensor:
    """float64 [k, k], positive definite: the mean of the diagonal times `damping` is added to it."""
    result = square.double()
    mean = float(result.diagonal().mean())
    result.diagonal().add_(damping * mean if mean > 0 else 1.0)
    return result


def _inverse_factor(square: Tensor) -> Tensor:
    """The upper triangular U with U^T U the inverse of `square`."""
    try:
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(square)), upper=True)
    except torch.linalg.LinAlgError as error:
        raise ValueError(f"the moments are not positive definite ({error}); expected a larger damping") from None


class Solver:
    """GPTQ for layers with the same inputs, whose rows do not depend on each other; :func:`gptq` has the method.

    Args:
        moments: of the inputs; those held back do not count.
        damping, by_importance: as for :func:`gptq`.

    Raises:
        ValueError: as :func:`gptq`.
    """

    def __init__(self, moments: Moments, damping: float = 0.01, by_importance: bool = False):
        _check(moments)
        k = len(moments.square)
        self.importance, self.by_importance = moments.importance(), by_importance
        square = _damped(moments.square, damping)
        diagonal = square.diagonal()
        self.order = torch.argsort(diagonal, descending=True, stable=True) if by_importance else torch.arange(k)
        if by_importance:
            square = square[self.order][:, self.order]
        factor = _inverse_factor(square)
        self.pull = None
        if moments.drift is not None:
            drift = moments.drift.double()
            if by_importance:
                drift = drift[self.order][:, self.order]
            self.pull = ((drift @ factor.T).triu_(1) @ factor).float()
        self.factor = factor.float()
        self.diagonal = self.factor.diagonal()
        # What an error of an input costs once the inputs behind it have made up for what they can.
        self.costs = self.diagonal.square().reciprocal()

    def table(self, weight: Tensor, config: Config) -> Config:
        """The config with its table of levels fitted to a whole matrix, where it has one that is to be fitted."""
        return with_table(config, weight, self.importance)

    def quantize(self, weight: Tensor, config: Config, correction: float) -> Quantized:
        """Rows of a matrix, float32 [n, k]; the arguments are those of :func:`gptq`."""
        config = self.table(weight, config)
        table = table_in(config)
        n, k = weight.shape
        if k != len(self.factor):
            raise ValueError(f"the moments are of {len(self.factor)} inputs; expected {k}")
        group, factor, order = config.group_size or k, self.factor, self.order
        in_order = not self.by_importance and group <= _MOST_COLUMNS
        pull = self.pull if correction else None
        initial = search(weight, self.importance, config)
        scales, mins = initial.scales.clone(), None if initial.mins is None else initial.mins.clone()
        largest = scales.abs().amax(1, keepdim=True)
        if mins is not None:
            largest = torch.maximum(largest, mins.abs().amax(1, keepdim=True))
        width = group * -(-_LEAST_COLUMNS // group) if in_order else 128
        work = weight.float()[:, order].T.contiguous()  # [k, n]: an input is a row
        levels = torch.empty_like(work)
        for begin in range(0, k, width):
            end = min(begin + width, k)
            block = work[begin:end]
            errors = torch.empty_like(block)
            for i in range(begin, end):
                at = i - begin
                column = int(order[i])
                g = column // group
                if in_order and column % group == 0:
                    last = min(i + group, end)
                    scale, low = search_groups(
                        in_groups(block[at : last - begin].T, group)[:, :1],
                        in_groups(self.costs[None, i:last], group)[:, :1],
                        config,
                    )
                    scales[:, g] = stored(scale, largest)[:, 0]
                    if mins is not None:
                        mins[:, g] = stored(low, largest)[:, 0]
                values = block[at]
                level = levels_near(values, scales[:, g], None if mins is None else mins[:, g], config.bits, table)
                rounded = scales[:, g] * level
                if mins is not None:
                    rounded = rounded + mins[:, g]
                levels[i] = level
                errors[at] = (values - rounded) / self.diagonal[i]
                rest = block[at + 1 :]
                rest.addr_(factor[i, i + 1 : end], errors[at], alpha=-1.0)
                if pull is not None:
                    rest.addr_(pull[i, i + 1 : end], values, alpha=correction)
            if end < k:
                work[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1.0)
                if pull is not None:
                    work[end:].addmm_(pull[begin:end, end:].T, block, alpha=correction)
        result = Quantized(torch.empty_like(weight), scales, mins, config)
        result.levels[:, order] = levels.T
        return result


def gptq(
    weight: Tensor,
    moments: Moments,
    config: Config,
    *,
    damping: float = 0.01,
    correction: float = 1.0,
    by_importance: bool = False,
    sweeps: int = 0,
) -> Quantized:
    """Quantizes a matrix so that the layer's outputs on the calibration text change little.

    Inputs are rounded one after the other, and the error of each is made up for by the inputs behind it, as far as they
    are correlated: GPTQ (Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for
    Generative Pre-trained Transformers", ICLR 2023), with its lazy updates by blocks and Cholesky factor. Moments with
    a drift add the error that the inputs have already: GPTAQ (Li, Yin, Lee, Xiao, Panda: "GPTAQ: Efficient
    Finetuning-Free Quantization for Asymmetric Calibration", ICML 2025).

    Scales are chosen by :func:`search`, weighted with what an error costs that the rest cannot make up for, when the
    first input of a group is reached, and rounded to what is stored before any code of the group is chosen.

    Args:
        weight: float32 [n, k], finite.
        moments: of the layer's inputs.
        config: bits, group size and mapping; its choice of scale does not count.
        damping: part of the mean of the diagonal that is added to the diagonal.
        correction: the factor of GPTAQ's term, 0 to 1; :func:`best_correction` measures it.
        by_importance: rounds the inputs with the largest mean square first ("act-order"). Groups stay runs of inputs,
            and so their scales are chosen before the first code.
        sweeps: of coordinate descent behind it (:func:`descend`).

    Raises:
        ValueError: moments of another shape, that are not finite, or of no tokens.
    """
    result = Solver(moments, damping, by_importance).quantize(weight, config, correction)
    if sweeps:
        descend(result, target(weight, moments, damping, correction), moments, damping=damping, sweeps=sweeps)
    return result


def best_correction(solver: Solver, weight: Tensor, config: Config, held: list[tuple[Tensor, Tensor]]) -> float:
    """The factor of GPTAQ's term with the least error of the outputs on tokens that the solver has not seen.

    The term makes up for the error of a layer's inputs as the text shows it; the shorter the text, the more of that
    is chance. Tried are 0 and 1 and two between, on some of the rows.

    Args:
        weight, config: as for :func:`gptq`.
        held: inputs (x, y) in the quantized and in the float model, float32 [tokens, k].
    """
    rows = weight[:: -(-len(weight) // _TRIAL_ROWS)].float()
    errors = []
    for correction in CORRECTIONS:
        found = solver.quantize(rows, config, correction).dequantize()
        errors.append(sum(float((x @ found.T - y @ rows.T).square().sum()) for x, y in held))
    return CORRECTIONS[errors.index(min(errors))]


def target(weight: Tensor, moments: Moments, damping: float, correction: float) -> Tensor:
    """The matrix [n, k] whose outputs in the quantized model are nearest to the float layer's in the float one.

    With a drift this is the weight plus ``correction`` times what least squares adds for it; without, the weight.
    """
    if moments.drift is None or not correction:
        return weight.float()
    solved = torch.cholesky_solve(
        moments.drift.double().T, torch.linalg.cholesky(_damped(moments.square, damping))
    )  # [k, k]: the transpose of drift @ inverse(square)
    return (weight.double() + correction * (weight.double() @ solved.T)).float()


def descend(quantized: Quantized, wanted: Tensor, moments: Moments, *, damping: float = 0.01, sweeps: int = 2) -> None:
    """Improves a quantized matrix in place by coordinate descent on ``|(wanted - quantized) X|^2``.

    A sweep goes through the inputs in order and moves each weight to the level that is best while all others stay as
    they are (Behdin et al.: "QuantEase", 2023); behind each group its scale (and min) is fitted anew. Both only ever
    lower the error, but for the rounding of scales to what is stored.

    Args:
        quantized: for example from :func:`gptq`.
        wanted: float32 [n, k], for example from :func:`target`.
        moments: as for :func:`gptq`; damping too.
        sweeps: each takes as long as :func:`gptq`.
    """
    config = quantized.config
    table = table_in(config)
    n, k = wanted.shape
    group = config.group_size or k
    square = _damped(moments.square, damping)
    square = (square / square.diagonal().mean()).float()
    diagonal = square.diagonal().clone()
    levels = quantized.levels.T.contiguous()  # [k, n]
    scales, mins = quantized.scales, quantized.mins
    largest = scales.abs().amax(1, keepdim=True)
    if mins is not None:
        largest = torch.maximum(largest, mins.abs().amax(1, keepdim=True))
    for _ in range(sweeps):
        # For each weight, half of what the error grows by when the weight falls.
        slopes = square @ (wanted - quantized.dequantize()).T
        for g, begin in enumerate(range(0, k, group)):
            end = min(begin + group, k)
            inner = square[begin:end, begin:end]
            scale, low = scales[:, g], None if mins is None else mins[:, g]
            block = slopes[begin:end].clone()
            before = scale * levels[begin:end] if low is None else scale * levels[begin:end] + low
            now = before.clone()
            for at in range(end - begin):
                level = levels_near(now[at] + block[at] / diagonal[begin + at], scale, low, config.bits, table)
                value = scale * level if low is None else scale * level + low
                block.addr_(inner[at], value - now[at], alpha=-1.0)
                levels[begin + at], now[at] = level, value
            refitted = _refit(levels[begin:end], block, inner, scale, low, largest)
            if refitted is not None:
                scales[:, g] = refitted[0]
                now = scales[:, g] * levels[begin:end]
                if mins is not None:
                    mins[:, g] = refitted[1]
                    now = now + mins[:, g]
            slopes.addmm_(square[begin:end].T, now - before, alpha=-1.0)
        quantized.levels = levels.T.contiguous()


def _refit(levels: Tensor, slopes: Tensor, square: Tensor, scale: Tensor, low: Tensor | None, largest: Tensor):
    """The scale and min [n] of one group with the least error for its levels [g, n]; slopes are those of now."""
    products = square @ levels
    ll = (levels * products).sum(0)
    le = (levels * slopes).sum(0)
    bound = largest[:, 0]
    if low is None:
        step = torch.where(ll > 0, le / torch.where(ll > 0, ll, 1.0), 0.0)
        return stored((scale + step)[:, None], bound[:, None])[:, 0], None
    lo, oo, oe = products.sum(0), square.sum(), slopes.sum(0)
    determinant = ll * oo - lo * lo
    fine = determinant > 1e-6 * ll * oo
    safe = torch.where(fine, determinant, 1.0)
    step = torch.where(fine, (le * oo - lo * oe) / safe, 0.0)
    shift = torch.where(fine, (ll * oe - lo * le) / safe, 0.0)
    return (stored((scale + step)[:, None], bound[:, None])[:, 0], stored((low + shift)[:, None], bound[:, None])[:, 0])
