"""Attention over caches of another type than the activations: codes of 8 and 4 bits, and other floats."""

import re

import lowbit
import pytest
import reference
import torch
from attention_texts import OTHER_SCORES, at, new_caches, run, text
from lowbit.operators.ops import cache_width
from reference import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:" + what)
    for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental", "Mutation on a buffer")
]

# Activations and caches of different types; in a pair, the first is for keys.
MIXED = [
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8), (torch.float16, torch.int8), (torch.bfloat16, torch.float32),
    (torch.float32, torch.int4), (torch.bfloat16, (torch.int8, torch.int4)),
]  # fmt: skip


@pytest.mark.parametrize("window, softcap, with_sinks, value_width", [(None, None, False, 32), *OTHER_SCORES])
@pytest.mark.parametrize("dtype, cache", MIXED, ids=str)
def test_caches_of_other_types(dtype, cache, window, softcap, with_sinks, value_width):
    length = 290
    if cache in (torch.int4, (torch.int8, torch.int4)):
        value_width = -(-value_width // 32) * 32
    q, k, _ = text(1, 4, 2, length, 32, dtype)
    _, _, v = text(1, 4, 2, length, value_width, dtype, seed=1)
    k[0, 1, 285] = 0  # no scale
    sinks = torch.tensor([-3.0, 0.5, 4.0, 90.0]).to(dtype) if with_sinks else None
    scores = {"window": window, "softcap": softcap, "sinks": sinks}
    results = []
    for cut in ((length - 20, 19, 1), (length,), (3, 250, 37)):
        k_cache, v_cache = new_caches(1, 2, 304, 32, value_width, cache)
        out, start = [], 0
        for count in cut:
            new = slice(start, start + count)
            out.append(lowbit.attention(q[:, :, new], k[:, :, new], v[:, :, new], k_cache, v_cache, at(start), **scores))
            start += count
        results.append(torch.cat(out, 1))
        assert results[-1].dtype is dtype
        assert_same_bits(results[-1], results[0])
    expected = reference.attention(q[:, :, -20:], k, v, length - 20, 32**-0.5, window or 0, softcap or 0.0, sinks, cache=cache)
    assert_same_bits(results[0][:, -20:], expected)


def test_int8_caches_hold_codes_and_scales():
    q, k, v = text(2, 4, 2, 37, 32)
    k[0, 0, 3], v[1, 1, 5] = 0, 2.0**-140  # no scale, and one that is too small
    k[0, 1, 4, 7], v[0, 0, 6, 1] = torch.inf, torch.nan
    k_cache, v_cache = new_caches(2, 2, 64, 32, 32, torch.int8)
    run(q, k, v, k_cache, v_cache, [20, 1, 16])
    for cache, given in ((k_cache, k), (v_cache, v)):
        codes, scales = cache.view(2, 2, -1).split((64 * 32, 64 * 4), -1)
        if cache is k_cache:
            codes = codes.view(2, 2, 4, 8, 16, 4).transpose(3, 4)  # panels of 16 positions, four inputs of one together
        codes, scales = codes.reshape(2, 2, 64, 32), scales.contiguous().view(torch.float32)
        expected, expected_scales = reference.cached(given, torch.int8)
        assert torch.equal(codes[:, :, :37].float(), expected) and (codes[:, :, 37:] == -1).all()
        assert torch.equal(scales[:, :, :37].nan_to_num(-5), expected_scales.nan_to_num(-5))
        assert scales[:, :, 37:].isnan().all()
        error = (codes[:, :, :37] * scales[:, :, :37, None] - given).abs()
        least = 127 * 2.0**-126  # smaller values have no scale
        finite = given.isfinite().all(-1, keepdim=True)
        assert (error <= 0.5001 * scales[:, :, :37, None] + least).logical_or(~finite).all()


@pytest.mark.parametrize("width", [32, 64, 96, 256, 512])
def test_int4_caches_hold_rotated_codes_and_scales(width):
    q, k, v = text(1, 2, 1, 37, width)
    k[0, 0, 3], v[0, 0, 5] = 0, 2.0**-140  # no scale, and one that is too small
    k[0, 0, 4, 7], v[0, 0, 6, 1] = torch.inf, torch.nan
    k[0, 0, 7, 3] = 1e30  # one input dominates; after the rotation, all values are near a level
    v[0, 0, 8] *= 2e37
    k_cache, v_cache = new_caches(1, 1, 48, width, width, torch.int4)
    run(q, k, v, k_cache, v_cache, [20, 1, 16])
    for cache, given in ((k_cache, k), (v_cache, v)):
        pairs, scales = cache.view(torch.uint8).flatten().split((48 * width // 2, 48 * 4))
        halves = torch.stack([pairs & 15, pairs >> 4], -1)
        if cache is k_cache:  # panels of 16 positions, inputs 2 i and 2 i + 1 of one in a byte
            codes = halves.view(3, width // 2, 16, 2).permute(0, 2, 1, 3)
        else:  # inputs i and i + 16
            codes = halves.view(48, width // 32, 16, 2).transpose(2, 3)
        codes, scales = codes.reshape(48, width)[:37], scales.clone().view(torch.float32)
        expected, expected_scales = reference.cached(given[0, 0], torch.int4)
        levels = torch.tensor([-level for level in reversed(reference.LEVELS)] + reference.LEVELS)
        assert torch.equal(levels[codes.long()], expected)
        assert torch.equal(scales[:37].nan_to_num(-5), expected_scales.nan_to_num(-5)) and scales[37:].isnan().all()
        # Rotated back, they equal the input within a hundredth of its squared norm.
        back = reference.rotated(levels[codes.long()].double() * scales[:37, None])
        error = (back - given[0, 0]).square().sum(-1) / given[0, 0].double().square().sum(-1)
        usual = [i for i in range(37) if i not in (3, 4, 5, 6)]
        assert error[usual].max() < 0.025 and 0.004 < error[usual].mean() < 0.0125


@pytest.mark.parametrize("kind", [torch.int8, torch.int4], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_position_that_is_not_finite_is_nan_in_a_cache_of_codes(value, kind):
    q, k, v = text(1, 4, 2, 300, 32)

    def nans(k, v):
        found = run(q, k, v, *new_caches(1, 2, 304, 32, 32, kind), [150, 150])
        return found.isnan().all(-1)[0], found.isnan().any(-1)[0]

    for of_keys in (True, False):
        changed = (k if of_keys else v).clone()
        changed[0, 0, 100, 3] = value
        everywhere, somewhere = nans(changed, v) if of_keys else nans(k, changed)
        expected = torch.zeros(300, 4, dtype=torch.bool)
        expected[100:, :2] = True
        assert torch.equal(everywhere, expected) and torch.equal(somewhere, expected)


def test_values_of_4_bits_with_keys_of_int8():
    """Each cache has the same bytes as with its own kind; the reverse combination is refused."""
    q, k, v = text(1, 4, 2, 37, 32)
    k_codes, v_codes = new_caches(1, 2, 48, 32, 32, torch.int8)
    k_pairs, v_pairs = new_caches(1, 2, 48, 32, 32, torch.int4)
    k_cache, v_cache = new_caches(1, 2, 48, 32, 32, (torch.int8, torch.int4))
    for used in ((k_codes, v_codes), (k_pairs, v_pairs), (k_cache, v_cache)):
        run(q, k, v, *used, [20, 1, 16])
    assert torch.equal(k_cache, k_codes) and torch.equal(v_cache, v_pairs)
    message = "k_cache has 4-bit codes and v_cache has shape [1, 2, 48, 36], int8; expected 20 for 4 bits, or int8 keys"
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.attention(q, k, v, k_pairs, v_codes, at(0))


def test_widths_of_4_bit_caches():
    assert [cache_width(64, torch.int4), cache_width(96, torch.int4)] == [36, 52]
    with pytest.raises(ValueError, match="have a width of 80; expected a multiple of 32 for a 4-bit cache"):
        cache_width(80, torch.int4)
    q = torch.ones(1, 2, 1, 80)
    caches = (torch.zeros(1, 2, 16, size, dtype=torch.int8) for size in (44, 84))
    message = "[1, 2, 16, 44]; expected [1, 2, 16, 84]: 4 bits are for widths that are m"
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.attention(q, q, q, *caches, at(0))
