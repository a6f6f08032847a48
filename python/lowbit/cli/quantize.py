"""``lowbit quantize``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import lowbit

from .options import Bits, EmbeddingBits, GroupSize, Json, Mapping, make_config, parse_group_size
from .output import Output, size, table

if TYPE_CHECKING:
    from lowbit import CheckpointSummary


def quantize(
    source: Annotated[Path, typer.Argument(help="Directory of a float checkpoint.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="Directory to write; empty, or not there yet.", show_default=False)],
    bits: Bits = 4,
    group_size: GroupSize = "32",
    mapping: Mapping = "symmetric",
    scale: Annotated[
        Literal["mse", "absmax"], typer.Option("--scale", help="Least squared error, or the whole range of a group.")
    ] = "mse",
    embedding_bits: EmbeddingBits = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            metavar="PATTERN=...",
            help="For layers of these names: PATTERN=BITS[,GROUP[,MAPPING]] or PATTERN=float. The last match counts.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Quantise a checkpoint, without ever holding it in memory."""
    output = Output(as_json)
    overrides = list(map(_override, override or ()))  # pairs: their order counts, and a pattern may come twice
    config = make_config(bits, group_size, mapping, embedding_bits, scale=scale, overrides=overrides)
    with output.progress(f"quantising {source}", "bytes") as advance:
        summary = lowbit.quantize_checkpoint(source, target, config, progress=advance)
    packed = [entry for entry in summary.entries if entry.kind == "packed"]
    packed_bytes = sum(entry.bytes for entry in packed)
    weights = sum(math.prod(entry.shape) for entry in packed)
    document = {
        "source": str(source),
        "target": str(target),
        "bytes_before": summary.source_bytes,
        "bytes_after": summary.target_bytes,
        "packed_layers": len(packed),
        "packed_bytes": packed_bytes,
        "packed_weights": weights,
        "bits_per_weight": 8 * packed_bytes / weights,
        "float_bytes": summary.target_bytes - packed_bytes,
        "left_bytes": summary.left_bytes,
        "left_float": summary.left,
        "seconds": summary.seconds,
    }
    shown = table("", "before", "after", "")
    share = f"{100 * summary.target_bytes / summary.source_bytes:.1f} %"
    shown.add_row("all tensors", size(summary.source_bytes), size(summary.target_bytes), share)
    shown.add_row(
        f"{len(packed)} packed layers", "", size(packed_bytes), f"{document['bits_per_weight']:.2f} bits per weight"
    )
    shown.add_row("left as they were", "", size(document["float_bytes"]), "")
    lines = _stays_float(summary)
    output.result(document, shown, *lines, f"{target} written in {summary.seconds:.1f} s")
    if 2 * summary.left_bytes > summary.target_bytes:
        output.warn(
            f"MOST OF THIS MODEL STAYS FLOAT: {len(summary.left)} matrices, "
            f"{100 * summary.left_bytes / summary.target_bytes:.0f} % of the bytes in {target}"
        )


def _stays_float(summary: CheckpointSummary) -> list[str]:
    """A line for each reason why matrices stay float: how many, their share of the bytes written, and one of them."""
    lines = []
    for why in dict.fromkeys(summary.left.values()):
        names = [name for name, reason in summary.left.items() if reason == why]
        share = sum(entry.bytes for entry in summary.entries if entry.name in names) / summary.target_bytes
        what = f"{names[0]} stays" if len(names) == 1 else f"{len(names)} matrices ({names[0]}, ...) stay"
        lines.append(f"{what} float, {100 * share:.1f} % of the bytes: {why}")
    return lines


def _override(text: str) -> tuple[str, dict | None]:
    """PATTERN=BITS[,GROUP[,MAPPING]] or PATTERN=float, as LowBitConfig takes it."""
    pattern, _, value = text.rpartition("=")
    if pattern and value == "float":
        return pattern, None
    bits, *rest = value.split(",")
    if not pattern or not bits.isdecimal() or len(rest) > 2:
        raise typer.BadParameter(
            f"{text!r}; expected PATTERN=BITS[,GROUP[,MAPPING]] or PATTERN=float", param_hint="--override"
        )
    changes: dict = {"bits": int(bits)}
    if rest:
        changes["group_size"] = parse_group_size(rest[0])
    if len(rest) == 2:
        changes["mapping"] = rest[1]
    return pattern, changes
