"""Options that several commands have, and what their text means."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from lowbit import LowBitConfig

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead (docs/cli.md has its keys).")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a checkpoint, float or packed.", show_default=False)]
ModelOrShape = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|SHAPE",
        help="Directory of a checkpoint; or random weights of a shape: llama-3.2-1b, llama-3.2-3b, llama-3.1-8b, qwen3-0.6b.",
        show_default=False,
    ),
]
Bits = Annotated[int, typer.Option("--bits", min=1, max=8, help="Bits per weight.")]
OptionalBits = Annotated[
    int | None,
    typer.Option("--bits", min=1, max=8, help="Quantize a float checkpoint to this number of bits first.", show_default=False),
]
GroupSize = Annotated[
    str, typer.Option("--group-size", help="Inputs that share a scale, a multiple of 16; or none: a scale per output.")
]
Mapping = Annotated[
    Literal["symmetric", "affine", "levels"],
    typer.Option("--mapping", help="Scale only, scale and minimum, or, at 2 to 4 bits, scale and fitted levels."),
]
EmbeddingBits = Annotated[
    int | None,
    typer.Option(
        "--embedding-bits", min=1, max=8, help="Bits of embedding tables and of heads that share one.", show_default="--bits"
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=1024, help="Threads to run on.", show_default="torch's")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the whole model first; needs a C++ compiler.")]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", min=16, help="Tokens in the KV cache, a multiple of 16.", show_default=False)
]

Cache = Annotated[
    Literal["float32", "bfloat16", "float16", "int8", "int4"] | None,
    typer.Option("--cache", help="Type of the KV cache.", show_default="the model's type"),
]


def finite(number: float | None) -> float | None:
    """A callback of options: neither NaN nor infinite, which are numbers to Python and within every range or none."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


def refuse_unused(why: str, **given: bool) -> None:
    """Refuses options that would have no effect, because a user who gives one expects an effect.

    Args:
        why: "without --bits", for example.
        given: by the parameter's name, whether an option has another value than its default.
    """
    for name, other in given.items():
        if other:
            raise typer.BadParameter(f"it has no effect {why}", param_hint=f"--{name.replace('_', '-')}")


def refuse_without_bits(bits: int | str | None, group_size: str, mapping: str, embedding_bits: int | None) -> None:
    """Refuses options for quantizing a float checkpoint if nothing is quantized."""
    if not bits:
        refuse_unused("without --bits", **said_how(group_size, mapping, embedding_bits))


def said_how(group_size: str, mapping: str, embedding_bits: int | None) -> dict[str, bool]:
    """Which of these options say something else than their defaults."""
    others = {"mapping": mapping != "symmetric", "embedding_bits": embedding_bits is not None}
    return {"group_size": group_size != "32", **others}


def parse_group_size(text: str, option: str = "--group-size") -> int | None:
    if text.lower() == "none":
        return None
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size <= 0 or size % 16:
        raise typer.BadParameter(f"{text!r} is no group size; expected a positive multiple of 16, or none", param_hint=option)
    return size


def parse_widths(text: str) -> list[int]:
    """Widths with commas between, each once, in their order."""
    try:
        widths = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        widths = [0]
    if not all(1 <= width <= 8 for width in widths):
        raise typer.BadParameter(f"{text!r}; expected numbers from 1 to 8, as in 8,4,2", param_hint="--bits")
    return widths


def make_config(
    bits: int, group_size: str, mapping: str = "symmetric", embedding_bits: int | None = None, **others
) -> LowBitConfig:
    from lowbit import LowBitConfig

    return LowBitConfig(
        bits=bits, group_size=parse_group_size(group_size), mapping=mapping, embedding_bits=embedding_bits, **others
    )
