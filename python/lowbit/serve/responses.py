"""OpenAI's Responses API: its requests as chats, the answers in its format, and stored responses."""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .answers import Answers, PartsForm
from .bodies import FIRST, Body, Part, Schema, few, validated
from .errors import ApiError, bad, shortened
from .model_list import LanguageModel
from .protocol import Chat, as_parts
from .tools import Tools


class _Shown(Part):
    """A part of a message, or of the result of a call."""

    type: Literal["input_text", "output_text", "text", "input_image"]
    text: str | None = None
    image_url: str | None = None
    detail: str | None = None

    @property
    def part(self) -> dict[str, Any]:
        """The part for a chat's message."""
        if self.type == "input_image":
            detail = {} if self.detail is None else {"detail": self.detail}
            return {"type": "image_url", "image_url": {"url": _given("image_url", self.image_url), **detail}}
        return {"type": "text", "text": _given("text", self.text)}


def _given(name: str, value: Any) -> Any:
    if value is None:
        raise bad("input", f"input has an item without {name}; expected a value")
    return value


_Parts = Annotated[list[_Shown], FIRST, few(1024), BeforeValidator(as_parts)]


class _Item(Part):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = Field(None, max_length=64)
    content: _Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _Parts | None = None


def _messages(items: list[_Item], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. A call becomes a part of the assistant's message before it."""
    found: list[dict[str, Any]] = []
    # The functions by the ids of their calls.
    names: dict[str, str] = {call["id"]: call["function"]["name"] for each in before for call in each.get("tool_calls") or ()}
    for item in items:
        if item.type == "message":
            found.append(
                {"role": _given("role", item.role), "content": [each.part for each in _given("content", item.content)]}
            )
        elif item.type == "function_call":
            number, name = _given("call_id", item.call_id), _given("name", item.name)
            names[number] = name
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": []})
            call = {"id": number, "function": {"name": name, "arguments": _given("arguments", item.arguments)}}
            found[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            number = _given("call_id", item.call_id)
            named = {"name": names[number]} if number in names else {}
            content = [each.part for each in _given("output", item.output)]
            found.append({"role": "tool", "tool_call_id": number, "content": content, **named})
    return found


class _Tool(Part):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Chosen(Part):
    type: Literal["function"]
    name: str


class _Format(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Schema | None = Field(None, alias="schema")


class _Text(Part):
    format: _Format = Field(default_factory=lambda: _Format.model_validate({"type": "text"}))


_OF_CHATS = ("temperature", "top_p", "seed", "stream", "chat_template_kwargs", "parallel_tool_calls")


class Responses(Body):
    # Reasoning is a part of the text, so the parameters for it have no effect.
    ignored = Body.ignored | {"reasoning", "max_tool_calls", "stream_options"}
    input: Annotated[list[_Item], FIRST, few(4096)] | str = Field(default_factory=list)
    instructions: str | None = None
    tools: Annotated[list[_Tool], FIRST, few(128)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | _Chosen = "auto"
    text: _Text = Field(default_factory=_Text)
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=1e30)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stream: bool = False
    parallel_tool_calls: bool = True
    store: bool = True
    previous_response_id: str | None = Field(None, max_length=64)
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], few(16)] = Field(default_factory=dict)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    include: Annotated[list[Literal["reasoning.encrypted_content"]], FIRST, few(16)] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Responses:
        if not self.input:
            raise bad("input", "input is empty; expected a text or items")
        form = self.text.format
        if form.type == "json_schema" and form.schema_ is None:
            raise bad("text", "text.format has no schema; expected an object")
        if any(len(name) > 64 for name in self.metadata):
            raise bad("metadata", "metadata has a name of more than 64 characters; expected fewer")
        return self

    def messages(self, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The new messages of the conversation.

        Args:
            before: the earlier ones.

        Raises:
            ApiError: an item lacks a value.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return _messages(self.input, before)

    def chat(self, before: list[dict[str, Any]]) -> Chat:
        """The same request as a chat.

        Args:
            before: earlier messages of the conversation.

        Raises:
            ApiError: a chat does not accept it.
        """
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        body: dict[str, Any] = {"model": self.model, "messages": [*system, *before, *self.messages(before)]}
        body |= {name: getattr(self, name) for name in _OF_CHATS}
        body |= {"max_tokens": self.max_output_tokens, "tools": [_function(each) for each in self.tools]}
        choice = self.tool_choice
        body["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
        form = self.text.format
        if form.type != "text":
            body["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                body["response_format"]["json_schema"] = {"schema": form.schema_}
        return validated(Chat, body)


def _function(tool: _Tool) -> dict[str, Any]:
    given = {name: value for name in ("description", "parameters", "strict") if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": {"name": tool.name, **given}}


class Store:
    """Responses and their conversations in memory; the least recently used are dropped."""

    def __init__(self, most: int):
        """
        Args:
            most: largest number of bytes of all documents.
        """
        self._most, self._kept, self.nbytes = most, OrderedDict[str, tuple[bytes, bytes]](), 0

    def add(self, document: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Stores a response with the conversation up to it; one that is larger than the store is not kept."""
        entry = json.dumps(document).encode(), json.dumps(messages).encode()
        self._kept[document["id"]] = entry
        self.nbytes += sum(map(len, entry))
        while self.nbytes > self._most:
            self.remove(next(iter(self._kept)))

    def remove(self, name: str) -> None:
        """Drops a response.

        Raises:
            ApiError: it is not stored.
        """
        self._entry(name)
        self.nbytes -= sum(map(len, self._kept.pop(name)))

    def document(self, name: str) -> bytes:
        """A response as JSON; raises ApiError if it is not stored."""
        return self._entry(name)[0]

    def messages(self, name: str) -> bytes:
        """The conversation up to a response as JSON; raises ApiError if it is not stored."""
        return self._entry(name)[1]

    def _entry(self, name: str) -> tuple[bytes, bytes]:
        if name not in self._kept:
            raise ApiError(
                404,
                f"there is no response {shortened(name, 64)!r}: it was not stored, or was dropped for later ones; expected the "
                "id of a stored response, or the whole conversation as input",
                param="previous_response_id",
                code="response_not_found",
            )
        self._kept.move_to_end(name)
        return self._kept[name]


class ResponsesForm(PartsForm):
    kind, prefix = "response", "resp_"

    def __init__(
        self,
        asked: Responses,
        keep: Callable[[dict[str, Any]], None],
        answers: Answers,
        model: LanguageModel,
        tools: Tools | None,
    ):
        """
        Args:
            asked: the request.
            keep: called with the complete response.
        """
        super().__init__(answers, model, tools)
        self._request, self._keep, self._count, self._text = asked, keep, 0, ""
        self._message = f"msg_{uuid.uuid4().hex}"

    def first(self) -> list[dict[str, Any]]:
        response = self._response("in_progress", [])
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def document(self, text: str, calls: list[dict[str, Any]], reason: str) -> dict[str, Any]:
        status = "incomplete" if reason == "length" else "completed"
        output = [self._said(text, status)] if text else []
        output += [_called(call, status, call["function"]["arguments"]) for call in calls]
        response = self._response(status, output)
        self._keep(response)
        return response

    def piece(self, text: str, begins: bool) -> list[dict[str, Any]]:
        self._text += text
        place = {"item_id": self._message, "output_index": 0, "content_index": 0}
        start = []
        if begins:
            item = self._said("", "in_progress") | {"content": []}
            start.append(self._event("output_item.added", output_index=0, item=item))
            start.append(self._event("content_part.added", **place, part=_words("")))
        return [*start, self._event("output_text.delta", **place, delta=text, logprobs=[])]

    def end(self, calls: list[dict[str, Any]], reason: str) -> list[dict[str, Any]]:
        response = self.document(self._text, calls, reason)
        events = []
        for index, item in enumerate(response["output"]):
            place = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                part = {"content_index": 0}
                events.append(self._event("output_text.done", **place, **part, text=self._text, logprobs=[]))
                events.append(self._event("content_part.done", **place, **part, part=_words(self._text)))
            else:
                started = item | {"status": "in_progress", "arguments": ""}
                arguments, name = item["arguments"], item["name"]
                events.append(self._event("output_item.added", output_index=index, item=started))
                events.append(self._event("function_call_arguments.delta", **place, delta=arguments))
                events.append(self._event("function_call_arguments.done", **place, name=name, arguments=arguments))
            events.append(self._event("output_item.done", output_index=index, item=item))
        return [*events, self._event(response["status"], response=response)]

    def failed(self, error: ApiError) -> dict[str, Any]:
        found = {"code": error.code or "server_error", "message": error.message}
        return self._event("failed", response=self._response("failed", []) | {"error": found})

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": f"response.{kind}", "sequence_number": self._count - 1, **content}

    def _said(self, text: str, status: str) -> dict[str, Any]:
        return {"id": self._message, "type": "message", "role": "assistant", "status": status, "content": [_words(text)]}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked, chat, done = self._request, self._asked, status in ("completed", "incomplete")
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        sampling = chat.sampling(self._model.usual)
        form = asked.text.format.model_dump(by_alias=True, exclude_none=True)
        usage = self._answers.usage if done else None
        choice = asked.tool_choice
        created = self._head["created"]
        return {
            "id": self._head["id"], "object": self.kind, "created_at": created, "completed_at": created if done else None,
            "status": status, "error": None, "incomplete_details": incomplete, "model": self._model.name, "output": output,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens, "metadata": asked.metadata,
            "parallel_tool_calls": asked.parallel_tool_calls, "previous_response_id": asked.previous_response_id,
            "store": asked.store, "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "text": {"format": form}, "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [each.model_dump() for each in asked.tools], "truncation": "disabled", "background": False,
            "reasoning": {"effort": None, "summary": None}, "seed": chat.seed,
            "usage": None if usage is None else {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            },
        }  # fmt: skip


def _words(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _called(call: dict[str, Any], status: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": status, "call_id": call["id"],
        "name": call["function"]["name"], "arguments": arguments,
    }  # fmt: skip


def answered(response: dict[str, Any]) -> dict[str, Any]:
    """A response as a message of a chat."""
    said = [{"type": "text", "text": part["text"]} for item in response["output"] for part in item.get("content", ())]
    calls = [
        {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in response["output"]
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {})
