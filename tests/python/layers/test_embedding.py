"""lowbit.embedding has the bits of the reference."""

import lowbit
import pytest
import reference
import torch
from reference import DTYPES, MAPPINGS, WIDTHS, assert_same_bits, random_packed

TABLES = [(1, 1, 16), (1, 17, None), (17, 16, 16), (33, 100, 48), (20, 130, 128), (50, 300, None), (64, 64, 32)]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables(bits, mapping, dtype):
    for n, k, group_size in TABLES:
        packed = random_packed(n, k, bits, group_size, mapping)
        rows = torch.arange(n)
        assert_same_bits(lowbit.embedding(rows, packed, k, dtype=dtype), reference.embedding(rows, packed, dtype))


INDICES = {
    "0-d": lambda: torch.tensor(16),
    "empty": lambda: torch.empty(0, dtype=torch.int64),
    "empty 3-d": lambda: torch.empty(2, 0, 3, dtype=torch.int64),
    "repeated": lambda: torch.tensor([5, 5, 0, 32, 5]),
    "3-d": lambda: torch.arange(24).view(2, 3, 4),
    "transposed": lambda: torch.arange(24).view(4, 6).t(),
    "strided": lambda: torch.arange(33)[3::5],
    "expanded": lambda: torch.tensor([[7], [31]]).expand(2, 5),
    "15-d": lambda: torch.arange(4).view(*([1] * 13), 2, 2),
    "many": lambda: torch.arange(5000) % 33,
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_indices(name, integers):
    indices = INDICES[name]().to(integers)
    for mapping in MAPPINGS:
        packed = random_packed(33, 40, 3, 16, mapping)
        found = lowbit.embedding(indices, packed, 40)
        assert_same_bits(found, reference.embedding(indices, packed))
        assert found.shape == (*indices.shape, 40) and found.is_contiguous()


def test_int32_indices_keep_their_strides():
    indices = torch.arange(24, dtype=torch.int32).view(4, 6)
    assert not indices.t().is_contiguous()
    packed = random_packed(33, 40, 3, 16, "symmetric")
    assert_same_bits(lowbit.embedding(indices.t(), packed, 40), lowbit.embedding(indices, packed, 40).transpose(0, 1))


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_code_value(mapping):
    # Scales and mins are powers of two, so all results are exact.
    for bits in WIDTHS:
        codes = torch.arange(2**bits, dtype=torch.uint8).repeat(3, 1)
        mins = torch.tensor([[-2.0], [0.0], [4.0]]) if mapping == "affine" else None
        scales = torch.tensor([[0.5], [1.0], [-4.0]])
        packed = lowbit.pack(codes, scales, mins, bits=bits, group_size=None, mapping=mapping)
        levels = torch.arange(2**bits).float()
        if mapping == "symmetric":
            levels = 2 * levels - 1 if bits == 1 else levels - 2 ** (bits - 1)
        expected = scales * levels + (0 if mins is None else mins)
        assert torch.equal(lowbit.embedding(torch.arange(3), packed, 2**bits), expected)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_the_table_is_the_linear_layers_weight(mapping):
    # One-hot activations are exact in int8, so the linear layer returns the same rows, up to float rounding.
    packed = random_packed(20, 48, 5, 16, mapping)
    table = lowbit.embedding(torch.arange(20), packed, 48)
    largest = table.abs().amax()
    torch.testing.assert_close(lowbit.linear(torch.eye(48), packed, 20).T, table, rtol=0, atol=float(largest) * 2**-10)


def test_module():
    table = torch.nn.Embedding(30, 40, padding_idx=2)
    module = lowbit.nn.Embedding.from_float(table, lowbit.EmbeddingConfig(bits=8, group_size=16))
    indices = torch.tensor([[2, 3], [29, 0]])
    assert torch.equal(module(indices), lowbit.embedding(indices, module.packed_weight, 40))
    assert (module(torch.tensor(2)) == 0).all()  # the padding row was zero
    assert module.padding_idx == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_dequantize(dtype, mapping):
    packed = random_packed(33, 100, 4, 48, mapping, bias=True)
    for module in (lowbit.nn.Linear(packed), lowbit.nn.Embedding(packed)):
        assert_same_bits(module.dequantize(dtype), reference.embedding(torch.arange(33), packed, dtype))
    # The float32 table is the exact weight, rounded at most twice (scale, then product or fma).
    parts = reference.take_apart(packed)
    magnitude = parts.weight().abs()
    if parts.mins is not None:
        magnitude = magnitude + 2 * (parts.per_input(parts.mins) * parts.row_scale[:, None]).double().abs()
    error = (lowbit.nn.Linear(packed).dequantize().double() - parts.weight()).abs()
    assert (error <= 4 * 2**-24 * magnitude).all()


def test_values_beyond_float16_become_infinite():
    codes = torch.tensor([[0, 255]], dtype=torch.uint8)
    packed = lowbit.pack(codes, torch.tensor([[1024.0]]), bits=8, group_size=None)
    found = lowbit.embedding(torch.tensor(0), packed, 2, dtype=torch.float16)
    assert found.tolist() == [-torch.inf, torch.inf]
    assert lowbit.embedding(torch.tensor(0), packed, 2).tolist() == [-131072.0, 127 * 1024.0]
