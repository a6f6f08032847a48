"""torch.compile: whole graphs, few compilations, no extra operations around the operators."""

import contextlib

import lowbit
import pytest
import torch
from models import BACKENDS, Small
from reference import DTYPES, random_packed, random_rows
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.decomposition import select_decomp_table
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

CONFIG = {"*": lowbit.LinearConfig(bits=4, group_size=16), "table": lowbit.EmbeddingConfig(bits=3)}
SIZES = (1, 2, 3, 7, 64, 128, 512, 1, 5)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def compilations(model, dynamic, mode) -> list[int]:
    """Number of compilations after each of SIZES."""
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
    [(None, mode) for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext)]
    + [(dynamic, torch.no_grad) for dynamic in (True, False)],
)
def test_as_few_compilations_as_a_float_model(dynamic, mode):
    with torch._dynamo.config.patch(recompile_limit=len(SIZES)):
        found = compilations(lowbit.quantize_(Small().eval(), CONFIG), dynamic, mode)
        assert found == compilations(Small().eval(), dynamic, mode)
    assert (found[-1] == found[1]) == (dynamic is not False)  # dynamic shapes need only m = 1 and m = 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast_packed", [True, False], ids=["quantized, then cast", "cast, then quantized"])
def test_no_casts_and_no_copies_around_the_operators(dtype, cast_packed):
    """Inductor sees only the operators, in the model's dtype, and the model's own operations."""
    model = torch.nn.Sequential(torch.nn.Embedding(50, 48), torch.nn.Linear(48, 80), torch.nn.ReLU())
    model.append(torch.nn.Linear(80, 48, bias=False)).eval()
    config = {"*": lowbit.LinearConfig(bits=4, group_size=16), "0": lowbit.EmbeddingConfig(bits=3)}
    if cast_packed:
        model = lowbit.quantize_(model, config).to(dtype)
    else:
        model = lowbit.quantize_(model.to(dtype), config)
    graphs = []

    def capture(graph_module, example):
        graphs.append(graph_module.graph)
        return graph_module

    compiled = torch.compile(
        model, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=capture, decompositions=select_decomp_table())
    )
    indices = torch.arange(6)
    with torch.no_grad():
        assert compiled(indices).dtype == dtype
    (graph,) = graphs
    calls = [node for node in graph.nodes if node.op == "call_function"]
    linear = torch.ops.lowbit.linear.default
    assert [node.target for node in calls] == [torch.ops.lowbit.embedding.default, linear, torch.ops.aten.relu.default, linear]
    assert [node.meta["val"].dtype for node in calls] == [dtype] * 4


