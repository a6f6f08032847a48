"""Properties of every operator registered with PyTorch: the tensors that it accepts, and in-place changes."""

import re

import lowbit
import pytest
import torch
from lowbit.layers.computed_tensor import ComputedTensor
from lowbit.operators.recurrence import state_shape
from torch.testing._internal.optests import fake_check

NAMES = sorted(
    name.removeprefix("lowbit::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("lowbit::") and not name.startswith("lowbit::_traced_")
)
FUNCTIONAL = [name for name in NAMES if not name.endswith(".out")]
OUT = [name for name in NAMES if name.endswith(".out")]


def overload(name):
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.lowbit, packet), variant or "default")


def call(name):
    """The arguments of a call, with the same values each time."""
    random = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=random)

    weight = rand(32, 64)
    codes, scales, mins = torch.ops.lowbit.quantize(weight, 4, 32, True, False)
    packed = torch.ops.lowbit.pack(codes, scales, mins, rand(32), 4, 32)
    caches, start = [torch.zeros(1, 2, 48, 16) for _ in range(2)], torch.tensor([2])
    window_caches = [torch.zeros(1, 2, 1040, 16) for _ in range(2)]
    q, k, v = rand(1, 4, 3, 16), rand(1, 2, 3, 16), rand(1, 2, 3, 16)
    heads, state = [rand(1, 3, 2, 16) for _ in range(3)], rand(1, 2, 1, 16, 16)
    calls = {
        "linear": (rand(5, 64), packed, 32),
        "linears": (rand(5, 64), [packed, packed.clone()], [32, 32]),
        "linear_experts": (rand(5, 64), torch.stack([packed, packed]), torch.tensor([[0], [1], [1], [0], [1]]), 32),
        "embedding": (torch.tensor([3, 1]), packed, 64),
        "attention": (q, k, v, *caches, start, 1.0, 0, 0.0, rand(4)),
        "window_attention": (q, k, v, *window_caches, torch.tensor([0, 4]), start, 1.0, 300, 0.0, rand(4)),
        "linear_attention": (*heads, -rand(1, 3, 2).abs(), rand(1, 3, 2), state, start, 1.0),
        "short_conv": (rand(2, 3, 16), rand(4, 16), rand(16), rand(2, 3, 16), start),
        "masked_attention": (q, k, v, torch.tensor([[[1, 0, 3]] * 3], dtype=torch.int32), 1.0),
        "activate": (rand(5, 64), rand(5, 64), 0),
        "rms_norm": (rand(5, 64), rand(64), 1e-6),
        "layer_norm": (rand(5, 64), rand(64), rand(64), 1e-5),
        "rotary": (q, k, rand(1, 3, 16), rand(1, 3, 16)),
        "pack": (codes, scales, mins, rand(32), 4, 32),
        "quantize": (weight, 4, 32, True, False),
        "search_groups": (weight, rand(32, 64).abs(), 4, True),
        "error_feedback": (rand(8, 16), torch.eye(8), rand(8, 8), rand(1, 16).abs(), rand(1, 16), None, 4),
        "unpack": (packed,),
    }
    return list(calls[name])


def places(arguments):
    """Positions of the tensors of a call: argument index, and element index in a list."""
    for at, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            yield at, None
        elif isinstance(argument, list) and isinstance(argument[0], torch.Tensor):
            yield from ((at, element) for element in range(len(argument)))


def at(arguments, place):
    return arguments[place[0]] if place[1] is None else arguments[place[0]][place[1]]


def replaced(arguments, place, tensor):
    arguments = [list(each) if isinstance(each, list) else each for each in arguments]
    if place[1] is None:
        arguments[place[0]] = tensor
    else:
        arguments[place[0]][place[1]] = tensor
    return arguments


def changed(name):
    """Indices of the arguments that an operator changes, except `out`."""
    parameters = overload(name)._schema.arguments
    return [at for at, each in enumerate(parameters) if each.alias_info and each.alias_info.is_write and each.name != "out"]


def listed(result):
    return list(result) if isinstance(result, tuple | list) else [result]


def written(name, arguments):
    return [arguments[at].clone() for at in changed(name)]


def same(a, b):
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def expected(name):
    arguments = call(name)
    return listed(overload(name)(*arguments)) + written(name, arguments)


CHANGING = [name for name in FUNCTIONAL if changed(name)]
EVERY_TENSOR = [(name, place) for name in FUNCTIONAL for place in places(call(name))]


