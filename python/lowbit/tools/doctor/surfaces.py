"""Trials of each way to run a model, on a tiny layer.

A trial runs in its own process, so that a crash is a result and does not end the doctor. The process is
``python -m lowbit.tools.doctor.surfaces NAME FILE``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import lowbit

from ... import _C
from ...files.untrusted import one_line
from ...machine.child import gist, result_of
from ...machine.facts import cpp_compiler
from ...machine.imports import why_not

if TYPE_CHECKING:
    import torch

_SECONDS = 600  # more than any trial takes on a slow board
_COMPILER = "install a C++ compiler (Debian, Ubuntu: apt-get install g++), or name one in the environment variable CXX"
_BUILD_AGAIN = "build lowbit again in a checkout, with `pip install .`"
_TORCH = "pip install 'lowbit[torch]'"
_TRANSFORMERS = "pip install 'lowbit[llm]'"


class Missing(Exception):
    """A package or program that a surface needs is not installed."""

    def __init__(self, what: str, remedy: str):
        super().__init__(what)
        self.remedy = remedy


class Broken(Exception):
    """A surface does not work, for a known reason."""

    def __init__(self, what: str, remedy: str):
        super().__init__(what)
        self.remedy = remedy


@dataclass(frozen=True)
class Surface:
    """Result of a trial."""

    name: str
    state: str  # "works", "broken" or "missing": not installed
    seconds: float  # without starting Python and importing torch
    reason: str | None = None  # why it does not work
    remedy: str | None = None


def _layer() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model of two 4-bit linear layers with an activation function in between, and an input [2, 64]."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32)).eval()
    return lowbit.quantize_(model, lowbit.LinearConfig(bits=4, group_size=32)), torch.randn(2, 64)


def _check_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    import torch

    if not torch.equal(result, expected):
        raise Broken("the results are not those of eager mode", _BUILD_AGAIN)


def _executorch() -> str:
    """How to install the version of executorch that this lowbit was built for."""
    if built := _C.executorch_version.partition("+")[0]:
        return f"pip install executorch=={built}, which this lowbit was built for"
    return f"pip install executorch==1.5.1; then {_BUILD_AGAIN}"


def _need_compiler() -> str:
    try:
        return cpp_compiler()
    except OSError as error:
        raise Broken("there is no C++ compiler", _COMPILER) from error


def _eager(directory: Path) -> None:
    """Tries every width: a linear layer with one row and with many, and a table."""
    import torch

    torch.manual_seed(0)
    weight = torch.randn(48, 96)
    for bits in range(1, 9):
        packed = lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits=bits, group_size=32))
        table = lowbit.embedding(torch.arange(48), packed, 96)
        for rows in (1, 17):
            x = torch.randn(rows, 96)
            error = (lowbit.linear(x, packed, 48) - x @ table.T).abs()
            # Rounding to int8 changes an activation by at most half a step; this is the largest step.
            step = x.abs().amax(1, keepdim=True) / 127
            if not bool((error <= 0.51 * step * table.abs().sum(1)).all()):
                raise Broken(f"linear layers with {bits} bits give wrong results", _BUILD_AGAIN)


def _compile(directory: Path) -> None:
    import torch

    _need_compiler()
    model, x = _layer()
    with torch.inference_mode():
        _check_equal(torch.compile(model, fullgraph=True)(x), model(x))


def _pt2(directory: Path) -> None:
    import torch

    _need_compiler()
    model, x = _layer()
    with torch.inference_mode():
        lowbit.export_pt2(model, (x,), directory / "layer.pt2")
        loaded = import_module("torch._inductor").aoti_load_package(str(directory / "layer.pt2"))
        _check_equal(loaded(x), model(x))


def _pte(directory: Path) -> None:
    if find_spec("executorch") is None:
        raise Missing("executorch is not installed", _executorch())
    register = import_module("lowbit.executorch").register
    try:
        register()
    except ImportError as error:
        raise Broken(str(error), _executorch()) from error
    model, x = _layer()
    lowbit.export_pte(model, (x,), directory / "layer.pte")
    runtime = import_module("executorch.runtime").Runtime.get()
    method = runtime.load_program(directory / "layer.pte").load_method("forward")
    _check_equal(method.execute([x])[0], model(x))


def _cpp(directory: Path) -> None:
    import torch

    compiler = _need_compiler()
    installed = Path(lowbit.cmake_prefix_path)
    if not (installed / "include").is_dir():
        raise Broken(f"there are no headers in {installed}", _BUILD_AGAIN)
    model, x = _layer()
    layer = model[0]
    program, packed, row = (directory / name for name in ("probe", "packed", "row"))
    packed.write_bytes(layer.packed_weight.numpy().tobytes())
    row.write_bytes(x[:1].numpy().tobytes())
    command = [
        compiler, "-std=c++17", f"-I{installed / 'include'}", str(Path(__file__).with_name("probe.cpp")),
        f"-L{installed}", "-llowbit", f"-Wl,-rpath,{installed}", "-o", str(program),
    ]  # fmt: skip
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        raise Broken(f"{compiler} does not compile against lowbit: {gist(compiled.stderr)}", _COMPILER)
    ran = subprocess.run([program, packed, row, str(layer.out_features)], capture_output=True)
    if ran.returncode:
        raise Broken(f"the compiled program fails: {gist(ran.stderr.decode(errors='replace'))}", _BUILD_AGAIN)
    _check_equal(torch.frombuffer(bytearray(ran.stdout), dtype=torch.float32), layer(x[:1])[0])


def _language_models(directory: Path) -> None:
    if missing := [name for name in ("transformers", "safetensors") if find_spec(name) is None]:
        raise Missing(f"{' and '.join(missing)} not installed", _TRANSFORMERS)
    try:
        llm = import_module("lowbit.llm")
        config = llm.shape_config("llama-3.2-1b")
    except ImportError as error:
        raise Broken(why_not("transformers", error, _TRANSFORMERS), _TRANSFORMERS) from error
    except AttributeError as error:
        raise Broken(f"transformers does not load: {error}", _TRANSFORMERS) from error
    config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers = 256, 64, 128, 2
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    config.bos_token_id = config.eos_token_id = None
    model = llm.random_model(config, lowbit.LinearConfig(bits=4), lowbit.EmbeddingConfig(bits=4))
    decoder = llm.Decoder(model, 32)  # compares itself with the model's attention
    if len(llm.generate(decoder, [1, 2, 3], 4, max_length=32).tokens) != 4:
        raise Broken("a tiny model does not decode", _TRANSFORMERS)


SURFACES: dict[str, Callable[[Path], None]] = {
    "eager": _eager,
    "torch.compile": _compile,
    ".pt2": _pt2,
    ".pte": _pte,
    "C++": _cpp,
    "language models": _language_models,
}


def _try_here(name: str) -> Surface:
    begin = time.perf_counter()
    state, reason, remedy = "works", None, None
    with tempfile.TemporaryDirectory() as directory:
        try:
            if find_spec("torch") is None:
                raise Missing("torch is not installed", _TORCH)
            SURFACES[name](Path(directory))
        except Missing as error:
            state, reason, remedy = "missing", str(error), error.remedy
        except Broken as error:
            state, reason, remedy = "broken", str(error), error.remedy
        except Exception as error:
            state, reason = "broken", f"{type(error).__name__}: {error}"
            remedy = _remedy_of(name)
            traceback.print_exc()
    reason = None if reason is None else one_line(reason, 300)
    return Surface(name, state, time.perf_counter() - begin, reason, remedy)


def _remedy_of(name: str) -> str:
    """The remedy for an unknown reason: the command that shows the whole error."""
    return f"the whole error: {Path(sys.executable).name} -m lowbit.tools.doctor.surfaces {name!r}"


def try_surface(name: str, seconds: float = _SECONDS) -> Surface:
    """Tries a surface in its own process, without compiler caches.

    Args:
        name: a name in :data:`SURFACES`.
        seconds: time limit.
    """
    begin = time.perf_counter()
    document, reason = result_of("lowbit.tools.doctor.surfaces", name, seconds=seconds)
    if document is not None:
        return Surface(**document)
    return Surface(name, "broken", time.perf_counter() - begin, one_line(reason, 300), _remedy_of(name))


def main() -> None:
    """Tries surface NAME in this process and writes the result to FILE, or to stdout, as JSON."""
    name, *file = sys.argv[1:]
    document = json.dumps(asdict(_try_here(name)))
    if file:
        Path(file[0]).write_text(document)
    else:
        print(document)


if __name__ == "__main__":
    main()
