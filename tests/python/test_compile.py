"""torch.compile: whole graphs, few compilations, nothing around the operators."""

import contextlib

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.decomposition import select_decomp_table

import lowbit
from models import Small
from reference import DTYPES

CONFIG = {"*": lowbit.LinearConfig(bits=4, group_size=16), "table": lowbit.EmbeddingConfig(bits=3)}
SIZES = (1, 2, 3, 7, 64, 128, 512, 1, 5)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def compilations(model, dynamic, mode) -> list[int]:
    """How many there were after each of SIZES."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
    counts = []
    with mode():
        for m in SIZES:
            indices = torch.arange(m) * 7 % 50
            torch.testing.assert_close(compiled(indices), model(indices), rtol=1e-2, atol=1e-2)
            counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize(
    "dynamic, mode",
    [(d, mode) for d in (None, True) for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext)]
    + [(False, torch.no_grad)],
)
def test_as_few_compilations_as_a_float_model(dynamic, mode):
    with torch._dynamo.config.patch(recompile_limit=len(SIZES)):
        found = compilations(lowbit.quantize_(Small().eval(), CONFIG), dynamic, mode)
        assert found == compilations(Small().eval(), dynamic, mode)
    assert (found[-1] == found[1]) == (dynamic is not False)  # m = 1 and m = 2 are all that dynamic shapes need


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("after", [True, False], ids=["converted", "quantised"])
def test_no_casts_and_no_copies_around_the_operators(dtype, after):
    """What Inductor gets to see: the operators, in the model's dtype, and what the model itself does."""
    model = torch.nn.Sequential(torch.nn.Embedding(50, 48), torch.nn.Linear(48, 80), torch.nn.ReLU())
    model.append(torch.nn.Linear(80, 48, bias=False)).eval()
    config = {"*": lowbit.LinearConfig(bits=4, group_size=16), "0": lowbit.EmbeddingConfig(bits=3)}
    if after:
        model = lowbit.quantize_(model, config).to(dtype)
    else:
        model = lowbit.quantize_(model.to(dtype), config)
    graphs = []

    def capture(graph_module, example):
        graphs.append(graph_module.graph)
        return graph_module

    compiled = torch.compile(
        model, fullgraph=True, dynamic=True,
        backend=aot_autograd(fw_compiler=capture, decompositions=select_decomp_table()),
    )
    indices = torch.arange(6)
    with torch.no_grad():
        assert compiled(indices).dtype == dtype
    (graph,) = graphs
    calls = [node for node in graph.nodes if node.op == "call_function"]
    linear = torch.ops.lowbit.linear.default
    assert [node.target for node in calls] == [
        torch.ops.lowbit.embedding.default, linear, torch.ops.aten.relu.default, linear
    ]
    assert [node.meta["val"].dtype for node in calls] == [dtype] * 4


class Bare(torch.nn.Module):
    """Nothing but lowbit's operators and views: nothing whose float operations a compiler may reorder."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 48)
        self.up = torch.nn.Linear(48, 80)
        self.down = torch.nn.Linear(80, 48, bias=False)

    def forward(self, indices):
        return self.down(self.up(self.table(indices)).relu()).transpose(0, 1)


def test_compiled_is_eager_bit_for_bit():
    model = lowbit.quantize_(Bare().eval(), CONFIG)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for shape in ((2, 3), (4, 7), (1, 5)):  # the second shape makes the sizes dynamic
            indices = torch.arange(shape[0] * shape[1]).view(shape)
            assert torch.equal(compiled(indices), model(indices))


def test_compiled_follows_a_loaded_state_dict():
    a, b = (lowbit.quantize_(Bare().eval(), {"*": lowbit.LinearConfig(bits=bits, group_size=16)}) for bits in (4, 2))
    compiled = torch.compile(a, fullgraph=True, backend="eager")
    indices = torch.arange(6).view(2, 3)
    with torch.no_grad():
        assert torch.equal(compiled(indices), a(indices))
        b.table.load_state_dict(a.table.state_dict())
        a.load_state_dict(b.state_dict())
        assert torch.equal(compiled(indices), b(indices))


def test_what_comes_before_a_compiled_layer_trains():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    lowbit.quantize_(model, {"1": lowbit.LinearConfig(group_size=16)})
    x = torch.randn(5, 16)
    model(x).square().sum().backward()
    expected = model[0].weight.grad.clone()
    model[0].weight.grad = None
    torch.compile(model, fullgraph=True)(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-2, atol=1e-2)
