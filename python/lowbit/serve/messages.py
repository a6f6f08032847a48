"""Anthropic's Messages API: its requests as chats, and the answers in its format."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .answers import PartsForm
from .bodies import FIRST, Body, Part, Schema, StopText, few, validated
from .errors import ApiError, bad
from .protocol import Chat, as_parts

_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def card(model: dict[str, Any]) -> dict[str, Any]:
    """A model in a list of models, from its entry in OpenAI's format."""
    created = datetime.fromtimestamp(model["created"], UTC).isoformat()
    length = model["max_model_len"]
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created, "max_input_tokens": length}


def refusal(error: ApiError) -> dict[str, Any]:
    """The JSON body of an error, also used in a stream's event."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class _Source(Part):
    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class _Text(Part):
    type: Literal["text"]
    text: str


class _Shown(Part):
    """A block that a user or a tool shows to the model."""

    type: Literal["text", "image"]
    text: str | None = None
    source: _Source | None = None

    @property
    def part(self) -> dict[str, Any]:
        """The block as a part of a chat's message."""
        if self.type == "image":
            source: _Source = _given("source", self.source)
            url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
            return {"type": "image_url", "image_url": {"url": url}}
        return {"type": "text", "text": _given("text", self.text)}


class _Block(_Shown):
    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]  # type: ignore[assignment]
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Annotated[list[_Shown], FIRST, few(1024), BeforeValidator(as_parts)] | None = None
    is_error: bool = False


def _given(name: str, value: Any) -> Any:
    if value is None:
        raise bad("messages", f"messages has a block without {name}; expected a value")
    return value


class _Message(Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], FIRST, few(1024), BeforeValidator(as_parts)]

    def documents(self, names: dict[str, str]) -> list[dict[str, Any]]:
        """The message as one or more messages of a chat: each result of a tool is a message.

        Args:
            names: names of the functions that were called, by the ids of the calls; calls of this message are added.
        """
        found, parts, calls = [], [], []
        for block in self.content:
            if block.type == "tool_result":
                number = _given("tool_use_id", block.tool_use_id)
                name = {"name": names[number]} if number in names else {}
                content = [each.part for each in block.content or ()]
                if block.is_error:  # templates have no other place for it
                    content = [{"type": "text", "text": "Error: "}, *content]
                found.append({"role": "tool", "tool_call_id": number, "content": content, **name})
            elif block.type == "tool_use":
                number, name = _given("id", block.id), _given("name", block.name)
                names[number] = name
                calls.append({"id": number, "function": {"name": name, "arguments": _given("input", block.input)}})
            elif block.type in ("text", "image"):
                parts.append(block.part)
        wrong = "tool_result" if self.role != "user" and found else "tool_use" if self.role != "assistant" and calls else None
        if wrong is not None:
            raise bad("messages", f"messages has a {wrong} block in a message of the {self.role}; expected another role")
        if parts or calls or not found:
            found.append({"role": self.role, "content": parts} | ({"tool_calls": calls} if calls else {}))
        return found


class _Tool(Part):
    type: Literal["custom"] = "custom"  # other types are tools that run on Anthropic's servers
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class _Choice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Format(Part):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class _Output(Part):
    format: _Format | None = None


class CountTokens(Body):
    """A conversation, whose tokens are counted."""

    # Reasoning is a part of the text, and prompts are always cached, so the parameters for them have no effect.
    ignored = Body.ignored | {
        "thinking", "cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id",
    }  # fmt: skip
    messages: Annotated[list[_Message], FIRST, few(4096, 1)]
    system: Annotated[list[_Text], FIRST, few(1024), BeforeValidator(as_parts)] = Field(default_factory=list)
    tools: Annotated[list[_Tool], FIRST, few(128)] = Field(default_factory=list)
    tool_choice: _Choice | None = None
    output_config: _Output | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> CountTokens:
        if self.tool_choice is not None and (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
            raise bad("tool_choice", "tool_choice has either type tool or a name; expected both or neither")
        return self

    def chat(self) -> Chat:
        """The same request as a chat.

        Raises:
            ApiError: a chat does not accept it.
        """
        names: dict[str, str] = {}
        messages: list[dict[str, Any]] = (
            [{"role": "system", "content": [dict(each) for each in self.system]}] if self.system else []
        )
        for document in (document for each in self.messages for document in each.documents(names)):
            before = messages[-1] if messages else {}
            if (
                document["role"] == before.get("role") != "tool" and "tool_calls" not in before
            ):  # consecutive messages of one role become one
                before["content"] += [{"type": "text", "text": "\n\n"}, *document.pop("content")]
                before |= document
            else:
                messages.append(document)
        body = self._settings | {"model": self.model, "messages": messages, "chat_template_kwargs": self.chat_template_kwargs}
        if messages[-1]["role"] == "assistant":
            body["continue_final_message"] = True
        if self.tools:
            body["tools"] = [_function(each) for each in self.tools]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
            body["tool_choice"] = named if choice.type == "tool" else "required" if choice.type == "any" else choice.type
        if self.output_config is not None and (form := self.output_config.format) is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return validated(Chat, body)

    @property
    def _settings(self) -> dict[str, Any]:
        return {}


def _function(tool: _Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": function}


class Messages(CountTokens):
    """A conversation, which the model answers."""

    max_tokens: int = Field(ge=1, le=2**31)
    stop_sequences: Annotated[list[StopText], FIRST, few(32)] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1e30)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


def _encodable(arguments: str) -> Any:
    """Arguments of a call. Half a surrogate pair, which UTF-8 cannot encode, becomes U+FFFD."""
    text = json.dumps(json.loads(arguments), ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


class MessagesForm(PartsForm):
    prefix = "msg_"

    def first(self) -> list[dict[str, Any]]:
        usage = {"input_tokens": len(self._answers.prompts[0]), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], None, usage)}, {"type": "ping"}]

    def document(self, text: str, calls: list[dict[str, Any]], reason: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text}] if text else []
        content += [_use(call, _encodable(call["function"]["arguments"])) for call in calls]
        return self._message(content, reason, self._usage)

    def piece(self, text: str, begins: bool) -> list[dict[str, Any]]:
        start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        more = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        return [start, more] if begins else [more]

    def end(self, calls: list[dict[str, Any]], reason: str) -> list[dict[str, Any]]:
        documents: list[dict[str, Any]] = [{"type": "content_block_stop", "index": 0}] if self._began else []
        for index, call in enumerate(calls, int(self._began)):
            delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            documents += [
                {"type": "content_block_start", "index": index, "content_block": _use(call, {})},
                {"type": "content_block_delta", "index": index, "delta": delta},
                {"type": "content_block_stop", "index": index},
            ]
        return [
            *documents,
            {"type": "message_delta", "delta": self._end(reason), "usage": self._usage},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> dict[str, Any]:
        return refusal(error)

    def _message(self, content: list[dict[str, Any]], reason: str | None, usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._model.name}
        return head | {"content": content, **self._end(reason), "usage": usage, "seed": self._asked.seed}

    def _end(self, reason: str | None) -> dict[str, Any]:
        if reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        string = self._answers.string if reason == "stop" else None
        return {"stop_reason": _REASONS[reason] if string is None else "stop_sequence", "stop_sequence": string}

    @property
    def _usage(self) -> dict[str, int]:
        usage = self._answers.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": usage["completion_tokens"],
        }  # fmt: skip


def _use(call: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value}
