"""How families of models write tool calls: a marker, then calls as JSON, tags, or code.

A reader starts after a marker. It yields each call with the position of its end; a call is ``{"name": ..., "arguments": ...}``,
or a list of these. At text that is not in its dialect it raises ValueError. Every reader takes linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, TypeAlias

Functions: TypeAlias = Mapping[str, dict[str, Any]]  # names of functions, and the schemas of their parameters
Reader: TypeAlias = Callable[[str, int, Functions], Iterator[tuple[Any, int]]]

_NAME = r"([A-Za-z0-9_.-]{1,64})"
_BETWEEN = re.compile(r"[\s;,]*")
_MOST_DEPTH = 32  # nesting of values that are written as code


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)


def read_json(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    """Consecutive JSON documents: ``{"name": ..., "arguments": ...}``, or lists of them."""
    while text[at : at + 1] in ("{", "["):
        value, at = DECODER.raw_decode(text, at)
        yield value, at
        between = _BETWEEN.match(text, at)
        at = at if between is None else between.end()


def _after_blanks(reader: Reader) -> Reader:
    def read(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
        between = _BETWEEN.match(text, at)
        return reader(text, at if between is None else between.end(), functions)

    return read


_JSON = _after_blanks(read_json)


def _named(head: str, end: str = "") -> Reader:
    """A reader of names, each followed by its arguments as JSON."""
    begin, close = re.compile(head), re.compile(end)

    def read(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
        while (found := begin.match(text, at)) is not None:
            value, at = DECODER.raw_decode(text, found.end())
            ended = close.match(text, at)
            at = at if ended is None else ended.end()
            yield {"name": found[1], "arguments": value}, at

    return read


def _tagged(head: str, key: str, close: str, end: str) -> Reader:
    """A reader of names, each followed by parameters in tags, whose values are text or JSON, as their schemas say.

    Args:
        key: expression for a tag before a value; the second group, if any, says whether the value is text.
        close: the text after a value.
        end: expression for the end of a call.
    """
    begin, before, ended = re.compile(head), re.compile(key), re.compile(end)

    def read(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
        while (found := begin.match(text, at)) is not None:
            at, arguments = found.end(), {}
            root = functions.get(found[1], {})
            properties = root.get("properties")
            kinds: dict[str, set[str] | None] = {}
            while (tag := before.match(text, at)) is not None:
                stop = text.index(close, tag.end())
                schema = properties.get(tag[1]) if isinstance(properties, dict) else None
                value, at = text[tag.end() : stop], stop + len(close)
                schema = schema if isinstance(schema, dict) else {}
                if tag.lastindex == 2:
                    schema = {"type": "string"} if tag[2] == "true" else {}
                if tag[1] not in kinds:
                    kinds[tag[1]] = _Kinds(root).of(schema)
                arguments[tag[1]] = _typed(value, schema, kinds[tag[1]])
            last = ended.match(text, at)
            if last is None:
                raise ValueError("a call has no end")
            at = last.end()
            yield {"name": found[1], "arguments": arguments}, at

    return read


def _kind(value: Any) -> str:
    """The name of a value's type in JSON schemas."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


_MOST_SCHEMAS = 256  # schemas that are read for the types of one value


class _Kinds:
    """Finds the types that a schema allows; of a schema with very many parts any type."""

    def __init__(self, root: dict[str, Any]):
        self._root, self._left = root, _MOST_SCHEMAS

    def of(self, schema: Any) -> set[str] | None:
        """The names of the types, "number" with "integer"; None: any."""
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0:
            return None
        kinds = schema.get("type")
        found = [{kinds} if isinstance(kinds, str) else {*filter(_is_text, kinds)} if isinstance(kinds, list) else None]
        if found[0] is not None and "number" in found[0]:
            found[0].add("integer")
        for options in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if isinstance(options, list):
                found.append({_kind(each) for each in options})
        for name in ("anyOf", "oneOf"):
            if isinstance(several := schema.get(name), list):
                parts = [self.of(each) for each in several]
                found.append(None if None in parts else {kind for part in parts if part is not None for kind in part})
        found += [self.of(each) for each in several] if isinstance(several := schema.get("allOf"), list) else []
        if isinstance(path := schema.get("$ref"), str) and path.startswith("#/"):
            found.append(self.of(self._at(path)))
        known = [each for each in found if each is not None]
        return set.intersection(*known) if known else None

    def _at(self, path: str) -> Any:
        found: Any = self._root
        for step in path.split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _typed(text: str, schema: dict[str, Any], kinds: set[str] | None) -> Any:
    """A value in a tag: text if the schema says so, or if it is not JSON of one of the schema's types."""
    bare = text.removeprefix("\n").removesuffix("\n")
    if kinds == {"string"} or bare in (options if isinstance(options := schema.get("enum"), list) else ()):
        return bare
    word = bare.strip()
    try:
        value = _WORDS[word] if word in _WORDS else DECODER.decode(word)
    except (ValueError, RecursionError):
        return bare
    return value if kinds is None or _kind(value) in kinds or "string" not in kinds else bare


