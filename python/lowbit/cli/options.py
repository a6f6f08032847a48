"""Options that several commands share, alone and in groups, and their parsers.

A command takes a group as a parameter of its class: :func:`for_typer` shows typer the options of the group instead.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from .output import Output

if TYPE_CHECKING:
    from .. import LowBitConfig
    from ..llm import PrefixCache

_AS_JSON = typer.Option("--json", help="Print one JSON document instead (docs/cli.md has its keys).")


def for_typer(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: with the options of each group, and ``--json`` for a parameter of the class Output."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    output = None

    def add(name: str, annotation: Any, default: Any) -> None:
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if parameter.annotation is Output:
            output = name
        elif is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            hints = get_type_hints(parameter.annotation, include_extras=True)
            for field in fields(parameter.annotation):
                add(field.name, hints[field.name], field.default)
        else:
            add(name, parameter.annotation, parameter.default)
    if output is not None:
        add("as_json", Annotated[bool, _AS_JSON], False)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        given = {
            name: kind(**{field.name: arguments.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        if output is not None:
            given[output] = Output(arguments.pop("as_json"))
        command(**arguments, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def finite(number: float | None) -> float | None:
    """An option callback that refuses NaN and infinity, which typer's ranges accept."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


def _number(option: str, help: str, most: float | None = None, least: float | None = 0, default: str | bool = False) -> Any:
    return typer.Option(option, min=least, max=most, callback=finite, help=help, show_default=default)


SHAPES = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-0.6b")  # lowbit.llm.shapes.NAMES, whose import takes torch
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a checkpoint, float or packed.", show_default=False)]
ModelOrShape = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|SHAPE",
        help=f"Directory of a checkpoint; or random weights of a shape: {', '.join(SHAPES)}.",
        show_default=False,
    ),
]
OptionalModelOrShape = Annotated[str | None, *ModelOrShape.__metadata__]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="Directory to write; empty, or new.", show_default=False)]
OptionalBits = Annotated[
    int | None,
    typer.Option("--bits", min=1, max=8, help="Quantize a float checkpoint to this number of bits first.", show_default=False),
]
GroupSize = Annotated[
    str, typer.Option("--group-size", help="Inputs that share a scale, a multiple of 16; none: one scale per output.")
]
ActivationBits = Annotated[
    Literal["8", "16"],
    typer.Option("--activation-bits", help="8: int8 inputs of packed layers; 16: two int8 planes, which lose next to nothing."),
]
Images = Annotated[
    list[Path] | None, typer.Option("--image", help="Image for the model; repeatable. Requires Pillow.", show_default=False)
]
Template = Annotated[
    Path | None, typer.Option("--template", help="Chat template, a Jinja file, instead of the model's.", show_default=False)
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=1024, help="Threads to run on.", show_default="torch's")]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", min=16, help="Tokens in the KV cache, a multiple of 16.", show_default=False)
]
Cache = Annotated[
    Literal["float32", "bfloat16", "float16", "int8", "int8,int4", "int4"] | None,
    typer.Option("--cache", help="Type of the KV cache; int8,int4: keys, then values.", show_default="the model's type"),
]
CalibrateTokens = Annotated[
    int, typer.Option("--calibrate-tokens", min=128, help="Largest number of tokens used from the text.")
]
PUBLISH_DIRECTORY = "docs/perf"
HOW = ("group_size", "activation_bits", "mapping", "embedding_bits")  # parameters that need --bits
on_command_line: dict[str, str] = {}  # parameter -> its option
_PREFIX_CACHE = "LOWBIT_PREFIX_CACHE"  # environment variable


@dataclass(frozen=True)
class Widths:
    """How a float checkpoint is quantized while it is loaded, or random weights are made."""

    bits: OptionalBits = None
    group_size: GroupSize = "32"
    activation_bits: ActivationBits = "8"

    def config_at(self, bits: int, **others: Any) -> LowBitConfig:
        """The config for a number of bits; ``others`` are its other fields."""
        from .. import LowBitConfig

        group_size = parse_group_size(self.group_size)
        return LowBitConfig(bits=bits, group_size=group_size, activation_bits=int(self.activation_bits), **others)


