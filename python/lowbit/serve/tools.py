"""Tool calls: the tools of a request, and the calls in a text."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..llm.stopping import overlap
from .dialects import DECODER, DIALECTS, Functions, Reader, read_code, read_json
from .errors import bad
from .protocol import Chat, Grammar, check_constants
from .schemas import closed

if TYPE_CHECKING:
    from .model_list import LanguageModel

_NOTHING = {"type": "object", "properties": {}}
_ANY = {"type": "object"}
_THOUGHT = "</think>"
_READERS = {each.begin: each.read for each in DIALECTS}
_SIGNS = (*_READERS, _THOUGHT)
_BEGIN = re.compile("|".join(map(re.escape, sorted(_SIGNS, key=len, reverse=True))))
_ENDS = re.compile(rf"(?:\s*(?:{'|'.join(re.escape(end) for each in DIALECTS for end in each.ends)}))?")
_LONGEST = max(map(len, _SIGNS))
_MOST_BROKEN = 64  # markers without a call; each may be parsed to the text's end, so more would take quadratic time
# Whitespace between parts of a JSON document: enough for an indented one, but limited, so that a text must end.
SPACE = r"[ \t\n\r]{0,20}"


@dataclass(frozen=True)
class Tools:
    """The tools of a request."""

    documents: list[dict[str, Any]]  # tools for the chat template
    forced: list[str]  # the text must be a call of one of these; empty: the model may also answer
    parallel: bool = True  # a text may have several calls
    strict: list[str] = field(default_factory=list)  # names of functions whose arguments must follow their schemas

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [each["function"]["name"] for each in self.documents]

    @property
    def functions(self) -> Functions:
        """The schemas of the functions' parameters, by name."""
        return {each["function"]["name"]: each["function"].get("parameters") or {} for each in self.documents}

    def grammar(self, answer: str | None, model: LanguageModel) -> Grammar | None:
        """The grammar of a forced call, of an answer with a schema or a call, or of a text with calls of strict functions.

        Args:
            answer: the schema of response_format.

        Raises:
            ApiError: the model writes calls in a form that has no grammar here, or a schema has constants that llguidance
                changes.
        """
        wanted = self.forced or (self.names if answer is not None or self.strict else [])
        if not wanted:
            return None
        free = not self.forced and answer is None  # arguments of other functions may be any object
        for each in wanted if not free else self.strict:
            check_constants("tools", self.functions[each])
        rules = []
        for number, each in enumerate(each["function"] for each in self.documents):
            if (name := each["name"]) in wanted:
                schema = _ANY if free and name not in self.strict else closed(each.get("parameters") or _NOTHING)
                begin = json.dumps(json.dumps({"name": name})[:-1] + ", ")
                rules.append(f'call{number}: {begin} "\\"arguments\\": " %json {_spaced(schema)} "}}"')
        calls = " | ".join(rule.partition(":")[0] for rule in rules)
        if self.forced:
            return Grammar("call", "\n".join([f"start: {calls}", *rules]), "tools")
        rules += [f"call: {calls}"]
        if answer is None:
            return Grammar("grammar", "\n".join([*_free_text(model), *rules]), "tools")
        rules += [f"answer: %json {_spaced(json.loads(answer))}"]
        start = 'start: answer | call | "<tool_call>\\n" call "\\n</tool_call>"'
        return Grammar("grammar", "\n".join([start, *rules]), "response_format")


def _takes_json(reader: Reader) -> bool:
    """Whether a call after the marker may be JSON with a name and arguments."""
    try:
        return any(
            value == {"name": "f", "arguments": {}} for value, _ in reader('{"name": "f", "arguments": {}}', 0, {"f": {}})
        )
    except ValueError:
        return False


# How calls without a marker begin: "{" or "[{", also after another call, or "[" with a name and "(". Brackets are escaped for
# the check of a grammar's size. Blanks in Python include \x1c to \x1f, in llguidance they do not.
_JSON_START = r"[\s;,\x1c-\x1f]*\x5b?\s*\x7b"
_CODE_START = r"[\s\x1c-\x1f]*\x5b[\s,\x1c-\x1f\x5b]*[A-Za-z0-9_.-]{1,64}\x28"
_JSON_DIALECTS = tuple(each for each in DIALECTS if _takes_json(each.read))


