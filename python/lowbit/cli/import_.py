"""``lowbit import``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .models import set_threads, showing_import
from .options import Target, Threads, refuse_unused
from .output import Output, packed_figures, size, table

if TYPE_CHECKING:
    from ..files.import_report import ImportedTensor


def import_(
    output: Output,
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A .gguf file, or the directory of a quantized checkpoint.", show_default=False),
    ],
    target: Target,
    i2s_order: Annotated[
        str | None, typer.Option(help="Order of weights in a GGUF file of bitnet.cpp: x86, arm or rows.", show_default=False)
    ] = None,
    mmproj: Annotated[
        Path | None, typer.Option(help="The .gguf file with the vision tower of a .gguf language model.", show_default=False)
    ] = None,
    activation_bits: Annotated[
        Literal["8", "16"] | None,
        typer.Option(help="As in quantize, for all packed layers; without it, 16 in the output head.", show_default=False),
    ] = None,
    threads: Threads = None,
) -> None:
    """Import a quantized checkpoint without requantizing."""
    begin = time.perf_counter()
    from ..importing import import_checkpoint, open_source

    set_threads(threads)
    if i2s_order is not None:
        if all(tensor.source != "I2_S" for tensor in open_source(source, i2s_order, mmproj).tensors):
            refuse_unused("without weights of the type I2_S", "i2s_order")
    with showing_import(output, source) as (opening, advance):
        summary = import_checkpoint(
            source,
            target,
            i2s_order=i2s_order,
            mmproj=mmproj,
            activation_bits=None if activation_bits is None else int(activation_bits),
            progress=advance,
            opening=opening,
        )
    from .plans import make_plan

    make_plan(output, target)
    count, packed = packed_figures(summary.entries)
    document = {
        "source": str(source),
        "target": str(target),
        "format": summary.format,
        "bytes_before": summary.source_bytes,
        "bytes_after": summary.target_bytes,
        "packed_layers": count,
        **packed,
        "seconds": time.perf_counter() - begin,
        "tensors": [asdict(tensor) for tensor in summary.tensors],
    }
    sizes = {entry.name: entry.bytes for entry in summary.entries}
    shown = table("tensors", "source type", "bytes", "conversion")
    for alike in groups(summary.tensors):
        first = alike[0]
        worst = type(first)("", "", first.kind, max(t.steps for t in alike), max(t.error for t in alike))
        bytes_ = sum(sizes[tensor.name] for tensor in alike)
        shown.add_row(str(len(alike)), first.source, size(bytes_), worst.came_over)
    density = f", {packed['bits_per_weight']:.2f} bits per weight" if count else ": no matrix is quantized"
    output.result(
        document,
        shown,
        f"{count} packed layers, {size(packed['packed_bytes'])}{density}",
        f"{target} written in {time.perf_counter() - begin:.1f} s",
    )


def groups(tensors: Iterable[ImportedTensor]) -> list[list[ImportedTensor]]:
    """Groups tensors by their type and by how they were imported."""
    alike: dict[tuple[str, str], list[ImportedTensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.source, tensor.kind), []).append(tensor)
    return list(alike.values())
