"""Uses an installed wheel like a user; run by a Python with the wheel and nothing else of the project.

    python wheel.py [--isa NAME] [--no-compiler] [--executorch]

NAME: the kernels that must be in use. --no-compiler: .pt2 files are not made. --executorch: executorch and its dependencies are
installed, and .pte files are made and run.
"""

import argparse
import importlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lowbit
import torch
from torch import nn


def fails_with(exception: type | tuple[type, ...], words: str, function, *arguments) -> None:
    try:
        function(*arguments)
    except exception as error:
        assert words in str(error), f"{error}: '{words}' is missing"
    else:
        raise AssertionError(f"no {exception} with '{words}'")


def export_to_machine_code(model: nn.Module, x: torch.Tensor, path: Path, compiler: bool) -> None:
    """Without a compiler, the export gives one sentence and no file."""
    inductor = importlib.import_module("torch._inductor")
    with importlib.import_module("torch._inductor.config").patch({"cpp.cxx": ("no-such-compiler",)}):
        fails_with(OSError, "there is no C++ compiler: 'no-such-compiler'", lowbit.export_pt2, model, (x,), path)
    assert not path.exists()
    if compiler:
        lowbit.export_pt2(model, (x,), path)
        assert torch.equal(inductor.aoti_load_package(str(path))(x), model(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa")
    parser.add_argument("--no-compiler", action="store_true")
    parser.add_argument("--executorch", action="store_true")
    arguments = parser.parse_args()
    package = Path(lowbit.__file__).parent
    assert not (package.parent.parent / "pyproject.toml").exists(), f"{package} is a checkout"
    if arguments.isa:
        assert arguments.isa in lowbit.isa()["active"], lowbit.isa()

    # Quantizes and runs every width; results are near the float result.
    torch.manual_seed(0)
    with torch.no_grad():
        for bits in range(1, 9):
            layer = nn.Linear(256, 96)
            x = torch.randn(7, 256)
            model = lowbit.quantize_(nn.Sequential(layer), lowbit.LinearConfig(bits=bits, group_size=32))
            error = (model(x) - layer(x)).norm() / layer(x).norm()
            assert error < 1.5 * 0.6**bits + 0.02, (bits, error)
        vocabulary = lowbit.quantize_(nn.Sequential(nn.Embedding(100, 64)), lowbit.EmbeddingConfig(bits=4))
        assert vocabulary(torch.tensor([[3, 99]])).shape == (1, 2, 64)

        # A state dict can be saved and loaded.
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        again = lowbit.quantize_(nn.Sequential(nn.Linear(256, 96)), lowbit.LinearConfig(bits=8, group_size=32))
        again.load_state_dict(torch.load(buffer, weights_only=True))
        assert torch.equal(again(x), model(x))

        # An exported program contains the operator and computes the same.
        with tempfile.TemporaryDirectory() as directory:
            program = torch.export.export(model, (x,))
            assert "lowbit.linear" in str(program.graph)
            torch.export.save(program, Path(directory) / "model.pt2")
            loaded = torch.export.load(Path(directory) / "model.pt2").module()
            assert torch.equal(loaded(x), model(x))
            export_to_machine_code(model, x, Path(directory) / "compiled.pt2", not arguments.no_compiler)
            if arguments.executorch:
                importlib.import_module("lowbit.executorch").register()
                lowbit.export_pte(model, (x,), Path(directory) / "model.pte")
                runtime = importlib.import_module("executorch.runtime").Runtime.get()
                method = runtime.load_program(Path(directory) / "model.pte").load_method("forward")
                assert torch.equal(method.execute([x])[0], model(x))

    # Errors in the operator library and in the module become exceptions.
    packed = model[0].packed_weight
    fails_with(ValueError, "not a packed weight", lowbit.info, torch.zeros(256, dtype=torch.uint8))
    # torch 2.15 converts every exception of an operator to RuntimeError; earlier versions keep its type.
    fails_with((ValueError, RuntimeError), "x has shape", torch.ops.lowbit.linear, torch.zeros(2, 3), packed, 96)
    fails_with(OSError, "does not load", lowbit.load_kernels, "/nowhere/vendor.so")
    wrong = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import lowbit"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"LOWBIT_ISA": "nonsense"},
    )
    assert "LOWBIT_ISA is 'nonsense'" in wrong.stderr.splitlines()[-1], wrong.stderr

    # Files for C++ programs exist.
    prefix = Path(lowbit.cmake_prefix_path)
    for name in "lib/cmake/lowbit/lowbit-config.cmake", "include/lowbit/ops/operators.h":
        assert (prefix / name).is_file(), name

    print(
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"{', '.join(lowbit.isa()['active'])}: {len(lowbit.kernels())} kernels, {prefix}"
    )


if __name__ == "__main__":
    main()
