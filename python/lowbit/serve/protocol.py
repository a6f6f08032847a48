"""What requests ask for: OpenAI's parameters, read and checked."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

from ..llm.sampling import Sampling
from ..llm.stopping import check_stop_strings
from .errors import ApiError, bad

# Parameters that change no text here.
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "reasoning_effort", "verbosity", "cache_prompt", "id_slot",
}  # fmt: skip
# Those that would, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple] = {
    "tools": ([],), "tool_choice": ("none",), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "suffix": ("",), "audio": (), "prediction": (), "web_search_options": (),
}  # fmt: skip
_DRAWN = {
    "temperature": (0, 1e30), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (1e-30, 1e30),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "dry_multiplier": (0, 1e30), "dry_base": (1, 1e30),
}  # fmt: skip


class Fields:
    """The parameters of a request; each is taken once, and at the end none may be left."""

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise ApiError(400, f"the body is {_kind(body)}; expected an object")
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad(name, f"{name} is {_kind(value)}; expected a number from {least:g} to {most:g}")
        if not least <= value <= most:  # also NaN, which Python's JSON knows
            raise bad(name, f"{name} is {value}; expected {least:g} to {most:g}")
        return value

    def count(self, name: str, least: int, most: int = 2**31) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(name, f"{name} is {_kind(value)}; expected a whole number")
        if not least <= value <= most:
            upper = f"{least} to {most}" if most != 2**31 else f"{least} or more"
            raise bad(name, f"{name} is {value}; expected {upper}")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise bad(name, f"{name} is {_kind(value)}; expected true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise bad(name, f"{name} is {_kind(value)}; expected a string")
        return value

    def end(self) -> None:
        for name, value in self._left.items():
            if name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    raise bad(name, f"{name} is not supported; expected a request without it", "unsupported_parameter")
            elif name not in _IGNORED:
                raise bad(name, f"there is no parameter {name}; expected one of those in docs/serving.md", "unknown_parameter")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


@dataclass(frozen=True)
class Grammar:
    """What a text must fit."""

    kind: str  # of the value: "json", a JSON schema; "regex"; "grammar", in Lark's syntax or llama.cpp's GBNF
    value: Any
    param: str  # of the request, for its errors


@dataclass(frozen=True)
class Asked:
    """How the texts of a request are written."""

    sampling: Sampling
    seed: int
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    logprobs: int | None  # so many likeliest tokens with each one
    echo: bool
    grammar: Grammar | None
    dry_breakers: tuple[str, ...] | None  # DRY's; None: the usual ones


def asked(fields: Fields, usual: Sampling, most: int, chat: bool) -> Asked:
    """Takes all parameters that both kinds of request have.

    Args:
        usual: what counts where the request says nothing.
        most: texts that a request may ask for.

    Raises:
        ApiError: one is wrong, or not known.
    """
    given: dict[str, Any] = {name: fields.number(name, *ends) for name, ends in _DRAWN.items()}
    given["top_k"] = fields.count("top_k", -1)
    given["dry_allowed_length"] = fields.count("dry_allowed_length", 1)
    given["logit_bias"] = _bias(fields)
    sampling = replace(usual, **{name: value for name, value in given.items() if value is not None})
    if given["top_k"] in (-1, 0):
        sampling = replace(sampling, top_k=None)  # all, as vLLM and llama.cpp have it
    seed = fields.count("seed", -(2**63), 2**64 - 1)
    n, best_of = fields.count("n", 1, most) or 1, fields.count("best_of", 1)
    if best_of not in (None, n):
        raise bad("best_of", f"best_of is {best_of}; expected {n}, as n")
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    counts = [count for name in names if (count := fields.count(name, 1 if chat else 0)) is not None]
    stream, options = fields.flag("stream"), fields.take("stream_options", {})
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise bad("stream_options", "stream_options is not an object with include_usage, true or false")
    logprobs = _logprobs(fields, chat)
    strings = fields.take("dry_sequence_breakers")
    found = Asked(
        sampling,
        secrets.randbits(32) if seed is None else seed,
        n,
        counts[0] if counts else None,
        _strings("stop", fields.take("stop", ())),
        fields.flag("ignore_eos"),
        stream,
        bool(options.get("include_usage")),
        logprobs,
        not chat and fields.flag("echo"),
        _grammar(fields),
        None if strings is None else _strings("dry_sequence_breakers", strings),
    )
    fields.end()
    if found.max_tokens == 0 and not found.echo:
        raise bad("max_tokens", "max_tokens is 0; expected 1 or more without echo")
    return found


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple):
        raise bad(name, f"{name} is {_kind(value)}; expected a string or an array of strings")
    try:
        return check_stop_strings(value, name)
    except ValueError as error:
        raise bad(name, str(error)) from error


def _bias(fields: Fields) -> dict[int, float] | None:
    value = fields.take("logit_bias")
    if value is None:
        return None
    try:
        found = {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise bad("logit_bias", "logit_bias is not an object of token ids and numbers") from None
    for token, bias in found.items():
        if not -100 <= bias <= 100:
            raise bad("logit_bias", f"logit_bias of token {token} is {bias}; expected -100 to 100")
    return found


def _logprobs(fields: Fields, chat: bool) -> int | None:
    if not chat:
        return fields.count("logprobs", 0, 20)
    wanted, top = fields.flag("logprobs"), fields.count("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise bad("top_logprobs", f"top_logprobs is {top}; expected logprobs true with it")
    return (top or 0) if wanted else None


def _grammar(fields: Fields) -> Grammar | None:
    """OpenAI's response_format, or vLLM's structured_outputs."""
    form, other = _schema(fields.take("response_format")), fields.take("structured_outputs")
    if other is None:
        return None if form is None else Grammar("json", form, "response_format")
    name = "structured_outputs"
    if form is not None:
        raise bad(name, f"{name} is beside response_format; expected one of the two")
    if not isinstance(other, dict) or len(other) != 1:
        raise bad(name, f"{name} is {_kind(other)}; expected an object with json, regex, choice or grammar")
    ((kind, value),) = other.items()
    if kind == "json" and isinstance(value, dict | bool):
        return Grammar("json", value, name)
    if kind == "choice" and isinstance(value, list) and value and all(isinstance(each, str) and each for each in value):
        return Grammar("grammar", f"start: {' | '.join(map(json.dumps, value))}", name)
    if kind in ("regex", "grammar") and isinstance(value, str):
        return Grammar(kind, value, name)
    raise bad(name, f"{name} has {kind} with {_kind(value)}; expected json, a text as regex or grammar, or texts as choice")


def _schema(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise bad("response_format", f"response_format is {kind!r}; expected text, json_object or json_schema")
    outer = value.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict | bool):
        raise bad("response_format", "response_format has no json_schema.schema; expected an object")
    return schema


def prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion: texts, or token ids.

    Raises:
        ApiError: it is something else, or empty.
    """
    if isinstance(value, str):
        return [value]
    if is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(each, str) or is_ids(each) for each in value):
        return value
    raise bad("prompt", f"prompt is {_kind(value)}; expected a text, token ids, or an array of either, not empty")


