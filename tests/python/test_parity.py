"""One model with every kind of layer, the same bits on every surface that runs models; test_cpp_runners.py has C++.

A surface is a function (model, example inputs, dynamic shapes, directory) that prepares the model once, for any m, and
returns a function from inputs to outputs. To add one, add it to SURFACES.
"""

import pytest
import torch

import lowbit
from models import DYNAMIC_SHAPES, Every, check_every, inputs

# executorch and torch.export warn of their own and each other's old calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore:" + what)
    for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
]

SIZES = (1, 7, 128)


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


@pytest.mark.parametrize("surface", SURFACES)
def test_the_bits_of_eager(request, tmp_path, surface):
    if surface == "pte":
        request.getfixturevalue("executorch")
    model = Every().eval()
    with torch.no_grad():
        run = SURFACES[surface](model, inputs(5), DYNAMIC_SHAPES, tmp_path)
        for m in SIZES:
            check_every(run(inputs(m)), model, inputs(m))
