"""`import torch` registers the operators, so programs that use packed files need not import lowbit."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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


def test_import_torch_imports_lowbit_and_nothing_else(run_python, without):
    with_lowbit = set(succeed(run_python(MODULES)).split())
    without("0")
    alone = set(succeed(run_python(MODULES)).split())
    assert not {name.split(".")[0] for name in alone} & {"lowbit", "lowbit_autoload"}
    added = {name.split(".")[0] for name in with_lowbit - alone} - sys.stdlib_module_names
    assert {"lowbit", "lowbit_autoload", "lowbit_entry"} <= added
    assert {name for name in added if "lowbit" not in name} == set()  # "torch" alone means no further modules
    # Each module adds a millisecond or more to every import of torch, so only the operators are imported.
    parts = {name for name in with_lowbit if name.startswith("lowbit.")}
    names = ("cache_layout", "fake_kernels", "library", "ops", "recurrence", "window")
    operators = ("operators", *(f"operators.{name}" for name in names))
    assert parts == {f"lowbit.{name}" for name in ("_C", *operators, "packed", "packed.header", "packed.matrix")}


@pytest.mark.more
def test_the_switch(run_python, without):
    script = "import torch; print(hasattr(torch.ops.lowbit, 'linear'))"
    assert succeed(run_python(script)) == "True\n"
    without("0")
    assert succeed(run_python(script)) == "False\n"
    assert succeed(run_python("import lowbit; " + script)) == "True\n"


@pytest.mark.more
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


@pytest.mark.more
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


BROKEN = {
    "missing": None,
    "moved": "raise FileNotFoundError('a clone that was moved')",
    "damaged": "def register(:",
    "half of an upgrade": "from lowbit_autoload.imports import gone",
    "older": "",
    "its own": "def register(): raise TypeError('its own')",
    "ends": "raise SystemExit(3)",
}


@pytest.mark.parametrize("warning", ["default", "error"])
def test_import_torch_succeeds_whatever_lowbit_does(tmp_path, warning):
    """With the installation's list of entry points and its file, together with other files of lowbit or none."""
    information = next(each for each in importlib.metadata.distributions(name="lowbit"))
    site = tmp_path / "site" / "lowbit-0.1.0.dist-info"
    site.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        (site / name).write_text(information.read_text(name))
    entry = importlib.util.find_spec("lowbit_entry").origin
    assert Path(entry).parent == Path(information.locate_file(""))  # of its own, also where the installation is editable
    (site.parent / "lowbit_entry.py").write_bytes(Path(entry).read_bytes())
    (site.parent / "lowbit_autoload.py").write_text(BROKEN["moved"])
    script = f"""
import sys, warnings
sys.path[:0] = {[str(site.parent), str(Path(torch.__file__).parents[1])]}
warnings.simplefilter({warning!r}, RuntimeWarning)
import torch
print(torch.ones(2).sum().item())
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    for source in {list(BROKEN.values())}:
        sys.modules.pop("lowbit_autoload", None)
        with open({str(site.parent / "lowbit_autoload.py")!r}, "w") as file:
            file.write("raise ModuleNotFoundError('no such module')" if source is None else source)
        sys.path_importer_cache.clear()
        sys.modules["lowbit_entry"].register()
print(len(caught), *sorted({{str(each.message)[:45] for each in caught}}))
"""
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert process.returncode == 0, process.stderr
    said = "lowbit's operators are not registered: "
    lines = process.stdout.splitlines()
    assert lines[0] == "2.0" and lines[1].startswith(f"{len(BROKEN)} {said}"), process.stdout
    assert (f"{said}FileNotFoundError: a clone that was moved" in process.stderr) == (warning == "default"), process.stderr
