"""Properties of every matrix: equal bits after permutations, splits, scaling by powers of two, and with other numbers of rows
and threads; and the bound of docs/accuracy.md."""

import hypothesis.strategies as st
import lowbit
import torch
from hypothesis import given, settings
from reference import assert_same_bits, quantize_rows, random_packed, random_rows, segments_of, take_apart

SIZES = {
    "n": st.integers(1, 70), "k": st.integers(1, 200), "bits": st.integers(1, 8), "seed": st.integers(0, 2**31),
}  # fmt: skip
GROUPS = st.sampled_from([16, 32, 48, 128])
MAPPINGS = st.sampled_from(["symmetric", "affine"])


def parts_of(n, k, bits, seed, group, mapping):
    """The arguments of `pack`."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    return {
        "codes": torch.randint(2**bits, (n, k), generator=generator, dtype=torch.uint8),
        "scales": torch.randn(n, groups, generator=generator) * 0.1,
        "mins": torch.randn(n, groups, generator=generator) if mapping == "affine" else None,
        "bias": torch.randn(n, generator=generator),
        "bits": bits, "group_size": group, "mapping": mapping,
    }  # fmt: skip


@given(**SIZES, group=GROUPS, mapping=MAPPINGS, m=st.integers(1, 9))
def test_rows_of_weights_may_change_places(n, k, bits, seed, group, mapping, m):
    parts, x = parts_of(n, k, bits, seed, group, mapping), random_rows(m, k, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    moved = parts | {name: parts[name][order] for name in ("codes", "scales", "bias")}
    if parts["mins"] is not None:
        moved["mins"] = parts["mins"][order]
    expected = lowbit.linear(x, lowbit.pack(**parts), n)
    assert_same_bits(lowbit.linear(x, lowbit.pack(**moved), n), expected[:, order])


@given(**SIZES, group=GROUPS, mapping=MAPPINGS, m=st.integers(1, 9))
def test_inputs_of_a_segment_may_change_places(n, k, bits, seed, group, mapping, m):
    """Sums in a segment are integers, so their order does not matter."""
    parts, x = parts_of(n, k, bits, seed, group, mapping), random_rows(m, k, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([
        inputs.start + torch.randperm(inputs.stop - inputs.start, generator=generator) for _, inputs in segments_of(k, group)
    ])  # fmt: skip
    expected = lowbit.linear(x, lowbit.pack(**parts), n)
    moved = lowbit.pack(**(parts | {"codes": parts["codes"][:, order]}))
    assert_same_bits(lowbit.linear(x[:, order].contiguous(), moved, n), expected)


@given(**SIZES, group=GROUPS, mapping=MAPPINGS, m=st.integers(1, 9), power=st.integers(-40, 40))
def test_powers_of_two_are_exact(n, k, bits, seed, group, mapping, m, power):
    parts, x = parts_of(n, k, bits, seed, group, mapping), random_rows(m, k, seed=seed)
    expected = lowbit.linear(x, lowbit.pack(**parts), n) * 2.0**power
    larger = parts | {name: parts[name] * 2.0**power for name in ("scales", "bias")}
    if parts["mins"] is not None:
        larger["mins"] = parts["mins"] * 2.0**power
    assert_same_bits(lowbit.linear(x, lowbit.pack(**larger), n), expected)
    larger = parts | {"bias": parts["bias"] * 2.0**power}
    assert_same_bits(lowbit.linear(x * 2.0**power, lowbit.pack(**larger), n), expected)


@given(**SIZES, group=GROUPS, mapping=MAPPINGS, m=st.integers(1, 40), threads=st.integers(1, 4))
def test_rows_and_threads_do_not_matter(n, k, bits, seed, group, mapping, m, threads):
    packed, x = lowbit.pack(**parts_of(n, k, bits, seed, group, mapping)), random_rows(m, k, seed=seed)
    torch.set_num_threads(1)
    alone = torch.cat([lowbit.linear(row, packed, n) for row in x.split(1)])
    torch.set_num_threads(threads)
    assert_same_bits(lowbit.linear(x, packed, n), alone)


def error_and_bound(x, packed):
    """|y - y'| and the bound of docs/accuracy.md, in float64: [m, n] both."""
    parts = take_apart(packed)
    steps = quantize_rows(x, parts.group)[1].double()
    sizes = torch.tensor([inputs.stop - inputs.start for _, inputs in segments_of(x.shape[1], parts.group)])
    scales, levels = parts.per_input(parts.scales).double(), parts.levels.double()
    row = parts.row_scale.double()[:, None]
    mins = torch.zeros_like(scales) if parts.mins is None else parts.per_input(parts.mins).double()
    weights = row * (scales * levels + mins)
    exact = x.double() @ weights.T + parts.bias.double()
    t = (row.abs() * ((scales * levels).abs() + mins.abs())).sum(1)
    sums = parts.info.groups * (1 if parts.mins is None else 2) + len(segments_of(x.shape[1], parts.group))
    rounding = 128 * (sums + 2) * 2.0**-24 * steps.amax(1, keepdim=True) * t + 2.0**-22 * parts.bias.double().abs()
    bound = (0.5 + 2.0**-15) * steps.repeat_interleave(sizes, 1) @ weights.abs().T + rounding
    return (lowbit.linear(x, packed, weights.shape[0]).double() - exact).abs(), bound


@given(**SIZES, group=GROUPS, mapping=MAPPINGS, power=st.integers(-3, 12), shift=st.floats(-5, 5, width=32))
@settings(max_examples=max(200, settings.default.max_examples))
def test_the_error_is_below_its_bound(n, k, bits, seed, group, mapping, power, shift):
    """Activations from evenly spread to mostly near zero, with and without an offset."""
    x = random_rows(5, k, seed=seed)
    x = x.sign() * x.abs() ** (1 + max(power, 0) / 2) * 2.0**power + shift
    error, bound = error_and_bound(x, lowbit.pack(**parts_of(n, k, bits, seed, group, mapping)))
    assert (error <= bound).all(), (error / bound).max()


def test_the_bound_is_reached():
    """Activations near the midpoint of two steps, each rounded to the side that is worse for its weight."""
    packed = random_packed(1, 512, 4, 32, "symmetric")
    levels = take_apart(packed).levels * take_apart(packed).per_input(take_apart(packed).scales).sign()
    x = torch.where(levels > 0, 100.499, 101.501)
    x[0, ::32] = 127 * (1 + 2.0**-21)  # a step is 1
    error, bound = error_and_bound(x, packed)
    assert 0.95 * bound < error <= bound


@given(**SIZES, group=GROUPS, mapping=MAPPINGS, m=st.integers(1, 9), cut=st.integers(0, 100))
def test_inputs_that_are_zero_may_be_cut_off(n, k, bits, seed, group, mapping, m, cut):
    """If a matrix is split between two groups, each part gives the result of the whole with the other part's inputs zero.

    Segments start with groups, so the other inputs do not affect scales, and zeros add nothing.
    """
    packed = lowbit.pack(**parts_of(n, k, bits, seed, group, mapping) | {"bias": None})
    at = cut % -(-k // group) * group
    x = random_rows(m, k, seed=seed)
    for begin, end in ((0, at), (at, k)):
        if end > begin:
            alone = torch.zeros_like(x)
            alone[:, begin:end] = x[:, begin:end]
            part = lowbit.linear(x[:, begin:end].contiguous(), lowbit.slice_columns(packed, begin, end), n)
            assert_same_bits(lowbit.linear(alone, packed, n), part)
