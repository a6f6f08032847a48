"""``lowbit bench``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

import lowbit

from ..machine.cpus import default_threads
from ..machine.facts import cpp_compiler
from . import options
from .models import is_shape, load_packed, set_threads
from .output import Output, size, table


class _Mode(enum.StrEnum):  # typer does not support a list of literals
    plan = "plan"
    eager = "eager"
    compile = "compile"
    aot = "aot"


def bench(
    output: Output,
    model: options.OptionalModelOrShape = None,
    *,
    widths: options.Widths,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Number of tokens of the prompt.")] = 512,
    new: Annotated[int, typer.Option("--new", min=1, help="Tokens that are decoded after the prompt.")] = 64,
    mode: Annotated[list[_Mode], typer.Option("--mode", help="Ways to run, repeatable.")] = [_Mode.plan],  # noqa: B006
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds; results are medians.")] = 3,
    cache: options.Cache = None,
    threads: options.Threads = None,
    publish: Annotated[
        Path | None,
        typer.Option(
            "--publish",
            metavar="[DIRECTORY]",
            help="Measure this machine instead, in ten minutes: kernels, and models of random weights. Writes a page and its "
            f"figures to this directory, or to {options.PUBLISH_DIRECTORY}.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure prefill and decoding speed, relative to the memory bandwidth."""
    if publish is not None:
        names = ("bits", "group_size", "activation_bits", "prompt", "new", "mode", "rounds", "cache")
        options.refuse_unused("with --publish, which has the same settings on every machine", *names)
        if model is not None:
            raise typer.BadParameter(f"{model!r}; --publish measures models of its own", param_hint="MODEL|SHAPE")
        set_threads(threads)
        _publish(output, publish)
        return
    if model is None:
        raise typer.BadParameter("expected a model or a shape, or --publish", param_hint="MODEL|SHAPE")
    modes = list(dict.fromkeys(way.value for way in mode))
    counts = {"prompt": prompt, "new": new, "rounds": rounds}
    figures = None
    if not is_shape(model) and modes == ["plan"] and widths.bits is None and Path(model).is_dir():
        figures = _measure_plan(output, Path(model), threads, cache, counts)
    if figures is None:
        figures = _measure(output, model, widths, threads, modes, cache=cache, **counts)
    shown = table("", "decode, tokens/s", "of the bandwidth", "prompt, tokens/s", "first token, s", "compiled in, s")
    for name, row in figures["modes"].items():
        shown.add_row(
            name,
            f"{row['decode_tokens_per_second']:.1f}",
            f"{100 * row['share_of_bandwidth']:.0f} %",
            f"{row['prefill_tokens_per_second']:.1f}",
            f"{row['seconds_to_first_token']:.3f}",
            f"{row['prepare_seconds']:.1f}",
        )
    machine = f"{figures['threads']} threads of {figures['machine']}, memory read at {size(figures['read_bandwidth'])}/s"
    weights = f"{size(figures['packed_bytes_per_token'])} of packed weights per token"
    memory = figures["peak_memory_bytes"]
    used = [] if memory is None else [f"peak memory {size(memory)}"]
    output.result({"model": model, **figures}, f"{model}: {weights}; {machine}", shown, *used)


def _measure_plan(
    output: Output, model: Path, threads: int | None, cache: str | None, counts: dict[str, int]
) -> dict[str, Any] | None:
    """The figures of a model that runs without torch, by the plan beside its weights; None: it has none that can be used."""
    from .plans import NoPlan, missing, open_model

    try:
        planned = open_model(output, model, threads, cache)
    except NoPlan as reason:
        missing(output, reason)
        return None
    options.refuse_unused(f"for {model}, which is packed already", "group_size", "activation_bits")
    from ..tools.speed_turns import run_plan

    with output.progress(f"measuring {model}"):
        return run_plan(planned, threads or default_threads(), **counts)


def _measure(
    output: Output, model: str, widths: options.Widths, threads: int | None, modes: list[str], **settings: Any
) -> dict[str, Any]:
    """The figures of any model, measured with torch."""
    lowbit.load_torch()
    from ..tools import model_speed

    if not {*modes} <= {"plan", "eager"}:
        cpp_compiler()
    set_threads(threads)
    measured = model if is_shape(model) else load_packed(output, Path(model), widths)
    group_size, activation_bits = options.parse_group_size(widths.group_size), int(widths.activation_bits)
    with output.progress(f"measuring {model}"):
        return model_speed.run(
            measured, widths.bits or 4, group_size, activation_bits=activation_bits, modes=modes, **settings
        )  # fmt: skip


def _publish(output: Output, directory: Path) -> None:
    lowbit.load_torch()
    import torch

    from ..tools.perf import publish

    with output.progress("measuring this machine, ten minutes at most") as advance:
        document, page, data = publish(directory, torch.get_num_threads(), lambda part: advance(0, 0, part))
    not_reached = [f"not reached: {each['what']}: {each['why']}" for each in document["not_reached"]]
    if document["load"]["busy"]:
        output.warn("other programs used this machine during the measurement; measure again when it is idle")
    result = {"page": str(page), "figures": str(data), "busy": document["load"]["busy"]}
    output.result(result | {"not_reached": document["not_reached"]}, *not_reached, f"written: {page}, {data}")