def test_there_is_a_call_of_each():
    assert len(FUNCTIONAL) >= 18 and CHANGING == ["attention", "linear_attention", "short_conv", "window_attention"]
    for name in FUNCTIONAL:
        tensors = [each for each in overload(name)._schema.arguments if "Tensor" in str(each.type)]
        given = {at for at, _ in places(call(name))}
        assert len(tensors) - len(given) <= 1, name  # levels exclude mins


def in_sparse(x):
    return x.to_sparse()


def in_mkldnn(x):
    return x.float().to_mkldnn() if x.ndim else None


def in_csr(x):
    return x.reshape(1, -1).to_sparse_csr()


def nested(x):
    return torch.nested.nested_tensor([x, x])


def jagged(x):
    return torch.nested.nested_tensor([x, x], layout=torch.jagged)


def shortened(x):
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


def quantized(x):
    return torch._empty_affine_quantized(x.shape, scale=1.0, zero_point=0, dtype=torch.quint8)


def scales(x):
    return torch.ones(x.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def complex_(x):
    return torch.complex(x.float(), x.float()).conj()


REFUSED = {
    in_sparse: "is sparse, or has another layout than torch.strided; expected a dense tensor",
    in_csr: "is sparse, or has another layout", in_mkldnn: "is sparse, or has another layout",
    jagged: "is (nested|sparse), or has", nested: "is nested, or has symbolic sizes; expected a dense tensor",
    shortened: r"has shape \[.*\], which needs \d+ bytes, and a storage of \d+", quantized: "has dtype quint8; expected",
    scales: "has dtype float8_e8m0fnu; expected one of torch's usual types", complex_: "has dtype complex64; expected",
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), EVERY_TENSOR)
@pytest.mark.parametrize("other", [torch.Tensor.cpu, lambda x: x.to("meta"), *REFUSED])
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions", "ignore:.*(Sparse CSR|nested tensors)")
def test_other_tensors_are_refused(name, place, other):
    arguments = call(name)
    tensor = other(at(arguments, place))
    if tensor is None:
        return
    before = written(name, arguments)
    arguments = replaced(arguments, place, tensor)
    if other is torch.Tensor.cpu:
        assert same(listed(overload(name)(*arguments)) + written(name, arguments), expected(name))
        return
    if tensor.is_meta and len(list(places(arguments))) == 1:
        if name == "quantize":  # called for its shapes
            assert all(result.is_meta for result in overload(name)(*arguments))
        else:
            with pytest.raises(RuntimeError, match="data-dependent shape"):
                overload(name)(*arguments)
        return
    parameter = overload(name)._schema.arguments[place[0]].name
    argument = parameter.removesuffix("s") if place[1] is not None else parameter
    with pytest.raises(ValueError, match=rf"^{argument} {REFUSED[other]}" if other in REFUSED else None) as caught:
        overload(name)(*arguments)
    if tensor.is_meta:
        assert re.search(rf"lowbit.{name}: \w+ is on (cpu|meta) and \w+ on (cpu|meta); expected one device", str(caught.value))
    rest = [arguments[number] for number in changed(name)]
    assert all(torch.equal(a, b) for a, b in zip(before, rest, strict=True) if b is not tensor)


@pytest.mark.parametrize("other", [in_sparse, nested, shortened])
def test_other_outputs_are_refused(other):
    for name in OUT:
        arguments = call(name.removesuffix(".out"))
        outputs = {
            each.name: other(torch.ones(5, 64))
            for each in overload(name)._schema.arguments
            if each.name.split("_")[-1] == "out"
        }
        with pytest.raises(ValueError, match=rf"^(q_)?out {REFUSED[other]}"):
            overload(name)(*arguments, **outputs)


@pytest.mark.parametrize(("name", "place"), EVERY_TENSOR)
def test_tensors_without_memory_of_their_own(name, place):
    """Tensors with computed or lazily negated values: the values are used, and changing them is an error."""
    tensor = at(call(name), place)
    others = [ComputedTensor(lambda: tensor.clone(), tensor.shape, tensor.dtype, tensor.device)]
    if tensor.is_floating_point():
        others.append(torch._neg_view(-tensor))
    for other in others:
        arguments = replaced(call(name), place, other)
        if place[0] in changed(name):
            with pytest.raises(RuntimeError):
                overload(name)(*arguments)
        else:
            assert same(listed(overload(name)(*arguments)) + written(name, arguments), expected(name))


