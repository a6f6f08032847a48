"""Requests of OpenAI's API as pydantic models."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from ..llm.sampling import Sampling
from .bodies import AS_LIST, FIRST, LEAST_BYTES, Body, Part, Schema, StopText, Token, check_bytes, dumped, few
from .errors import bad, shortened
from .schemas import closed

_MOST_SCHEMA = 1 << 17  # bytes of a schema or grammar
_MOST_TOOLS = 1 << 18  # bytes of all tools of a request

MOST_TOKENS = 1 << 16  # of /detokenize, if the context is smaller


_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # have schemas by name
_MOST_CONSTANT = 2**53


def check_constants(name: str, schema: Any) -> None:
    """Raises ApiError for a constant of a schema that llguidance, which computes in float64, would write as another number."""
    left = [(schema, False)]
    while left:
        value, constant = left.pop()
        if isinstance(value, dict):
            for key, each in value.items():
                named = not constant and key in _NAMED and isinstance(each, dict)
                left += [(inner, False) for inner in each.values()] if named else [(each, constant or key in ("const", "enum"))]
        elif isinstance(value, list):
            left += [(each, constant) for each in value]
        elif constant and isinstance(value, int) and abs(value) > _MOST_CONSTANT:
            raise bad(
                name, f"{name} has the constant {shortened(str(value), 40)}; expected -2^53 to 2^53, or a string",
                "unsupported_schema",
            )  # fmt: skip


def dumped_schema(name: str, schema: Any) -> str:
    """A schema as JSON, checked and :func:`closed`."""
    dumped(name, schema, _MOST_SCHEMA)
    check_constants(name, schema)
    return json.dumps(closed(schema))


@dataclass(frozen=True)
class Grammar:
    """A constraint on a text."""

    kind: str  # kind of value: "json", a JSON schema; "regex"; "grammar", in Lark's syntax or llama.cpp's GBNF; "call"
    value: str
    param: str  # parameter of the request, for errors


class _StreamOptions(Part):
    include_usage: bool = False


class _Named(Part):
    schema_: Schema = Field(alias="schema")


class _Format(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Named | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # llama.cpp's extension of json_object

    @model_validator(mode="after")
    def _check(self) -> _Format:
        if self.type == "json_schema" and self.json_schema is None:
            raise bad("response_format", "response_format has no json_schema.schema; expected an object")
        return self

    @property
    def wanted(self) -> Any:
        """The requested schema; None: any text."""
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.schema_ is None else self.schema_


class _Structured(Part):
    model_config = ConfigDict(extra="forbid")
    json_: Schema | None = Field(None, alias="json")
    regex: str | None = Field(None, max_length=4096)
    choice: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], FIRST, few(1024, 1)] | None = None
    grammar: str | None = Field(None, max_length=_MOST_SCHEMA)

    @property
    def wanted(self) -> Grammar:
        name = "structured_outputs"
        given = {kind: value for kind, value in self if value is not None}
        if len(given) != 1:
            raise bad(name, f"{name} has {', '.join(given) or 'nothing'}; expected one of json, regex, choice and grammar")
        ((kind, value),) = given.items()
        if kind == "json_":
            return Grammar("json", dumped_schema(name, value), name)
        if kind == "choice":
            text = f"start: {' | '.join(json.dumps(each) for each in value)}"
            if len(text) > _MOST_SCHEMA:
                raise bad(name, f"{name}.choice has {len(text)} bytes; expected at most {_MOST_SCHEMA}", "unsupported_schema")
            return Grammar("grammar", text, name)
        return Grammar(kind, value, name)


class Writing(Body):
    """Options of generation that completions and chats share."""

    temperature: float = Field(0.0, ge=0, le=1e30)
    top_p: float = Field(1.0, ge=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    top_k: int = Field(-1, ge=-1, le=2**31)
    repetition_penalty: float = Field(1.0, ge=1e-30, le=1e30)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    dry_multiplier: float = Field(0.0, ge=0, le=1e30)
    dry_base: float = Field(1.75, ge=1, le=1e30)
    dry_allowed_length: int = Field(2, ge=1, le=2**31)
    dry_sequence_breakers: Annotated[list[StopText], FIRST, few(64), AS_LIST] | None = None
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0, le=2**31, strict=False)], Annotated[float, Field(ge=-100, le=100)]], few(4096)
    ] = Field(default_factory=dict)
    seed: int = Field(default_factory=lambda: secrets.randbits(32), ge=-(2**63), le=2**64 - 1)
    n: int = Field(1, ge=1, le=16)
    best_of: int | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    stop: Annotated[list[StopText], FIRST, few(32), AS_LIST] = Field(default_factory=list)
    ignore_eos: bool = False
    echo: bool = False  # only for completions
    stream: bool = False
    stream_options: _StreamOptions = Field(default_factory=_StreamOptions)
    response_format: _Format | None = None
    structured_outputs: _Structured | None = None

    @model_validator(mode="after")
    def _check(self) -> Writing:
        if self.best_of not in (None, self.n):
            raise bad("best_of", f"best_of is {self.best_of}; expected {self.n}, as n")
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens", "max_tokens is 0; expected 1 or more without echo")
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.type != "text":
            raise bad("structured_outputs", "structured_outputs and response_format are both given; expected one of the two")
        return self

    @property
    def scores(self) -> int | None:
        """Number of likeliest alternatives to report per token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def schema_text(self) -> str | None:
        """The schema of response_format as JSON."""
        schema = None if self.response_format is None else self.response_format.wanted
        return None if schema is None else dumped_schema("response_format", schema)

    @property
    def grammar(self) -> Grammar | None:
        """OpenAI's response_format, or vLLM's structured_outputs."""
        if self.structured_outputs is not None:
            return self.structured_outputs.wanted
        return None if (schema := self.schema_text) is None else Grammar("json", schema, "response_format")

    def sampling(self, usual: Sampling) -> Sampling:
        """How tokens are sampled.

        Args:
            usual: defaults for missing parameters.
        """
        names = Sampling.__dataclass_fields__.keys() & self.model_fields_set
        given = {name: getattr(self, name) for name in names}
        if given.get("top_k", 1) < 1:
            given["top_k"] = None  # all tokens, as in vLLM and llama.cpp
        return replace(usual, **given)


