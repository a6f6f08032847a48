"""lowbit.concat, slice_rows and slice_columns keep codes, scales and results; joined slices have the original bytes."""

import lowbit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def packed_of(n, k, bits, group, mapping, bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group is None else -(-k // group)
    levels = None
    if mapping == "levels":
        levels = torch.randint(-127, 128, (2**bits,), generator=generator).to(torch.int8)
    return lowbit.pack(
        torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8),
        torch.randn(n, groups, generator=generator),
        torch.randn(n, groups, generator=generator) if mapping == "affine" else None,
        torch.randn(n, generator=generator) if bias else None,
        bits=bits,
        group_size=group,
        mapping=mapping,
        levels=levels,
    )


@st.composite
def matrices(draw, most_rows=50, most_inputs=200):
    bits = draw(st.integers(1, 8))
    mapping = draw(st.sampled_from(["symmetric", "affine"] + (["levels"] if 2 <= bits <= 4 else [])))
    group = draw(st.sampled_from([None, 16, 32, 48, 64]))
    n, k = draw(st.integers(1, most_rows)), draw(st.integers(1, most_inputs))
    return packed_of(n, k, bits, group, mapping, draw(st.booleans()), draw(st.integers(0, 5)))


def check_same(found, whole, rows=slice(None), inputs=slice(None), bias=True):
    """`found` equals that part of `whole`, with valid header and checksum."""
    lowbit.verify(found)
    found, whole = lowbit.unpack(found), lowbit.unpack(whole)
    groups = slice(None)
    if whole.group_size is not None and inputs != slice(None):
        groups = slice(inputs.start // whole.group_size, -(-inputs.stop // whole.group_size))
    assert torch.equal(found.codes, whole.codes[rows, inputs])
    assert torch.equal(found.scales, whole.scales[rows, groups])
    assert (found.mins is None) == (whole.mins is None)
    if whole.mins is not None:
        assert torch.equal(found.mins, whole.mins[rows, groups])
    if bias and whole.bias is not None:
        assert torch.equal(found.bias, whole.bias[rows])
    else:
        assert found.bias is None
    assert (found.bits, found.group_size, found.mapping) == (whole.bits, whole.group_size, whole.mapping)
    assert (found.levels is None) == (whole.levels is None)
    assert found.levels is None or torch.equal(found.levels, whole.levels)


def cuts(data, total, step):
    """Sorted cut positions from 0 to total, the inner ones multiples of `step`."""
    places = data.draw(st.sets(st.integers(1, max(1, (total - 1) // step)), max_size=4))
    return [0, *sorted(p * step for p in places if p * step < total), total]


@settings(max_examples=max(60, settings.default.max_examples))
@given(st.data())
def test_rows(data):
    whole = data.draw(matrices())
    n, k = lowbit.info(whole).shape
    places = cuts(data, n, data.draw(st.sampled_from([1, 16])))
    parts = [lowbit.slice_rows(whole, a, b) for a, b in zip(places, places[1:])]
    x = torch.randn(3, k)
    expected = lowbit.linear(x, whole, n)
    for part, a, b in zip(parts, places, places[1:]):
        check_same(part, whole, slice(a, b))
        assert torch.equal(lowbit.linear(x, part, b - a), expected[:, a:b])
    assert torch.equal(lowbit.concat(parts), whole)


@settings(max_examples=max(60, settings.default.max_examples))
@given(st.data())
def test_columns(data):
    whole = data.draw(matrices())
    found = lowbit.info(whole)
    n, k = found.shape
    places = cuts(data, k, found.group_size or 1)
    parts = [lowbit.slice_columns(whole, a, b) for a, b in zip(places, places[1:])]
    for part, a, b in zip(parts, places, places[1:]):
        check_same(part, whole, inputs=slice(a, b), bias=a == 0)
        # It has its own row sums, which matter for activations far from zero.
        x = 5 + torch.rand(2, b - a)
        weight = lowbit.unpack(part)
        again = lowbit.pack(
            weight.codes,
            weight.scales,
            weight.mins,
            weight.bias,
            bits=weight.bits,
            group_size=weight.group_size,
            mapping=weight.mapping,
            levels=weight.levels,
        )
        # Repacking may round scales and mins to float16, relative to the largest weights.
        largest = weight.scales.abs().amax(1) * (127 if weight.levels is not None else 2**weight.bits)
        largest = largest if weight.mins is None else largest + weight.mins.abs().amax(1)
        off = (lowbit.linear(x, part, n) - lowbit.linear(x, again, n)).abs()
        assert (off <= 2**-10 * x.sum(1, keepdim=True) * largest).all()
    assert torch.equal(lowbit.concat(parts, dim=1), whole)


@settings(max_examples=max(30, settings.default.max_examples))
@given(st.data())
def test_rows_of_different_matrices(data):
    bits, k = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 100))
    group, affine = data.draw(st.sampled_from([None, 16, 32])), data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    biases = [data.draw(st.booleans()) for _ in sizes]
    parts = [
        packed_of(n, k, bits, group, "affine" if affine else "symmetric", bias, seed)
        for seed, (n, bias) in enumerate(zip(sizes, biases))
    ]
    whole = lowbit.concat(parts)
    assert lowbit.info(whole).has_bias == any(biases)
    x = torch.randn(2, k)
    expected = torch.cat([lowbit.linear(x, part, n) for part, n in zip(parts, sizes)], 1)
    assert torch.equal(lowbit.linear(x, whole, sum(sizes)), expected)


def test_scales_at_the_ends_of_float16():
    """Slicing keeps values that repacking would round: row scales that a sliced row would not choose, and subnormal scales."""
    scales = torch.tensor([[65504.0, 3e-5, 1e-7, 0.1]]).repeat(20, 1)
    whole = lowbit.pack(torch.arange(20 * 64, dtype=torch.uint8).view(20, 64) % 16, scales, bits=4, group_size=16)
    parts = [lowbit.slice_columns(whole, a, a + 16) for a in range(0, 64, 16)]
    for i, part in enumerate(parts):
        assert torch.equal(lowbit.unpack(part).scales[:, 0], lowbit.unpack(whole).scales[:, i])
    assert torch.equal(lowbit.concat(parts, dim=1), whole)


WHOLE = dict(n=40, k=96, bits=4, group=32, mapping="symmetric", bias=True)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda w: lowbit.slice_rows(w, 5, 5), ValueError, "rows 5 to 5 were requested; expected 0 <= begin < end <= 40"),
        (lambda w: lowbit.slice_rows(w, -1, 5), ValueError, "rows -1 to 5"),
        (lambda w: lowbit.slice_rows(w, 0, 41), ValueError, "rows 0 to 41"),
        (lambda w: lowbit.slice_rows(w, 2**62, 2**63 - 1), ValueError, "rows 4611686018427387904 to"),
        (lambda w: lowbit.slice_rows(w, 0, 2**63), ValueError, "end is 9223372036854775808; expected"),
        (lambda w: lowbit.slice_rows(w, -(2**63), 1), ValueError, "rows -9223372036854775808 to 1"),
        (lambda w: lowbit.slice_rows(w, -(2**63) - 1, 1), ValueError, "begin is -9223372036854775809; expected"),
        (lambda w: lowbit.slice_rows(w, 0.0, 5), TypeError, "begin is a float; expected an int"),
        (lambda w: lowbit.slice_columns(w, 16, 96), ValueError, "inputs 16 to 96 cut a group of 32; expected multiples"),
        (lambda w: lowbit.slice_columns(w, 0, 95), ValueError, "inputs 0 to 95 cut a group of 32"),
        (lambda w: lowbit.concat([]), ValueError, "there are no parts"),
        (lambda w: lowbit.concat([w], dim=2), ValueError, "dim is 2; expected 0"),
        (lambda w: lowbit.concat([w], dim="rows"), ValueError, "dim is 'rows'; expected 0"),
        (
            lambda w: lowbit.concat([w, packed_of(40, 64, 4, 32, "symmetric", False)]),
            ValueError,
            "matrix 1 has 64 inputs; expected 96, as matrix 0",
        ),
        (
            lambda w: lowbit.concat([w, packed_of(39, 96, 4, 32, "symmetric", False)], dim=1),
            ValueError,
            "matrix 1 has 39 rows; expected 40",
        ),
        (
            lambda w: lowbit.concat([w, packed_of(40, 96, 5, 32, "symmetric", False)]),
            ValueError,
            "matrix 1 has 5 bits, mapping symmetric and groups of 32; expected 4, symmetric and 32",
        ),
        (
            lambda w: lowbit.concat([w, packed_of(40, 96, 4, None, "affine", False)]),
            ValueError,
            "4 bits, mapping affine and groups of 0",
        ),
        (
            lambda w: lowbit.concat([packed_of(1, 32, 4, 32, "levels", False, seed) for seed in (0, 1)]),
            ValueError,
            "matrix 1 has another table of levels",
        ),
        (lambda w: lowbit.concat([w, w], dim=1), ValueError, "matrix 1 has a bias; expected one in the first only"),
        (
            lambda w: lowbit.concat([packed_of(40, 96, 4, 32, "symmetric", False, seed) for seed in (0, 1)], dim=1),
            ValueError,
            "row 0 has the row scale .* in matrix 1; expected .*: matrices side by side are slices of one",
        ),
        (
            lambda w: lowbit.concat([packed_of(4, 40, 4, 32, "symmetric", False)] * 2, dim=1),
            ValueError,
            "matrix 0 has 40 inputs, which end inside a group of 32",
        ),
        (
            lambda w: lowbit.concat([packed_of(4, 40, 4, None, "symmetric", False, seed) for seed in (0, 1)], dim=1),
            ValueError,
            "row 0 has the (row )?scale",
        ),
        (lambda w: lowbit.slice_rows(w[:100], 0, 5), ValueError, "bytes"),
        (lambda w: lowbit.slice_rows(w.view(1, -1), 0, 5), ValueError, "expected torch.uint8 and one dimension"),
        (lambda w: lowbit.slice_rows("w", 0, 5), TypeError, "packed is a str"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(packed_of(**WHOLE))


def test_altered_bytes_are_refused():
    """Otherwise new checksums would hide the change."""
    whole = packed_of(**WHOLE)
    whole[300] ^= 1
    for call in (
        lambda: lowbit.slice_rows(whole, 0, 16),
        lambda: lowbit.slice_columns(whole, 0, 32),
        lambda: lowbit.concat([whole, whole]),
    ):
        with pytest.raises(ValueError, match="checksum"):
            call()