@dataclass(frozen=True)
class Quantizing(Widths):
    """The same as Widths, with all settings of the weights."""

    mapping: Annotated[
        Literal["symmetric", "affine", "levels"],
        typer.Option("--mapping", help="Scale only, scale and minimum, or, at 2 to 4 bits, scale and fitted levels."),
    ] = "symmetric"
    embedding_bits: Annotated[
        int | None,
        typer.Option(
            "--embedding-bits", min=1, max=8, help="Bits of embedding tables and of heads that share one.",
            show_default="--bits",
        ),
    ] = None  # fmt: skip

    def config(self) -> LowBitConfig | None:
        """The config for ``--bits``; None without it."""
        if self.bits is None:
            refuse_unused("without --bits", *HOW)
            return None
        return self.config_at(self.bits)

    def config_at(self, bits: int, **others: Any) -> LowBitConfig:
        return super().config_at(bits, mapping=self.mapping, embedding_bits=self.embedding_bits, **others)


@dataclass(frozen=True)
class Prefixes:
    """Prefix caching on disk."""

    prefix_cache: Annotated[
        Path | None,
        typer.Option(
            "--prefix-cache", help="Directory for prefix caching on disk.", show_default=f"the environment's {_PREFIX_CACHE}"
        ),
    ] = None
    prefix_cache_size: Annotated[str, typer.Option("--prefix-cache-size", help="Largest size of that directory.")] = "8GB"

    @property
    def wants_prefixes(self) -> bool:
        """Whether the option or the environment names a prefix cache, which needs the keys and values of whole texts."""
        return self.prefix_cache is not None or bool(os.environ.get(_PREFIX_CACHE))

    def prefix_bytes(self) -> int:
        """The largest size of the directory."""
        if not self.wants_prefixes:
            refuse_unused("without --prefix-cache", "prefix_cache_size")
        return parse_size(self.prefix_cache_size, "--prefix-cache-size")

    def open_prefix_cache(self, output: Output, step: Any, snapshots: bool = False) -> PrefixCache | None:
        """The prefix cache in the directory of the option or the environment variable; None without either.

        Raises:
            ValueError: the option is given, and the model does not support a prefix cache. For the environment variable, which
                applies to all models, this is only a note.
        """
        from .. import llm

        directory = self.prefix_cache or os.environ.get(_PREFIX_CACHE)
        if not directory:
            return None
        try:
            # The constructor raises ValueError for a step that is not a decoder.
            return llm.PrefixCache(directory, step, self.prefix_bytes(), snapshots=snapshots)
        except ValueError as error:
            if self.prefix_cache is not None:
                raise
            output.note(f"{_PREFIX_CACHE} is not used: {error}")
            return None


