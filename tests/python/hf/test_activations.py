"""Rows of activations that are hard to quantize."""

import lowbit
import pytest
import reference
import torch
from reference import DTYPES, MAPPINGS, WIDTHS, assert_same_bits, random_packed, random_rows

K = 50


def rows() -> dict[str, torch.Tensor]:
    noise = random_rows(K)
    outlier = noise.clone()
    outlier[7] = 1e6
    ramp = torch.linspace(-1.0, 1.0, K)
    return {
        "positive": noise.abs() + 3,
        "negative": -noise.abs() - 3,
        "constant": torch.full((K,), 2.5),
        "negative constant": torch.full((K,), -0.7),
        "zero": torch.zeros(K),
        "negative zero": torch.full((K,), -0.0),
        "one value": torch.nn.functional.one_hot(torch.tensor(3), K).float(),
        "one negative value": -torch.nn.functional.one_hot(torch.tensor(K - 1), K).float(),
        "outlier": outlier,
        "negative outlier": -outlier,
        "symmetric": ramp,
        "ties": torch.arange(K) * 0.5 - 10,  # with 117.5 at the end, the step is 0.5 and each value hits the grid
        "tiny": noise * 1e-30,
        "smallest usable": ramp * (2.0**-126 * 128),
        "largest usable": torch.full((K,), 126.9 * 2.0**104),
        "too small": ramp * 1e-38,
        "denormal": noise.sign() * 1e-45,
        "huge": ramp * 3e38,
        "huge positive": torch.full((K,), 3.4e38),
        "huge negative": torch.full((K,), -3.4e38),
        "float16 range": ramp * 65504,
    }


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_row(bits, mapping, dtype):
    x = torch.stack(list(rows().values())).to(dtype)
    packed = random_packed(20, K, bits, 16, mapping)
    assert_same_bits(lowbit.linear(x, packed, 20), reference.linear(x, packed))
    for i, name in enumerate(rows()):  # one at a time, other kernels run
        y = lowbit.linear(x[i], packed, 20)
        try:
            assert_same_bits(y, reference.linear(x[i], packed))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def identity(k: int) -> torch.Tensor:
    """A weight whose product with x is x as the kernel quantized it."""
    codes = torch.full((k, k), 128, dtype=torch.uint8) + torch.eye(k, dtype=torch.uint8)
    return lowbit.pack(codes, torch.ones(k, -(-k // 16)), bits=8, group_size=16)


@pytest.mark.parametrize("name", rows())
def test_each_value_is_off_by_half_a_step_at_most(name):
    x = rows()[name]
    found = lowbit.linear(x, identity(K), K).double()
    x = x.double()
    if x.abs().max() >= 127 * 2.0**104:  # out of the quantized range
        assert found.isnan().all()
        return
    for segment in range(0, K, 16):
        part, result = x[segment : segment + 16], found[segment : segment + 16]
        step = part.abs().max() / 127
        # The quotient is rounded twice. Below the smallest usable step a segment is zero.
        bound = step * (0.5 + 2**-14) if step >= 1.0001 * 2.0**-126 else 128 * 2.0**-126
        assert (result - part).abs().max() <= bound


def test_an_outlier_costs_its_segment_alone():
    x = random_rows(1, 256)
    x[0, 100] = 1e4
    lost = (lowbit.linear(x, identity(256), 256) - x).abs()[0]
    assert lost[96:112].max() > 1 and max(lost[:96].max(), lost[112:].max()) < 0.02


def test_zero_stays_zero():
    x = random_rows(200, K)
    x[:, 11] = 0
    assert (lowbit.linear(x, identity(K), K)[:, 11] == 0).all()


def test_zero_rows_give_the_bias():
    packed = random_packed(20, K, 4, 16, "affine", bias=True)
    assert torch.equal(lowbit.linear(torch.zeros(3, K), packed, 20), lowbit.unpack(packed).bias.expand(3, 20))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_a_bad_value_spoils_its_row_and_no_other(bits, mapping, dtype, bad):
    packed = random_packed(20, K, bits, 16, mapping, bias=True)
    clean = random_rows(9, K).to(dtype)
    expected = lowbit.linear(clean, packed, 20)
    for row, column in ((0, 0), (4, 31), (7, K - 1)):
        x = clean.clone()
        x[row, column] = bad
        y = lowbit.linear(x, packed, 20)
        assert torch.isnan(y[row]).all()
        others = torch.arange(9) != row
        assert_same_bits(y[others], expected[others])


def test_each_row_is_quantized_by_itself():
    packed = random_packed(20, K, 4, 16, "symmetric")
    x = torch.stack([random_rows(K, seed=i) * 10.0**i for i in range(-5, 6)])
    assert_same_bits(lowbit.linear(x, packed, 20), torch.stack([lowbit.linear(row, packed, 20) for row in x]))
