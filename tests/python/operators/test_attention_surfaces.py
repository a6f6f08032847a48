"""Attention on every surface: compiled, in .pt2 and .pte files, with caches that persist between calls."""

import math

import lowbit
import pytest
import torch
from lowbit.operators.ops import cache_storage, cache_width
from reference import assert_same_bits
from torch._inductor.utils import run_and_get_code

pytestmark = [
    pytest.mark.first,
    *(
        pytest.mark.filterwarnings("ignore:" + what)
        for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental", "Mutation on a buffer")
    ),
]


def at(start: int) -> torch.Tensor:
    return torch.tensor([start])


class Layers(torch.nn.Module):
    """Layers with only attention, so that every surface gives the same bits. Input [b, t, heads, width].

    The second has a window, a cap and sinks, the later ones have smaller caches.
    """

    CACHES = (None, None, (torch.int8, torch.int4), torch.bfloat16, torch.int4)

    def __init__(self, heads=4, kv_heads=2, width=32, max_length=64, dtype=torch.float32):
        super().__init__()
        self.kv_heads, self.groups = kv_heads, heads // kv_heads
        for layer, cache in enumerate(self.CACHES):
            pair = cache if isinstance(cache, tuple) else (cache or dtype,) * 2
            for name, kind in zip(("keys", "values"), pair, strict=True):
                shape = (1, kv_heads, max_length, cache_width(width, kind))
                self.register_buffer(f"{name}{layer}", torch.zeros(shape, dtype=cache_storage(kind)), False)
        self.register_buffer("sinks", torch.linspace(-2, 3, heads, dtype=dtype))

    def forward(self, x, start):
        for layer in range(len(self.CACHES)):
            new = x[:, :, :: self.groups].transpose(1, 2)
            caches = getattr(self, f"keys{layer}"), getattr(self, f"values{layer}")
            more = {"window": 20, "softcap": 3.0, "sinks": self.sinks} if layer == 1 else {}
            x = lowbit.attention(x.transpose(1, 2), new, new, *caches, start, scale=0.5, **more)
        return x


def steps(function, x, lengths):
    start, out = 0, []
    for length in lengths:
        out.append(function(x[:, start : start + length].contiguous(), at(start)).clone())
        start += length
    return torch.cat(out, 1)


LENGTHS = [9, 1, 1, 5, 1, 30, 1]


def test_compiled():
    torch._dynamo.reset()
    x = torch.randn(1, sum(LENGTHS), 4, 32)
    expected = steps(Layers(), x, LENGTHS)
    model = Layers()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, x[:, :9], at(0))
        body = code[code.index("def call(") :]
        assert body.count("torch.ops.lowbit.attention.default(") == 5
        # No tensor is as large as a cache, and no operator copies one.
        assert "copy" not in body and "clone" not in body and "empty_strided_cpu((1, 2, 64" not in body
        assert_same_bits(steps(compiled, x, LENGTHS), expected)
    assert torch.equal(model.values0[:, :, : x.shape[1]], x[:, :, ::2].transpose(1, 2))


@pytest.mark.more
def test_pt2_keeps_its_caches_between_calls(tmp_path):
    x = torch.randn(1, sum(LENGTHS), 4, 32)
    model = Layers()
    expected = steps(model, x, LENGTHS)
    lowbit.export_pt2(
        Layers(), (x[:, :3], at(0)), tmp_path / "m.pt2", dynamic_shapes=({1: torch.export.Dim("t", max=64)}, None)
    )
    loaded = torch._inductor.aoti_load_package(str(tmp_path / "m.pt2"))
    for _ in range(2):
        assert_same_bits(steps(loaded, x, LENGTHS), expected)
    with pytest.raises(RuntimeError):
        loaded(x[:, :9], at(60))


@pytest.fixture(scope="module")
def program(executorch, tmp_path_factory):
    path = tmp_path_factory.mktemp("attention") / "m.pte"
    shapes = ({1: torch.export.Dim("t", max=48)}, None)
    lowbit.export_pte(Layers(), (torch.zeros(1, 3, 4, 32), at(0)), path, dynamic_shapes=shapes)
    return path


@pytest.mark.more
def test_pte_keeps_its_caches_between_calls(executorch, program):
    x = torch.randn(1, sum(LENGTHS), 4, 32)
    expected = steps(Layers(), x, LENGTHS)
    methods = [executorch.load_program(program).load_method("forward") for _ in range(2)]
    for method in methods * 2:
        assert_same_bits(steps(lambda *inputs, method=method: method.execute(inputs)[0], x, LENGTHS), expected)


def test_pte_copies_no_cache(executorch, program):
    from executorch.exir._serialize._program import deserialize_pte_binary

    (plan,) = deserialize_pte_binary(program.read_bytes()).program.execution_plan
    names = {f"{operator.name}.{operator.overload}" for operator in plan.operators}
    assert "lowbit::attention.out" in names and not any("copy_" in name or "clone" in name for name in names), names
    shapes = [tuple(value.val.sizes) for value in plan.values if hasattr(value.val, "sizes")]
    found = [shapes.count((1, 2, 64, width)) for width in (32, 36, 20)]  # the caches
    assert found == [6, 1, 3]
    assert all(math.prod(shape) <= math.prod((1, 48, 4, 32)) for shape in shapes if shape[:3] != (1, 2, 64))


def test_pte_with_a_wrong_start_fails_the_call(executorch, program, capfd):
    method = executorch.load_program(program).load_method("forward")
    x = torch.randn(1, 20, 4, 32)
    expected = steps(Layers(), x, [20])
    (before,) = method.execute((x[:, :10].contiguous(), at(0)))
    assert_same_bits(before, expected[:, :10])
    for start in (-1, 55, 2**62):
        with pytest.raises(RuntimeError, match="0x12"):
            method.execute((x[:, 10:].contiguous(), at(start)))
        message = f"lowbit::attention.out: start is {start} with 10 new positions; expected 0 to 54"
        assert message in capfd.readouterr().err
    assert_same_bits(method.execute((x[:, 10:].contiguous(), at(10)))[0], expected[:, 10:])