def _prompts(value: Any) -> Any:
    return [value] if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)) else value


_Ids = Annotated[list[Token], FIRST, few(1 << 20, 1)]


class Completion(Writing):
    prompt: Annotated[list[str | _Ids], FIRST, few(16, 1), BeforeValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def scores(self) -> int | None:
        return self.logprobs


def as_parts(value: Any) -> Any:
    """A text as a list of one text part."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Url(Part):
    """The address of an image."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class Content(Part):
    """A part of a message: a text or an image."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: Annotated[Url, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Content:
        if getattr(self, self.type) is None:
            raise bad("messages", f"messages has a part of type {self.type} without {self.type}; expected one with it")
        return self


def as_object(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    try:
        return (
            from_json(value, allow_inf_nan=False) if value.strip() else {}
        )  # OpenAI returns an empty text for a call without arguments
    except ValueError as error:
        raise PydanticCustomError("arguments", "a JSON object: {why}", {"why": shortened(str(error), 60)}) from None


class _CalledFunction(Part):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(as_object)] = Field(default_factory=dict)


class _Call(Part):
    id: str = ""
    function: _CalledFunction


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Message(Part):
    """A message of a conversation."""

    role: str = Field(max_length=64)
    content: Annotated[list[Content], FIRST, few(1024), BeforeValidator(as_parts)] | None = None
    name: str | None = Field(None, max_length=1024)
    tool_call_id: str | None = Field(None, max_length=1024)
    tool_calls: Annotated[list[_Call], FIRST, few(128)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise bad("messages", "messages has one without content; expected a text or text parts")
        # Templates write any role. Most have only these, and a model does not know "User".
        if self.role not in ROLES and (known := self.role.strip().lower()) in ("", *ROLES):
            expected = repr(known) if known else ", ".join(ROLES)
            raise bad("messages", f"messages has one of the role {self.role!r}; expected {expected}")
        return self

    @property
    def texts(self) -> list[str]:
        """Its text parts."""
        return [part.text for part in self.content or () if part.type == "text" and part.text is not None]

    @property
    def images(self) -> list[Url]:
        """The addresses of its images."""
        return [part.image_url for part in self.content or () if part.type == "image_url" and part.image_url is not None]

    @property
    def document(self) -> dict[str, Any]:
        """The message for chat templates: a single text, and arguments as objects."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        found["content"] = "".join(self.texts)
        found |= {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": each.id, "type": "function", "function": dict(each.function)} for each in self.tool_calls
            ]
        return found


class Conversation(Body):
    """The messages of a conversation, for a chat template."""

    messages: Annotated[list[Message], FIRST, few(4096, 1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_end(self) -> Conversation:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise bad(
                "add_generation_prompt",
                "add_generation_prompt and continue_final_message are both true; expected one of the two",
            )
        if self.messages and (self.messages[-1].tool_calls or self.messages[-1].content is None):
            raise bad("messages", "the last message has calls of tools; expected a text to continue")
        return self

    @property
    def rendering(self) -> dict[str, Any]:
        """How a chat template writes the messages: arguments of :func:`lowbit.llm.templates.render`."""
        return {
            "answers": self.add_generation_prompt, "continues": self.continue_final_message,
            "variables": self.chat_template_kwargs,
        }  # fmt: skip

    @property
    def images(self) -> list[Url]:
        """The addresses of the images of all messages."""
        return [image for each in self.messages for image in each.images]

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [each.document for each in self.messages]

    def check_bytes(self, tokens: int) -> None:
        """Like :func:`check_bytes`, for all messages."""
        texts = [text for each in self.messages for text in each.texts]
        # Most templates use no other fields, but any field could be as long as the body.
        texts += [text for each in self.messages for text in (each.role, each.name, each.tool_call_id) if text is not None]
        for call in (call for each in self.messages for call in each.tool_calls or ()):
            texts += call.id, call.function.name, json.dumps(call.function.arguments)
        check_bytes("messages", texts, tokens)
        dumped("chat_template_kwargs", self.chat_template_kwargs, LEAST_BYTES)


class _Function(Part):
    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}\z")
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Part):
    type: Literal["function"]
    function: _Function


class _Name(Part):
    name: str


class _Chosen(Part):
    function: _Name


class Chat(Writing, Conversation):
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[_Tool], FIRST, few(128)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | _Chosen = "auto"

    @model_validator(mode="after")
    def _check_chat(self) -> Chat:
        if self.echo:
            raise bad("echo", "echo is true; expected it in completions", "unsupported_parameter")
        self.max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs", f"top_logprobs is {self.top_logprobs}; expected logprobs true with it")
        dumped("tools", [each.model_dump() for each in self.tools], _MOST_TOOLS)
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, _Chosen) else None
        if wanted is not None and wanted not in self.tool_names:
            raise bad(
                "tool_choice", f"tool_choice is {shortened(wanted, 64)!r}; expected none, auto, required or one of the tools"
            )
        if self.tool_choice == "required" and not self.tools:
            raise bad("tool_choice", "tool_choice requires a call, but the request has no tools; expected at least one")
        formed = self.structured_outputs is not None or (
            self.response_format is not None and self.response_format.type != "text"
        )
        called = self.tool_choice == "required" or wanted is not None
        called = called or (self.tool_choice == "auto" and any(each.function.strict for each in self.tools))
        if self.continue_final_message and (formed or called):
            raise bad(
                "continue_final_message", "the last message is to be continued, but a format or a call is for a whole answer; "
                "expected one of the two",
            )  # fmt: skip
        return self

    @property
    def tool_names(self) -> list[str]:
        return [each.function.name for each in self.tools]

    @property
    def scores(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Embeddings(Body):
    input: Annotated[list[Annotated[str, Field(min_length=1)] | _Ids], FIRST, few(2048, 1), BeforeValidator(_prompts)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=2**31)
    prompt_name: str | None = Field(None, max_length=256)
    truncate: bool = False


def _document(value: Any) -> Any:
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


class Ranking(Body):
    query: str = Field(min_length=1)
    documents: Annotated[list[Annotated[str, BeforeValidator(_document), Field(min_length=1)]], FIRST, few(2048, 1)]
    top_n: int | None = Field(None, ge=1, le=2**31)
    return_documents: bool = False
    truncate: bool = False


class Tokenize(Conversation):
    content: str | None = None  # llama.cpp's name
    prompt: str | None = None  # vLLM's
    messages: Annotated[list[Message], FIRST, few(4096, 1)] = Field(default_factory=list)


class Detokenize(Body):
    tokens: Annotated[list[Token], FIRST, few(1 << 20)]  # also limited by MOST_TOKENS or the model's context


def finite(value: float) -> float:
    """JSON has no infinity, so impossible tokens get the smallest float32."""
    return value if math.isfinite(value) else -9999.0