@pytest.mark.parametrize("name", CHANGING)
def test_changed_tensors_share_no_memory(name):
    for number in changed(name):
        for place in places(call(name)):
            if place[0] == number:
                continue
            arguments = call(name)
            state, other = arguments[number], at(arguments, place)
            if state.dtype != other.dtype:
                other = None
            memory = torch.zeros(state.numel() + (other.numel() if other is not None else 0), dtype=state.dtype)
            arguments[number] = memory[: state.numel()].view(state.shape)
            if other is None:
                continue
            arguments = replaced(arguments, place, memory[state.numel() - 1 :][: other.numel()].view(other.shape))
            if (name, overload(name)._schema.arguments[place[0]].name) == ("window_attention", "start"):
                arguments[number].zero_()
                overload(name)(*arguments)  # `start` may be held[1:]
                continue
            with pytest.raises(ValueError, match="share memory"):
                overload(name)(*arguments)
            assert not memory.any()
        arguments = call(name)
        arguments[number] = arguments[number][..., :1].expand(arguments[number].shape)
        with pytest.raises(ValueError, match="not contiguous"):
            overload(name)(*arguments)


@pytest.mark.parametrize("name", CHANGING)
def test_a_change_is_a_new_version(name):
    """Like torch's in-place operators: a backward pass that needs the old values raises an error."""
    for number in changed(name):
        arguments = call(name)
        tensor = arguments[number]
        before = tensor._version
        with torch.no_grad():
            overload(name)(*arguments)
        assert tensor._version > before
        if not tensor.is_floating_point():
            continue
        arguments = call(name)
        factor = torch.ones_like(arguments[number], requires_grad=True)
        loss = (arguments[number] * factor).sum()
        overload(name)(*arguments)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        for graph in (lambda x: x.requires_grad_(), lambda x: x.requires_grad_() * 1):
            arguments = call(name)
            arguments[number] = graph(arguments[number])
            with pytest.raises(RuntimeError, match="changed in place"):
                overload(name)(*arguments)
            assert torch.equal(arguments[number], call(name)[number])
        with torch.inference_mode():
            arguments = call(name)
            result = listed(overload(name)(*arguments)) + written(name, arguments)
        assert same(result, expected(name))


@pytest.mark.parametrize("name", sorted({*FUNCTIONAL} - {"unpack"}))  # its sizes are in its bytes
def test_fake_results_are_as_the_real_ones(name):
    fake_check(overload(name), call(name), {})


@pytest.mark.parametrize("name", CHANGING)
def test_programs_change_what_the_operator_changes(name):
    numbers = changed(name)

    class Module(torch.nn.Module):
        def forward(self, *arguments):
            return overload(name)(*arguments)

    def run(program):
        arguments = call(name)
        result = listed(program(*arguments)) + written(name, arguments)
        return same(result, expected(name))

    assert run(torch.compile(Module(), backend="aot_eager", fullgraph=True))
    with torch.no_grad():
        exported = torch.export.export(Module(), tuple(call(name))).run_decompositions()
    assert len(exported.graph_signature.user_inputs_to_mutate) == len(numbers) and run(exported.module())


@pytest.mark.parametrize("name", OUT)
def test_out(name):
    functional = name.removesuffix(".out")
    results = expected(functional)
    names = [each.name for each in overload(name)._schema.arguments if each.kwarg_only and each.alias_info]
    outs = {each: torch.empty_like(result) for each, result in zip(names, results, strict=False)}
    arguments, versions = call(functional), [out._version for out in outs.values()]
    returned = listed(overload(name)(*arguments, **outs))
    assert [each.data_ptr() for each in returned] == [out.data_ptr() for out in outs.values()]
    assert all(out._version > version for out, version in zip(outs.values(), versions, strict=True))
    assert same([*outs.values(), *written(functional, arguments)], results)
    for out_name, out in outs.items():
        for bad, message in [
            (torch.empty(7, dtype=out.dtype), f"{out_name} has shape"),
            (torch.empty_like(out, dtype=torch.float64), f"{out_name} has dtype float64"),
        ]:
            with pytest.raises(ValueError, match=message):
                overload(name)(*call(functional), **outs | {out_name: bad})
        for place in places(call(functional)):
            arguments = call(functional)
            tensor = at(arguments, place)
            if tensor.dtype == out.dtype and tensor.is_contiguous():
                memory = torch.zeros(tensor.numel() + out.numel(), dtype=out.dtype)
                arguments = replaced(arguments, place, memory[: tensor.numel()].view(tensor.shape))
                over = memory[tensor.numel() - 1 :][: out.numel()].view(out.shape)
                with pytest.raises(ValueError, match="out and another argument share memory"):
                    overload(name)(*arguments, **outs | {out_name: over})
    if len(outs) > 1:
        with pytest.raises(ValueError, match=" and ".join(names) + " share memory"):
            overload(name)(*call(functional), **dict.fromkeys(names, torch.empty_like(results[0])))


