"""Options that several commands share, and their parsers."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from .. import LowBitConfig


def finite(number: float | None) -> float | None:
    """An option callback that refuses NaN and infinity, which typer's ranges accept."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


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
OptionalModelOrShape = Annotated[str | None, *ModelOrShape.__metadata__]
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
ActivationBits = Annotated[
    Literal["8", "16"],
    typer.Option(
        "--activation-bits", help="Inputs of packed layers: int8; or 16, two int8 planes, which lose next to nothing."
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="Picture for the model to see; several times. Needs Pillow.", show_default=False),
]
ConvBits = Annotated[
    int | None,
    typer.Option(
        "--conv-bits", min=1, max=8, help="Bits of convolutions that are matrix products; 8.", show_default="they stay float"
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=1024, help="Threads to run on.", show_default="torch's")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the whole model first; needs a C++ compiler.")]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", min=16, help="Tokens in the KV cache, a multiple of 16.", show_default=False)
]

Cache = Annotated[
    Literal["float32", "bfloat16", "float16", "int8", "int8,int4", "int4"] | None,
    typer.Option(
        "--cache", help="Type of the KV cache; int8,int4: that of keys, then of values.", show_default="the model's type"
    ),
]
ExpertMemory = Annotated[
    str | None,
    typer.Option(
        "--expert-memory", help="Memory for experts of a mixture; others stay in the files.", show_default="all of them"
    ),
]
PUBLISH_DIRECTORY = "docs/perf"
PREFIX_SIZE = "8GB"
PrefixDirectory = Annotated[
    Path | None,
    typer.Option(
        "--prefix-cache", help="Directory for prefix caching on disk.", show_default="the environment's LOWBIT_PREFIX_CACHE"
    ),
]
PrefixSize = Annotated[str, typer.Option("--prefix-cache-size", help="Largest size of that directory.")]


def _number(option: str, help: str, most: float | None = None, least: float | None = 0) -> Any:
    return typer.Option(option, min=least, max=most, callback=finite, help=help, show_default=False)


def temperature_option(default: str) -> Any:
    """--temperature, with the default that the help shows."""
    help = "0 always takes the most likely token."
    return typer.Option("--temperature", min=0, callback=finite, help=help, show_default=default)


def top_k_option(default: str) -> Any:
    """--top-k, with the default that the help shows."""
    return typer.Option("--top-k", min=1, help="Sample from this number of most likely tokens.", show_default=default)


def top_p_option(default: str) -> Any:
    """--top-p, with the default that the help shows."""
    help = "Sample from the most likely tokens that reach this probability."
    return typer.Option("--top-p", min=0, max=1, callback=finite, help=help, show_default=default)


# Sampling options. None: the setting of the model's files, or off.
MinP = Annotated[float | None, _number("--min-p", "Draw from tokens at least so many times as likely as the likeliest.", 1)]
RepetitionPenalty = Annotated[float | None, _number("--repetition-penalty", "Above 1: what came before becomes less likely.")]
PresencePenalty = Annotated[
    float | None, _number("--presence-penalty", "Subtracted from logits of tokens that the text has.", least=None)
]
FrequencyPenalty = Annotated[
    float | None, _number("--frequency-penalty", "The same, as many times as the text has the token.", least=None)
]
DryMultiplier = Annotated[float | None, _number("--dry-multiplier", "Above 0: repetitions become less likely (DRY); 0.8.")]
DryBase = Annotated[float | None, _number("--dry-base", "DRY's growth with each token of a repetition; 1.75.", least=1)]
DryAllowedLength = Annotated[
    int | None,
    typer.Option("--dry-allowed-length", min=1, help="Tokens of a repetition that DRY allows; 2.", show_default=False),
]
DryBreakers = Annotated[
    list[str] | None,
    typer.Option("--dry-breaker", help="Text that no repetition goes beyond; several times.", show_default=False),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="TOKEN=BIAS", help="Added to a token's logit; several times.", show_default=False),
]
Guesses = Annotated[
    int | None,
    typer.Option(
        "--guesses",
        min=0,
        help="Speculative decoding: guess this number of tokens; the text is the same.",
        show_default="0; 4 with --draft",
    ),
]
Draft = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        help="Draft model: a smaller model with the same tokens; or mtp: the model's own multi-token prediction head.",
        show_default=False,
    ),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the new text; several times.", show_default=False)
]


