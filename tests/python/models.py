"""Models of quantised layers only: what an exported file computes must be the bits of eager."""

import torch

import lowbit
from reference import DTYPES, MAPPINGS, WIDTHS, assert_same_bits, random_packed, random_rows

MAGIC = bytes.fromhex("894c4f574249540a")  # a packed weight begins with it
N, K, GROUP = 21, 80, 32  # odd n, a short last group


class Every(torch.nn.Module):
    """Every width and mapping, linear and embedding, in one program; the inputs' dtypes are the outputs'."""

    def __init__(self):
        super().__init__()
        packed = [
            (bits, mapping, random_packed(N, K, bits, GROUP, mapping, bias=bits % 2 == 0))
            for bits in WIDTHS
            for mapping in MAPPINGS
        ]
        self.names = [
            f"{family} {bits} {mapping} {dtype}"
            for bits, mapping, _ in packed
            for dtype in DTYPES
            for family in ("linear", "embedding")
        ]
        self.linears = torch.nn.ModuleList(lowbit.nn.Linear(weight) for _, _, weight in packed)
        self.tables = torch.nn.ModuleList(
            lowbit.nn.Embedding(weight, dtype) for _, _, weight in packed for dtype in DTYPES
        )

    def forward(self, indices, *rows):
        results, tables = [], iter(self.tables)
        for linear in self.linears:
            for x in rows:
                results += [linear(x), next(tables)(indices)]
        return tuple(results)


def inputs(m: int, integers: torch.dtype = torch.int64) -> tuple:
    indices = (torch.arange(m) * 13 % N).to(integers)
    return indices, *(random_rows(m, K, seed=m).to(dtype) for dtype in DTYPES)


_M = torch.export.Dim("m", max=128)
DYNAMIC_SHAPES = {"indices": {0: _M}, "rows": tuple({0: _M} for _ in DTYPES)}


def check_every(outputs, model: Every, arguments: tuple) -> None:
    """Fails unless `outputs` are the bits of `model(*arguments)`."""
    with torch.no_grad():
        expected = model(*arguments)
    assert len(outputs) == len(expected) == len(model.names) == 2 * len(DTYPES) * len(MAPPINGS) * len(WIDTHS)
    for name, output, value in zip(model.names, outputs, expected):
        try:
            assert_same_bits(output, value)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
