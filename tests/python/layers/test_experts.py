"""lowbit.linear_experts and lowbit.nn.LinearExperts have the bits of a loop over the experts, on every surface."""

import copy
import pickle

import lowbit
import pytest
import torch
from lowbit import nn
from models import BACKENDS
from reference import DTYPES, assert_same_bits, random_packed, random_rows

EXPERTS, N, K = 5, 21, 100


def stacked(bits: int = 4, mapping: str = "symmetric", n: int = N, group_size: int | None = 32) -> torch.Tensor:
    return torch.stack([random_packed(n, K, bits, group_size, mapping, bias=True, seed=i) for i in range(EXPERTS)])


def chosen(*shape: int) -> torch.Tensor:
    """Some experts get many rows; the last one gets none."""
    return torch.randint(0, EXPERTS - 1, shape, generator=torch.Generator().manual_seed(3)) // 2 * 2


def loop(x: torch.Tensor, packed: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    n = lowbit.info(packed[0]).out_features
    out = x.new_zeros(*experts.shape, n)
    for expert in experts.unique().tolist():
        *row, slot = torch.where(experts == expert)
        out[(*row, slot)] = lowbit.linear(x[tuple(row)], packed[expert], n)
    return out


class Model(torch.nn.Module):
    """Two layers: each row goes to two experts, and each result to the same expert again."""

    def __init__(self):
        super().__init__()
        self.up = nn.LinearExperts(stacked(3, "affine", n=K))
        self.down = nn.LinearExperts(stacked())

    def forward(self, x, experts):
        inner = torch.relu(self.up(x, experts))
        return self.down(inner, experts[..., None])[..., 0, :].sum(-2)

    def by_loop(self, x, experts):
        inner = torch.relu(loop(x, self.up.packed_weight, experts))
        return loop(inner, self.down.packed_weight, experts[..., None])[..., 0, :].sum(-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, e", [((1,), 2), ((90,), 1), ((3, 5), 4), ((0,), 2), ((4,), 0)])
def test_the_bits_of_a_loop(dtype, shape, e):
    for bits, mapping in ((1, "symmetric"), (4, "symmetric"), (5, "affine"), (8, "affine")):
        packed, x, experts = stacked(bits, mapping), random_rows(*shape, K).to(dtype), chosen(*shape, e)
        result = lowbit.linear_experts(x, packed, experts, N)
        assert result.dtype == dtype and result.shape == (*shape, e, N)
        assert_same_bits(result, loop(x, packed, experts))
        assert_same_bits(lowbit.linear_experts(x.mT.contiguous().mT, packed, experts, N), result)


def test_a_table_of_levels_for_each():
    packed = [
        lowbit.quantize_tensor(random_rows(N, K, seed=i), lowbit.LinearConfig(4, 32, levels="fit")) for i in range(EXPERTS)
    ]
    assert len({lowbit.info(each).levels for each in packed}) > 1
    x, experts = random_rows(40, K), chosen(40, 2)
    result = nn.LinearExperts(torch.stack(packed))(x, experts)
    assert_same_bits(result, loop(x, torch.stack(packed), experts))


def test_gradients_are_those_of_a_loop():
    packed, experts, grads = stacked(), chosen(7, 3), []
    for together in (True, False):
        x = random_rows(7, K).requires_grad_()
        result = lowbit.linear_experts(x, packed, experts, N) if together else loop(x, packed, experts)
        (result * torch.arange(3.0)[:, None]).sum().backward()
        grads.append(x.grad)
    assert torch.allclose(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"experts": torch.tensor([[0, EXPERTS]])}, IndexError, "expert 5 .* is out of range; expected 0 to 4"),
        ({"experts": torch.tensor([[-1, 0]])}, IndexError, "expert -1"),
        ({"experts": torch.tensor([[0, 1]], dtype=torch.int32)}, ValueError, "experts has dtype int32; expected int64"),
        ({"experts": torch.tensor([0, 1])}, ValueError, r"experts has shape \[2\]; expected that of x"),
        ({"x": random_rows(1, K - 1)}, ValueError, r"x has shape \[1, 99\]; expected \[..., 100\]"),
        ({"x": random_rows(1, K).double()}, ValueError, "x has dtype float64"),
        ({"packed_weights": stacked()[0]}, ValueError, r"expected uint8 and \[experts, bytes\]"),
        ({"packed_weights": stacked()[:, :-1].contiguous()}, ValueError, "expert 0: packed weight has"),
        ({"packed_weights": stacked()[:, ::2]}, ValueError, "packed_weights is not contiguous"),
        ({"out_features": N + 1}, ValueError, "out_features is 22; expected 21, the rows of expert 0"),
        ({"out_features": 0}, ValueError, "out_features is 0"),
    ],
)
def test_refusals(change, error, message):
    arguments = {"x": random_rows(1, K), "packed_weights": stacked(), "experts": torch.tensor([[0, 1]]), "out_features": N}
    with pytest.raises(error, match=message):
        lowbit.linear_experts(**arguments | change)