def parse_sampling(tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of lowbit.llm.Sampling that the options set.

    Args:
        tokenizer: to find the tokens of DRY's breakers.
        options: field name -> value; None or []: not given.
    """
    from ..llm.stopping import BREAKERS, breakers, check_stop_strings

    given = {name: value for name, value in options.items() if value not in (None, [])}
    if not given.get("dry_multiplier"):
        names = ("dry_base", "dry_allowed_length", "dry_breakers")
        refuse_unused("without --dry-multiplier", **{name.removesuffix("s"): name in given for name in names})
    else:
        strings = check_stop_strings(given.get("dry_breakers", BREAKERS), "--dry-breaker")
        given["dry_breakers"] = breakers(tokenizer, strings)
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_parse_bias, given["logit_bias"]))
    return given


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}; expected a token id and a number, as in 42=-5", param_hint="--logit-bias"
        ) from None


def refuse_unused(why: str, **given: bool) -> None:
    """Refuses options that would have no effect.

    Args:
        why: for example "without --bits".
        given: parameter name -> whether the option differs from its default.
    """
    for name, differs in given.items():
        if differs:
            raise typer.BadParameter(f"it has no effect {why}", param_hint=f"--{name.replace('_', '-')}")


def refuse_without_bits(bits: int | str | None, group_size: str, mapping: str, embedding_bits: int | None) -> None:
    """Refuses options for quantizing a float checkpoint unless ``bits`` is given."""
    if not bits:
        refuse_unused("without --bits", **said_how(group_size, mapping, embedding_bits))


# Names of the sampling parameters of commands.
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_breakers", "logit_bias",
)  # fmt: skip


def sampling_in(parameters: dict[str, Any]) -> dict[str, Any]:
    """The sampling options among a command's parameters."""
    return {name: parameters[name] for name in _SAMPLING}


def optional_config(bits: int | None, group_size: str, mapping: str, embedding_bits: int | None) -> LowBitConfig | None:
    """How to quantize a float checkpoint while it is loaded; None: not at all."""
    refuse_without_bits(bits, group_size, mapping, embedding_bits)
    return None if bits is None else make_config(bits, group_size, mapping, embedding_bits)


def said_how(group_size: str, mapping: str, embedding_bits: int | None) -> dict[str, bool]:
    """Which of these options differ from their defaults."""
    mapped, embedded = mapping != "symmetric", embedding_bits is not None
    return {"group_size": group_size != "32", "mapping": mapped, "embedding_bits": embedded}


def parse_group_size(text: str, option: str = "--group-size") -> int | None:
    if text.lower() == "none":
        return None
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size <= 0 or size % 16:
        raise typer.BadParameter(
            f"{text!r} is not a group size; expected a positive multiple of 16, or none", param_hint=option
        )
    return size


def parse_size(text: str, option: str) -> int:
    """Parses a size such as 1.2GB, 800 MB, 1.1GiB or 1000; returns bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?", text.strip())
    if match is None or (match[3] and not match[2]):
        raise typer.BadParameter(f"{text!r}; expected a size, as in 1.2GB, 800MB or 1.1GiB", param_hint=option)
    number, unit, binary = match.groups()
    return int(Fraction(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def parse_widths(text: str) -> list[int]:
    """Parses comma-separated bit widths; keeps their order and drops duplicates."""
    try:
        widths = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        widths = [0]
    if not all(1 <= width <= 8 for width in widths):
        raise typer.BadParameter(f"{text!r}; expected numbers from 1 to 8, as in 8,4,2", param_hint="--bits")
    return widths


def make_config(
    bits: int, group_size: str, mapping: str = "symmetric", embedding_bits: int | None = None, **others: Any
) -> LowBitConfig:
    from .. import LowBitConfig

    return LowBitConfig(
        bits=bits, group_size=parse_group_size(group_size), mapping=mapping, embedding_bits=embedding_bits, **others
    )


def number_of_guesses(guesses: int | None, draft: Path | None) -> int:
    """The number of draft tokens from ``--guesses`` and ``--draft``."""
    if draft is not None and guesses == 0:
        raise typer.BadParameter("a draft needs guesses of 1 or more", param_hint="--guesses")
    return (0 if draft is None else 4) if guesses is None else guesses
