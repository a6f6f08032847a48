"""One model with every kind of layer has the same bits when compiled; test_cpp_runners.py tests it as files, in Python and C++.

A surface is a function of the model that prepares it once, for any m, and returns a function from inputs to outputs. To add
one, add it to SURFACES.
"""

import pytest
import torch
from models import Every, check_every, inputs

pytestmark = pytest.mark.first

SIZES = (1, 7, 128)


def compiled(**options):
    def prepare(model):
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, dynamic=True, options=options)
        return lambda arguments: run(*arguments)

    return prepare


SURFACES = {"compile": compiled(), "compile-cpp-wrapper": compiled(cpp_wrapper=True)}


@pytest.mark.more
@pytest.mark.parametrize("surface", SURFACES)
def test_the_bits_of_eager(surface):
    model = Every().eval()
    with torch.no_grad():
        run = SURFACES[surface](model)
        for m in SIZES:
            check_every(run(inputs(m)), model, inputs(m))
