"""``lowbit export``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..files.replace import has_mark, refuse_other_file
from ..machine.facts import cpp_compiler
from . import options
from .models import load, positions, set_threads
from .output import Output, size, table

# What each kind of file from lowbit has: a plan its first bytes, and a program the names of lowbit's operators or backend.
_MARKS = {"plan": b"lowbit plan", "pte": b"lowbit", "pt2": b"lowbit"}


def export(
    output: Output,
    model: options.Model,
    *,
    to: Annotated[
        Literal["plan", "pte", "pt2", "gguf"],
        typer.Option("--to", help="lowbit's own format, ExecuTorch's, AOTInductor's, or llama.cpp's.", show_default=False),
    ],
    file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="File to write; its name ends in .plan, .pte, .pt2 or .gguf. A plan is written beside the model's weights, by "
            "default to lowbit.plan.",
            show_default=False,
        ),
    ] = None,
    max_length: options.MaxLength = None,
    cache: options.Cache = None,
    chunk: Annotated[
        int, typer.Option("--chunk", min=1, help="Largest number of tokens in one call; longer prompts are split.")
    ] = 128,
    quantizing: options.Quantizing,
    threads: options.Threads = None,
) -> None:
    """Write a model, with its KV cache, to a file that runs without Python; or its weights to one for llama.cpp."""
    set_threads(threads)
    if file is None:
        if to != "plan":
            raise typer.BadParameter(f"it is missing; expected the file to write, such as model.{to}", param_hint="--output")
        file = model / "lowbit.plan"
    if file.suffix != f".{to}":
        raise ValueError(f"--output is {str(file)!r}; expected a name that ends in .{to}")
    if not file.absolute().parent.is_dir():
        raise NotADirectoryError(f"{file.absolute().parent} is not a directory; make it first")
    refuse_other_file(file, lambda path: _is_ours(path, to), f"a .{to} file")
    document: dict[str, Any] = {"model": str(model), "output": str(file), "to": to}
    if to == "plan":
        _check_plan(model, file, quantizing)
        options.refuse_unused("with --to plan, whose programs choose it", "max_length", "cache", "chunk")
    if to == "gguf":
        if quantizing.bits is not None:
            raise typer.BadParameter("quantize with lowbit quantize, and export the result", param_hint="--bits with --to gguf")
        if cache is not None:
            raise typer.BadParameter("the program that runs the file chooses its cache", param_hint="--cache with --to gguf")
        options.refuse_unused("with --to gguf", "max_length", "chunk", *options.HOW)
        document |= dict.fromkeys(("max_length", "cache", "chunk"))
        begin = time.perf_counter()
        document["tensors"], shown = _to_gguf(output, model, file)
        about = ""
    else:
        config = quantizing.config()
        if to == "pt2":
            cpp_compiler()
        loaded = load(output, model, config)
        max_length = max_length or min(2048, positions(loaded) // 16 * 16)
        chunk = min(chunk, max_length)
        begin = time.perf_counter()
        kind = _program(output, loaded, file, max_length, cache, chunk)
        document |= {"max_length": max_length, "cache": kind, "chunk": chunk, "tensors": None}
        about, shown = f", up to {max_length} tokens", []
        if to == "plan":
            document |= dict.fromkeys(("max_length", "cache", "chunk"))
            about = ""
            _note_refusal(output, file)
    document |= {"bytes": file.stat().st_size, "seconds": time.perf_counter() - begin}
    written = f"{file}: {size(document['bytes'])}{about}, written in {document['seconds']:.1f} s"
    output.result(document, *shown, written)


def _is_ours(path: Path, to: str) -> bool:
    if to != "gguf":
        return has_mark(path, _MARKS[to])
    from ..exports.gguf_settings import is_of_lowbit

    return is_of_lowbit(path)


def _check_plan(model: Path, file: Path, quantizing: options.Quantizing) -> None:
    from ..llm.loading import is_packed

    if quantizing.bits is not None or not is_packed(model):
        raise ValueError("--to plan: a plan uses the packed weights beside it; expected a model of lowbit quantize or import")
    if file.absolute().parent.resolve() != model.resolve():
        raise ValueError(f"--output is {str(file)!r}; expected a file in {model}, whose weights the plan uses")


def _program(output: Output, model: Any, file: Path, max_length: int, cache: str | None, chunk: int) -> str:
    """Writes a program, and returns the type of its KV cache."""
    from .. import llm

    decoder = llm.Decoder(model, max_length, cache)
    with output.progress(f"exporting to {file}", "steps") as advance:
        llm.export_decoder(decoder, file, chunk=chunk, progress=advance)
    return decoder.cache_type


def _note_refusal(output: Output, plan: Path) -> None:
    """Says why lowbit-run will not run the plan's model."""
    from .. import _C
    from ..exports.token_file import TOKENS

    tokens = plan.with_name(TOKENS)
    if not tokens.exists():
        output.note(f"there is no tokenizer beside {plan}, so lowbit-run does not run it")
        return
    try:
        _C.Tokenizer(tokens.read_bytes())
    except ValueError as error:
        output.note(f"lowbit-run does not run {plan.parent}: {error}")


def _to_gguf(output: Output, model: Path, file: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """Writes a GGUF file; returns its tensors for the JSON document, and a table of their types."""
    from ..exports.gguf import export_gguf
    from ..files.import_report import ImportedTensor

    with output.progress(f"exporting to {file}", "bytes") as advance:
        tensors = export_gguf(model, file, advance)
    shown = table("tensors", "target type", "conversion")
    for type_, kind in sorted({(tensor.type, tensor.kind) for tensor in tensors}):
        alike = [tensor.steps for tensor in tensors if (tensor.type, tensor.kind) == (type_, kind)]
        shown.add_row(str(len(alike)), type_, ImportedTensor("", "", kind, max(alike)).came_over)
    return [asdict(tensor) for tensor in tensors], [shown]
