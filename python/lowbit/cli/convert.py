"""``lowbit convert``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .options import Target
from .output import Output, size


def convert(
    output: Output,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Directory of a packed checkpoint.", show_default=False)],
    target: Target,
    activation_bits: Annotated[
        Literal["8", "16"],
        typer.Option("--activation-bits", help="Inputs of packed layers: int8; or 16, two int8 planes.", show_default=False),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Only layers whose names match; repeatable.", show_default="all"),
    ] = None,
) -> None:
    """Change the activation bits of a packed checkpoint; its codes and scales stay as they are."""
    from .. import convert_checkpoint

    begin = time.perf_counter()
    bits = int(activation_bits)
    with output.progress(f"copying {source}", "bytes") as advance:
        entries = convert_checkpoint(source, target, bits, only=only or ("*",), progress=advance)
    from .plans import make_plan

    make_plan(output, target)
    packed = [entry for entry in entries if entry.kind == "packed"]
    counts = {width: sum(entry.activation_bits == width for entry in packed) for width in (8, 16)}
    total = sum(entry.bytes for entry in entries)
    document: dict[str, Any] = {
        "source": str(source),
        "target": str(target),
        "bytes": total,
        "packed_layers": len(packed),
        "layers_of_16": counts[16],
        "seconds": time.perf_counter() - begin,
    }
    output.result(
        document,
        f"{len(packed)} packed layers: {counts[16]} with activations of 16 bits, {counts[8]} with 8",
        f"{target} written in {document['seconds']:.1f} s, {size(total)}",
    )
