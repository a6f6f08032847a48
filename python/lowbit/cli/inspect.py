"""``lowbit inspect``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..files.untrusted import printable
from .output import Output, packed_figures, size, table


def inspect(
    output: Output,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="Directory of a checkpoint, or one .safetensors or .gguf file.", show_default=False
        ),
    ],
) -> None:
    """List the tensors of a checkpoint, with their bits and bytes."""
    from ..files.entries import inspect_checkpoint
    from ..files.import_report import read_report

    entries = inspect_checkpoint(path)
    imported = read_report(path if path.is_dir() else path.parent)
    count, packed = packed_figures(entries)
    document = {
        "path": str(path),
        "bytes": sum(entry.bytes for entry in entries),
        **packed,
        "tensors": [asdict(entry) for entry in entries],
        "imported": [asdict(imported[entry.name]) for entry in entries if entry.name in imported] or None,
    }
    columns = ("source type", "conversion") if document["imported"] else ()
    shown = table("tensor", "kind", "shape", "bits", "group", "mapping", "activations", "bytes", *columns)
    for entry in entries:
        is_packed = entry.kind == "packed"
        group = "" if not is_packed else "row" if entry.group_size is None else str(entry.group_size)
        shape = " x ".join(map(str, entry.shape))
        name, mapping = printable(entry.name), f"{entry.mapping or ''}{', rotated' if entry.rotated_inputs else ''}"
        activations = "" if entry.activation_bits is None else str(entry.activation_bits)
        was = imported.get(entry.name)
        came = () if not columns else ("", "") if was is None else (printable(was.source), was.came_over)
        shown.add_row(name, entry.kind, shape, f"{entry.bits:g}", group, mapping, activations, str(entry.bytes), *came)
    total = f"{len(entries)} tensors, {size(document['bytes'])}"
    if count:
        total += f"; {count} packed: {size(packed['packed_bytes'])}, {packed['bits_per_weight']:.2f} bits per weight"
    output.result(document, shown, total)
