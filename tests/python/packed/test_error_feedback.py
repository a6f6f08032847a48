"""Sequential rounding with error feedback: lowbit::error_feedback."""

import lowbit  # noqa: F401 - registers the operators
import pytest
import torch
from lowbit.levels import Table
from reference import WIDTHS
from torch import Tensor

GRIDS = ["symmetric", "affine", "levels"]


def run(weights, factor, pull, scales, mins, levels, bits):
    return torch.ops.lowbit.error_feedback(weights, factor, pull, scales, mins, levels, bits)


def plain(weights, factor, pull, scales, mins, levels, bits):
    """One input at a time, in the operator's order of arithmetic."""
    values, rounded, errors = [], [], []
    for i, value in enumerate(weights.unbind()):
        for j in range(i):
            value = value - factor[i, j] * errors[j]
        for j in range(i if pull is not None else 0):
            value = value + pull[i, j] * values[j]
        row = 0 if len(scales) == 1 else i
        scale, low = scales[row], torch.zeros_like(scales[row]) if mins is None else mins[row]
        x = (value - low) * torch.where(scale == 0, 0.0, 1 / scale)
        if levels is not None:
            level = Table(levels).nearest(x)[1]
        elif mins is not None:
            level = x.round().clamp(0, 2**bits - 1)
        elif bits == 1:
            level = torch.where(x >= 0, 1.0, -1.0)
        else:
            level = x.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        values.append(value)
        rounded.append(level)
        errors.append((value - (scale * level + low)) / factor[i, i])
    return torch.stack(values), torch.stack(rounded), torch.stack(errors)


def arguments(inputs: int, rows: int, grid: str, bits: int, shared: bool, pulled: bool):
    generator = torch.Generator().manual_seed(inputs + rows + bits)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    factor = 0.2 * random(inputs, inputs) + torch.eye(inputs)
    grids = (1 if shared else inputs, rows)
    scales = random(*grids) * 2.0**-bits
    scales[:, ::7] = 0
    mins = random(*grids) if grid == "affine" else None
    levels = random(2**bits).sort().values * 2**bits if grid == "levels" else None
    pull = 0.1 * random(inputs, inputs) if pulled else None
    return random(inputs, rows), factor, pull, scales, mins, levels, bits


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("grid", GRIDS)
def test_equals_the_loop(grid, bits):
    for inputs, rows, shared, pulled in (
        (1, 1, True, False),
        (32, 16, True, True),
        (5, 41, False, False),
        (130, 35, False, True),
    ):
        given = arguments(inputs, rows, grid, bits, shared, pulled)
        assert all(map(torch.equal, run(*given), plain(*given))), (inputs, rows)


def test_threads_change_no_bit():
    given = arguments(64, 333, "affine", 3, True, True)
    whole, before = run(*given), torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        assert all(map(torch.equal, run(*given), whole))
    finally:
        torch.set_num_threads(before)


def test_refusals():
    weights, factor, pull, scales, mins, levels, bits = arguments(8, 5, "affine", 3, True, True)
    for wrong, message in (
        (dict(bits=9), "bits is 9; expected 1 to 8"),
        (dict(weights=weights[0]), r"weights have shape \[5\]; expected \[inputs, rows\], each 1 or more"),
        (dict(weights=weights[:0]), r"weights have shape \[0, 5\]; expected \[inputs, rows\], each 1 or more"),
        (dict(weights=weights.double()), "weights has dtype float64; expected float32"),
        (dict(factor=factor[:7]), r"factor has shape \[7, 8\]; expected \[8, 8\]"),
        (dict(pull=pull.T), "pull is not contiguous"),
        (dict(scales=scales[:, :4].contiguous()), r"scales has shape \[1, 4\]; expected \[1, 5\]"),
        (dict(mins=mins.expand(8, 5).contiguous()), r"mins has shape \[8, 5\]; expected \[1, 5\]"),
        (dict(mins=None, levels=torch.arange(7.0)), r"levels has shape \[7\]; expected \[8\]"),
        (dict(levels=torch.arange(8.0)), "levels and mins are both given; expected at most one"),
    ):
        given = dict(weights=weights, factor=factor, pull=pull, scales=scales, mins=mins, levels=levels, bits=bits) | wrong
        with pytest.raises(ValueError, match=message):
            run(**given)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("grid", ["affine", "levels"])
def test_numbers_that_are_not_finite(grid, bad):
    """Refused as in quantize, because the codes would be finite."""
    names = ("weights", "factor", "pull", "scales", "mins", "levels")
    given = arguments(6, 5, grid, 3, True, True)
    run(*given)
    for at, name in enumerate(names):
        if given[at] is None:
            continue
        changed = [each.clone() if isinstance(each, Tensor) else each for each in given]
        changed[at].view(-1)[-1] = bad
        with pytest.raises(ValueError, match=f"{name} has {bad} at position {changed[at].numel() - 1}; expected finite"):
            run(*changed)
    factor = given[1].clone()
    factor[2, 2] = 0
    with pytest.raises(ValueError, match=r"factor has 0 at \[2, 2\]"):
        run(given[0], factor, *given[2:])
