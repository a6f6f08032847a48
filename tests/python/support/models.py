"""Models that several tests use."""

import lowbit
import pytest
import torch
from reference import DTYPES, WEIGHTS, assert_same_bits, random_packed, random_rows

MAGIC = bytes.fromhex("894c4f574249540a")  # the first bytes of a packed weight
# Of torch.compile: the graph is traced, and run by torch or as machine code, whose compilation takes seconds.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)]
N, K, GROUP = 21, 80, 32  # sizes of Every's matrices: n is odd, and the last group is short
_ROTATED = ("symmetric", "affine", "levels")  # mappings of the weights with rotated inputs in Every
_PLANES = ((8, "symmetric"), (4, "affine"))  # bits and mappings of the weights with 16-bit activations in Every


class Small(torch.nn.Module):
    """Both kinds of packed layers between float ones. Input [...] indices below 50; output [..., 48]."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 48)
        self.norm = torch.nn.LayerNorm(48)
        self.up = torch.nn.Linear(48, 80)
        self.down = torch.nn.Linear(80, 48, bias=False)

    def forward(self, indices):
        x = self.norm(self.table(indices))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Every(torch.nn.Module):
    """Every width, mapping and dtype, linear and embedding. It has only lowbit's operators, so compiled and exported
    programs must give the bits of eager mode."""

    def __init__(self):
        super().__init__()
        packed = {(bits, mapping): random_packed(N, K, bits, GROUP, mapping, bias=bits % 2 == 0) for bits, mapping in WEIGHTS}
        for mapping in _ROTATED:
            packed[4, f"rotated {mapping}"] = random_packed(N, K, 4, GROUP, mapping, bias=True, rotated_inputs=16)
        for bits, mapping in _PLANES:
            packed[bits, f"two planes {mapping}"] = random_packed(N, K, bits, GROUP, mapping, bias=True, activation_bits=16)
        self.names = [
            f"{family} {bits} {mapping} {dtype}"
            for family in ("linear", "embedding")
            for bits, mapping in packed
            for dtype in DTYPES
        ]
        self.linears = torch.nn.ModuleList(map(lowbit.nn.Linear, packed.values()))
        self.tables = torch.nn.ModuleList(lowbit.nn.Embedding(weight, dtype) for weight in packed.values() for dtype in DTYPES)

    def forward(self, int64s, f32, bf16, f16, int32s):
        """Takes indices [m] of both types, and [m, K] of each of DTYPES; returns outputs in the order of `names`."""
        results = [linear(x) for linear in self.linears for x in (f32, bf16, f16)]
        return tuple(results + [table((int64s, int32s)[i % 2]) for i, table in enumerate(self.tables)])


def inputs(m: int) -> tuple:
    """Inputs of Every."""
    indices = torch.arange(m) * 13 % N
    return indices, *(random_rows(m, K, seed=m).to(dtype) for dtype in DTYPES), indices.int()


_M = torch.export.Dim("m", max=128)
DYNAMIC_SHAPES = tuple({0: _M} for _ in inputs(2))


def check_every(outputs, model: Every, arguments: tuple) -> None:
    """Fails unless `outputs` have the bits of `model(*arguments)`."""
    with torch.no_grad():
        expected = model(*arguments)
    assert len(outputs) == len(expected) == len(model.names) == 2 * len(DTYPES) * (len(WEIGHTS) + len(_ROTATED) + len(_PLANES))
    for name, output, value in zip(model.names, outputs, expected):
        try:
            assert_same_bits(output, value)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
