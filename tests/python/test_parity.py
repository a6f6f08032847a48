"""One model with every kind of layer, the same bits on every surface that runs models.

A surface is a function (model, example inputs, dynamic shapes, directory) that prepares the model once, for any m, and
returns a function from inputs to outputs. To add one, add it to SURFACES.
"""

import pytest
import torch

import lowbit
from reference import DTYPES, MAPPINGS, WIDTHS, assert_same_bits, random_packed, random_rows

# executorch and torch.export warn of their own and each other's old calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore:" + what)
    for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
]

N, K, GROUP = 21, 80, 32  # odd n, a short last group
SIZES = (1, 7, 128)


class Every(torch.nn.Module):
    """Every width, mapping and dtype, linear and embedding: nothing but lowbit's operators."""

    def __init__(self):
        super().__init__()
        packed = {
            (bits, mapping): random_packed(N, K, bits, GROUP, mapping, bias=bits % 2 == 0)
            for bits in WIDTHS
            for mapping in MAPPINGS
        }
        self.names = [
            f"{family} {bits} {mapping} {dtype}"
            for family in ("linear", "embedding")
            for bits, mapping in packed
            for dtype in DTYPES
        ]
        self.linears = torch.nn.ModuleList(map(lowbit.nn.Linear, packed.values()))
        self.tables = torch.nn.ModuleList(
            lowbit.nn.Embedding(weight, dtype) for weight in packed.values() for dtype in DTYPES
        )

    def forward(self, int64s, int32s, *rows):
        """Indices [m] of both types, and [m, K] of each of DTYPES; outputs in the order of `names`."""
        results = [linear(x) for linear in self.linears for x in rows]
        return tuple(results + [table((int64s, int32s)[i % 2]) for i, table in enumerate(self.tables)])


def inputs(m: int) -> tuple:
    indices = torch.arange(m) * 13 % N
    return indices, indices.int(), *(random_rows(m, K, seed=m).to(dtype) for dtype in DTYPES)


def compiled(**options):
    def prepare(model, example, shapes, directory):
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, dynamic=True, options=options)
        return lambda arguments: run(*arguments)

    return prepare


def pt2(model, example, shapes, directory):
    lowbit.export_pt2(model, example, directory / "every.pt2", dynamic_shapes=shapes)
    loaded = torch._inductor.aoti_load_package(directory / "every.pt2")
    return lambda arguments: loaded(*arguments)


def pte(model, example, shapes, directory):
    lowbit.export_pte(model, example, directory / "every.pte", dynamic_shapes=shapes)
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(directory / "every.pte").load_method("forward")
    return method.execute


SURFACES = {
    "compile": compiled(),
    "compile-cpp-wrapper": compiled(cpp_wrapper=True),
    "pt2": pt2,
    "pte": pte,
}


@pytest.fixture(scope="module")
def every():
    """The model and, for each m, its inputs and eager's outputs."""
    model = Every().eval()
    with torch.no_grad():
        return model, {m: (inputs(m), model(*inputs(m))) for m in SIZES}


@pytest.mark.parametrize("surface", SURFACES)
def test_the_bits_of_eager(request, tmp_path, every, surface):
    if surface == "pte":
        request.getfixturevalue("executorch")
    model, cases = every
    m = torch.export.Dim("m", max=max(SIZES))
    shapes = {"int64s": {0: m}, "int32s": {0: m}, "rows": tuple({0: m} for _ in DTYPES)}
    with torch.no_grad():
        run = SURFACES[surface](model, inputs(5), shapes, tmp_path)
        for m, (arguments, expected) in cases.items():
            outputs = run(arguments)
            assert len(outputs) == len(expected) == len(model.names) == 2 * len(DTYPES) * len(MAPPINGS) * len(WIDTHS)
            for name, output, value in zip(model.names, outputs, expected):
                try:
                    assert_same_bits(output, value)
                except AssertionError as error:
                    raise AssertionError(f"{name}, m = {m}: {error}") from None