def _free_text(model: LanguageModel) -> list[str]:
    """Rules of a text in which :func:`find_calls` finds only calls that the rule ``call`` describes.

    A call is JSON after a marker of the model's template, or the whole text. All other text has no marker, and does not begin
    like calls as JSON or code, or continue them.
    """
    own = [each for each in DIALECTS if each.begin in (model.template or "")]
    dialects = [each for each in own if each in _JSON_DIALECTS]
    if own and not dialects:
        raise bad(
            "tools", f"the model {model.name} writes calls after {own[0].begin!r} in a form that strict does not support; "
            "expected strict false, or a tool_choice that asks for a call", "unsupported_parameter",
        )  # fmt: skip
    added = model.tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
    special = {each.content: f"<[{token}]>" for token, each in added if each.special}
    marks = "|".join(re.escape(sign).replace("/", r"\/") for sign in _SIGNS)
    opened = f"{special['<think>']}? " if "<think>" in special else ""

    def through(rule: str, sign: str) -> str:  # a special token is not a text
        return f"{rule}: TEXT {special[sign]}" if sign in special else f"{rule}[lazy]: TEXT {json.dumps(sign)}"

    ends = [special[end] for each in dialects for end in each.ends if end in special]
    rules = [
        f"start: thought* (SPACE call SPACE | LIST more SPACE | (marked{' | ended' * bool(ends)})* TEXT)",
        'more: call (", " call)* "]"',
        f"SPACE: /{SPACE}/",
        'LIST: SPACE "["',  # one lexeme, because TEXT may begin like it: the longest one wins
        rf"TEXT: /(?s:.*)/ & ~/{_JSON_START}(?s:.*)/ & ~/{_CODE_START}(?s:.*)/ & ~/(?s:.*)({marks})(?s:.*)/",
        f"thought: {opened}thinking",
        through("thinking", _THOUGHT),
    ]
    begins = [each.begin for each in dialects] or ["<tool_call>"]
    rules += [through(f"mark{number}", begin) for number, begin in enumerate(begins)]
    rules.append(f"marked: ({' | '.join(f'mark{number}' for number in range(len(begins)))}) (SPACE call | LIST more)")
    return [*rules, f"ended: TEXT ({' | '.join(ends)})"] if ends else rules


def _spaced(schema: Any) -> str:
    schema = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    return json.dumps(schema | {"x-guidance": {"whitespace_pattern": SPACE}})


def read_tools(asked: Chat) -> Tools | None:
    """The tools of a request; None if the model must not call any.

    Raises:
        ApiError: a function's parameters are not an object schema, or two functions have one name.
    """
    if not asked.tools or asked.tool_choice == "none":
        return None
    documents = [each.model_dump(exclude_unset=True) for each in asked.tools]
    strict = [each["function"]["name"] for each in documents if each["function"].pop("strict", None)]
    names = [each["function"]["name"] for each in documents]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise bad("tools", f"tools has two functions {twice}; expected a name of its own for each")
    for number, each in enumerate(documents):
        if (parameters := each["function"].get("parameters")) and parameters.setdefault("type", "object") != "object":
            raise bad("tools", f"tools[{number}].function.parameters has another type; expected an object")
    if asked.tool_choice == "auto":
        return Tools(documents, [], asked.parallel_tool_calls, strict)
    forced = asked.tool_names if asked.tool_choice == "required" else [asked.tool_choice.function.name]
    return Tools(documents, forced, asked.parallel_tool_calls, strict)


