"""``lowbit dequantize``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..files.config_json import quantization_method, read_config
from .models import set_threads
from .options import Target, Threads
from .output import Output, packed_figures, size


def dequantize(
    output: Output,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Directory of a packed checkpoint.", show_default=False)],
    target: Target,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="Type of the weights that were packed.", show_default="as config.json says"),
    ] = None,
    threads: Threads = None,
) -> None:
    """Write a packed checkpoint as a float one, for programs and methods that need floats."""
    import torch

    from .. import dequantize_checkpoint, inspect_checkpoint

    begin = time.perf_counter()
    set_threads(threads)
    before = inspect_checkpoint(source)
    with output.progress(f"dequantizing {source}", "layers") as advance:
        after = dequantize_checkpoint(source, target, dtype=None if dtype is None else getattr(torch, dtype), progress=advance)
    count, packed = packed_figures(before)
    document = {
        "source": str(source),
        "target": str(target),
        "bytes_before": sum(entry.bytes for entry in before),
        "bytes_after": sum(entry.bytes for entry in after),
        "packed_layers": count,
        "bits_per_weight": packed["bits_per_weight"],
        "seconds": time.perf_counter() - begin,
    }
    output.result(
        document,
        f"{count} packed layers, {packed['bits_per_weight']:.2f} bits per weight: {size(document['bytes_before'])} became "
        f"{size(document['bytes_after'])} of floats",
        f"{target} written in {document['seconds']:.1f} s",
    )


@contextmanager
def as_float(output: Output, source: Path, target: Path) -> Iterator[Path]:
    """A context with a float checkpoint: the source, or if it is packed, its dequantized copy in a temporary directory.

    The temporary directory is hidden, next to the target.

    Raises:
        OSError: the source does not exist, or the target cannot be written; this is found out first.
    """
    from .. import dequantize_checkpoint, inspect_checkpoint
    from ..files.replace import PartialDirectory, resolve_new_directory
    from ..transformers import METHOD

    method, place = quantization_method(read_config(source)), resolve_new_directory(target)
    if method != METHOD:
        yield source
        return
    _, packed = packed_figures(inspect_checkpoint(source))
    output.warn(
        f"{source} is packed already, with {packed['bits_per_weight']:.2f} bits per weight: that loss stays, and "
        "quantizing it again adds to it; start from the float checkpoint if you have it"
    )
    with PartialDirectory(place.with_name(f"{place.name}.float")) as directory:
        floats = directory.path / "float"
        with output.progress(f"dequantizing {source}", "layers") as advance:
            dequantize_checkpoint(source, floats, progress=advance)
        yield floats
