"""Level tables for 2-, 3- and 4-bit codes: standard tables, fitting a table to a matrix, rounding to a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .packed.groups import in_groups

# 4-bit tables: name -> level of each code. The levels of mxfp4 and nvfp4 (E2M1) are doubled, so their scales are halved.
TABLES: dict[str, tuple[int, ...]] = {
    # NormalFloat of QLoRA (Dettmers et al., 2023), times 127 and rounded.
    "nf4": (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127),
    # IQ4_NL and IQ4_XS of GGUF.
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "nvfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""Standard tables, by name: int8 levels by code."""
FIT = "fit"
LARGEST = 127

SAMPLE = 1 << 18  # weights used to fit a table; more weights change a level by about one step
_ROUNDS = 20
_CHUNK = 1 << 20  # weights processed at a time
# Factors of the scale at which the group's largest magnitude meets the largest level. Below 1 outliers are clipped.
FACTORS = (1.0, 0.93, 0.87, 0.81, 0.75, 1.08)


def sampled_rows(n: int, k: int) -> range:
    """The rows of a matrix [n, k] that :func:`fit_levels` samples.

    All rows of a small matrix; otherwise equidistant rows with 250,000 to 500,000 weights in total.
    """
    return range(0, n, max(1, n * k // SAMPLE))


def _per_weight(importance: Tensor | None, weight: Tensor) -> Tensor | None:
    if importance is None:
        return None
    if importance.shape not in (weight.shape, weight.shape[1:]):
        raise ValueError(f"importance has shape {list(importance.shape)}; expected [{weight.shape[1]}] or {list(weight.shape)}")
    return importance.float().expand(weight.shape)


class Table:
    """A sorted level table with nearest-level lookup."""

    def __init__(self, levels: Tensor):
        self.levels, self.order = levels.float().sort()
        self.between = (self.levels[1:] + self.levels[:-1]) / 2

    @property
    def by_code(self) -> tuple[int, ...]:
        """The level of each code, as stored in a packed weight."""
        levels = torch.empty_like(self.levels)
        levels[self.order] = self.levels
        return tuple(map(int, levels))

    def codes(self, levels: Tensor) -> Tensor:
        """The uint8 codes of ``levels``, all of which are in the table."""
        return self.order[torch.searchsorted(self.levels, levels.contiguous())].to(torch.uint8)

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The indices of the levels nearest to ``x``, and these levels."""
        above = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
        for border in self.between:  # at most 15 borders; torch.bucketize takes twice as long
            above += x <= border
        places = len(self.between) - above.int()
        return places, self.levels[places]


def refit(x: Tensor, near: Tensor, importance: Tensor | None, scale: Tensor) -> Tensor:
    """The least-squares scales [groups, 1] for the levels ``near`` assigned to ``x``."""
    weighted = near if importance is None else near * importance
    squares = (weighted * near).sum(1, keepdim=True)
    return torch.where(squares > 0, (weighted * x).sum(1, keepdim=True) / squares.clamp(min=1e-30), scale)


def _error(x: Tensor, near: Tensor, importance: Tensor | None, scale: Tensor) -> Tensor:
    error = (x - scale * near).square_()
    return (error if importance is None else error * importance).sum(1, keepdim=True)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.where(scale == 0, 0.0, 1.0 / scale)


def best_scales(x: Tensor, table: Table, importance: Tensor | None, factors: Sequence[float]) -> Tensor:
    """The best of several candidate scales per group (of both signs if the table is asymmetric), refitted by least squares."""
    largest = x.abs().amax(1, keepdim=True)
    ends = {float(table.levels[-1]), float(table.levels[0])} - {0.0}
    if len({abs(end) for end in ends}) == 1 and torch.equal(table.levels, -table.levels.flip(0)):
        ends = {max(ends)}
    best_scale = least = None
    for end in sorted(ends):
        # The largest weight may map to either end of the table; the sign of the scale chooses which.
        signs = (1.0, -1.0) if len(ends) > 1 else (1.0,)
        for sign in signs:
            for factor in factors:
                scale = largest * (sign * factor / end)
                _, near = table.nearest(_scaled(x, scale))
                if len(factors) > 1:
                    scale = refit(x, near, importance, scale)
                error = _error(x, near, importance, scale)
                if least is None:
                    best_scale, least = scale, error
                else:
                    better = error < least
                    best_scale, least = torch.where(better, scale, best_scale), torch.where(better, error, least)
    return best_scale


def round_to_levels(
    weight: Tensor, levels: Sequence[int], group_size: int | None, importance: Tensor | None = None, *, search: bool = True
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix for a table of levels.

    Args:
        weight: [n, k], floating point and finite.
        levels: 4, 8 or 16 integers from -127 to 127, by code.
        group_size: inputs that share a scale, None for one per row.
        importance: [k] or [n, k], non-negative factors of the squared errors; None: 1.
        search: try several scales per group and refit the best one to its codes; otherwise the scale maps the largest
            magnitude of a group to an end of the table.

    Returns:
        Codes uint8 [n, k] and scales float32 [n, groups], of either sign, for :func:`lowbit.pack`.

    Raises:
        ValueError: importance of another shape.
    """
    n, k = weight.shape
    table = Table(torch.tensor(list(levels), device=weight.device))
    importance = _per_weight(importance, weight)
    codes, scales = [], []
    rows = max(1, _CHUNK // k)
    for begin in range(0, n, rows):
        part = weight[begin : begin + rows].detach().float()
        x = in_groups(part, group_size).flatten(0, 1)
        counts = None if importance is None else in_groups(importance[begin : begin + rows], group_size).flatten(0, 1)
        scale = best_scales(x, table, counts, FACTORS if search else (1.0,))
        places, near = table.nearest(_scaled(x, scale))
        if search:
            scale = refit(x, near, counts, scale)
            places, _ = table.nearest(_scaled(x, scale))
        codes.append(table.order[places].to(torch.uint8).reshape(len(part), -1)[:, :k])
        scales.append(scale.reshape(len(part), -1))
    return torch.cat(codes), torch.cat(scales)


def _starts(bits: int, device: torch.device) -> list[Tensor]:
    """Initial levels of a fit. All are asymmetric: with a signed scale per group, symmetric levels give a larger error."""
    half = 2 ** (bits - 1)
    even = torch.arange(-half, half, dtype=torch.float32, device=device) / half
    if bits == 4:
        return [even, torch.tensor(TABLES["iq4_nl"], dtype=torch.float32, device=device) / LARGEST]
    return [even, even.sign() * even.abs() ** 1.4]


def _fit(x: Tensor, importance: Tensor | None, bits: int, start: Tensor) -> tuple[Table, float]:
    """The table fitted from the initial levels ``start``, and its squared error."""
    table = Table(start)
    scale = best_scales(x, table, importance, FACTORS)
    for step in range(_ROUNDS):
        if step % 4 == 3:
            fitted = []
            for signed in (scale, -scale):
                _, near = table.nearest(_scaled(x, signed))
                signed = refit(x, near, importance, signed)
                fitted.append((signed, _error(x, near, importance, signed)))
            (scale, kept), (other, turned) = fitted
            scale = torch.where(turned < kept, other, scale)
        places, near = table.nearest(_scaled(x, scale))
        scale = refit(x, near, importance, scale)
        weighted = scale.expand(x.shape) if importance is None else scale * importance
        squares = torch.bincount(places.flatten(), (weighted * scale).flatten().double(), minlength=2**bits)
        products = torch.bincount(places.flatten(), (weighted * x).flatten().double(), minlength=2**bits)
        moved = torch.where(squares > 0, products / squares.clamp(min=1e-300), table.levels.double())
        largest = float(moved.abs().max())
        table = Table(moved / largest)
        scale = scale * largest
    scale = best_scales(x, table, importance, FACTORS)
    _, near = table.nearest(_scaled(x, scale))
    return table, float(_error(x, near, importance, scale).sum())


def fit_levels(weight: Tensor, bits: int, group_size: int | None, importance: Tensor | None = None) -> tuple[int, ...]:
    """The table that minimizes the squared error of rounding a matrix to it (a local optimum).

    Lloyd-Max (Lloyd, 1982; Max, 1960) over the weights of the sampled rows, each divided by the scale of its group: weights
    are assigned to the nearest levels, then scales and levels are refitted by least squares, in turns. Deterministic.

    Args:
        weight: [n, k], floating point and finite.
        bits: 2, 3 or 4.
        group_size: inputs that share a scale, None for one per row.
        importance: [k] or [n, k], non-negative factors of the squared errors; None: 1.

    Returns:
        ``2**bits`` integers from -127 to 127 in order, the largest magnitude 127.

    Raises:
        ValueError: importance of another shape.
    """
    n, k = weight.shape
    importance = _per_weight(importance, weight)
    chosen = list(sampled_rows(n, k))
    part = weight.detach()[chosen].float()
    x = in_groups(part, group_size).flatten(0, 1)
    counts = None if importance is None else in_groups(importance[chosen], group_size).flatten(0, 1)
    largest = x.abs().amax(1, keepdim=True)
    if not float(largest.max()) > 0:
        return tuple(range(-(2 ** (bits - 1)), 2 ** (bits - 1)))  # all weights are zero: any table will do
    table, _ = min((_fit(x, counts, bits, start) for start in _starts(bits, x.device)), key=lambda fitted: fitted[1])
    levels = (table.levels * LARGEST).round().clamp(-LARGEST, LARGEST)
    return tuple(int(level) for level in levels)
