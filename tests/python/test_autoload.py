"""`import torch` registers the operators: no file that uses them needs a program that names lowbit."""

import os
import sys

import lowbit
import pytest
import torch
from models import Small
from reference import assert_same_bits

pytestmark = pytest.mark.first

MODULES = "import sys, torch; print(*sys.modules)"


def succeed(process) -> str:
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture
def without(monkeypatch):
    """Sets the switch of torch for the processes of a test."""

    def switch(value: str) -> None:
        monkeypatch.setitem(os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD", value)

    return switch


def test_import_torch_brings_lowbit_and_nothing_else(run_python, without):
    with_lowbit = set(succeed(run_python(MODULES)).split())
    without("0")
    alone = set(succeed(run_python(MODULES)).split())
    assert not {name.split(".")[0] for name in alone} & {"lowbit", "lowbit_autoload"}
    added = {name.split(".")[0] for name in with_lowbit - alone} - sys.stdlib_module_names
    assert {"lowbit", "lowbit_autoload"} <= added
    assert {name for name in added if "lowbit" not in name} == set()  # "torch" would be one more of its parts
    # Each module costs every import of torch a millisecond or more: the operators are enough.
    parts = {name for name in with_lowbit if name.startswith("lowbit.")}
    assert parts == {f"lowbit.{name}" for name in ("_C", "_library", "_packed", "_recurrence", "_window", "ops")}


def test_the_switch(run_python, without):
    script = "import torch; print(hasattr(torch.ops.lowbit, 'linear'))"
    assert succeed(run_python(script)) == "True\n"
    without("0")
    assert succeed(run_python(script)) == "False\n"
    assert succeed(run_python("import lowbit; " + script)) == "True\n"


@pytest.mark.parametrize("order", ["torch, lowbit", "lowbit, torch", "lowbit.nn, torch", "lowbit_autoload, lowbit"])
def test_any_order_of_imports(run_python, order):
    script = f"""
import warnings
warnings.filterwarnings("error", "lowbit.*")
import {order}
import torch, lowbit, lowbit_autoload
lowbit_autoload.register()
layer = lowbit.nn.Linear.from_float(torch.nn.Linear(16, 3), lowbit.LinearConfig(group_size=16))
print(layer(torch.zeros(2, 16, device="cpu")).shape, torch.ops.lowbit.linear(
    torch.zeros(2, 16, device="meta"), layer.packed_weight.to("meta"), 3).shape)
"""
    assert succeed(run_python(script)) == "torch.Size([2, 3]) torch.Size([2, 3])\n"


def test_files_load_without_lowbit_named(run_python, tmp_path):
    model = lowbit.quantize_(
        Small().eval(), {"*": lowbit.LinearConfig(bits=4, group_size=16), "table": lowbit.EmbeddingConfig(bits=3)}
    )
    indices = torch.arange(6).view(2, 3)
    torch.save(model, tmp_path / "pickled.pt")
    length = {1: torch.export.Dim("length", max=32)}
    torch.export.save(torch.export.export(model, (indices,), dynamic_shapes=(length,)), tmp_path / "exported.pt2")
    script = """
import sys, torch
directory, indices = sys.argv[1], torch.arange(10).view(2, 5)
pickled = torch.load(directory + "/pickled.pt", weights_only=False)
exported = torch.export.load(directory + "/exported.pt2")
with torch.no_grad():
    outputs = [pickled(indices), exported.module()(indices)]
    outputs.append(exported.run_decompositions().module()(indices))  # runs the fake kernels
torch.save(outputs, directory + "/outputs.pt")
"""
    succeed(run_python(script, tmp_path))
    with torch.no_grad():
        expected = model(indices.new_tensor(range(10)).view(2, 5))
    pickled, *exported = torch.load(tmp_path / "outputs.pt")
    assert_same_bits(pickled, expected)
    for output in exported:
        torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
