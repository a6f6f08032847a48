"""torch.library.opcheck, fake kernels and torch.export."""

import pickle

import lowbit
import pytest
import torch
from models import Small
from reference import DTYPES, MAPPINGS, random_packed, random_rows
from torch.library import opcheck

OPS = torch.ops.lowbit


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (0, 40)], ids=str)
def test_opcheck_linear(mapping, shape):
    packed = random_packed(20, 40, 4, 16, mapping, bias=True)
    for dtype in DTYPES:
        opcheck(OPS.linear.default, (random_rows(*shape).to(dtype), packed, 20))


def test_opcheck_linear_with_strides():
    packed = random_packed(20, 40, 4, 16, "symmetric")
    opcheck(OPS.linear.default, (random_rows(40, 3).t(), packed, 20))
    opcheck(OPS.linear.default, (random_rows(3, 80)[:, ::2], packed, 20))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=str)
def test_opcheck_embedding(integers, dtype):
    packed = random_packed(20, 40, 4, 16, "affine")
    for indices in (torch.tensor(3), torch.tensor([1, 19]), torch.arange(6).view(2, 3).t(), torch.empty(0)):
        opcheck(OPS.embedding.default, (indices.to(integers), packed, 40), {"dtype": dtype})


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_opcheck_pack_and_unpack(bits, mapping):
    packed = random_packed(18, 40, bits, 16, mapping, bias=bits % 2 == 0)
    found = lowbit.unpack(packed)
    opcheck(OPS.pack.default, (found.codes, found.scales, found.mins, found.bias, bits, 16))
    opcheck(OPS.unpack.default, (packed,))


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("group_size", [0, 16])
def test_opcheck_quantize(mapping, group_size):
    for dtype in DTYPES:
        opcheck(OPS.quantize.default, (random_rows(18, 40).to(dtype), 4, group_size, mapping == "affine", True))


def test_values_and_the_meta_device_do_not_mix():
    """A layer on the meta device was never loaded. torch would run the fake kernel, whose result is uninitialized memory."""
    model = lowbit.quantize_(Small(), {"*": lowbit.LinearConfig(4), "table": lowbit.EmbeddingConfig(4)})
    packed, x = model.up.packed_weight, torch.randn(2, 48)
    experts = torch.stack([packed, packed])
    tokens = torch.tensor([[0], [1]])
    model.to("meta")
    calls = [
        lambda: model.up(x),
        lambda: model.up(x.clone().requires_grad_()),
        lambda: model.table(torch.tensor([1])),
        lambda: lowbit.linear(x.to("meta"), packed, 80),
        lambda: OPS.linears(x, [packed, packed.to("meta")], [80, 80]),
        lambda: lowbit.linear_experts(x, experts.to("meta"), tokens, 80),
        lambda: lowbit.linear_experts(x, experts, tokens.to("meta"), 80),
    ]
    q = torch.randn(1, 1, 2, 16)
    caches = [torch.zeros(1, 1, 16, 16) for _ in range(2)]
    calls.append(lambda: lowbit.attention(q, q, q, caches[0].to("meta"), caches[1].to("meta"), torch.tensor([0])))
    for call in calls:
        with pytest.raises(ValueError, match=r"lowbit.\w+: \w+ is on \w+ and \w+ on \w+; expected one device"):
            call()
    assert model.up(x.to("meta")).shape == (2, 80)


def test_fake_kernels_give_the_real_shapes_and_types():
    packed = random_packed(18, 40, 4, 16, "symmetric")
    for dtype in DTYPES:
        x = torch.empty(2, 0, 40, dtype=dtype, device="meta")
        y = lowbit.linear(x, packed.to("meta"), 18)
        assert (y.shape, y.dtype, y.device.type) == ((2, 0, 18), dtype, "meta")
        rows = lowbit.embedding(torch.empty(5, dtype=torch.int64, device="meta"), packed.to("meta"), 40, dtype=dtype)
        assert (rows.shape, rows.dtype, rows.device.type) == ((5, 40), dtype, "meta")


@pytest.fixture
def small():
    return lowbit.quantize_(
        Small().eval(), {"*": lowbit.LinearConfig(bits=4, group_size=16), "table": lowbit.EmbeddingConfig(bits=3)}
    )


@pytest.mark.parametrize("strict", [True, False])
def test_export(small, strict):
    indices = torch.arange(6).view(2, 3)
    batch, length = torch.export.Dim("batch", max=8), torch.export.Dim("length", max=32)
    program = torch.export.export(small, (indices,), dynamic_shapes=({0: batch, 1: length},), strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(OPS.linear.default) == 2 and targets.count(OPS.embedding.default) == 1
    buffers = {name for name, _ in program.named_buffers()}
    assert buffers >= {"up.packed_weight", "down.packed_weight", "table.packed_weight"}
    for other in (indices, torch.arange(35).view(5, 7)):
        with torch.no_grad():
            assert torch.equal(program.module()(other), small(other))


class AllLinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = lowbit.nn.Linear(random_packed(32, 32, 4, 32, "symmetric"))
        self.register_buffer("experts", torch.stack([random_packed(16, 32, 4, 32, "symmetric")] * 2))

    def forward(self, x):
        first, second = lowbit.linears(self.layer(x) + x, [self.layer.packed_weight, self.experts[0]], [32, 16])
        chosen = torch.zeros(3, 2, dtype=torch.int64)
        return first.sum() + second.sum() + lowbit.linear_experts(x, self.experts, chosen, 16).sum()


def test_graphs_traced_by_fx_have_gradients():
    model = AllLinear()
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(model)))
    x = random_rows(3, 32).requires_grad_()
    results = [call(x) for call in (model, traced)]
    assert torch.equal(*results)
    assert torch.equal(*(torch.autograd.grad(result, x)[0] for result in results))


def test_exported_program_survives_a_file(small, tmp_path):
    indices = torch.arange(6).view(2, 3)
    torch.export.save(torch.export.export(small, (indices,)), tmp_path / "small.pt2")
    loaded = torch.export.load(tmp_path / "small.pt2")
    with torch.no_grad():
        assert torch.equal(loaded.module()(indices), small(indices))