def is_ids(value: Any) -> bool:
    """Whether a value of a request is an array of token ids."""
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)


def messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, with contents of several text parts joined.

    Raises:
        ApiError: they are no messages, or have parts that are no text.
    """
    if not isinstance(value, list) or not value:
        raise bad("messages", f"messages is {_kind(value)}; expected an array of messages, not empty")
    return [_message(number, each) for number, each in enumerate(value)]


def _message(number: int, value: Any) -> dict[str, Any]:
    name = f"messages[{number}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise bad("messages", f"{name} has no role; expected an object with role and content")
    content, calls = value.get("content"), value.get("tool_calls") or []
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                found = part.get("type") if isinstance(part, dict) else _kind(part)
                raise bad("messages", f"{name} has a part of type {found!r}; expected text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise bad("messages", f"{name} has a content that is {_kind(content)}; expected a string or text parts")
    message = {"role": "system" if value["role"] == "developer" else value["role"], "content": content}
    message |= {key: value[key] for key in ("name", "tool_call_id") if isinstance(value.get(key), str)}
    return message | ({"tool_calls": _calls(name, calls)} if calls else {})


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Earlier calls of tools, with arguments as templates take them: objects."""
    calls = []
    try:
        for each in value:
            function = each["function"]
            arguments = json.loads(function["arguments"])
            calls.append({"id": each["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    except (TypeError, KeyError, ValueError):
        raise bad(
            "messages", f"{name} has tool_calls that are none; expected id and function with name and arguments"
        ) from None
    return calls


def finite(value: float) -> float:
    """JSON has no infinity: what cannot be is as unlikely as a float32 can say."""
    return value if math.isfinite(value) else -9999.0
