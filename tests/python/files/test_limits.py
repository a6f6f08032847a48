"""Extreme sizes and numbers: more than 2^31 weights, a million rows and indices, empty inputs, scales that are subnormal or
near the largest float, and small stacks."""

import threading

import lowbit
import pytest
import reference
import torch
from reference import assert_same_bits, random_packed, random_rows


def test_more_weights_than_an_int_counts():
    """2^31 + 2^25 one-bit weights, 280 MB: 65 copies of one matrix, so that each row is known."""
    n, k, copies = 2048, 16384, 65
    part = random_packed(n, k, 1, 1024, "symmetric")
    whole = lowbit.concat([part] * copies)
    assert lowbit.info(whole).out_features * k == 2**31 + 2**25
    lowbit.verify(whole)
    x = random_rows(2, k)
    expected = lowbit.linear(x, part, n)
    for rows in (x[:1], x):
        assert_same_bits(lowbit.linear(rows, whole, n * copies), expected[: len(rows)].repeat(1, copies))
    last = torch.tensor([n * copies - 1, 0, n * (copies - 1)])
    assert_same_bits(lowbit.embedding(last, whole, k), lowbit.embedding(last % n, part, k))
    with pytest.raises(IndexError, match=f"index {n * copies} "):
        lowbit.embedding(last[:1] + 1, whole, k)
    assert torch.equal(lowbit.slice_rows(whole, n * (copies - 1), n * copies), part)
    whole[-1] ^= 1
    with pytest.raises(ValueError, match="altered bytes"):
        lowbit.verify(whole)


def test_a_million_rows_and_indices():
    count, k = 10**6, 16
    small = random_packed(3, k, 4, 16, "affine", bias=True)
    x = random_rows(1000, k)
    assert_same_bits(lowbit.linear(x.repeat(1000, 1), small, 3), lowbit.linear(x, small, 3).repeat(1000, 1))
    indices = torch.arange(2**20) % 3
    assert_same_bits(lowbit.embedding(indices, small, k), lowbit.embedding(torch.arange(3), small, k)[indices])
    experts = torch.stack([small, small])
    chosen = (torch.arange(count) % 2).view(-1, 1)
    found = lowbit.linear_experts(x.repeat(1000, 1), experts, chosen, 3)
    assert_same_bits(found, lowbit.linear(x, small, 3).repeat(1000, 1)[:, None])
    part = random_packed(1000, k, 3, 16, "symmetric")
    tall = lowbit.concat([part] * 1000)
    assert_same_bits(lowbit.linear(x[:1], tall, count), lowbit.linear(x[:1], part, 1000).repeat(1, 1000))
    codes = lowbit.unpack(tall).codes
    assert torch.equal(codes, lowbit.unpack(part).codes.repeat(1000, 1))


def test_nothing():
    """Zero rows, tokens or indices give zero rows; matrices without rows or inputs are refused."""
    packed = random_packed(20, 48, 4, 16, "affine")
    for shape in ((0,), (0, 5), (5, 0), (2, 0, 3)):
        assert lowbit.linear(torch.empty(*shape, 48), packed, 20).shape == (*shape, 20)
        assert lowbit.embedding(torch.empty(shape, dtype=torch.int64), packed, 48).shape == (*shape, 48)
    experts = torch.stack([packed, packed])
    none = torch.empty(0, 2, dtype=torch.int64)
    assert lowbit.linear_experts(torch.empty(0, 48), experts, none, 20).shape == (0, 2, 20)
    cache = torch.zeros(1, 2, 16, 16)
    before = cache.clone()
    q, k = torch.empty(1, 4, 0, 16), torch.empty(1, 2, 0, 16)
    found = lowbit.attention(q, k, k, cache, cache.clone(), torch.tensor([3]))
    assert found.numel() == 0 and torch.equal(cache, before)
    for function, arguments, message in (
        (lowbit.slice_rows, (packed, 5, 5), "expected"),
        (lowbit.slice_columns, (packed, 16, 16), "expected"),
        (lowbit.concat, ([],), "expected"),
        (torch.ops.lowbit.quantize, (torch.empty(0, 48), 4, 16, False, False), "expected"),
        (torch.ops.lowbit.quantize, (torch.empty(48, 0), 4, 16, False, False), "expected"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


@pytest.mark.parametrize("mapping", ["symmetric", "affine"])
@pytest.mark.parametrize("size", [1e-45, 3e-42, 1e-38, 1e-30, 1e30, 3e35])
def test_scales_of_any_size(mapping, size):
    """Also with activations so large or small that products overflow or underflow."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(16, (40, 64), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(40, 2, generator=generator) + 0.5) * size
    mins = -7.3 * scales if mapping == "affine" else None
    packed = lowbit.pack(codes, scales, mins=mins, bits=4, group_size=32, mapping=mapping)
    for factor in (1e-40, 1e-30, 1.0, 1e30):
        x = random_rows(9, 64) * factor
        for rows in (x[:1], x):
            assert_same_bits(lowbit.linear(rows, packed, 40), reference.linear(rows, packed))
    indices = torch.arange(40)
    assert_same_bits(lowbit.embedding(indices, packed, 64), reference.embedding(indices, packed))


@pytest.mark.parametrize("kib", [128, 8192])
def test_small_and_large_stacks(kib):
    """musl's threads have 128 KiB."""
    packed, x = random_packed(600, 512, 4, 32, "affine"), random_rows(70, 512)
    cache, q = torch.zeros(1, 4, 80, 64), random_rows(1, 4, 70, 64)
    calls = [
        lambda: lowbit.linear(x, packed, 600),
        lambda: lowbit.linear(x[:1], packed, 600),
        lambda: lowbit.embedding(torch.arange(100), packed, 512),
        lambda: lowbit.linear_experts(x, packed[None].repeat(2, 1), torch.arange(70).view(70, 1) % 2, 600),
        lambda: lowbit.unpack(packed).codes,
        lambda: lowbit.attention(q, q, q, cache.clone(), cache.clone(), torch.tensor([0])),
    ]
    expected, found = [call() for call in calls], []
    before = threading.stack_size(kib * 1024)
    try:
        thread = threading.Thread(target=lambda: found.extend(call() for call in calls))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
