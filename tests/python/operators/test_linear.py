"""lowbit.linear has the bits of the reference, for every width, mapping, dtype and kind of shape."""

import lowbit
import pytest
import reference
import torch
from reference import DTYPES, MAPPINGS, WEIGHTS, WIDTHS, assert_same_bits, random_packed, random_rows

# n, k, group size: one row, odd inputs, less than a block, short last groups, more rows than a panel, several panels.
MATRICES = [
    (1, 1, 16),
    (1, 17, None),
    (5, 16, 16),
    (16, 32, 32),
    (17, 17, 16),
    (33, 100, 48),
    (40, 130, 128),
    (64, 256, 32),
    (3, 300, None),
    (96, 288, 144),
]
every_weight = pytest.mark.parametrize("bits", WIDTHS)
every_kind = pytest.mark.parametrize("bits, mapping", WEIGHTS)
both_mappings = pytest.mark.parametrize("mapping", MAPPINGS)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices(bits, mapping, dtype):
    for n, k, group_size in MATRICES:
        for bias in (False, True):
            packed = random_packed(n, k, bits, group_size, mapping, bias=bias)
            for m in (1, 2, 3, 4, 5, 13):
                x = (3 * random_rows(m, k, seed=m)).to(dtype)
                assert_same_bits(lowbit.linear(x, packed, n), reference.linear(x, packed))


@every_kind
def test_large_enough_for_all_threads_and_tiles(bits, mapping):
    packed = random_packed(530, 544, bits, 32, mapping, bias=True)
    x = random_rows(37, 544)
    torch.set_num_threads(2)
    assert_same_bits(lowbit.linear(x, packed, 530), reference.linear(x, packed))


@both_mappings
def test_more_rows_than_one_chunk_of_scratch_memory(mapping):
    # 8 MiB of quantized activations at a time: some 1800 rows of 4096 inputs.
    packed = random_packed(3, 4096, 4, 128, mapping)
    x = random_rows(2100, 4096)
    torch.set_num_threads(2)
    assert_same_bits(lowbit.linear(x, packed, 3), reference.linear(x, packed))


@every_weight
def test_largest_sums_of_a_group(bits):
    # Groups of any length, all products at their largest: 64 * 127 * 255 per segment.
    k = 65600
    codes = torch.full((2, k), 2**bits - 1, dtype=torch.uint8)
    x = torch.full((1, k), -1.0)
    symmetric = lowbit.pack(codes, torch.ones(2, 1), bits=bits, group_size=None)
    assert_same_bits(lowbit.linear(x, symmetric, 2), reference.linear(x, symmetric))
    affine = lowbit.pack(codes, torch.ones(2, 1), torch.ones(2, 1), bits=bits, group_size=None, mapping="affine")
    assert_same_bits(lowbit.linear(x, affine, 2), reference.linear(x, affine))
    assert_same_bits(lowbit.linear(-x, affine, 2), reference.linear(-x, affine))


@every_kind
@pytest.mark.parametrize("shape", [(40,), (0, 40), (3, 0, 40), (2, 3, 40), (2, 1, 3, 2, 40), (1,) * 15 + (40,)], ids=str)
def test_leading_dimensions(bits, mapping, shape):
    packed = random_packed(18, 40, bits, 16, mapping, bias=True)
    x = random_rows(*shape)
    y = lowbit.linear(x, packed, 18)
    assert_same_bits(y, reference.linear(x, packed))
    assert y.is_contiguous()


