"""Attention without caches, activation functions, norms and rotary positions, compared with torch's."""

import lowbit
import pytest
import torch
import torch.nn.functional as F
from lowbit.operators.elementwise import ROTARY_LAYOUTS
from models import BACKENDS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_compared_with_torch(name, dtype):
    torch.manual_seed(0)
    x = torch.cat([torch.randn(40, 100) * 4, torch.linspace(-12, 12, 1000).view(10, 100)]).to(dtype)
    gate = torch.randn(50, 100).to(dtype)
    expected = FUNCTIONS[name](x.double())
    out = lowbit.activate(x, name)
    assert out.dtype is dtype and out.shape == x.shape
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    torch.testing.assert_close(
        lowbit.activate(x, name, gate).double(), expected * gate.double(), rtol=TOLERANCE[dtype], atol=1e-5
    )
    for row in (0, 17, 49):  # independent of the other rows
        assert lowbit.activate(x[row], name).equal(out[row])
    wide = torch.cat([x, gate], dim=1)
    assert lowbit.activate(wide[:, :100], name, wide[:, 100:]).equal(lowbit.activate(x, name, gate))


def test_gelu_is_within_its_bound_and_keeps_what_is_not_finite():
    x = torch.linspace(-9, 9, 200_001)
    error = (lowbit.activate(x, "gelu").double() - F.gelu(x.double())).abs() / x.double().abs().clamp(min=1e-6)
    assert error.max() < 2.5e-7
    odd = lowbit.activate(torch.tensor([torch.inf, -torch.inf, torch.nan, -1e30, 0.0]), "gelu")
    assert odd[:2].tolist() == [torch.inf, 0.0] and odd[2].isnan() and odd[3:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 100, 640])
def test_rms_norm_compared_with_torch(width, dtype):
    torch.manual_seed(0)
    x, weight = (torch.randn(5, 7, width) * 3).to(dtype), torch.randn(width).to(dtype)
    for offset in (0.0, 1.0):
        expected = F.rms_norm(x.double(), (width,), weight.double() + offset, 1e-6)
        out = lowbit.rms_norm(x, weight, weight_offset=offset)
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)
        assert lowbit.rms_norm(x[3, 4], weight, weight_offset=offset).equal(out[3, 4])
    expected = F.rms_norm(x.double(), (width,), None, 0.5)
    torch.testing.assert_close(lowbit.rms_norm(x, epsilon=0.5).double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 100, 640])
def test_layer_norm_compared_with_torch(width, dtype):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(5, 7, width) * 3 + 1).to(dtype), *torch.randn(2, width).to(dtype)
    for parameters in ((weight, bias), (weight, None), (None, bias), (None, None)):
        expected = F.layer_norm(x.double(), (width,), *(None if each is None else each.double() for each in parameters), 1e-5)
        out = lowbit.layer_norm(x, *parameters)
        assert out.dtype is dtype and out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)
        assert lowbit.layer_norm(x[3, 4], *parameters).equal(out[3, 4])
        assert lowbit.layer_norm(torch.cat([x, x], dim=-1)[..., :width], *parameters).equal(out)
    expected = F.layer_norm(x.double(), (width,), None, None, 0.5)
    torch.testing.assert_close(lowbit.layer_norm(x, epsilon=0.5).double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)


