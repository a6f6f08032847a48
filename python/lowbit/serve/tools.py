"""Functions that a model may ask its client to call: what a request offers, and the calls in a text."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

from .errors import bad
from .protocol import Fields, Grammar

_BEGIN = "<tool_call>"
_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tools:
    """The tools of a request."""

    documents: list[dict[str, Any]]  # for the chat template
    forced: list[str]  # the text must be a call of one of these; empty: the model may also answer

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [each["function"]["name"] for each in self.documents]

    @property
    def grammar(self) -> Grammar | None:
        """The form of a forced call."""
        if not self.forced:
            return None
        rules = [
            f'call{number}: {json.dumps(json.dumps({"name": each["function"]["name"]})[:-1] + ", ")} "\\"arguments\\": " '
            f'%json {json.dumps(each["function"].get("parameters") or _NOTHING)} "}}"'
            for number, each in enumerate(self.documents)
            if each["function"]["name"] in self.forced
        ]
        start = " | ".join(rule.partition(":")[0] for rule in rules)
        return Grammar("grammar", "\n".join([f"start: {start}", *rules]), "tools")


def read_tools(fields: Fields) -> Tools | None:
    """Takes the tools of a request.

    Raises:
        ApiError: they are no functions, or the choice is none of them.
    """
    given, choice = fields.take("tools"), fields.take("tool_choice", "auto")
    if given is None or given == []:
        if choice not in ("none", "auto"):
            raise bad("tool_choice", "tool_choice asks for a call, and the request has no tools; expected some")
        return None
    if not isinstance(given, list):
        raise bad("tools", "tools is not an array; expected an array of functions")
    found = Tools([_tool(number, each) for number, each in enumerate(given)], [])
    if choice in ("none", "auto"):
        return None if choice == "none" else found
    if choice == "required":
        return Tools(found.documents, found.names)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in found.names:
        raise bad("tool_choice", f"tool_choice is {choice!r}; expected none, auto, required or one of the tools")
    return Tools(found.documents, [name])


def _tool(number: int, value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    function = function if isinstance(function, dict) else {}
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad("tools", f"tools[{number}] has no function with a name of 1 to 64 letters, digits, _, . and -")
    if not isinstance(function.get("parameters") or {}, dict):
        raise bad("tools", f"tools[{number}] has parameters that are no JSON schema; expected an object")
    return {"type": "function", "function": function}


def find_calls(text: str, names: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """The calls of a text as OpenAI's API returns them, and the text without them.

    Models write a call as JSON between <tool_call> and </tool_call> (Qwen, Hermes), or their whole text is a call or a list of
    calls (Llama, Mistral). A text with a call of an unknown function, or with broken JSON, stays as it is.
    """
    tagged = _TAGGED.findall(text)
    try:
        documents = [json.loads(each) for each in tagged or [text]]
    except ValueError:
        return text, []
    if not tagged and isinstance(documents[0], list):
        documents = documents[0]
    calls = [_call(each, names) for each in documents]
    if not calls or None in calls:
        return text, []
    return _TAGGED.sub("", text) if tagged else "", [each for each in calls if each is not None]


def _call(value: Any, names: list[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class Held:
    """The text of a stream, of which nothing is told that may belong to a call."""

    def __init__(self) -> None:
        self.text = ""
        self._told = 0

    def more(self, piece: str) -> str:
        """What can be told after another piece of the text."""
        self.text += piece
        if self.text.lstrip()[:1] in ("", "{", "["):
            return ""
        end = self.text.find(_BEGIN)
        if end < 0:
            part = next(n for n in range(len(_BEGIN), -1, -1) if self.text.endswith(_BEGIN[:n]))
            end = len(self.text) - part
        new = self.text[self._told : end]
        self._told = end
        return new

    def rest(self, content: str) -> str:
        """What is left to tell at the end, given the text without its calls."""
        return content[self._told :]
