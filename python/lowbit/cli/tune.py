"""``lowbit tune``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

import lowbit

from ..machine.cpus import available_cpus
from .models import is_shape, load_packed
from .options import ModelOrShape, Widths, finite, parse_group_size
from .output import Output, table


def tune(
    output: Output,
    model: ModelOrShape,
    *,
    widths: Widths,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of activations: 1 for decoding, more for a prompt.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", min=0.001, callback=finite, help="Approximate time to measure.")] = 2.0,
) -> None:
    """Measure with how many threads the linear layers run fastest."""
    measured = _layer_shapes(model) if is_shape(model) else load_packed(output, Path(model), widths)
    with output.progress(f"measuring 1 to {available_cpus()} threads"):
        tuning = lowbit.tune_threads(
            measured, rows=rows, bits=widths.bits or 4, group_size=parse_group_size(widths.group_size),
            activation_bits=int(widths.activation_bits), seconds=seconds, apply=False,
        )  # fmt: skip
    document = {
        "model": model,
        "rows": rows,
        "threads": tuning.threads,
        "seconds": {str(threads): median for threads, median in tuning.seconds.items()},
    }
    shown = table("threads", "ms per pass")
    for threads, median in tuning.seconds.items():
        shown.add_row(f"{threads}{' *' if threads == tuning.threads else ''}", f"{1e3 * median:.3f}")
    output.result(document, shown, f"fastest: --threads {tuning.threads}, or torch.set_num_threads({tuning.threads})")


def _layer_shapes(shape: str) -> list[tuple[int, int]]:
    """[out_features, in_features] of the linear layers of one block of a named shape, and of its head."""
    import torch

    from ..llm.shapes import shape_config

    config = shape_config(shape)
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model = import_module("transformers").AutoModelForCausalLM.from_config(config)
    linear = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return [(layer.out_features, layer.in_features) for layer in linear]