def test_layer_norm_of_a_large_mean_and_special_values():
    """The variance is that of differences from the mean, not a difference of two large numbers."""
    x = torch.tensor([4096.0, 4097.0, 4098.0, 4099.0]).repeat(25)
    expected = F.layer_norm(x.double(), (100,), eps=0.0)
    torch.testing.assert_close(lowbit.layer_norm(x, epsilon=0.0).double(), expected, rtol=1e-6, atol=0)
    assert lowbit.layer_norm(torch.full((3, 100), 7.0)).eq(0).all()
    for odd in (torch.nan, torch.inf, -torch.inf):
        rows = torch.randn(3, 100)
        rows[1, 50] = odd
        out = lowbit.layer_norm(rows)
        assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_masked_attention_compared_with_torch(kind, dtype):
    torch.manual_seed(0)
    length, heads, kv_heads = 21, 8, 2
    q, k, v = (torch.randn(3, n, length, w).to(dtype) for n, w in ((heads, 32), (kv_heads, 32), (kv_heads, 48)))
    shown = torch.ones(3, length, dtype=torch.bool)
    shown[0, 15:] = shown[1, :4] = False
    i = torch.arange(length)
    begin = (i - 3).clamp(min=0) if kind == "window" else torch.zeros_like(i)
    end = {"full": torch.full_like(i, length), "causal": i + 1, "window": (i + 4).clamp(max=length)}[kind]
    bounds = torch.stack([shown, begin.expand(3, -1), end.expand(3, -1)], dim=-1).int()
    out = lowbit.masked_attention(q, k, v, bounds, scale=0.2)
    mask = (i >= begin[:, None]) & (i < end[:, None]) & shown[:, None]
    q, k, v = (x.float() for x in (q, k, v))
    repeated = [x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
    expected = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask[:, None], scale=0.2).transpose(1, 2)
    torch.testing.assert_close(out[shown].float(), expected[shown], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not out[~shown].any()


def turned(x, layout):
    """Half of the pairs' numbers with their sign changed, as transformers' functions rotate_half do."""
    if layout == "halves":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def separate_rotary(x, cos, sin, heads_dim, layout, round_once):
    """lowbit.rotary with torch's operators, as in models of transformers."""
    dtype, count = x.dtype, cos.shape[-1]
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    x, rest = x[..., :count], x[..., count:]
    if round_once:
        x, cos, sin = x.float(), cos.float(), sin.float()
    if layout == "adjacent_to_halves":
        cos, sin = cos[..., : count // 2], sin[..., : count // 2]
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(dtype)
    if layout == "adjacent_half_table":
        cos, sin = (each[..., : count // 2].repeat_interleave(2, dim=-1) for each in (cos, sin))
    return torch.cat([x * cos + turned(x, layout) * sin, rest], dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ROTARY_LAYOUTS)
def test_rotary_has_the_bits_of_separate_operators(layout, dtype):
    torch.manual_seed(0)
    for width, count in ((64, 64), (80, 64), (40, 6), (2, 2), (96, 50)):
        for heads_dim in (1, 2):
            # Strided views of projections, as in attention layers.
            q = (torch.randn(2, 5, 4 * width) * 3).to(dtype).unflatten(-1, (4, width))
            k = (torch.randn(2, 5, 2 * (width + 8)) * 3).to(dtype).unflatten(-1, (2, width + 8))
            if heads_dim == 1:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            for rows, round_once, table in ((1, False, dtype), (2, False, dtype), (2, True, dtype), (1, True, torch.float32)):
                cos, sin = torch.randn(2, rows, 5, count).to(table)
                more = {"heads_dim": heads_dim, "layout": layout, "round_once": round_once}
                results = lowbit.rotary(q, k, cos, sin, **more)
                for x, result in zip((q, k), results, strict=True):
                    assert result.dtype is dtype and result.is_contiguous()
                    assert result.equal(separate_rotary(x, cos, sin, **more))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_of_special_values(dtype):
    x = torch.tensor([torch.inf, 1.0, torch.nan, 3e38, 0.0, -0.0, 1e-40, 2.0]).view(1, 1, 1, 8).to(dtype)
    cos = torch.tensor([3.0, 1.0, 1.0, -2.0, 0.0, 1.0, 0.5, 1.0]).view(1, 1, 8).to(dtype)
    sin = torch.tensor([1.0, 0.0, 2.0, 3.0, 1.0, -1.0, 1.0, 0.0]).view(1, 1, 8).to(dtype)
    expected = separate_rotary(x, cos, sin, 1, "halves", False)
    for result in lowbit.rotary(x, x, cos, sin):
        assert torch.equal(result.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert torch.equal(result[numbers], expected[numbers])
        assert torch.equal(result[numbers].signbit(), expected[numbers].signbit())


def test_rotary_on_threads():
    q, k, cos, sin = torch.randn(2, 8, 300, 64), torch.randn(2, 2, 300, 64), torch.randn(2, 300, 64), torch.randn(2, 300, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = lowbit.rotary(q, k, cos, sin)
        torch.set_num_threads(4)
        assert all(a.equal(b) for a, b in zip(alone, lowbit.rotary(q, k, cos, sin), strict=True))
    finally:
        torch.set_num_threads(before)


def test_rotary_refusals():
    q, k, table = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16), torch.randn(1, 3, 16)
    for arguments, options, message in (
        ((q[0], k, table, table), {}, r"q has shape \[4, 3, 16\]; expected \[batch, heads, positions, width\]"),
        ((q, k[0], table, table), {}, r"k has shape \[2, 3, 16\]; expected \[batch, heads, positions, width\]"),
        ((q, k[:, :, :2], table, table), {}, r"k has shape \[2, 2, 2, 16\]; expected \[2, 2, 3, 16\]"),
        ((q, k[:1], table, table), {}, r"k has shape \[1, 2, 3, 16\]; expected \[2, 2, 3, 16\]"),
        ((q, k, table[0], table), {}, r"cos has shape \[3, 16\]; expected \[batch or 1, positions, rotary\]"),
        ((q, k, table.expand(3, 3, 16), table), {}, r"cos has shape \[3, 3, 16\]; expected \[2, 3, 16\]"),
        ((q, k, table, table[..., :8]), {}, r"sin has shape \[1, 3, 8\]; expected \[1, 3, 16\]"),
        ((q, k, table, table), {"heads_dim": 2}, r"k has shape \[2, 2, 3, 16\]; expected \[2, 4, 3, 16\]"),
        ((q, k, table[..., :5], table[..., :5]), {}, "cos has 5 numbers per position, q a width of 16 and k of 16"),
        ((q, k[..., :8], table, table), {}, "cos has 16 numbers per position, q a width of 16 and k of 8"),
        ((q.double(), k, table, table), {}, "q has dtype float64; expected float32, bfloat16 or float16"),
        ((q, k.half(), table, table), {}, "k has dtype float16; expected float32"),
        ((q.half(), k.half(), table, table), {}, "cos has dtype float32; expected float16"),
        ((q, k, table, table.half()), {"round_once": True}, "sin has dtype float16; expected float32"),
        ((q.half(), k.half(), table, table.half()), {"round_once": True}, "sin has dtype float16; expected float32"),
        ((q[..., ::2], k, table, table), {}, "q has stride 2 in its last dimension; expected 1"),
        ((q, k, table[..., ::2], table[..., ::2]), {}, "cos has stride 2 in its last dimension; expected 1"),
        ((q, k, table, table), {"heads_dim": 3}, "heads_dim is 3; expected 1 or 2"),
        ((q, k, table, table), {"layout": "neox"}, "layout is 'neox'; expected one of halves, adjacent"),
    ):
        with pytest.raises(ValueError, match=message):
            lowbit.rotary(*arguments, **options)
    with pytest.raises(ValueError, match="layout is 4; expected 0 to 3"):
        torch.ops.lowbit.rotary(q, k, table, table, 1, 4)


def test_traced_operators_have_the_shapes_of_real_ones():
    q, k, v = torch.randn(2, 4, 5, 32), torch.randn(2, 2, 5, 32), torch.randn(2, 2, 5, 16)
    bounds = torch.tensor([1, 0, 5], dtype=torch.int32).expand(2, 5, 3).contiguous()
    operators = torch.ops.lowbit
    for operator, arguments in (
        (operators.masked_attention, (q, k, v, bounds, 0.1)),
        (operators.activate, (torch.randn(3, 5), None, 2)),
        (operators.rms_norm, (torch.randn(3, 5), torch.randn(5), 1e-6)),
        (operators.layer_norm, (torch.randn(3, 5), torch.randn(5), None, 1e-5)),
        (operators.rotary, (q, k, torch.randn(2, 5, 16), torch.randn(2, 5, 16), 1, 2, True)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_refusals():
    x = torch.randn(2, 4, 5, 32)
    with pytest.raises(ValueError, match="activation is 'relu'; expected one of gelu, gelu_tanh, gelu_quick, silu"):
        lowbit.activate(x, "relu")
    with pytest.raises(ValueError, match="x has dtype float64; expected float32, bfloat16 or float16"):
        lowbit.activate(x.double(), "silu")
    with pytest.raises(ValueError, match=r"weight has shape \[3\]; expected \[32\]"):
        lowbit.rms_norm(x, torch.ones(3))
    with pytest.raises(ValueError, match=r"bias has dtype float16; expected float32"):
        lowbit.layer_norm(x, torch.ones(32), torch.ones(32).half())
    with pytest.raises(ValueError, match=r"epsilon is -1; expected 0 to 1"):
        lowbit.layer_norm(x, epsilon=-1)
    with pytest.raises(ValueError, match=r"bounds has shape \[2, 4, 3\]; expected \[2, 5, 3\]"):
        lowbit.masked_attention(x, x, x, torch.ones(2, 4, 3, dtype=torch.int32))
    for call in (
        lambda y: lowbit.activate(y, "silu"),
        lambda y: lowbit.rms_norm(y),
        lambda y: lowbit.layer_norm(y),
        lambda y: lowbit.layer_norm(x, None, y[0, 0, 0]),
        lambda y: lowbit.masked_attention(y, y, y),
        lambda y: lowbit.rotary(y, y, x[:, 0], x[:, 0]),
    ):
        with pytest.raises(RuntimeError, match=r"has no gradients; call it under torch.no_grad\(\)"):
            call(x.clone().requires_grad_())


class Everything(torch.nn.Module):
    """The five operators one after the other. Input [2, 6, 64] and bounds [2, 6, 3]."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, 64), requires_grad=False)

    def forward(self, x, bounds):
        x = lowbit.rms_norm(x, self.weight, weight_offset=1.0)
        x = lowbit.layer_norm(x, None, self.weight)
        heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
        q, k = lowbit.rotary(heads, heads[:, :2], x[..., :8], x[:1, :, 8:16].expand(2, -1, -1), layout="adjacent")
        x = lowbit.masked_attention(q, k, heads[:, 2:], bounds).flatten(2)
        return lowbit.activate(x, "gelu", lowbit.activate(x, "silu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:This API is experimental")
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_surface_has_the_same_bits(tmp_path, executorch, backend):
    torch._dynamo.reset()
    model, x = Everything(), torch.randn(2, 6, 64)
    bounds = torch.tensor([1, 0, 6], dtype=torch.int32).repeat(2, 6, 1)
    bounds[1, 4:, 0] = 0
    with torch.no_grad():
        expected = model(x, bounds)
        assert torch.compile(model, fullgraph=True, backend=backend)(x, bounds).equal(expected)
    if backend == "inductor":
        lowbit.export_pt2(model, (x, bounds), tmp_path / "all.pt2")
        assert torch._inductor.aoti_load_package(str(tmp_path / "all.pt2"))(x, bounds).equal(expected)
    else:
        lowbit.export_pte(model, (x, bounds), tmp_path / "all.pte")
        method = executorch.load_program(tmp_path / "all.pte").load_method("forward")
        assert method.execute([x, bounds])[0].equal(expected)
