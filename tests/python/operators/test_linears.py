"""lowbit.linears: several linear layers of the same input, in eager mode, under compile, AOTInductor and ExecuTorch."""

import lowbit
import pytest
import torch
from reference import DTYPES, assert_same_bits, random_packed, random_rows

KINDS = ((20, 4, 32, "symmetric"), (33, 8, 32, "affine"), (5, 2, 48, "affine"), (16, 1, None, "symmetric"))
K = 100


def weights() -> tuple[list[torch.Tensor], list[int]]:
    packed = [random_packed(n, K, bits, group_size, mapping, bias=True) for n, bits, group_size, mapping in KINDS]
    return packed, [n for n, *_ in KINDS]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        packed, self.sizes = weights()
        for i, weight in enumerate(packed):
            self.register_buffer(f"packed_{i}", weight)

    def forward(self, x):
        results = lowbit.linears(x, [getattr(self, f"packed_{i}") for i in range(len(self.sizes))], self.sizes)
        return torch.cat([result * 2 for result in results], -1)

    def one_by_one(self, x):
        each = [lowbit.linear(x, getattr(self, f"packed_{i}"), n) * 2 for i, n in enumerate(self.sizes)]
        return torch.cat(each, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(K,), (1, K), (3, 5, K), (0, K)])
def test_the_bits_of_single_calls(dtype, shape):
    packed, sizes = weights()
    x = random_rows(*shape).to(dtype)
    results = lowbit.linears(x, packed, sizes)
    assert len(results) == len(sizes)
    for result, weight, n in zip(results, packed, sizes):
        assert result.dtype == dtype and result.shape == (*shape[:-1], n)
        assert_same_bits(result.contiguous(), lowbit.linear(x, weight, n))


def test_gradients_are_those_of_single_calls():
    packed, sizes = weights()
    grads = []
    for together in (True, False):
        x = random_rows(3, K).requires_grad_()
        outputs = lowbit.linears(x, packed, sizes) if together else [lowbit.linear(x, *z) for z in zip(packed, sizes)]
        sum((output * (i + 1)).sum() for i, output in enumerate(outputs)).backward()
        grads.append(x.grad)
    assert_same_bits(*grads)


@pytest.mark.parametrize(
    "packed, sizes, message",
    [
        (slice(0, 2), [20], "there are 2 packed_weights and 1 out_features; expected equal numbers"),
        (slice(0, 0), [], "there are 0 out_features; expected 1 to 16"),
        (slice(0, 2), [20, 34], "out_features is 34; expected 33"),
    ],
)
def test_refusals(packed, sizes, message):
    for x in (random_rows(3, K), random_rows(3, K).requires_grad_()):
        with pytest.raises(ValueError, match=message):
            lowbit.linears(x, weights()[0][packed], sizes)


def test_inputs_that_differ_are_refused():
    packed, sizes = weights()
    with pytest.raises(ValueError, match="x has shape .*; expected"):
        lowbit.linears(random_rows(3, K), [packed[0], random_packed(20, K + 1, 4, 32, "symmetric")], [20, 20])


def test_compile_and_aot(tmp_path):
    model = Model()
    x = random_rows(3, K)
    expected = model.one_by_one(x)
    assert_same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=64)},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    assert_same_bits(loaded(x), expected)
    assert_same_bits(loaded(random_rows(1, K)), model.one_by_one(random_rows(1, K)))


def test_executorch():
    pytest.importorskip("executorch")
    import lowbit.executorch
    from executorch.exir import to_edge
    from executorch.runtime import Runtime

    lowbit.executorch.register()
    model = Model()
    x = random_rows(3, K)
    program = to_edge(torch.export.export(model, (x,))).to_executorch()
    (result,) = Runtime.get().load_program(program.buffer).load_method("forward").execute([x])
    assert_same_bits(result, model.one_by_one(x))