def test_state_dicts_copies_and_descriptions():
    layer, other = nn.LinearExperts(stacked()), nn.LinearExperts(stacked(8, "affine"))
    assert "experts=5, in_features=100, out_features=21, bias=True, bits=4" in repr(layer)
    assert layer.weight.shape == (EXPERTS, N, K) and layer.info.experts == EXPERTS
    assert_same_bits(layer.dequantize()[2], nn.Linear(stacked()[2]).dequantize())
    other.load_state_dict(layer.state_dict())
    x, experts = random_rows(3, K), chosen(3, 2)
    for each in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(each(x, experts), layer(x, experts))
        assert each.info == layer.info
    damaged = layer.packed_weight.clone()
    damaged[3, -40] ^= 1
    with pytest.raises(RuntimeError, match="expert 3: "):
        layer.load_state_dict({"packed_weight": damaged})
    with pytest.raises(RuntimeError, match=r"the weight has shape \[4, 21, 100\]; expected \[5, 21, 100\]"):
        layer.load_state_dict({"packed_weight": layer.packed_weight[:4]})
    with pytest.raises(ValueError, match="expert 1 is packed as"):
        nn.LinearExperts(torch.stack([random_packed(N, 64, 4, size, "symmetric", bias=True) for size in (48, 32)]))
    with pytest.raises(ValueError, match="the weights of experts have no other"):
        layer.to_format("KAI4")


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_compiled(backend):
    torch._dynamo.reset()
    model, inputs = Model().eval(), (random_rows(3, K), chosen(3, 2))
    expected = model.by_loop(*inputs)
    assert_same_bits(model(*inputs), expected)
    assert_same_bits(torch.compile(model, fullgraph=True, dynamic=True, backend=backend)(*inputs), expected)


@torch.no_grad()
def test_exported(tmp_path):
    pytest.importorskip("executorch")
    import lowbit.executorch

    model, rows = Model().eval(), torch.export.Dim("rows", min=1, max=64)
    example = (random_rows(3, K), chosen(3, 2))
    lowbit.export_pte(model, example, tmp_path / "m.pte", dynamic_shapes=({0: rows}, {0: rows}))
    lowbit.executorch.register()
    from executorch.runtime import Runtime

    forward = Runtime.get().load_program(str(tmp_path / "m.pte")).load_method("forward")
    program = torch.export.export(model, example, dynamic_shapes=({0: rows}, {0: rows})).module()
    for count in (1, 50):
        inputs = (random_rows(count, K, seed=count), chosen(count, 2))
        expected = model.by_loop(*inputs)
        assert_same_bits(forward.execute(inputs)[0], expected)
        assert_same_bits(program(*inputs), expected)
    with pytest.raises(RuntimeError):
        forward.execute((inputs[0], inputs[1] + EXPERTS))
