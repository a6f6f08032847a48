"""quantize_tensor: error bounds, exact cases, hard cases."""

import lowbit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit import LinearConfig
from reference import MAPPINGS, WIDTHS, random_rows, take_apart

GROUPS = (16, 32, 48, None)


def round_trip(weight: torch.Tensor, config: LinearConfig) -> torch.Tensor:
    return take_apart(lowbit.quantize_tensor(weight, config)).weight()


def per_input(values: torch.Tensor, group_size: int | None, k: int) -> torch.Tensor:
    return values.double().repeat_interleave(group_size or k, 1)[:, :k]


def weights(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows of different kinds: normal, one-sided, with outliers, tiny."""
    weight = random_rows(n, k, seed=seed)
    weight[1::4] = weight[1::4].abs() + 0.5
    weight[2::4, :: max(1, k // 3)] *= 20
    weight[3::4] *= 1e-4
    return weight


def stored_error(scales: torch.Tensor, mins: torch.Tensor | None, bits: int, largest: torch.Tensor) -> torch.Tensor:
    """The error from float16 scales and mins: 11 significant bits each, or 2^-40 of the row's largest."""
    per_scale = scales.double().abs() * 2**-11 + largest * 2.0**-40
    if mins is None:
        return 2 ** (bits - 1) * per_scale
    return (2**bits - 1) * per_scale + mins.double().abs() * 2**-11 + largest * 2.0**-40


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_absmax_is_off_by_half_a_step_at_most(bits, mapping, group_size):
    weight = weights(13, 100, seed=bits)
    config = LinearConfig(bits, group_size, mapping, "absmax")
    found = lowbit.unpack(lowbit.quantize_tensor(weight, config))
    largest = found.scales.abs().amax(1, keepdim=True).double()
    if found.mins is not None:
        largest = torch.maximum(largest, found.mins.abs().amax(1, keepdim=True).double())
    stored = stored_error(found.scales, found.mins, bits, largest)
    bound = found.scales.double().abs() / 2 * (1 + 2**-10) + stored * (1 + 2**-10)
    # Finding the code takes three float32 operations on values of up to 2^b steps and the minimum.
    arithmetic = 2**-22 * (weight.abs().double() + per_input(found.scales.abs(), group_size, 100) * 2**bits)
    error = (round_trip(weight, config) - weight.double()).abs()
    assert (error <= per_input(bound, group_size, 100) + arithmetic).all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_mse_is_no_worse_than_absmax_in_any_group(bits, mapping, group_size):
    weight = weights(13, 96, seed=bits)
    absmax, mse = (round_trip(weight, LinearConfig(bits, group_size, mapping, scale)) for scale in ("absmax", "mse"))
    size = group_size or 96

    def norm(values):
        return values.reshape(13, -1, size).norm(dim=-1)

    # The search compares before the scales are rounded to float16, which moves each result by up to 2^-11 of its terms.
    terms = mse.abs() + absmax.abs()
    if mapping == "affine":
        largest = weight.double().reshape(13, -1, size).abs().amax(-1, keepdim=True)
        terms = 4 * largest.expand(-1, -1, size).reshape(13, 96)
    slack = norm(terms) * 2**-11 * 1.01
    assert (norm(mse - weight) <= norm(absmax - weight) + slack).all()


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_mse_pays_at_few_bits(bits, mapping):
    weight = random_rows(64, 256)
    errors = {
        scale: (round_trip(weight, LinearConfig(bits, 64, mapping, scale)) - weight).square().mean()
        for scale in ("absmax", "mse")
    }
    assert errors["mse"] < 0.95 * errors["absmax"]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_each_bit_helps(mapping):
    weight = random_rows(64, 256)
    errors = [(round_trip(weight, LinearConfig(b, 32, mapping)) - weight).square().mean().item() for b in WIDTHS]
    for more, fewer in zip(errors[2:], errors[1:]):
        assert more < 0.4 * fewer  # a bit halves the step: a quarter of the squared error
    assert errors[1] < errors[0]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("scale", ["absmax", "mse"])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_weights_on_the_grid_are_exact(bits, scale, mapping):
    k, group = 96, 32
    codes = torch.randint(0, 2**bits, (9, k))
    codes[:, ::group], codes[:, 1::group] = 0, 2**bits - 1  # each group uses the whole range
    steps = torch.tensor([1.0, 0.375, 2.0**-10]).repeat(9, 1)
    step = steps.repeat_interleave(group, 1)
    if mapping == "affine":
        weight = step * codes + 0.5
    else:
        weight = step * (2 * codes - 1 if bits == 1 else codes - 2 ** (bits - 1))
        weight[4:] *= -1  # the longer tail may be on either side
    assert torch.equal(round_trip(weight, LinearConfig(bits, group, mapping, scale)), weight.double())


@pytest.mark.parametrize("scale, statistic", [("absmax", torch.amax), ("mse", torch.mean)])
def test_one_bit_is_plus_or_minus_the_scale(scale, statistic):
    weight = random_rows(8, 64)
    found = lowbit.unpack(lowbit.quantize_tensor(weight, LinearConfig(1, 32, "symmetric", scale)))
    expected = statistic(weight.view(8, 2, 32).abs(), -1)
    torch.testing.assert_close(found.scales, expected, rtol=2**-11, atol=0)
    assert torch.equal(found.codes, (weight >= 0).to(torch.uint8))
    signs = torch.where(weight >= 0, 1.0, -1.0)
    result = round_trip(weight, LinearConfig(1, 32, "symmetric", scale))
    assert torch.equal(result.float(), found.scales.repeat_interleave(32, 1) * signs)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_zero_groups_and_constant_rows(bits, mapping, scale):
    weight = random_rows(4, 64)
    weight[0] = 0
    weight[1, 32:] = 0
    weight[2] = -0.7
    config = LinearConfig(bits, 32, mapping, scale)
    found = round_trip(weight, config)
    assert (found[0] == 0).all() and (found[1, 32:] == 0).all()
    if mapping == "affine" or bits == 1:
        # Two groups of one value: it becomes the largest float16, and the row scale carries the rest.
        torch.testing.assert_close(found[2], weight[2].double(), rtol=2**-23, atol=0)
    packed = lowbit.quantize_tensor(weight, config)
    assert (lowbit.linear(random_rows(1, 64), packed, 4)[:, 0] == 0).all()


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("magnitude", [8e37, 1e20, 1e-20, 1e-33, 1e-36, 1e-44])
def test_large_and_small_magnitudes(mapping, magnitude):
    weight = torch.linspace(-1, 1, 64).repeat(2, 1) * magnitude
    found = round_trip(weight, LinearConfig(8, 32, mapping, "absmax"))
    assert torch.isfinite(found).all()
    # A group whose step would be below 2^-120 counts as constant.
    assert (found - weight).abs().max() <= magnitude / 100 + (256 * 2.0**-120 if magnitude < 1e-34 else 0)


@settings(max_examples=200)
@given(
    st.integers(1, 8),
    st.sampled_from(MAPPINGS),
    st.sampled_from(["absmax", "mse"]),
    st.integers(1, 20),
    st.integers(1, 150),
    st.sampled_from([*GROUPS, 1024]),
    st.integers(0, 1 << 20),
)
def test_codes_are_the_nearest_for_the_stored_scales(bits, mapping, scale, n, k, group_size, seed):
    weight = random_rows(n, k, seed=seed)
    parts = take_apart(lowbit.quantize_tensor(weight, LinearConfig(bits, group_size, mapping, scale)))
    step = (parts.per_input(parts.scales) * parts.row_scale[:, None]).double().abs()
    if mapping == "symmetric" and bits == 1:
        step = 2 * step
    weight, found = weight.double(), parts.weight()
    # Either the nearest level within half a step, or the first or last level for a weight beyond it. Finding the code
    # takes three float32 operations on values of up to 2^b steps and the minimum.
    slack = 2**-21 * (weight.abs() + found.abs() + step * 2**bits)
    ascending, top = parts.per_input(parts.scales) >= 0, parts.codes == 2**bits - 1
    first, last = torch.where(ascending, parts.codes == 0, top), torch.where(ascending, top, parts.codes == 0)
    near = (found - weight).abs() <= step / 2 + slack
    assert (near | (first & (weight <= found)) | (last & (weight >= found)) | (step == 0)).all()

    # A group's scale does not depend on other groups or rows, except for its rounding to float16.
    size = group_size or k
    row, group = n // 2, (k - 1) // size  # the last group, which is often short
    alone = lowbit.quantize_tensor(weight[row : row + 1, group * size :], LinearConfig(bits, None, mapping, scale))
    found = parts.scales[row, group] * parts.row_scale[row]
    torch.testing.assert_close(found, lowbit.unpack(alone).scales[0, 0], rtol=2**-10, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weight_dtypes(dtype):
    weight, bias = random_rows(9, 40).to(dtype), random_rows(9).to(dtype)
    config = LinearConfig(4, 16)
    packed = lowbit.quantize_tensor(weight, config, bias=bias)
    assert torch.equal(packed, lowbit.quantize_tensor(weight.float(), config, bias=bias.float()))


def test_strided_weights_and_gradients():
    weight = random_rows(40, 18)
    config = LinearConfig(4, 16)
    expected = lowbit.quantize_tensor(weight.t().contiguous(), config)
    assert torch.equal(lowbit.quantize_tensor(weight.t(), config), expected)
    assert torch.equal(lowbit.quantize_tensor(torch.nn.Parameter(weight.t()), config), expected)


@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_the_same_bytes_for_any_number_of_threads(scale):
    weight = random_rows(300, 512)
    torch.set_num_threads(1)
    expected = lowbit.quantize_tensor(weight, LinearConfig(4, 32, scale=scale))
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert torch.equal(lowbit.quantize_tensor(weight, LinearConfig(4, 32, scale=scale)), expected)
