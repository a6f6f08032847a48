"""`import lowbit` works, or raises an ImportError with a remedy."""

import shutil
from pathlib import Path

import lowbit
import pytest
import torch

pytestmark = pytest.mark.first

# Imports the copy in argv[1], even if an editable install would redirect the name to the checkout.
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
    sources = Path(lowbit.__file__).parent
    for source in sources.rglob("*.py"):
        (package / source.relative_to(sources)).parent.mkdir(exist_ok=True)
        shutil.copy(source, package / source.relative_to(sources))
    for source in Path(lowbit._C.__file__).parent.iterdir():
        if source.suffix in (".so", ".dylib"):
            shutil.copy(source, package)
    return package


def last_line(fork_python, package: Path, before: str = "") -> str:
    process = fork_python(SCRIPT.format(before=before), package.parent)
    return (process.stdout + process.stderr).strip().splitlines()[-1]


def compiled(package: Path, name: str) -> Path:
    (found,) = package.glob(f"{name}*.so")
    return found


def test_a_module_of_another_python(fork_python, copied):
    module = compiled(copied, "_C.")
    module.rename(copied / "_C.cpython-399-riscv64-linux-gnu.so")
    assert last_line(fork_python, copied) == (
        "ImportError: this lowbit was built for another Python or processor: found _C.cpython-399-riscv64-linux-gnu.so; "
        f"expected {module.name}. Install the wheel for that one, or build lowbit again with `pip install .`."
    )


def test_a_whole_copy(fork_python, copied):
    assert last_line(fork_python, copied) == "imported"


@pytest.mark.more
@pytest.mark.parametrize(
    "missing, message",
    [
        ("_C.", "lowbit's compiled part is missing. Build it with `pip install .`"),
        ("lowbit_torch", "lowbit's operator library is missing: "),
        ("liblowbit", "lowbit's compiled part does not load: "),
    ],
)
def test_a_missing_library(fork_python, copied, missing, message):
    compiled(copied, missing).unlink()
    line = last_line(fork_python, copied)
    assert line.startswith(f"ImportError: {message}") and "`pip install .`" in line


@pytest.mark.parametrize("broken", ["_C.", "lowbit_torch", "liblowbit"])
def test_a_broken_library(fork_python, copied, broken):
    compiled(copied, broken).write_bytes(b"not a library")
    line = last_line(fork_python, copied)
    assert line.startswith("ImportError: lowbit's ") and "does not load: " in line and "Build it again" in line


@pytest.mark.more
def test_an_old_torch(fork_python, copied):
    before = "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch; torch.__version__ = "
    line = last_line(fork_python, copied, before + "'2.9.1+cpu'")
    assert line == "ImportError: lowbit needs torch >= 2.10; found 2.9.1+cpu"
    assert last_line(fork_python, copied, before + "'3.0.0a0+git1234'") == "imported"


def test_a_broken_library_does_not_break_torch(run_python, copied):
    compiled(copied, "lowbit_torch").write_bytes(b"not a library")
    before = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
print("sum:", torch.ones(3).sum().item())
print(*("warned: " + str(warning.message) for warning in caught if warning.category is RuntimeWarning), sep="\\n")
"""
    process = run_python(SCRIPT.format(before=before), copied.parent)
    summed, warned = process.stdout.splitlines()
    assert summed == "sum: 3.0"
    assert warned.startswith(
        "warned: lowbit's operators are not registered: ImportError: lowbit's operator library does not load: "
    )
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in warned
    assert process.stderr.splitlines()[-1].startswith("ImportError: lowbit's operator library does not load: ")


def test_the_operators_are_registered():
    for name in ("linear", "embedding", "pack", "unpack"):
        assert "lowbit::" + name in str(getattr(torch.ops.lowbit, name).default._schema)
    for name in ("linear", "embedding"):
        assert getattr(torch.ops.lowbit, name).out._schema.is_mutable
