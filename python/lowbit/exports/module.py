"""Exports any module to a .pte or a .pt2."""

from __future__ import annotations

import copy
import io
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..files.elf import without_executable_stack
from ..files.replace import replacing
from ..files.safetensors import ORDER_SUFFIX, PACKED_SUFFIX
from ..files.untrusted import one_line
from ..machine.facts import cpp_compiler
from ..operators.elementwise import each_operator_alone

# Tolerances for outputs of an exported program, because other kernels round differently and an activation may become the
# next int8 value; and for their changes between two calls, in which the same rounding cancels.
_ROUNDING, _NOISE = 0.1, 1e-3


def export_pte(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    dynamic_shapes: Any = None,
    xnnpack: bool = True,
    constant_methods: dict[str, Any] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    check_buffers: bool = True,
) -> None:
    """Writes an ExecuTorch program with one method, "forward".

    lowbit's layers keep their packed weights and run on the same kernels as in PyTorch, with bitwise equal results. The
    process that runs the program must register lowbit's operators: in Python by :func:`lowbit.executorch.register`, in C++ by
    loading ``lowbit_executorch.so``.

    Args:
        model: quantized, in eval mode.
        example_inputs: the positional arguments of one call. Their shapes are fixed except for ``dynamic_shapes``.
        path: a name that ends in .pte; replaced atomically, and unchanged if the export fails.
        dynamic_shapes: as in ``torch.export.export``, for example ``({0: torch.export.Dim("batch", max=64)},)`` for
            one input of shape [batch, ...]. The program reserves memory for the largest shape, so give a ``max``.
        xnnpack: run the operators that XNNPACK supports there; otherwise all but lowbit's run on ExecuTorch's kernels.
        constant_methods: additional methods, by name, that return a constant, such as a setting for runners.
        progress: called as ``progress(steps done, steps, next step)``.
        check_buffers: if a call changes buffers of the model, such as a counter, run the program twice and compare its
            outputs with the model's. If XNNPACK cannot handle these buffers, it is not used, with a warning. State in other
            attributes is not in the program; a warning names what a call changes.

    Raises:
        ImportError: executorch is not installed.
        TypeError: example_inputs is not a tuple.
        ValueError, OSError: path does not end in .pte, or cannot be written; or the program changes buffers differently from
            the model.
        Exception: whatever torch.export and ExecuTorch raise on models they cannot export.
    """
    exir = _executorch("exir")
    partitioners = [_executorch("backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner()] if xnnpack else []
    with replacing(path, ".pte") as written:
        report = progress or (lambda done, steps, what: None)
        report(0, 4, "tracing the model")
        with each_operator_alone():
            exported = _traced(model, example_inputs, dynamic_shapes)
        changed = _buffers_of(exported) if check_buffers else []
        # Without this pass the file lacks initial values of mutated buffers, which would then start as zeros.
        first = [name.replace(".", "_") for name, buffer in model.named_buffers() if name in changed and buffer.any()]
        passes = (
            [import_module("executorch.exir.passes.init_mutable_pass").InitializedMutableBufferPass(first)] if first else []
        )

        def lower(partitioners: list[Any]) -> None:
            report(1, 4, "lowering it")
            edge = exir.to_edge_transform_and_lower(exported, partitioner=partitioners, constant_methods=constant_methods)
            report(2, 4, "making the program")
            program = edge.to_executorch(exir.ExecutorchBackendConfig(passes=passes))
            report(3, 4, "writing it")
            with open(written, "wb") as file:
                program.write_to_file(file)
            if changed:
                check_changes(model, example_inputs, changed, lambda: _method_of(written))

        try:
            lower(partitioners)
        except (ValueError, RuntimeError) as error:
            through = "pass through" in str(error)
            if not partitioners or not (changed or through):
                raise
            # XNNPACK refuses subgraphs whose result is both an output and the new value of a buffer, or an input.
            lower([])
            what = f"the operators that change {', '.join(changed)}" if changed else "a part whose result is one of its inputs"
            warnings.warn(
                f"XNNPACK does not run {what}; all operators but lowbit's run on ExecuTorch's kernels ({one_line(error)})",
                stacklevel=2,
            )


@dataclass(frozen=True)
class Delegate:
    """A call of a backend as a method of a program."""

    content: bytes
    outline: torch.nn.Module  # has the delegate's inputs and outputs; what it computes is not in the program
    inputs: tuple[Tensor, ...]  # an example
    sizes: Any = None  # dynamic shapes, as in torch.export.export
    name: str = ""  # of a compile spec, by which the backend recognizes the method


class _Delegated(torch.nn.Module):
    def __init__(self, delegate: torch.nn.Module):
        super().__init__()
        self.delegate = delegate

    def forward(self, *inputs: Tensor) -> Any:
        return self.delegate(*inputs)


def export_delegates(
    backend: str,
    methods: Mapping[str, Delegate],
    path: str | os.PathLike[str],
    constant_methods: dict[str, Any] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Writes an ExecuTorch program whose methods are each one call of a delegate.

    The program has named data, by whose address the backend recognizes methods of the same loaded program.

    Args:
        backend: the name of the backend that runs them.
        methods: by name.
        path, constant_methods, progress: as in :func:`export_pte`.

    Raises:
        ImportError: executorch is not installed.
        ValueError, OSError: path does not end in .pte, or cannot be written.
    """
    exir = _executorch("exir")
    with replacing(path, ".pte") as written:
        report = progress or (lambda done, steps, what: None)
        report(0, 2, "making the program")
        whole = {name: _delegated(backend, method) for name, method in methods.items()}
        program = exir.to_edge(whole, constant_methods=constant_methods).to_executorch()
        report(1, 2, "writing it")
        with open(written, "wb") as file:
            program.write_to_file(file)


def _delegated(backend: str, method: Delegate) -> torch.export.ExportedProgram:
    traced = _executorch("exir").to_edge(torch.export.export(method.outline, method.inputs, dynamic_shapes=method.sizes))
    named = _executorch("exir._serialize._named_data_store").NamedDataStore()
    named.add_named_data(backend, b"1")
    specs = [_executorch("exir.backend.compile_spec_schema").CompileSpec(method.name, b"1")] if method.name else []
    lowered = _executorch("exir.lowered_backend_module").LoweredBackendModule(
        traced.exported_program(), backend, method.content, specs, named.get_named_data_store_output()
    )
    shapes = None if method.sizes is None else (method.sizes,)  # of *inputs, one argument
    return torch.export.export(_Delegated(lowered), method.inputs, dynamic_shapes=shapes)


def _executorch(name: str) -> Any:
    """A module of ExecuTorch."""
    try:
        return import_module(f"executorch.{name}")
    except ImportError as error:
        from ..executorch import INSTALL

        raise ImportError(f"executorch is not installed, or does not load: {error}. {INSTALL}") from error


def _traced(model: torch.nn.Module, example_inputs: tuple[Any, ...], dynamic_shapes: Any) -> torch.export.ExportedProgram:
    """torch.export.export, with a warning of state that is in attributes, which torch.export restores after the trace."""
    if not isinstance(example_inputs, tuple):
        raise TypeError(f"example_inputs is a {type(example_inputs).__name__}; expected a tuple of a call's arguments")
    before, changed = _attributes(model), list[str]()

    def compare(*_: Any) -> None:
        after = _attributes(model)
        changed.extend(name for name, value in before.items() if value is not None and after.get(name) != value)

    hook = model.register_forward_hook(compare)
    try:
        exported = torch.export.export(model, example_inputs, dynamic_shapes=dynamic_shapes)
    finally:
        hook.remove()
    if changed:
        warnings.warn(
            f"a call of the model changes {', '.join(changed)}: the exported program computes each call with the values that "
            "these attributes have now. Make this state a buffer, or an input and an output of the model",
            stacklevel=3,
        )
    return exported


def _attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Copies of the numbers, texts and containers in attributes of the model's modules."""
    usual = vars(torch.nn.Module()).keys()
    return {
        f"{name}.{key}".lstrip("."): _copied(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in usual
    }


def _copied(value: Any, depth: int = 4) -> Any:
    """A value to compare a later one with: None for objects, which are taken to be constant."""
    if isinstance(value, list | tuple) and depth:
        return [_copied(each, depth - 1) for each in value]
    if isinstance(value, dict) and depth:
        return [(_copied(key, depth - 1), _copied(each, depth - 1)) for key, each in value.items()]
    return repr(value) if type(value) in (bool, int, float, complex, str, bytes) else None


def _buffers_of(exported: torch.export.ExportedProgram) -> list[str]:
    """The buffers of the model that a call changes."""
    if all(name.endswith((PACKED_SUFFIX, ORDER_SUFFIX)) for name in exported.graph_signature.buffers):
        return []
    # Before decompositions, buffers are changed in place, which the signature does not show.
    return list(dict.fromkeys(exported.run_decompositions({}).graph_signature.buffers_to_mutate.values()))


def _method_of(path: Path) -> Callable[[tuple[Any, ...]], Any]:
    from .. import executorch

    executorch.register()
    program = import_module("executorch.runtime").Runtime.get().load_program(path)
    method = program.load_method("forward")
    return lambda inputs, program=program: method.execute(tree_leaves(inputs))  # type: ignore[misc]  # it keeps the program


def check_changes(
    model: torch.nn.Module, inputs: tuple[Any, ...], changed: list[str], load: Callable[[], Callable[[tuple[Any, ...]], Any]]
) -> None:
    """Runs a program and the model twice and compares the outputs, which reveals buffers that are updated differently.

    Args:
        changed: names of the buffers that a call changes.
        load: loads the program and returns a function of the model's inputs.

    Raises:
        ValueError: the outputs of a call differ, for example because a counter is not updated.
    """
    held = {name: buffer.clone() for name, buffer in model.named_buffers() if name in changed}
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    run = load()
    with torch.no_grad():
        expected = [_outputs(torch.func.functional_call(model, held, copy.deepcopy(inputs))) for _ in range(2)]
        found = [_outputs(run(copy.deepcopy(inputs))) for _ in range(2)]
    for now, kept in attributes:  # an export does not change the model
        now.update(kept)
    if len(found[0]) != len(expected[0]) or not all(map(_alike, *expected, *found)):
        raise ValueError(
            f"the exported program does not change {', '.join(changed)} as the model does: its outputs in two calls differ "
            "from the model's. Make this state an input and an output of the model instead of a buffer"
        )


def _outputs(result: Any) -> list[Tensor]:
    return [leaf.clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _alike(first: Tensor, second: Tensor, found_first: Tensor, found_second: Tensor) -> bool:
    """Whether an output of two calls, and its change between them, agrees with the model's up to rounding."""
    if first.shape != found_first.shape or second.shape != found_second.shape:
        return False
    if not first.is_floating_point():
        return bool(torch.equal(first, found_first) and torch.equal(second, found_second))
    first, second, found_first, found_second = (
        each.double().nan_to_num() for each in (first, second, found_first, found_second)
    )
    if first.numel() == 0:
        return True
    largest = max(float(first.abs().max()), float(second.abs().max()))
    if float((found_first - first).abs().max()) > _ROUNDING * largest:
        return False
    if first.shape != second.shape:
        return True
    change = second - first
    off = float((found_second - found_first - change).abs().max())
    return bool(off <= _ROUNDING * float(change.abs().max()) + _NOISE * largest)


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
    """Compiles a model ahead of time with AOTInductor to a .pt2; requires a C++ compiler.

    If a call changes an attribute that is not a buffer, the program does not keep the change; a warning names the attribute.

    Load it with ``torch._inductor.aoti_load_package(path)`` where lowbit is installed, or from C++ with
    ``AOTIModelPackageLoader`` after loading ``lowbit_torch.so``.

    Args:
        model: quantized, in eval mode.
        example_inputs: the positional arguments of one call. Their shapes are fixed except for ``dynamic_shapes``.
        path: a name that ends in .pt2; replaced atomically, and unchanged if the export fails.
        dynamic_shapes: as in ``torch.export.export``, for example ``({0: torch.export.Dim("batch", max=64)},)`` for
            one input of shape [batch, ...].
        metadata: stored in the package, for its loader's ``get_metadata()``.
        progress: called as ``progress(steps done, steps, next step)``.

    Raises:
        TypeError: example_inputs is not a tuple.
        ValueError, OSError: path does not end in .pt2, or cannot be written; there is no C++ compiler; or a call changes
            buffers of the model, and the program, which is then run twice, changes them differently.
        Exception: whatever torch.export and AOTInductor raise on models they cannot compile.
    """
    with replacing(path, ".pt2") as written:
        cpp_compiler()
        report = progress or (lambda done, steps, what: None)
        report(0, 3, "tracing the model")
        exported = _traced(model, example_inputs, dynamic_shapes)
        # With AOTI_RUNTIME_CHECK_INPUTS=1 the lower bound check would refuse a dynamic size of 1, which works.
        options = {"aot_inductor.check_lowerbound": False, "aot_inductor.metadata": metadata or {}}
        report(1, 3, "compiling it")
        files = machine_code(exported, example_inputs, options)
        report(2, 3, "writing it")
        write_package(written, files)
        if changed := _buffers_of(exported):
            inductor = import_module("torch._inductor")
            check_changes(model, example_inputs, changed, lambda: _called(inductor.aoti_load_package(str(written))))


class _Archive(io.FileIO):
    """A file that keeps the first error of a write, because torch's archive writer ends the process if a write fails."""

    failed: OSError | None = None

    def write(self, data: Any) -> int:
        if self.failed is None:
            try:
                with memoryview(data).cast("B") as left:
                    done = 0
                    while done < len(left):
                        done += super().write(left[done:])
            except OSError as error:
                self.failed = error
        return len(data)


def write_package(path: Path, files: Any) -> None:
    """Writes the files of :func:`machine_code`, or a dict of them by model, to a .pt2.

    Raises:
        OSError: a write failed.
    """
    with _Archive(path, "wb") as file:
        import_module("torch._inductor.package").package_aoti(file, files)
        if file.failed is not None:
            raise file.failed


def _called(loaded: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    return lambda inputs: loaded(*inputs)


def described(cache: Tensor) -> str:
    """Describes a cache, an input that a .pt2 updates in place, for its metadata: float32:1x4x64x16."""
    return f"{str(cache.dtype).removeprefix('torch.')}:{'x'.join(map(str, cache.shape))}"


def zeros(text: str) -> Tensor:
    """A cache of zeros from its description by :func:`described`."""
    name, _, shape = text.partition(":")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not all(size.isdecimal() for size in shape.split("x")):
        raise ValueError(f"it has a cache {text!r}; expected a dtype and a shape, as float32:1x4x64x16")
    return torch.zeros([int(size) for size in shape.split("x")], dtype=dtype)
