"""Bodies of requests: parsing, checks, and what all requests have. Every field has a limit, checked before any other work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from .errors import ApiError, bad, shortened

# Parameters that do not affect texts here.
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "reasoning_effort", "verbosity", "cache_prompt", "id_slot",
})  # fmt: skip
# Parameters that lowbit does not support, with the values that have no effect.
_NEUTRAL: dict[str, tuple] = {
    "tools": ([],), "tool_choice": ("none",), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "suffix": ("",), "audio": (), "prediction": (), "web_search_options": (),
}  # fmt: skip
# Limits of a body. A parsed object takes about a hundred times the memory of its two brackets. No other thread runs while a
# body is parsed, which takes 0.1 s of CPU time for so many numbers or strings, and also for 16 MiB of text.
_MOST = {"brackets": 1 << 17, "strings": 1 << 17, "commas": 1 << 20}
LEAST_BYTES = 1 << 16  # bytes that any text may have
_TOKEN_BYTES = 16  # a text with more bytes per token of the context is refused without tokenizing it; four are typical


def few(most: int, least: int = 0) -> BeforeValidator:
    """Limits the number of entries before any of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and not least <= len(value) <= most:
            raise PydanticCustomError(
                "few", "{least} to {most} entries, not {n}", {"least": least, "most": most, "n": len(value)}
            )
        return value

    return BeforeValidator(check)


FIRST = Field(fail_fast=True)  # stop at the first error, because a million of them take minutes
AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0, le=2**31)]
# true and false are also schemas: any value, and no value.
Schema = Annotated[
    dict[str, Any], BeforeValidator(lambda value: ({} if value else {"not": {}}) if isinstance(value, bool) else value)
]


class Part(BaseModel):
    """Base class of parts of requests."""

    model_config = ConfigDict(strict=True)


class Body(Part):
    """Base class of requests. A null parameter counts as missing, and unknown parameters are refused."""

    model_config = ConfigDict(extra="allow")
    ignored: ClassVar[frozenset[str]] = _IGNORED
    model: str | None = Field(None, max_length=1024)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_names(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    raise bad(name, f"{name} is not supported; expected a request without it", "unsupported_parameter")
            elif name not in self.ignored:
                name = shortened(name, 64)
                raise bad(name, f"there is no parameter {name}; expected one of those in docs/serving.md", "unknown_parameter")
        self.__pydantic_extra__ = {}  # otherwise large values would stay in memory until the answer
        return self


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: bytes) -> B:
    """Parses a request from the JSON of its body.

    Raises:
        ApiError: the body is not JSON, or a parameter is invalid or unknown.
    """
    # An escaped quote ends no string, unless the backslash before it is itself escaped.
    quotes = data.count(b'"') - data.replace(b"\\\\", b"").count(b'\\"')
    counts = {"brackets": data.count(b"{") + data.count(b"["), "strings": quotes // 2, "commas": data.count(b",")}
    for what, found in counts.items():
        if found > _MOST[what]:
            raise ApiError(413, f"the body has {found} {what}; expected at most {_MOST[what]}")
    try:
        value = from_json(data.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
    except ValueError as error:  # also for nesting of more than 200 levels, and half a surrogate pair
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    return validated(kind, value)


def validated(kind: type[B], value: Any) -> B:
    """Like :func:`parse`, for a parsed body."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        # If a value may have several forms, report the closest one.
        first = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
    place = ""
    for step in first["loc"]:
        if isinstance(step, int):
            place += f"[{step}]"
        elif not place or (
            (step.isidentifier() or step.isdigit()) and step not in ("str", "int", "float", "bool", "list", "dict")
        ):
            place += f".{step}" if place else step
    place = shortened(place, 200) or "the body"
    found = "missing" if first["type"] == "missing" else _found(first["input"])
    wanted = _WANTED.get(first["type"]) or re.sub("^(Input should be|String should have) ", "", shortened(first["msg"], 150))
    raise ApiError(400, f"{place} is {found}; expected {wanted}", param=str(first["loc"][0]) if first["loc"] else None)


# Messages of pydantic in Python's terms, or without "Input should be".
_WANTED = {
    "missing": "a value", "model_type": "an object", "dict_type": "an object", "list_type": "an array",
    "string_type": "a string", "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "extra_forbidden": "no such name", "string_too_short": "a longer text",
    "too_short": "a longer text",
    "int_parsing": "a whole number", "string_pattern_mismatch": "1 to 64 letters, digits, _, . and -",
}  # fmt: skip


def _found(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return shortened(str(value), 40)
    if isinstance(value, str):
        return f"{shortened(value, 40)!r}"
    return "an object" if isinstance(value, dict) else "an array" if isinstance(value, list) else "null"


def check_bytes(name: str, texts: Iterable[str], tokens: int | None) -> None:
    """Raises ApiError for texts too long for a context of this many tokens, without tokenizing them."""
    count, most = sum(len(each.encode()) for each in texts), max(LEAST_BYTES, _TOKEN_BYTES * (tokens or 0))
    if count > most:
        raise bad(name, f"{name} has {count} bytes; expected at most {most}", "context_length_exceeded")


def dumped(name: str, value: Any, most: int) -> str:
    """A value as JSON of at most this many bytes."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        raise bad(name, f"{name} has a number that is not finite; expected JSON") from None
    if len(text) > most:
        raise bad(name, f"{name} has {len(text)} bytes; expected at most {most}", "unsupported_schema")
    return text