class Bare(torch.nn.Module):
    """Only lowbit's operators and views, without float operations that a compiler may reorder."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 48)
        self.up = torch.nn.Linear(48, 80)
        self.down = torch.nn.Linear(80, 48, bias=False)

    def forward(self, indices):
        return self.down(self.up(self.table(indices)).relu()).transpose(0, 1)


def test_compiled_results_equal_eager_ones_bit_for_bit():
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


def test_layers_before_a_compiled_layer_train():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    lowbit.quantize_(model, {"1": lowbit.LinearConfig(group_size=16)})
    x = torch.randn(5, 16)
    model(x).square().sum().backward()
    expected = model[0].weight.grad.clone()
    model[0].weight.grad = None
    torch.compile(model, fullgraph=True)(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-2, atol=1e-2)


def tangent_inside(layer, x, direction):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent


DERIVATIVES = {
    "jvp": lambda f, x, way: torch.func.jvp(f, (x,), (way,))[1],
    "dual": tangent_inside,
    "grad": lambda f, x, way: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jacrev": lambda f, x, way: torch.func.jacrev(f)(x[0]),
    "hessian": lambda f, x, way: torch.func.hessian(lambda x: f(x).square().sum())(x[0]),
    "of each row": lambda f, x, way: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "kind, several", [(kind, several) for several in (False, True) for kind in list(DERIVATIVES)[: 3 if several else None]]
)
def test_compiled_derivatives_are_those_of_eager(kind, several):
    """Derivatives were silently zero, because Dynamo does not see inputs of torch.func.grad, or tangents.

    Now Dynamo runs derivatives by torch.func in Python, outside of the graph; with fullgraph=True they are refused."""
    layer = lowbit.nn.Linear(random_packed(21, 40, 4, 16, "affine", bias=True))
    x, way = random_rows(3, 40), random_rows(3, 40, seed=1)
    function = (lambda x: lowbit.linears(x, [layer.packed_weight] * 2, [21, 21])[1]) if several else layer
    expected = DERIVATIVES[kind](function, x, way)
    assert expected.any()

    def derivative(x, way):
        return DERIVATIVES[kind](function, x, way)

    compiled, whole = (torch.compile(derivative, backend="aot_eager", fullgraph=whole) for whole in (False, True))
    torch.testing.assert_close(compiled(x, way), expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()  # otherwise the function is marked to run in Python
    if kind == "dual":
        torch.testing.assert_close(whole(x, way), expected, rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"lowbit.linears? by torch.func.* are not compiled"):
            whole(x, way)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tangents_from_outside_of_a_compiled_function(backend):
    """The inputs have no tangents while the function is traced."""
    layer = lowbit.nn.Linear(random_packed(21, 40, 4, 16, "affine"))
    x, way = random_rows(3, 40), random_rows(3, 40, seed=1)
    expected = way @ layer.dequantize().T
    compiled = torch.compile(lambda x: layer(x), backend=backend)
    compiled(x)  # compiles a graph without tangents, which must not be used for the next call
    assert torch.equal(tangent_inside(compiled, x, way), expected)
    assert torch.equal(torch.func.jvp(compiled, (x,), (way,))[1], expected)
    torch._dynamo.reset()
    whole = torch.compile(lambda x: layer(x), backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="tangents from outside of the compiled function"):
        tangent_inside(whole, x, way)


def test_compiled_operators_without_derivatives_refuse_them():
    packed = random_packed(21, 40, 4, 16, "affine")[None]
    x, q = random_rows(3, 40), random_rows(1, 1, 2, 16)

    def experts(x):
        return lowbit.linear_experts(x, packed, torch.zeros(3, 1, dtype=torch.int64), 21)

    def attention(q):
        caches = (torch.zeros(1, 1, 16, 16) for _ in range(2))
        return lowbit.attention(q, q, q, *caches, torch.zeros(1, dtype=torch.int64))

    for name, function, tensor in (("linear_experts", experts, x), ("attention", attention, q)):
        assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(tensor), function(tensor))
        for call in (
            lambda x: torch.func.jvp(function, (x,), (x,))[1],
            lambda x: tangent_inside(function, x, x),
            torch.func.grad(lambda x: function(x).sum()),
        ):
            with pytest.raises(torch._dynamo.exc.Unsupported, match=f"lowbit.{name} (by torch.func|has no derivatives)"):
                torch.compile(call, backend="aot_eager", fullgraph=True)(tensor)
            torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager")  # gradients by backward() are compiled
    found = [f(x := x.detach().requires_grad_()).sum().backward() or x.grad for f in (experts, compiled)]
    assert torch.equal(*found) and found[0].any()


def through_autocast(function, x):
    with torch.autocast("cpu", torch.bfloat16):
        return function(torch.nn.functional.linear(x, torch.eye(40)))


def through_checkpoint(function, x, use_reentrant):
    x = x.clone().requires_grad_()
    checkpoint(function, x, use_reentrant=use_reentrant).square().sum().backward()
    return x.grad


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_operations_that_torch_adds_around_a_layer(backend):
    """Each wrapper is right in eager and compiled; under autocast the layer has the dtype of torch's linear layers."""
    layer = lowbit.nn.Linear(random_packed(21, 40, 4, 16, "affine", bias=True))
    table = lowbit.nn.Embedding(layer.packed_weight)
    x, tokens = random_rows(3, 40), torch.arange(6).view(2, 3)
    called, looked_up = (each if backend == "none" else torch.compile(each, backend=backend) for each in (layer, table))
    assert torch.equal(torch.vmap(called)(x), layer(x))
    assert torch.equal(torch.vmap(called, in_dims=1)(x.T), layer(x))
    assert torch.equal(torch.vmap(looked_up)(tokens), table(tokens))
    assert torch.equal(through_autocast(called, x), layer(x.bfloat16()))
    expected = torch.func.grad(lambda x: layer(x).square().sum())(x)
    for use_reentrant in (True, False):
        assert torch.equal(through_checkpoint(called, x, use_reentrant), expected)
    with torch.inference_mode():
        assert torch.equal(called(x.clone()), layer(x))
    other = random_packed(21, 40, 4, 16, "affine", bias=True, seed=1)
    swapped = torch.func.functional_call(called, {name: other for name, _ in called.named_buffers()}, (x,))
    assert torch.equal(swapped, lowbit.linear(x, other, 21)) and not torch.equal(swapped, layer(x))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(called(x), layer(x)) and torch.equal(looked_up(tokens), table(tokens))
    finally:
        torch.use_deterministic_algorithms(False)
