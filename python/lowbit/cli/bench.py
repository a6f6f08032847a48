"""``lowbit bench``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from lowbit._machine import cpp_compiler

from .models import is_shape, load_packed, set_threads
from .options import Cache, GroupSize, Json, ModelOrShape, OptionalBits, Threads, parse_group_size
from .output import Output, size, table


class _Mode(enum.StrEnum):  # typer takes no list of literals
    eager = "eager"
    compile = "compile"
    aot = "aot"


def bench(
    model: ModelOrShape,
    bits: OptionalBits = None,
    group_size: GroupSize = "32",
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of the prompt.")] = 512,
    new: Annotated[int, typer.Option("--new", min=1, help="Tokens that are decoded after the prompt.")] = 64,
    mode: Annotated[list[_Mode], typer.Option("--mode", help="Ways to run, in turns.")] = [_Mode.aot],  # noqa: B006
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of runs; the median counts.")] = 3,
    cache: Cache = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure a prompt and decoding, beside the bandwidth of this machine's memory."""
    from lowbit.llm import bench as library

    output = Output(as_json)
    modes = list(dict.fromkeys(way.value for way in mode))
    if modes != ["eager"]:
        cpp_compiler()
    set_threads(threads)
    measured = model if is_shape(model) else load_packed(output, Path(model), bits, group_size)
    with output.progress(f"measuring {model}"):
        figures = library.run(
            measured, bits or 4, parse_group_size(group_size), prompt=prompt, new=new, modes=modes, rounds=rounds, cache=cache
        )
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