_WORDS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_NUMBER = re.compile(r"[+-]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:[eE][+-]?\d{1,4})?(?![\w.])")
_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{each: each for each in "\\/'\""}}
_WORD = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_BARE = re.compile(r"[^,{}\[\]]{1,1000}")
_BLANKS = re.compile(r"\s*")


def _unescaped(text: str) -> str:
    def one(found: re.Match) -> str:
        if found[3] is None:
            return chr(int(found[1] or found[2], 16))
        return _ESCAPED.get(found[3], found[0])

    # JSON writes characters beyond 16 bits as two halves.
    return _ESCAPE.sub(one, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Values:
    """Reads values as Python or Gemma writes them, from a position on."""

    def __init__(self, text: str, at: int, quotes: tuple[str, ...] = (), bare: bool = False):
        """
        Args:
            quotes: additional quotation marks, between which nothing is escaped.
            bare: strings may have no quotation marks.
        """
        self.text, self.at, self._quotes, self._bare = text, at, quotes, bare

    def takes(self, sign: str) -> bool:
        """Reads blanks, and then a sign if it follows; returns whether it does."""
        blanks = _BLANKS.match(self.text, self.at)
        self.at = self.at if blanks is None else blanks.end()
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) * found
        return found

    def expect(self, sign: str) -> None:
        if not self.takes(sign):
            raise ValueError(f"there is no {sign!r}")

    def _match(self, pattern: re.Pattern) -> str | None:
        found = pattern.match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return None if found is None else found[0]

    def _string(self) -> str | None:
        for quote in self._quotes:
            if self.takes(quote):
                stop = self.text.index(quote, self.at)
                value, self.at = self.text[self.at : stop], stop + len(quote)
                return value
        self.takes("")
        found = self._match(_STRING)
        return None if found is None else _unescaped(found[1:-1])

    def _key(self) -> str:
        key = self._string()
        key = self._match(_WORD) if key is None else key
        if key is None:
            raise ValueError("there is no name")
        return key

    def pairs(self, sign: str, end: str, depth: int) -> dict[str, Any]:
        """Names and values up to an end."""
        found: dict[str, Any] = {}
        while not self.takes(end):
            if found:
                self.expect(",")
                if self.takes(end):
                    break
            key = self._key()
            self.expect(sign)
            found[key] = self.value(depth)
        return found

    def value(self, depth: int) -> Any:
        if depth == 0:
            raise ValueError("values are nested too deeply")
        if (text := self._string()) is not None:
            return text
        if self.takes("{"):
            return self.pairs(":", "}", depth - 1)
        for begin, end in ("[]", "()"):
            if self.takes(begin):
                values: list[Any] = []
                while not self.takes(end):
                    if values:
                        self.expect(",")
                        if self.takes(end):
                            break
                    values.append(self.value(depth - 1))
                return values
        if (number := self._match(_NUMBER)) is not None:
            return int(number) if number.lstrip("+-").isdigit() else float(number)
        word = self._match(_BARE if self._bare else _WORD)
        if word is None or not (self._bare or word in _WORDS):
            raise ValueError("there is no value")
        return _WORDS.get(word.strip(), word.strip())


_CODE = re.compile(rf"[\s,\[]*{_NAME}\(")


