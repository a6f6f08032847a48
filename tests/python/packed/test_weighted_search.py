"""The weighted search of scales and minimums: lowbit::search_groups."""

import lowbit  # noqa: F401 - registers the operators
import pytest
import torch

BITS_AND_MAPPINGS = [(bits, affine) for bits in range(1, 9) for affine in (False, True)]


def search(x, importance, bits, affine):
    return torch.ops.lowbit.search_groups(x, importance, bits, affine)


def error(x, importance, bits, affine, scale, low):
    """sum of importance * (x - rounded)^2 per group, float64, for scales and minimums [groups]."""
    x, importance = x.double(), importance.double()
    scale = scale.double()[:, None]
    low = low.double()[:, None] if affine else torch.zeros_like(scale)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    if affine:
        q = ((x - low) * inverse).round().clamp(0, 2**bits - 1)
    elif bits == 1:
        q = torch.where(x * inverse >= 0, 1.0, -1.0).double()
    else:
        q = (x * inverse).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (importance * (x - scale * q - low) ** 2).sum(1)


def groups(count, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator) * torch.rand(count, 1, generator=generator).exp()
    return x, torch.rand(count, inputs, generator=generator) ** 3


@pytest.mark.parametrize("bits, affine", BITS_AND_MAPPINGS)
def test_no_scale_of_a_fine_grid_is_much_better(bits, affine):
    x, importance = groups(40, 32, seed=bits)
    scales, mins = search(x, importance, bits, affine)
    found = error(x, importance, bits, affine, scales, mins)
    full = x.amax(1) - x.amin(1) if affine else 2 * x.abs().amax(1)
    least = torch.full_like(found, torch.inf)
    for factor in torch.linspace(0.2, 1.2, 200):
        for low in [x.amin(1) * part for part in torch.linspace(0.4, 1.1, 15)] if affine else [None]:
            for sign in (1,) if affine else (1, -1):
                scale = sign * full * factor / (2**bits - 1)
                least = torch.minimum(least, error(x, importance, bits, affine, scale, low))
    assert found.sum() <= least.sum() * (1.0 if bits < 4 else 1.35), (float(found.sum()), float(least.sum()))


@pytest.mark.parametrize("bits, affine", BITS_AND_MAPPINGS)
def test_cuts_threads_and_shared_importance_change_no_bit(bits, affine):
    x, importance = groups(600, 41)
    shared = importance[:6]
    whole = search(x, shared.repeat(100, 1), bits, affine)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert all(map(torch.equal, search(x, shared, bits, affine), whole))
    finally:
        torch.set_num_threads(before)
    parts = [search(x[i : i + 200], shared.repeat(100, 1)[i : i + 200], bits, affine) for i in range(0, 600, 200)]
    assert all(torch.equal(torch.cat(part), expected) for part, expected in zip(zip(*parts, strict=True), whole, strict=True))


@pytest.mark.parametrize("bits, affine", BITS_AND_MAPPINGS)
def test_inputs_without_importance_do_not_count(bits, affine):
    x, importance = groups(20, 32)
    importance[:, 5:9] = 0
    changed = x.clone()
    changed[:, 5:9] = 1000.0
    assert all(map(torch.equal, search(x, importance, bits, affine), search(changed, importance, bits, affine)))
    # A group with zero importance is searched with equal importance, and so are constant groups.
    nothing, alike = torch.zeros_like(x), torch.ones_like(x)
    assert all(map(torch.equal, search(x, nothing, bits, affine), search(x, alike, bits, affine)))
    scales, mins = search(torch.zeros(3, 16), torch.ones(1, 16), bits, affine)
    assert scales.tolist() == [0.0] * 3 and (not affine or mins.tolist() == [0.0] * 3)


def test_exact_grids_are_found():
    """Weights on a grid are recovered exactly."""
    codes = torch.arange(16).repeat(4, 2).float()
    scales, mins = search(codes * 0.5 - 3, torch.ones(1, 32), 4, True)
    assert torch.allclose(scales, torch.tensor(0.5)) and torch.allclose(mins, torch.tensor(-3.0))


def test_refusals():
    x, importance = groups(6, 16)
    for arguments, message in [
        ((x, importance[:4], 4, False), r"importance has shape \[4, 16\]; expected \[rows, 16\], rows a divisor of 6"),
        ((x, importance[:, :8].contiguous(), 4, False), r"importance has shape \[6, 8\]; expected \[rows, 16\]"),
        ((x, importance, 9, False), "bits is 9; expected 1 to 8"),
        ((x[0], importance, 4, False), r"weights has shape \[16\]; expected \[rows, inputs\]"),
        ((x.double(), importance, 4, False), "weights has dtype float64; expected float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            search(*arguments)


@pytest.mark.parametrize("bits, affine", [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(bits, affine, bad):
    """Refused as in quantize, because the scales would be finite."""
    x, importance = groups(4, 32)
    x[2, 31] = bad
    with pytest.raises(ValueError, match=f"weights has {bad} at position 95; expected finite numbers"):
        search(x, importance, bits, affine)
    x[2, 31] = 1
    for wrong in (bad, -1.0):
        importance[3, 0] = wrong
        with pytest.raises(ValueError, match="importance has .* at position 96; expected finite numbers from 0 on"):
            search(x, importance, bits, affine)