STRIDED = {
    "transposed": lambda dtype: random_rows(40, 6).to(dtype).t(),
    "column slice": lambda dtype: random_rows(6, 50).to(dtype)[:, 3:43],
    "every other column": lambda dtype: random_rows(6, 80).to(dtype)[:, 1::2],
    "every other row": lambda dtype: random_rows(12, 40).to(dtype)[::2],
    "one row for all": lambda dtype: random_rows(1, 40).to(dtype).expand(5, 40),
    "one value for all": lambda dtype: random_rows(1, 1).to(dtype).expand(5, 40),
    "permuted": lambda dtype: random_rows(3, 40, 4).to(dtype).permute(2, 0, 1),
    "unaligned": lambda dtype: random_rows(241).to(dtype)[1:].view(6, 40),
    "negated view": lambda dtype: torch.complex(random_rows(6, 40), random_rows(6, 40, seed=1)).conj().imag.to(dtype),
    "large and transposed": lambda dtype: random_rows(40, 1000).to(dtype).t(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STRIDED)
def test_strides_do_not_matter(name, dtype):
    x = STRIDED[name](dtype)
    for mapping in MAPPINGS:
        packed = random_packed(21, 40, 4, 16, mapping)
        y = lowbit.linear(x, packed, 21)
        assert_same_bits(y, lowbit.linear(x.clone(memory_format=torch.contiguous_format), packed, 21))
        assert_same_bits(y, reference.linear(x, packed))


def test_packed_bytes_may_be_unaligned():
    packed = random_packed(33, 100, 5, 48, "affine")
    x = random_rows(3, 100)
    for offset in (1, 2, 4, 63):
        room = torch.zeros(packed.numel() + offset, dtype=torch.uint8)
        room[offset:] = packed
        assert_same_bits(lowbit.linear(x, room[offset:], 33), lowbit.linear(x, packed, 33))


@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_at_the_limit_of_int8_activations(bits, mapping, dtype):
    """Error relative to the exact product: at most half a step per activation, plus the rounding of the sums."""
    for n, k, group_size in MATRICES:
        packed = random_packed(n, k, bits, group_size, mapping, bias=True)
        parts = reference.take_apart(packed)
        x = (random_rows(7, k) + 0.5).to(dtype)
        weight = parts.weight()
        exact = x.double() @ weight.T + parts.bias.double()

        # Half a step, and the float32 roundings of x * inverse, at most 127.001, and of the inverse.
        step = reference.quantize_rows(x, parts.group)[1].double().amax(1)
        per_input = step * (0.5 + 2**-15)
        quantization = per_input[:, None] * weight.abs().sum(1)
        # Each of the at most 2 groups + segments + 1 roundings is of a value no larger than all products together with a in
        # [-127, 127]: 128 steps times the sum of the terms of the weights.
        scale = parts.per_input(parts.scales).double().abs() * parts.levels.abs()
        terms = scale if parts.mins is None else scale + parts.per_input(parts.mins).double().abs()
        largest = 128 * step[:, None] * (terms.sum(1) * parts.row_scale.abs()) + parts.bias.double().abs()
        segments = len(reference.segments_of(k, parts.group))
        roundings = (2 * parts.info.groups + segments + 1) * 2**-24 * largest
        # The output's own rounding.
        output = torch.finfo(dtype).eps / 2 * (exact.abs() + quantization) + torch.finfo(dtype).smallest_normal

        error = (lowbit.linear(x, packed, n).double() - exact).abs()
        assert (error <= quantization + roundings + output).all()


def test_module_and_function_agree():
    weight, bias = random_rows(19, 48), random_rows(19, seed=1)
    packed = lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits=3, group_size=16), bias=bias)
    module = lowbit.nn.Linear(packed)
    x = random_rows(2, 5, 48)
    assert torch.equal(module(x), lowbit.linear(x, packed, 19))
    assert torch.equal(lowbit.unpack(packed).bias, bias)
    without = lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits=3, group_size=16))
    torch.testing.assert_close(lowbit.linear(x, packed, 19) - bias, lowbit.linear(x, without, 19), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_the_gradient_of_the_input(dtype, mapping):
    layer = lowbit.nn.Linear(random_packed(21, 40, 4, 16, mapping, bias=True))
    x = random_rows(2, 3, 40).to(dtype).requires_grad_()
    grad = random_rows(2, 3, 21, seed=1).to(dtype)
    y = layer(x)
    assert_same_bits(y.detach(), layer(x.detach()))
    y.backward(grad)
    assert_same_bits(x.grad, grad @ layer.dequantize(dtype))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = x.detach().requires_grad_()
    compiled(again).backward(grad)
    assert_same_bits(again.grad, x.grad)


def test_adapters_train_before_and_beside_a_packed_layer():
    layer = lowbit.nn.Linear(random_packed(8, 16, 4, 16, "symmetric"))
    down, up, before = torch.nn.Linear(16, 2), torch.nn.Linear(2, 8), torch.nn.Linear(16, 16)
    hidden = before(random_rows(5, 16))
    (layer(hidden) + up(down(hidden))).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for part in (down, up, before) for parameter in part.parameters())
    assert list(layer.parameters()) == []


def test_no_gradient_unless_requested():
    packed = random_packed(3, 40, 4, 16, "symmetric")
    assert not lowbit.linear(random_rows(2, 40), packed, 3).requires_grad
    x = random_rows(2, 40).requires_grad_()
    with torch.no_grad():
        assert not lowbit.linear(x, packed, 3).requires_grad
    with torch.inference_mode():
        assert lowbit.linear(x, packed, 3).is_inference()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_derivatives_of_every_kind_are_those_of_the_weight():
    """Forward mode does not set requires_grad; without its own rule, tangents were zero."""
    layer = lowbit.nn.Linear(random_packed(21, 40, 4, 16, "affine", bias=True))
    x, direction, weight = random_rows(3, 40), random_rows(3, 40, seed=1), layer.dequantize()
    y, tangent = torch.func.jvp(layer, (x,), (direction,))
    assert_same_bits(y, layer(x))
    assert_same_bits(tangent, direction @ weight.T)
    _, (again,) = torch.func.jvp(lambda x: lowbit.linears(x, [layer.packed_weight], [21]), (x,), (direction,))
    assert_same_bits(again, tangent)
    for jacobian in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(jacobian(layer)(x[0]), weight, rtol=0, atol=0)
    each = torch.vmap(torch.func.grad(lambda row: layer(row).sum()))(x)
    torch.testing.assert_close(each, weight.sum(0).expand(3, -1), rtol=0, atol=1e-5)
    experts = layer.packed_weight[None]
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: lowbit.linear_experts(x, experts, torch.zeros(3, 1).long(), 21), (x,), (direction,))
