"""``lowbit export``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..machine.facts import cpp_compiler
from . import options
from .models import load, positions, set_threads
from .output import Output, size, table


def export(
    output: Output,
    model: options.Model,
    *,
    to: Annotated[
        Literal["pte", "pt2", "gguf"],
        typer.Option("--to", help="ExecuTorch's format, AOTInductor's, or llama.cpp's.", show_default=False),
    ],
    file: Annotated[
        Path, typer.Option("--output", help="File to write; its name ends in .pte, .pt2 or .gguf.", show_default=False)
    ],
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
    if file.suffix != f".{to}":
        raise ValueError(f"--output is {str(file)!r}; expected a name that ends in .{to}")
    if not file.absolute().parent.is_dir():
        raise NotADirectoryError(f"{file.absolute().parent} is not a directory; make it first")
    if to == "gguf":
        if quantizing.bits is not None:
            raise typer.BadParameter("quantize with lowbit quantize, and export the result", param_hint="--bits with --to gguf")
        if cache is not None:
            raise typer.BadParameter("the program that runs the file chooses its cache", param_hint="--cache with --to gguf")
        options.refuse_unused("with --to gguf", "max_length", "chunk", *options.HOW)
        _to_gguf(output, model, file)
        return
    from .. import llm

    config = quantizing.config()
    if to == "pt2":
        cpp_compiler()
    loaded = load(output, model, config)
    if max_length is None:
        max_length = min(2048, positions(loaded) // 16 * 16)
    decoder = llm.Decoder(loaded, max_length, cache)
    begin = time.perf_counter()
    with output.progress(f"exporting to {file}", "steps") as advance:
        llm.export_decoder(decoder, file, chunk=min(chunk, max_length), progress=advance)
    written, seconds = file.stat().st_size, time.perf_counter() - begin
    document = {
        "model": str(model),
        "output": str(file),
        "to": to,
        "max_length": max_length,
        "cache": decoder.cache_type,
        "chunk": min(chunk, max_length),
        "bytes": written,
        "seconds": seconds,
        "tensors": None,
    }
    output.result(document, f"{file}: {size(written)}, up to {max_length} tokens, written in {seconds:.1f} s")


def _to_gguf(output: Output, model: Path, file: Path) -> None:
    from ..exports.gguf import export_gguf
    from ..importing.summary import ImportedTensor

    begin = time.perf_counter()
    with output.progress(f"exporting to {file}", "bytes") as advance:
        tensors = export_gguf(model, file, advance)
    written, seconds = file.stat().st_size, time.perf_counter() - begin
    document = {
        "model": str(model),
        "output": str(file),
        "to": "gguf",
        "max_length": None,
        "cache": None,
        "chunk": None,
        "bytes": written,
        "seconds": seconds,
        "tensors": [asdict(tensor) for tensor in tensors],
    }
    shown = table("tensors", "target type", "conversion")
    for type_, kind in sorted({(tensor.type, tensor.kind) for tensor in tensors}):
        alike = [tensor.steps for tensor in tensors if (tensor.type, tensor.kind) == (type_, kind)]
        shown.add_row(str(len(alike)), type_, ImportedTensor("", "", kind, max(alike)).came_over)
    output.result(document, shown, f"{file}: {size(written)}, written in {seconds:.1f} s")