@dataclass(frozen=True)
class Running(Prefixes, Quantizing):
    """How a model is loaded and runs."""

    max_length: MaxLength = None
    cache: Cache = None
    expert_memory: Annotated[
        str | None,
        typer.Option("--expert-memory", help="Memory for experts; the others stay in the files.", show_default="all of them"),
    ] = None
    threads: Threads = None
    compile: Annotated[bool, typer.Option("--compile", help="Compile the whole model first; needs a C++ compiler.")] = False


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding."""

    guesses: Annotated[
        int | None,
        typer.Option(
            "--guesses", min=0, help="Speculative decoding: guess this number of tokens; the text is the same.",
            show_default="0; 4 with --draft",
        ),
    ] = None  # fmt: skip
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            help="Draft model: a smaller model with the same tokens; or mtp: the model's own multi-token prediction head.",
            show_default=False,
        ),
    ] = None

    @property
    def count(self) -> int:
        """The number of draft tokens."""
        if self.draft is not None and self.guesses == 0:
            raise typer.BadParameter("0; expected 1 or more with --draft", param_hint="--guesses")
        return (0 if self.draft is None else 4) if self.guesses is None else self.guesses


def _temperature(default: str) -> Any:
    return _number("--temperature", "0 always takes the most likely token.", default=default)


def _top_k(default: str) -> Any:
    return typer.Option("--top-k", min=1, help="Sample from this number of most likely tokens.", show_default=default)


def _top_p(default: str) -> Any:
    return _number("--top-p", "Sample from the most likely tokens that reach this probability.", 1, default=default)


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and what ends a text. None: the setting of the model's files, or off."""

    temperature: Annotated[float | None, _temperature("the model's")] = None
    top_k: Annotated[int | None, _top_k("the model's")] = None
    top_p: Annotated[float | None, _top_p("the model's")] = None
    min_p: Annotated[
        float | None, _number("--min-p", "Sample only tokens with at least this fraction of the largest probability.", 1)
    ] = None
    repetition_penalty: Annotated[
        float | None, _number("--repetition-penalty", "Above 1: tokens of the prompt and the text become less likely.")
    ] = None
    presence_penalty: Annotated[
        float | None, _number("--presence-penalty", "Subtracted from the logits of tokens in the new text.", least=None)
    ] = None
    frequency_penalty: Annotated[
        float | None, _number("--frequency-penalty", "Subtracted for each occurrence in the new text.", least=None)
    ] = None
    dry_multiplier: Annotated[
        float | None, _number("--dry-multiplier", "Above 0: repetitions become less likely (DRY); usually 0.8.")
    ] = None
    dry_base: Annotated[float | None, _number("--dry-base", "DRY's growth per repeated token; default 1.75.", least=1)] = None
    dry_allowed_length: Annotated[
        int | None,
        typer.Option("--dry-allowed-length", min=1, help="Repeated tokens that DRY allows; default 2.", show_default=False),
    ] = None
    dry_breakers: Annotated[
        list[str] | None, typer.Option("--dry-breaker", help="Text that ends a repetition; repeatable.", show_default=False)
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="TOKEN=BIAS", help="Added to a token's logit; repeatable.", show_default=False),
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the new text; repeatable.", show_default=False)
    ] = None

    def stop_strings(self) -> tuple[str, ...]:
        from ..llm.stopping import check_stop_strings

        return check_stop_strings(check_text(text, "--stop") for text in self.stop or ())

    def parsed(self, tokenizer: Any) -> dict[str, Any]:
        """The fields of lowbit.llm.Sampling that the options set; the tokenizer finds the tokens of DRY's breakers."""
        from ..llm.stopping import BREAKERS, breakers, check_stop_strings

        given = {name: value for name, value in vars(self).items() if name != "stop" and value not in (None, [])}
        if not given.get("dry_multiplier"):
            refuse_unused("without --dry-multiplier", "dry_base", "dry_allowed_length", "dry_breakers")
        else:
            chosen = given.get("dry_breakers", BREAKERS)
            strings = check_stop_strings((check_text(text, "--dry-breaker") for text in chosen), "--dry-breaker")
            given["dry_breakers"] = breakers(tokenizer, strings)
        if "logit_bias" in given:
            pairs = list(map(_parse_bias, given["logit_bias"]))
            given["logit_bias"] = dict(pairs)
            if len(given["logit_bias"]) < len(pairs):
                token = next(token for at, (token, _) in enumerate(pairs) if token in dict(pairs[:at]))
                raise typer.BadParameter(f"token {token} has two; expected one", param_hint="--logit-bias")
        return given


@dataclass(frozen=True)
class GreedySampling(Sampling):
    """The same as Sampling, with defaults that do not depend on the model."""

    temperature: Annotated[float | None, _temperature("0")] = 0.0
    top_k: Annotated[int | None, _top_k("all")] = None
    top_p: Annotated[float | None, _top_p("1")] = None


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}; expected a token id and a number, as in 42=-5", param_hint="--logit-bias"
        ) from None


def check_text(text: str, option: str) -> str:
    """Returns a text from the command line or stdin after checking it.

    Raises:
        ValueError: it is not UTF-8. Python represents invalid bytes by surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        problem = f"the byte 0x{code & 0xFF:02x}" if 0xDC80 <= code <= 0xDCFF else f"half of a character, 0x{code:x},"
        raise ValueError(f"{option} is not UTF-8 text: found {problem} at character {error.start}") from error
    return text


def refuse_unused(why: str, *names: str) -> None:
    """Refuses options that would have no effect.

    Args:
        why: for example "without --bits".
        names: the names of parameters.
    """
    for name in names:
        if name in on_command_line:
            raise typer.BadParameter(f"it has no effect {why}", param_hint=on_command_line[name])


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
    from fractions import Fraction

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
