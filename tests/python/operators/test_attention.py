"""Attention over static caches: its bits, its error, and independence of other data."""

import re

import lowbit
import pytest
import reference
import torch
from attention_texts import OTHER_SCORES, at, caches, new_caches, run, text
from reference import DTYPES, assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:" + what)
    for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental", "Mutation on a buffer")
]

SHAPES = [(1, 8, 2, 64), (2, 4, 4, 32), (1, 7, 1, 80), (1, 6, 2, 128), (1, 3, 3, 16), (1, 2, 1, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_contract(shape, dtype):
    batch, heads, kv_heads, width = shape
    length = 300 if width <= 80 else 40
    q, k, v = text(batch, heads, kv_heads, length, width, dtype)
    q[:, :, -5:] *= 100  # scores of several hundred, so that weights vanish
    found = run(q, k, v, *caches(batch, kv_heads, 304, width, dtype), [length - 20, 19, 1])
    scale = width**-0.5
    assert_same_bits(found[:, -20:], reference.attention(q[:, :, -20:], k, v, length - 20, scale))
    assert_same_bits(found[:, :9], reference.attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], 0, scale))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_near_the_exact_result(shape, dtype):
    batch, heads, kv_heads, width = shape
    length, scale = 600, 0.7 * width**-0.5
    q, k, v = text(batch, heads, kv_heads, length, width, dtype)
    found = run(q, k, v, *caches(batch, kv_heads, 608, width, dtype), [length], scale).double()
    q, k, v = q.double(), k.double(), v.double()
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(
        1, 2
    )
    # A score has the error of width + 2 roundings of its products, a weight is off by the factor that two such
    # errors, the rounding of a difference and exp2 are, and the result by twice that and a rounding per position.
    unit = 2.0**-24
    products = (q.abs() @ k.abs().repeat_interleave(heads // kv_heads, 1).transpose(2, 3) * scale).max().item()
    weight = 2 * (width + 2) * unit * products + 2 * products * unit + 2.0**-23
    bound = (2 * weight + (length + 4) * unit) * v.abs().max() + exact.abs() * torch.finfo(dtype).eps / 2
    assert ((found - exact).abs() <= bound + 2.0**-24).all()
    assert bound.max() < (1e-2 if dtype is not torch.bfloat16 else 3e-2)  # the bound is tight enough to be useful


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_any_cut_and_any_number_of_threads_give_the_same_bits(shape, dtype):
    batch, heads, kv_heads, width = shape
    q, k, v = text(batch, heads, kv_heads, 560, width, dtype)
    whole = caches(batch, kv_heads, 576, width, dtype)
    expected = run(q, k, v, *whole, [560])
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for lengths in ([560], [1] * 10 + [2, 7, 16, 33, 200, 0, 291, 1], [255, 1, 1, 303], [16] * 35):
            used = caches(batch, kv_heads, 576, width, dtype)
            assert_same_bits(run(q, k, v, *used, lengths), expected)
            for one, other in zip(used, whole):
                assert_same_bits(one, other)


@pytest.mark.parametrize("more", [{}, {"window": 700, "softcap": 5.0, "sinks": True}], ids=["plain", "more"])
@pytest.mark.parametrize("kind", [torch.float32, (torch.int8, torch.int4), torch.int4], ids=str)
def test_a_long_text_with_one_head_of_keys(kind, more):
    """Threads share the positions of a token."""
    length, width = 1290, 32
    q, k, v = text(1, 6, 1, length, width)
    if "sinks" in more:
        more = more | {"sinks": torch.randn(6, generator=torch.Generator().manual_seed(3))}
    k_cache, v_cache = new_caches(1, 1, 1296, width, width, kind)
    whole = lowbit.attention(q, k, v, k_cache, v_cache, at(0), **more)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            for start in (500, 511, 512, 1023, 1024, 1289):
                new = slice(start, start + 1)
                token = lowbit.attention(q[:, :, new], k[:, :, new], v[:, :, new], k_cache, v_cache, at(start), **more)
                assert_same_bits(token, whole[:, new])
    finally:
        torch.set_num_threads(threads)
    scale, old = width**-0.5, more | {"cache": kind}
    assert_same_bits(whole[:, -1:], reference.attention(q[:, :, -1:], k, v, length - 1, scale, **old))


def test_the_caches_hold_the_text_and_nothing_else_changes():
    q, k, v = text(2, 4, 2, 37, 32)
    k_cache, v_cache = (torch.full((2, 2, 64, 32), -7.0) for _ in range(2))
    run(q, k, v, k_cache, v_cache, [20, 1, 16])
    keys = k_cache.view(2, 2, 4, 32, 16).transpose(3, 4).reshape(2, 2, 64, 32)  # panels of 16 positions
    for cache, new in ((keys, k), (v_cache, v)):
        assert torch.equal(cache[:, :, :37], new) and (cache[:, :, 37:] == -7).all()
    # A new text begins at 0; remains of an older text have no effect.
    other = run(*(t[:, :, :5] for t in (q, k, v)), k_cache, v_cache, [5])
    assert_same_bits(other, run(*(t[:, :, :5] for t in (q, k, v)), *caches(2, 2, 16, 32), [5]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype):
    q, k, v = text(2, 4, 2, 20, 48, dtype)
    expected = run(q, k, v, *caches(2, 2, 32, 48, dtype), [20])
    assert expected.is_contiguous() and expected.shape == (2, 20, 4, 48)

    def spread(t):
        wide = torch.full((*t.shape[:3], 2 * t.shape[3]), torch.nan, dtype=dtype)
        wide[..., ::2] = t
        return wide[..., ::2]

    changes = [
        torch.Tensor.contiguous,
        spread,
        lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
        lambda t: torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape),  # not aligned
    ]
    for change in changes:
        found = run(change(q), change(k), change(v), *caches(2, 2, 32, 48, dtype), [13, 7])
        assert_same_bits(found, expected)
    same = k[:1, :1].expand(2, 2, 20, 48)
    assert_same_bits(
        run(q, same, same, *caches(2, 2, 32, 48, dtype), [20]),
        run(q, same.clone(), same.clone(), *caches(2, 2, 32, 48, dtype), [20]),
    )


def test_start_is_a_scalar_or_has_one_element():
    q, k, v = text(1, 2, 1, 3, 16)
    for start in (torch.tensor(0), torch.tensor([0])):
        assert lowbit.attention(q, k, v, *caches(1, 1, 16, 16), start).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_where_they_belong(dtype):
    q, k, v = text(1, 4, 2, 300, 32, dtype)
    usual = run(q, k, v, *caches(1, 2, 304, 32, dtype), [300])

    def changed(tensor, index, value):
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    def other(found):
        """[positions, heads]: rows that differ from the normal result, and rows that are all NaN."""
        assert torch.where(
            found.isnan(),
            True,
            found.view(torch.int32 if dtype is torch.float32 else torch.int16)
            != (torch.full_like(found, torch.nan).view(torch.int32 if dtype is torch.float32 else torch.int16)),
        ).all()
        return (found != usual).any(-1)[0], found.isnan().all(-1)[0]

    everywhere = torch.zeros(300, 4, dtype=torch.bool)
    for value in (torch.nan, torch.inf, -torch.inf):
        changes, nans = other(run(changed(q, (0, 1, 270, 3), value), k, v, *caches(1, 2, 304, 32, dtype), [300]))
        expected = everywhere.clone()
        expected[270, 1] = True
        assert torch.equal(changes, expected)
        assert nans[270, 1]  # an infinite score is the maximum

        changes, nans = other(run(q, k, changed(v, (0, 1, 100, 3), value), *caches(1, 2, 304, 32, dtype), [300]))
        expected = everywhere.clone()
        expected[100:, 2:] = True
        assert torch.equal(changes, expected) and not nans.any()

    changes, nans = other(run(q, changed(k, (0, 0, 100, 3), torch.nan), v, *caches(1, 2, 304, 32, dtype), [150, 150]))
    expected = everywhere.clone()
    expected[100:, :2] = True
    assert torch.equal(changes, expected) and torch.equal(nans, expected)


def test_scores_of_minus_infinity_weigh_nothing():
    q, k, v = text(1, 1, 1, 300, 16)
    q = q.abs() + 1
    k[:, :, :260] = -torch.inf  # the whole first block
    found = run(q, k, v, *caches(1, 1, 304, 16), [300])
    assert found[:, :260].isnan().all()
    assert_same_bits(found[:, 260], v[:, 0, None, 260])
    assert found[:, 260:].isfinite().all()


GOOD = {
    "q": torch.ones(1, 4, 3, 32),
    "k": torch.ones(1, 2, 3, 32),
    "v": torch.ones(1, 2, 3, 32),
    "k_cache": torch.ones(1, 2, 16, 32),
    "v_cache": torch.ones(1, 2, 16, 32),
    "start": torch.tensor([0]),
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": GOOD["q"].double()}, "q has dtype float64; expected float32, bfloat16 or float16"),
        ({"q": torch.ones(4, 3, 32)}, "q has shape [4, 3, 32]; expected [batch, heads, positions, width]"),
        ({"q": torch.ones(1, 4, 3, 40)}, "q has width 40; expected a multiple of 16 from 16 to 512"),
        ({"q": torch.ones(1, 4, 3, 0)}, "q has width 0; expected a multiple of 16 from 16 to 512"),
        ({"q": torch.ones(1, 4, 3, 528)}, "q has width 528; expected a multiple of 16 from 16 to 512"),
        ({"q": torch.ones(1, 3, 3, 32)}, "q has 3 heads; expected 1 or more times 2, the heads of the caches"),
        ({"q": torch.ones(1, 0, 3, 32)}, "q has 0 heads; expected 1 or more times 2, the heads of the caches"),
        ({"q": GOOD["q"].half()}, "k has dtype float32; expected float16, as q has"),
        ({"k_cache": GOOD["k_cache"].double()}, "k_cache has dtype float64; expected float32, bfloat16, float16 or int8"),
        ({"k_cache": GOOD["k_cache"].to(torch.int8)}, "k_cache has shape [1, 2, 16, 32]; expected [1, 2, 16, 36], or 20"),
        ({"k_cache": torch.ones(1, 2, 16, 36, dtype=torch.int8)}, "v_cache has dtype float32; expected int8"),
        ({"v_cache": torch.ones(1, 2, 16, 36, dtype=torch.int8)}, "v_cache has dtype int8; expected float32"),
        (
            {"k_cache": torch.ones(1, 2, 16, 36, dtype=torch.int8), "v_cache": torch.ones(1, 2, 16, 32, dtype=torch.int8)},
            "v_cache has shape [1, 2, 16, 32]; expected [1, 2, 16, 36], or 20 for 4 bits",
        ),
        ({"k": GOOD["k"].half()}, "k has dtype float16; expected float32, as q has"),
        ({"v": GOOD["v"].bfloat16()}, "v has dtype bfloat16; expected float32, as q has"),
        ({"k": torch.ones(1, 4, 3, 32)}, "k has shape [1, 4, 3, 32]; expected [1, 2, 3, 32]"),
        ({"k": torch.ones(1, 2, 2, 32)}, "k has shape [1, 2, 2, 32]; expected [1, 2, 3, 32]"),
        ({"v": torch.ones(1, 2, 3, 16)}, "v_cache has shape [1, 2, 16, 32]; expected [1, 2, 16, 16]"),
        ({"v": torch.ones(1, 2, 3, 40)}, "v has width 40; expected a multiple of 16 from 16 to 512"),
        ({"v": torch.ones(1, 2, 2, 32)}, "v has shape [1, 2, 2, 32]; expected [1, 2, 3, 32]"),
        ({"v": torch.ones(2, 3, 32)}, "v has shape [2, 3, 32]; expected [batch, heads, positions, width]"),
        ({"k_cache": torch.ones(2, 16, 32)}, "k_cache has shape [2, 16, 32]; expected [batch, kv_heads, max_length"),
        ({"k_cache": torch.ones(2, 2, 16, 32)}, "k_cache has shape [2, 2, 16, 32]; expected [1, 2, 16, 32]"),
        ({"k_cache": torch.ones(1, 2, 16, 48)}, "k_cache has shape [1, 2, 16, 48]; expected [1, 2, 16, 32]"),
        ({"k_cache": torch.ones(1, 2, 20, 32)}, "expected a max_length that is a multiple of 16"),
        ({"k_cache": torch.ones(1, 0, 16, 32)}, "k_cache has shape [1, 0, 16, 32]; expected a head"),
        ({"k_cache": torch.ones(1, 16, 2, 32).transpose(1, 2)}, "k_cache is not contiguous"),
        ({"v_cache": torch.ones(1, 2, 32, 32)}, "v_cache has shape [1, 2, 32, 32]; expected [1, 2, 16, 32]"),
        ({"v_cache": torch.ones(1, 2, 16, 32).half()}, "v_cache has dtype float16; expected float32"),
        ({"v_cache": torch.ones(1, 16, 2, 32).transpose(1, 2)}, "v_cache is not contiguous"),
        ({"start": torch.tensor([0], dtype=torch.int32)}, "start has dtype int32 and shape [1]; expected int64"),
        ({"start": torch.tensor([0, 1])}, "start has dtype int64 and shape [2]; expected int64 and one element"),
        ({"start": torch.tensor([[0]])}, "start has dtype int64 and shape [1, 1]; expected int64 and one element"),
        ({"start": torch.tensor([], dtype=torch.int64)}, "start has dtype int64 and shape [0]; expected int64 and one"),
        *[
            ({"start": at(start)}, f"start is {start} with 3 new positions; expected 0 to 13, the max_length of 16 less")
            for start in (-1, 14, 16, 2**62, -(2**63), 2**63 - 1)
        ],
        (
            {"q": torch.ones(1, 4, 20, 32), "k": torch.ones(1, 2, 20, 32), "v": torch.ones(1, 2, 20, 32)},
            "start is 0 with 20 new positions; expected 0 to -4",
        ),
    ],
)
def test_refusals(changes, message):
    arguments = {**GOOD, **changes}
    k_cache, v_cache = (arguments[name].clone() for name in ("k_cache", "v_cache"))
    with pytest.raises(IndexError if message.startswith("start is") else ValueError, match=re.escape(message)):
        lowbit.attention(**arguments)
    assert torch.equal(arguments["k_cache"], k_cache) and torch.equal(arguments["v_cache"], v_cache)


def test_one_memory_for_both_caches_is_refused():
    cache = torch.zeros(3, 1, 2, 16, 32)
    for k_cache, v_cache in ((cache[0], cache[0]), (cache[0], cache.flatten()[1023:2047].view(1, 2, 16, 32))):
        with pytest.raises(ValueError, match="share memory"):
            lowbit.attention(**{**GOOD, "k_cache": k_cache, "v_cache": v_cache})
    lowbit.attention(**{**GOOD, "k_cache": cache[2], "v_cache": cache[1]})


def test_no_positions_change_nothing():
    k_cache, v_cache = torch.zeros(1, 2, 16, 32), torch.zeros(1, 2, 16, 32)
    out = lowbit.attention(*(GOOD[name][:, :, :0] for name in "qkv"), k_cache, v_cache, at(16))
    assert out.shape == (1, 0, 4, 32) and not k_cache.any() and not v_cache.any()


@pytest.mark.parametrize("window, softcap, with_sinks, value_width", OTHER_SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_scores(window, softcap, with_sinks, value_width, dtype):
    length = 290
    q, k, _ = text(1, 4, 2, length, 32, dtype)
    _, _, v = text(1, 4, 2, length, value_width, dtype, seed=1)
    sinks = torch.tensor([-3.0, 0.5, 4.0, 90.0]).to(dtype) if with_sinks else None
    scores = {"window": window, "softcap": softcap, "sinks": sinks}
    (k_cache, _), (_, v_cache) = caches(1, 2, 304, 32, dtype), caches(1, 2, 304, value_width, dtype)
    out, start = [], 0
    for count in (length - 20, 19, 1):
        new = slice(start, start + count)
        out.append(lowbit.attention(q[:, :, new], k[:, :, new], v[:, :, new], k_cache, v_cache, at(start), **scores))
        start += count
    found = torch.cat(out, 1)
    scale = 32**-0.5
    expected = reference.attention(q[:, :, -20:], k, v, length - 20, scale, window or 0, softcap or 0.0, sinks)
    assert_same_bits(found[:, -20:], expected)

    # The meaning of the arguments.
    scores = (q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3)) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    i, j = torch.arange(length)[:, None], torch.arange(length)
    scores = scores.masked_fill((j > i) | (j <= i - (window or length)), -torch.inf)
    if with_sinks:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(1, 4, length, 1)], -1)
    exact = scores.softmax(-1)[..., :length] @ v.double().repeat_interleave(2, 1)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(found.double(), exact.transpose(1, 2), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "scores, message",
    [
        ({"window": 0}, "window is 0; expected 1 or more, or None"),
        ({"window": -4}, "window is -4; expected 1 or more, or None"),
        ({"softcap": 0.0}, "softcap is 0.0; expected a positive number, or None"),
        ({"softcap": float("nan")}, "softcap is nan; expected a positive number, or None"),
        ({"softcap": float("inf")}, "softcap is inf; expected a number from 1e-06 to 1e+30, or 0 for none"),
        ({"softcap": 1e-320}, "softcap is 9.99989e-321; expected a number from 1e-06 to 1e+30, or 0 for none"),
        ({"scale": float("nan")}, "scale is nan; expected a number from -1e+30 to 1e+30"),
        ({"sinks": torch.zeros(3)}, "sinks has dtype float32 and shape [3]; expected float32 and [4]"),
        ({"sinks": torch.zeros(4).half()}, "sinks has dtype float16 and shape [4]; expected float32 and [4]"),
    ],
)
def test_refused_scores(scores, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.attention(**GOOD, **scores)


def test_opcheck():
    for dtype in DTYPES:
        q, k, v = text(1, 4, 2, 3, 32, dtype)
        buffers = (torch.zeros(1, 2, 16, 32, dtype=dtype) for _ in range(2))
        torch.library.opcheck(torch.ops.lowbit.attention.default, (q, k, v, *buffers, at(2), 0.25))
        for sizes in ((36, 20), (20, 20)):
            codes = (torch.zeros(1, 2, 16, size, dtype=torch.int8) for size in sizes)
            torch.library.opcheck(torch.ops.lowbit.attention.default, (q, k, v, *codes, at(2), 0.25))


def test_there_is_no_way_back():
    """torch alone would only warn, and omit the gradients."""
    q, k, v = text(1, 2, 2, 3, 32)
    expected = lowbit.attention(q, k, v, *caches(1, 2, 16, 32), at(0))
    found = lowbit.attention(q.requires_grad_(), k, v, *(both := caches(1, 2, 16, 32)), at(0))
    assert_same_bits(found.detach(), expected)
    assert both[0].any() and both[1].any()
    with pytest.raises(RuntimeError, match="lowbit.attention has no gradients"):
        found.sum().backward()
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda k: lowbit.attention(q.detach(), k, v, *caches(1, 2, 16, 32), at(0)), (k,), (k,))