def find_calls(text: str, functions: Functions) -> tuple[str, list[dict[str, Any]]]:
    """The calls in a text, in OpenAI's format, and the text without them.

    Models write calls after a marker (:data:`DIALECTS`), or their whole text consists of calls. Text before ``</think>``
    contains no calls. A call of an unknown function, or one that cannot be read, stays in the text.
    """
    # Strings in such calls may have any marker.
    bodies = [0, *(each.end() for each in re.finditer(_THOUGHT, text))]
    for body in (*bodies[:_MOST_BROKEN], bodies[-1]):
        if whole := _rest(read_json, text, body, functions):
            return text[:body], whole
    calls: list[dict[str, Any]] = []
    content: list[str] = []
    kept = at = body = broken = 0
    while broken < _MOST_BROKEN and (mark := _BEGIN.search(text, at)) is not None:
        at = mark.end()
        if mark[0] == _THOUGHT:
            calls, content, kept, body = [], [], at, at
            continue
        found, end = _calls_at(_READERS[mark[0]], text, at, functions, True)
        broken += not found
        if found:
            between = text[kept : mark.start()]
            content.append(between if not calls or between.strip() else "")
            calls += found
            close = _ENDS.match(text, end)
            kept = at = end if close is None else close.end()
    if not body and text.lstrip().startswith("<think>"):
        return text, []  # the text ended before </think>
    if not calls and (found := _rest(read_code, text, body, functions)):
        return text[:body], found
    return (text[:body] + "".join(content) + text[kept:], calls) if calls else (text, [])


def _rest(reader: Reader, text: str, body: int, functions: Functions) -> list[dict[str, Any]]:
    """The calls of which a text consists from a position on; none if there is anything else."""
    start = len(text) - len(text[body:].lstrip())
    if text[start : start + 1] not in ("{", "["):
        return []
    calls, end = _calls_at(reader, text, start, functions, False)
    return [] if text[end:].strip() else calls


def _calls_at(reader: Reader, text: str, at: int, functions: Functions, marked: bool) -> tuple[list[dict[str, Any]], int]:
    """The calls that a reader finds at a position of a text, and their end."""
    calls: list[dict[str, Any]] = []
    try:
        for value, end in reader(text, at, functions):
            found = [_call(each, functions, marked) for each in (value if isinstance(value, list) else [value])]
            if not found or None in found:
                return (calls if marked else []), at
            calls += [each for each in found if each is not None]
            at = end
    except (ValueError, RecursionError):  # another dialect, NaN, a number with thousands of digits, or deep nesting
        pass
    return calls, at


def _call(value: Any, functions: Functions, marked: bool) -> dict[str, Any] | None:
    """A call in OpenAI's format, or None if the value is not a call.

    Args:
        marked: the call follows a marker, so arguments may be missing.
    """
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or name not in functions:
        return None
    arguments = value.get("arguments", value.get("parameters", {} if marked else None))
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None and marked else arguments
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        text = json.dumps(arguments, allow_nan=False)  # escapes half surrogate pairs, which UTF-8 cannot encode
    # Templates of Mistral accept only ids of nine letters and digits.
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": {"name": name, "arguments": text}}


class Held:
    """The text of a stream; holds back text that may belong to a call."""

    def __init__(self) -> None:
        self.text = ""
        self._told = self._read = 0  # numbers of characters: sent, and known to contain no marker
        self._body = self._first = 0  # start of the text after </think>, and its first nonblank character
        self._marked = False

    def more(self, piece: str) -> str:
        """The text that can be sent after another piece."""
        self.text += piece
        if self._marked:
            return ""
        text, end = self.text, self._read
        while True:
            while self._first < len(text) and text[self._first].isspace():
                self._first += 1
            mark = _BEGIN.search(text, end)
            if mark is None or mark[0] != _THOUGHT or self._in_string(mark.start()):
                break
            end = self._body = self._first = mark.end()
        if mark is None:
            self._read = max(end, len(text) - max(overlap(text[-_LONGEST:], each) for each in _SIGNS))
            end = self._body if text[self._first : self._first + 1] in ("", "{", "[") else self._read
        else:
            self._marked = True
            end = self._body if self._in_string(mark.start()) else mark.start()
        new = text[self._told : max(end, self._told)]
        self._told += len(new)
        return new

    def _in_string(self, at: int) -> bool:
        """Whether a position is in a string of calls as JSON, which the text may consist of."""
        try:
            for _ in read_json(self.text[self._first : at], 0, {}):
                pass
        except (ValueError, RecursionError) as error:
            return str(error).startswith("Unterminated string")
        return False

    def rest(self, content: str) -> str:
        """The rest to send at the end, given the text without its calls."""
        return content[self._told :]
