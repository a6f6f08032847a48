"""`import lowbit` works or raises an ImportError that says what to do."""

import shutil
from pathlib import Path

import pytest
import torch

import lowbit

# Imports the copy in argv[1], also where an editable install would redirect the name to the checkout.
SCRIPT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
sys.path.insert(0, sys.argv[1])
{before}
import lowbit
assert lowbit.__file__.startswith(sys.argv[1])
print("imported")
"""


@pytest.fixture
def copied(tmp_path) -> Path:
    package = tmp_path / "lowbit"
    package.mkdir()
    for source in Path(lowbit.__file__).parent.glob("*.py"):
        shutil.copy(source, package)
    for source in Path(lowbit._C.__file__).parent.iterdir():
        if source.suffix in (".so", ".dylib"):
            shutil.copy(source, package)
    return package


def last_line(run_python, package: Path, before: str = "") -> str:
    process = run_python(SCRIPT.format(before=before), package.parent)
    return (process.stdout + process.stderr).strip().splitlines()[-1]


def compiled(package: Path, name: str) -> Path:
    (found,) = package.glob(f"{name}*.so")
    return found


def test_a_whole_copy(run_python, copied):
    assert last_line(run_python, copied) == "imported"


@pytest.mark.parametrize(
    "missing, message",
    [
        ("_C.", "lowbit's compiled part is missing. Build it with `pip install .`"),
        ("lowbit_torch", "lowbit's operator library is missing: "),
        ("liblowbit", "lowbit's compiled part does not load: "),
    ],
)
def test_a_missing_library(run_python, copied, missing, message):
    compiled(copied, missing).unlink()
    line = last_line(run_python, copied)
    assert line.startswith(f"ImportError: {message}") and "`pip install .`" in line


@pytest.mark.parametrize("broken", ["_C.", "lowbit_torch", "liblowbit"])
def test_a_broken_library(run_python, copied, broken):
    compiled(copied, broken).write_bytes(b"not a library")
    line = last_line(run_python, copied)
    assert line.startswith("ImportError: lowbit's ") and "does not load: " in line and "Build it again" in line


def test_an_old_torch(run_python, copied):
    line = last_line(run_python, copied, "import torch; torch.__version__ = '2.9.1+cpu'")
    assert line == "ImportError: lowbit needs torch >= 2.10; found 2.9.1+cpu"
    assert last_line(run_python, copied, "import torch; torch.__version__ = '3.0.0a0+git1234'") == "imported"


def test_the_operators_are_registered():
    for name in ("linear", "embedding", "pack", "unpack"):
        assert "lowbit::" + name in str(getattr(torch.ops.lowbit, name).default._schema)
    for name in ("linear", "embedding"):
        assert getattr(torch.ops.lowbit, name).out._schema.is_mutable