def read_code(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    """Calls as Python writes them, also in a list: ``[f(a="b", c=1), g()]``."""
    inside = text[at : at + 1] == "["
    while (found := _CODE.match(text, at)) is not None:
        values = _Values(text, found.end())
        arguments = values.pairs("=", ")", _MOST_DEPTH)
        closed = inside and values.takes("]")
        at = values.at
        yield {"name": found[1], "arguments": arguments}, at
        if closed:
            return


def _read_list(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    """JSON or code."""
    rest = text[at : at + 64].lstrip()
    json_ = rest[:1] == "{" or (rest[:1] == "[" and rest[1:].lstrip()[:1] in ("{", ""))
    return (read_json if json_ else read_code)(text, at, functions)


_GEMMA = re.compile(rf"\s*call:\s*{_NAME}\s*")


def _read_gemma(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    """``call:f{a:<escape>b<escape>,c:1}``"""
    found = _GEMMA.match(text, at)
    if found is not None:
        values = _Values(text, found.end(), ("<escape>", '<|"|>'), bare=True)
        values.expect("{")
        arguments = values.pairs(":", "}", _MOST_DEPTH)
        yield {"name": found[1], "arguments": arguments}, values.at


def _read_apertus(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    """``[{"f": {"a": "b"}}]``"""
    for value, end in read_json(text, at, functions):
        calls: list[Any] = []
        for each in value if isinstance(value, list) else [value]:
            name, arguments = next(iter(each.items())) if isinstance(each, dict) and len(each) == 1 else (None, None)
            calls.append({"name": name, "arguments": arguments})
        yield calls, end


def _read_plugin(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    return _JSON(text, at + len("<|plugin|>") * text.startswith("<|plugin|>", at), functions)


_FUNCTION = _tagged(rf"\s*<function={_NAME}>\s*", r"\s*<parameter=([^<>]{1,128})>", "</parameter>", r"\s*</function>")
_INVOKE = _tagged(
    rf'\s*<invoke name="{_NAME}">\s*', r'\s*<parameter name="([^"<>]{1,128})"(?: string="(true|false)")?>', "</parameter>",
    r"\s*</invoke>",
)  # fmt: skip
_DSML = _tagged(
    rf'\s*<｜DSML｜invoke name="{_NAME}">\s*', r'\s*<｜DSML｜parameter name="([^"<>]{1,128})"(?: string="(true|false)")?>',
    "</｜DSML｜parameter>", r"\s*</｜DSML｜invoke>",
)  # fmt: skip
_GLM = _tagged(
    rf"\s*{_NAME}\s*(?=<arg_key>|</tool_call>)", r"\s*<arg_key>([^<>]{1,128})</arg_key>\s*<arg_value>", "</arg_value>",
    r"\s*(?=</tool_call>)",
)  # fmt: skip


def _read_tag(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    """What follows ``<tool_call>``: one JSON document (Hermes, Qwen, Granite), or tags (Qwen-Coder, GLM)."""
    rest = text[at : at + 64].lstrip()
    if rest[:1] in ("{", "["):
        yield from islice(_JSON(text, at, functions), 1)
    else:
        yield from (_FUNCTION if rest.startswith("<function") else _GLM)(text, at, functions)


def _read_mistral(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    """JSON, or names before it: ``f[ARGS]{...}``, in the newest form without ``[ARGS]``."""
    reader = _JSON if text[at : at + 64].lstrip()[:1] in ("{", "[") else _MISTRAL
    return reader(text, at, functions)


_MISTRAL = _named(rf"[\s;,]*(?:\[TOOL_CALLS\]\s*)?{_NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s*(?={{)")


def _read_calls(text: str, at: int, functions: Functions) -> Iterator[tuple[Any, int]]:
    """What follows ``<function_calls>``: tags or code."""
    return (_INVOKE if text[at : at + 64].lstrip().startswith("<invoke") else read_code)(text, at, functions)


_S = r"\s{0,16}"  # blanks; several unlimited ones in an expression could take quadratic time
_DEEPSEEK = _named(
    rf"{_S}(?:<｜tool▁call▁begin｜>)?{_S}(?:function<｜tool▁sep｜>)?{_NAME}{_S}(?:<｜tool▁sep｜>)?{_S}(?:```json)?{_S}(?={{)",
    rf"{_S}(?:```)?{_S}<｜tool▁call▁end｜>",
)
_KIMI = _named(
    rf"{_S}(?:<\|tool_call_begin\|>)?{_S}(?:functions\.)?{_NAME}(?::\d{{1,9}})?{_S}<\|tool_call_argument_begin\|>{_S}",
    r"\s*<\|tool_call_end\|>",
)
_HARMONY = _named(rf"([A-Za-z0-9_.-]{{1,64}}?)(?:commentary)?{_S}(?:json)?{_S}(?={{)")


@dataclass(frozen=True)
class Dialect:
    """How calls begin and end."""

    begin: str
    read: Reader
    ends: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()  # other texts of calls that may be special tokens


DIALECTS = (
    Dialect("<tool_call>", _read_tag, ("</tool_call>",)),  # Hermes, Qwen, Granite, SmolLM3, GLM, Ernie, Nemotron
    Dialect("[TOOL_CALLS]", _read_mistral, (), ("[ARGS]", "[CALL_ID]")),
    Dialect("<|python_tag|>", _JSON, ("<|eom_id|>",)),  # Llama 3
    Dialect("<|python_start|>", _after_blanks(read_code), ("<|python_end|>",)),  # Llama 4
    Dialect("<|tool_call|>", _JSON, ("<|/tool_call|>",)),  # Granite 3, Phi-4-mini
    Dialect("functools[", lambda text, at, functions: read_json(text, at - 1, functions)),  # Phi-4-mini
    Dialect("<|tool_call_start|>", _after_blanks(_read_list), ("<|tool_call_end|>",)),  # LFM2
    Dialect("<start_function_call>", _read_gemma, ("<end_function_call>",), ("<escape>",)),  # FunctionGemma
    Dialect("<|tool_call>", _read_gemma, ("<tool_call|>",), ('<|"|>',)),  # Gemma 4
    Dialect("<｜tool▁calls▁begin｜>", _DEEPSEEK, ("<｜tool▁calls▁end｜>",), ("<｜tool▁call▁end｜>", "<｜tool▁sep｜>")),
    Dialect("<｜tool▁call▁begin｜>", _DEEPSEEK, ("<｜tool▁calls▁end｜>",)),  # DeepSeek V3, R1
    Dialect("<｜DSML｜function_calls>", _DSML, ("</｜DSML｜function_calls>",), ("｜DSML｜",)),  # DeepSeek V3.2
    Dialect("<｜DSML｜tool_calls>", _DSML, ("</｜DSML｜tool_calls>",)),  # DeepSeek V4
    Dialect("<|tool_calls_section_begin|>", _KIMI, ("<|tool_calls_section_end|>",), ("<|tool_call_argument_begin|>",)),
    Dialect("<|tool_call_begin|>", _KIMI, ("<|tool_calls_section_end|>",), ("<|tool_call_end|>",)),  # Kimi K2
    Dialect("<minimax:tool_call>", _INVOKE, ("</minimax:tool_call>",)),
    Dialect("<seed:tool_call>", _FUNCTION, ("</seed:tool_call>",)),
    Dialect("<tool_calls>", _JSON, ("</tool_calls>",)),  # Jamba, Hunyuan, MiniMax M1
    Dialect("<function_calls>", _read_calls, ("</function_calls>",)),  # Olmo 3
    Dialect("<|START_ACTION|>", _JSON, ("<|END_ACTION|>",)),  # Cohere
    Dialect("<|action_start|>", _read_plugin, ("<|action_end|>",), ("<|plugin|>",)),  # InternLM
    Dialect(" to=functions.", _HARMONY),  # gpt-oss
    Dialect("<|tools_prefix|>", _after_blanks(_read_apertus), ("<|tools_suffix|>",)),
)  # fmt: skip
# Some tokenizers have these texts as special tokens. Decoding drops special tokens, so answers with tools keep these.
TOKENS = frozenset(text for each in DIALECTS for text in (each.begin, *each.ends, *each.tokens))