def test_every_operator_has_a_kernel():
    for name in NAMES:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lowbit::{name}", "CPU"), name


def test_an_output_that_is_too_large():
    packed = call("linear")[1]
    one = torch.zeros(1).expand(2**40, 64)
    with pytest.raises(MemoryError, match=r"no memory for an output of shape \[1099511627776, 32\]"):
        torch.ops.lowbit.linear(one, packed, 32)
    with pytest.raises(ValueError, match=r"the output has shape .*; expected less than 2\^60 elements"):
        torch.ops.lowbit.linear(torch.zeros(4, 64), packed, 2**60)


def test_autocast_as_torch():
    """lowbit uses autocast's dtype for the same operations as torch."""
    layer = torch.nn.Linear(64, 32)
    packed = lowbit.nn.Linear.from_float(layer, lowbit.LinearConfig(4))
    experts = lowbit.nn.LinearExperts(torch.stack([packed.packed_weight] * 2))
    chosen = torch.zeros(3, 1, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16):
        for x in (torch.randn(3, 64), torch.randn(3, 64).bfloat16()):
            with torch.autocast("cpu", dtype):
                assert packed(x).dtype is layer(x).dtype is dtype
                rounded = x.to(dtype)
                assert torch.equal(lowbit.linears(x, [packed.packed_weight], [32])[0], packed(x))
                assert torch.equal(experts(x, chosen)[:, 0], packed(x))
            assert torch.equal(packed(rounded), experts(rounded, chosen)[:, 0])
        with torch.autocast("cpu", dtype):
            q, k, v = (torch.randn(1, 2, 3, 16) for _ in range(3))
            assert torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype is dtype
            assert lowbit.masked_attention(q, k, v).dtype is dtype
            x = torch.randn(3, 64, requires_grad=True)
            packed(x).sum().backward()
            assert x.grad is not None and x.grad.dtype is torch.float32


def cached_calls() -> dict:
    """Operators with a cache or a state: a function of the float inputs that autocast casts, and these inputs."""
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    start = torch.zeros(1, dtype=torch.int64)
    caches = lambda dtype: [torch.zeros(1, 2, 1024, 32, dtype=dtype) for _ in range(2)]  # noqa: E731
    sinks, q, k = draw(4), draw(1, 4, 3, 32), draw(1, 2, 3, 32)

    def attention(q, k, v, sinks):
        return lowbit.attention(q, k, v, *caches(torch.float32), start, sinks=sinks)

    def window(q, k, v, sinks):
        held = torch.zeros(2, dtype=torch.int64)
        return lowbit.window_attention(q, k, v, *caches(torch.float16), held, start, window=8, sinks=sinks)

    def recurrent(q, k, v, decay, beta):
        state = torch.zeros(state_shape(1, 4, 32, 32))
        return lowbit.linear_attention(q, k, v, decay, state, start, beta=beta)

    def convolution(x, weight, bias):
        return lowbit.short_conv(x, weight, torch.zeros(1, 3, 16, dtype=torch.bfloat16), start, bias=bias)

    rows = [each.transpose(1, 2).contiguous() for each in (k, k, q)]
    return {
        "attention": (attention, [q, k, k, sinks]), "window_attention": (window, [q, k, k, sinks]),
        "linear_attention": (recurrent, [*rows, -draw(1, 3, 4).abs(), draw(1, 3, 4).sigmoid()]),
        "short_conv": (convolution, [draw(1, 5, 16), draw(4, 16), draw(16)]),
    }  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", cached_calls())
def test_autocast_beside_caches(name, compiled):
    """Float inputs of any dtypes are cast; caches and states keep their dtype, which short_conv's inputs are cast to."""
    function, floats = cached_calls()[name]
    called = torch.compile(function, backend="aot_eager") if compiled else function
    dtype = torch.bfloat16 if name == "short_conv" else torch.float16
    rounded = [each.to(dtype) for each in floats]
    mixed = [rounded[0].float(), *rounded[1:]]
    if name == "linear_attention":  # its decay and beta are float32
        mixed[3:] = [each.bfloat16() for each in floats[3:]]
        rounded[3:] = [each.float() for each in mixed[3:]]
    expected = function(*rounded)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        found = called(*mixed)
    assert found.dtype is dtype
    assert torch.equal(found, expected)
