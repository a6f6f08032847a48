"""Export of any module to a .pte or a .pt2."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .._machine import cpp_compiler
from ..files.elf import without_executable_stack
from ..files.replace import replacing


def export_pte(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    dynamic_shapes: Any = None,
    xnnpack: bool = True,
    constant_methods: dict[str, Any] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Writes an ExecuTorch program with one method, "forward".

    Linear layers and embeddings of this package keep their packed weights and run on the same kernels as in PyTorch,
    with the same bits. The process that runs the program must register lowbit's operators: in Python by
    :func:`lowbit.executorch.register`, in C++ by loading ``lowbit_executorch.so``.

    Args:
        model: quantized, in eval mode.
        example_inputs: the positional arguments of one call. Their shapes are fixed but for ``dynamic_shapes``.
        path: a name that ends in .pte; replaced in one step, and untouched when the export fails.
        dynamic_shapes: as in ``torch.export.export``, for example ``({0: torch.export.Dim("batch", max=64)},)`` for
            one input of shape [batch, ...]. The program reserves memory for the largest shape, so give a ``max``.
        xnnpack: run the operators that XNNPACK supports there; otherwise all but lowbit's run on ExecuTorch's kernels.
        constant_methods: further methods, by name, that return this value, for a runner's settings.
        progress: called as ``progress(steps done, steps, what begins)``.

    Raises:
        ImportError: executorch is not installed.
        ValueError, OSError: path does not end in .pte, or cannot be written.
        Exception: whatever torch.export and ExecuTorch raise on models they cannot export.
    """
    try:
        exir = import_module("executorch.exir")
        partitioners = []
        if xnnpack:
            partitioners.append(import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner())
    except ImportError as error:
        raise ImportError(
            f"executorch is not installed, or does not load: {error}. Install it with `pip install executorch==1.5.1`."
        ) from error
    with replacing(path, ".pte") as written:
        report = progress or (lambda done, steps, what: None)
        report(0, 4, "tracing the model")
        exported = torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes)
        report(1, 4, "lowering it")
        edge = exir.to_edge_transform_and_lower(exported, partitioner=partitioners, constant_methods=constant_methods)
        report(2, 4, "making the program")
        program = edge.to_executorch()
        report(3, 4, "writing it")
        with open(written, "wb") as file:
            program.write_to_file(file)


def machine_code(exported: torch.export.ExportedProgram, example_inputs: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """Compiles a program with AOTInductor; returns the files to package in a .pt2."""
    inductor = import_module("torch._inductor")
    module = exported.module(check_guards=False)
    files: list[Any] = inductor.aot_compile(module, example_inputs, options={"aot_inductor.package": True, **options})
    for file in files:
        if isinstance(file, str) and file.endswith(".so"):
            without_executable_stack(file)
    return files


def export_pt2(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    dynamic_shapes: Any = None,
    metadata: dict[str, str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Compiles a model ahead of time with AOTInductor; needs a C++ compiler here.

    Load it with ``torch._inductor.aoti_load_package(path)`` where lowbit is installed, or from C++ with
    ``AOTIModelPackageLoader`` after loading ``lowbit_torch.so``.

    Args:
        model: quantized, in eval mode.
        example_inputs: the positional arguments of one call. Their shapes are fixed but for ``dynamic_shapes``.
        path: a name that ends in .pt2; replaced in one step, and untouched when the export fails.
        dynamic_shapes: as in ``torch.export.export``, for example ``({0: torch.export.Dim("batch", max=64)},)`` for
            one input of shape [batch, ...].
        metadata: kept in the package, for its loader's ``get_metadata()``.
        progress: called as ``progress(steps done, steps, what begins)``.

    Raises:
        ValueError, OSError: path does not end in .pt2, or cannot be written; there is no C++ compiler.
        Exception: whatever torch.export and AOTInductor raise on models they cannot compile.
    """
    with replacing(path, ".pt2") as written:
        cpp_compiler()
        report = progress or (lambda done, steps, what: None)
        report(0, 3, "tracing the model")
        exported = torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes)
        # With AOTI_RUNTIME_CHECK_INPUTS=1 the check would refuse a dynamic size of 1, which works.
        options = {"aot_inductor.check_lowerbound": False, "aot_inductor.metadata": metadata or {}}
        report(1, 3, "compiling it")
        files = machine_code(exported, example_inputs, options)
        report(2, 3, "writing it")
        import_module("torch._inductor.package").package_aoti(str(written), files)


def described(cache: Tensor) -> str:
    """An input that a .pt2 changes in place, as its metadata has it: float32:1x4x64x16."""
    return f"{str(cache.dtype).removeprefix('torch.')}:{'x'.join(map(str, cache.shape))}"


def zeros(text: str) -> Tensor:
    """A cache as a .pt2 describes it: float32:1x4x64x16."""
    name, _, shape = text.partition(":")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not all(size.isdecimal() for size in shape.split("x")):
        raise ValueError(f"it has a cache {text!r}; expected a dtype and a shape, as float32:1x4x64x16")
    return torch.zeros([int(size) for size in shape.split("x")], dtype=dtype)
