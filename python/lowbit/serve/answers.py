"""Passes texts from the engine to a request, and formats them as response documents."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..llm.generation import Generation, Text
from ..llm.penalties import TokenLogprobs
from ..llm.stopping import TextUntil
from .engine import Engine
from .errors import ApiError
from .model_list import LanguageModel, decoded
from .protocol import Writing, finite
from .tools import Held, Tools, find_calls

_REASONS = {"stop": "stop", "until": "stop", "max_new_tokens": "length", "max_length": "length"}


@dataclass
class Event:
    """A piece of one text; the last piece of a text comes with the result of its generation."""

    index: int
    text: str
    logprobs: list[TokenLogprobs]
    end: Generation | None = None


class Answers:
    """The texts of a request."""

    def __init__(
        self,
        engine: Engine,
        model: LanguageModel,
        prompts: list[list[int]],
        asked: Writing,
        usual_tokens: int | None,
        shown: Collection[str] = (),
    ):
        """
        Args:
            prompts: each gets the requested number of texts.
            usual_tokens: default number of new tokens, as for :meth:`LanguageModel.text`.
            shown: special tokens that are part of the texts.

        Raises:
            ApiError: a text cannot be generated.
        """
        self._engine, self._model, self.asked, self.prompts = engine, model, asked, prompts
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Event | Exception]()
        self.texts = [model.text(tokens, asked, number, usual_tokens) for tokens in prompts for number in range(asked.n)]
        self.ends: dict[int, Generation] = {}
        self.began = time.perf_counter()
        self.first: float | None = None  # time of the first token
        for index, text in enumerate(self.texts):
            text.until = until = TextUntil(model.tokenizer, text.plain, asked.stop, shown=shown)
            text.on_token = self._came
            tell = self._teller(index, until)
            until.on_text = partial(tell, None)
            text.on_end = partial(self._end, text, until, tell)
            text.on_error = self._tell

    def _came(self, token: int) -> None:
        if self.first is None:
            self.first = time.perf_counter()

    # The next three methods run on the engine's thread.

    def _tell(self, event: Event | Exception) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _teller(self, index: int, until: TextUntil) -> Callable[[Generation | None, str], None]:
        text, told = self.texts[index], 0

        def tell(end: Generation | None, piece: str) -> None:
            nonlocal told
            logprobs = [] if text.result is None else text.result.logprobs[told : until.tokens]
            told += len(logprobs)
            self._tell(Event(index, piece, logprobs, end))

        return tell

    def _end(self, text: Text, until: TextUntil, tell: Callable[[Generation, str], None], result: Generation) -> None:
        until.on_text = None
        before = len(until.text)
        left = until.finish()[before:]
        if text.constraint is not None and result.stopped == "stop":
            try:
                text.constraint.check(until.text)
            except ApiError as error:
                self._tell(error)
                return
        tell(result, left)

    # All others run on the server's thread.

    def start(self) -> None:
        """Queues the texts for generation.

        Raises:
            ApiError: too many texts wait.
        """
        self._engine.add(self._model.batch, self.texts)

    def close(self) -> None:
        """Ends unfinished texts."""
        left = [text for index, text in enumerate(self.texts) if index not in self.ends]
        if left:
            self._engine.remove(self._model.batch, left)

    async def events(self) -> AsyncIterator[Event]:
        """Yields the events of all texts.

        Raises:
            Exception: a text failed.
        """
        while len(self.ends) < len(self.texts):
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if event.end is not None:
                self.ends[event.index] = event.end
            yield event

    @property
    def string(self) -> str | None:
        """The stop string that has ended the first text."""
        until = self.texts[0].until
        return until.string if isinstance(until, TextUntil) else None

    @property
    def usage(self) -> dict[str, Any]:
        done = [self.ends[index] for index in sorted(self.ends)]
        prompt = sum(map(len, self.prompts))
        new = 0 if self.asked.max_tokens == 0 else sum(len(each.tokens) for each in done)
        firsts = done[:: self.asked.n]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in firsts)},
        }


class Form:
    """Formats the documents of an endpoint."""

    kind, prefix, chunk_kind = "text_completion", "cmpl-", "text_completion"
    named = False  # whether a stream has a line "event: TYPE" before each event, and no [DONE] at its end

    def __init__(self, answers: Answers, model: LanguageModel, tools: Tools | None):
        self._answers, self._model, self._asked, self._tools = answers, model, answers.asked, tools
        self._head = {
            "id": f"{self.prefix}{uuid.uuid4().hex}", "object": self.kind, "created": int(time.time()), "model": model.name,
        }  # fmt: skip
        self._offsets: dict[int, int] = {}

    def whole(self, pieces: dict[int, list[Event]]) -> dict[str, Any]:
        """The complete answer, from the events of all texts."""
        choices = []
        for index, events in sorted(pieces.items()):
            end = events[-1].end
            assert end is not None
            text = self._echoed(index) + ("" if self._asked.max_tokens == 0 else "".join(each.text for each in events))
            logprobs = [] if self._asked.max_tokens == 0 else [one for each in events for one in each.logprobs]
            content, reason = self._content(text, _REASONS[end.stopped])
            scores = self._logprobs(index, end, logprobs, True)
            choices.append({"index": index, **content, "logprobs": scores, "finish_reason": reason})
        return self._head | {"choices": choices, "usage": self._answers.usage, "seed": self._asked.seed}

    def first(self) -> list[dict[str, Any]]:
        """Stream documents before all texts."""
        return [self._chunk(index, self._begin(), None) for index in range(len(self._answers.texts)) if self._begin()]

    def next(self, event: Event, begins: bool) -> list[dict[str, Any]]:
        """Stream documents for an event."""
        chunks = []
        text = (self._echoed(event.index) if begins else "") + ("" if self._asked.max_tokens == 0 else event.text)
        text = self._told(event.index, text)
        logprobs = [] if self._asked.max_tokens == 0 else event.logprobs
        if text or logprobs:
            result = self._answers.texts[event.index].result
            chunks.append(self._chunk(event.index, self._delta(text), self._logprobs(event.index, result, logprobs, begins)))
        if event.end is not None:
            left, reason = self._left(event.index, _REASONS[event.end.stopped])
            chunks += [self._chunk(event.index, each, None) for each in left]
            chunks.append(self._chunk(event.index, self._delta(None), None, reason))
        return chunks

    def last(self) -> list[dict[str, Any]]:
        """Stream documents after all texts."""
        if not self._asked.stream_options.include_usage:
            return []
        return [self._head | {"object": self.chunk_kind, "choices": [], "usage": self._answers.usage}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last document of a stream that has begun and fails."""
        return error.document

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"object": self.chunk_kind, "choices": [choice], "seed": self._asked.seed}

    def _echoed(self, index: int) -> str:
        if not self._asked.echo:
            return ""
        return decoded(self._model.tokenizer, self._answers.texts[index].prompt)

    def _content(self, text: str, reason: str) -> tuple[dict[str, Any], str]:
        """The content of a text, and its finish reason."""
        return {"text": text}, reason

    def _told(self, index: int, text: str) -> str:
        """The part of a text's new piece that a stream sends at once."""
        return text

    def _left(self, index: int, reason: str) -> tuple[list[dict[str, Any]], str]:
        """What a stream sends at the end of a text, and the finish reason."""
        return [], reason

    def _begin(self) -> dict[str, Any]:
        return {}

    def _delta(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _logprobs(self, index: int, result: Generation | None, new: list[TokenLogprobs], begins: bool) -> Any:
        """Log-probabilities as in OpenAI's completions: a list for each kind of figure, with offsets in the text."""
        if self._asked.scores is None:
            return None
        found: list[TokenLogprobs | int] = list(new)
        if begins and self._asked.echo and result is not None:
            found = [self._answers.texts[index].prompt[0], *result.prompt_logprobs, *new]  # the first token has no probability
        at = self._offsets.get(index, 0)
        document: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in found:
            text = self._model.piece(each if isinstance(each, int) else each.token)
            document["tokens"].append(text)
            document["text_offset"].append(at)
            document["token_logprobs"].append(None if isinstance(each, int) else finite(each.logprob))
            top = None if isinstance(each, int) else {self._model.piece(t): finite(value) for t, value in reversed(each.top)}
            document["top_logprobs"].append(top)
            at += len(self._model.visible(each if isinstance(each, int) else each.token))
        self._offsets[index] = at
        return document


class ChatForm(Form):
    kind, prefix, chunk_kind = "chat.completion", "chatcmpl-", "chat.completion.chunk"

    def __init__(self, answers: Answers, model: LanguageModel, tools: Tools | None):
        super().__init__(answers, model, tools)
        self._held = {index: Held() for index in range(len(answers.texts))} if tools is not None else {}

    def _calls(self, text: str, reason: str) -> tuple[str, list[dict[str, Any]], str]:
        """A text without its calls, the calls, and the finish reason."""
        content, calls = (text, []) if self._tools is None else find_calls(text, self._tools.functions)
        if self._tools is not None and not self._tools.parallel:
            calls = calls[:1]
        return content, calls, "tool_calls" if calls and reason == "stop" else reason

    def _content(self, text: str, reason: str) -> tuple[dict[str, Any], str]:
        content, calls, reason = self._calls(text, reason)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content if content.strip() else None, "tool_calls": calls}
        return {"message": message}, reason

    def _told(self, index: int, text: str) -> str:
        return self._held[index].more(text) if index in self._held else text

    def _ended(self, index: int, reason: str) -> tuple[str, list[dict[str, Any]], str]:
        """The text that a stream has not sent yet, the calls, and the finish reason."""
        if index not in self._held:
            return "", [], reason
        content, calls, reason = self._calls(self._held[index].text, reason)
        return self._held[index].rest(content), calls, reason

    def _left(self, index: int, reason: str) -> tuple[list[dict[str, Any]], str]:
        rest, calls, reason = self._ended(index, reason)
        deltas: list[dict[str, Any]] = [{"content": rest}] if rest.strip() or (rest and not calls) else []
        deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(calls)]
        return [{"delta": each} for each in deltas], reason

    def _begin(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, index: int, result: Generation | None, new: list[TokenLogprobs], begins: bool) -> Any:
        if self._asked.scores is None:
            return None

        def one(token: int, logprob: float) -> dict[str, Any]:
            text = self._model.piece(token)
            # A token may be a part of a character, whose bytes are then unknown.
            return {"token": text, "logprob": finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}

        content = [one(each.token, each.logprob) | {"top_logprobs": [one(*top) for top in each.top]} for each in new]
        return {"content": content, "refusal": None}


class PartsForm(ChatForm):
    """Formats an answer of several parts: a text, unless it is blank and calls follow, and the calls."""

    named = True

    def __init__(self, answers: Answers, model: LanguageModel, tools: Tools | None):
        super().__init__(answers, model, tools)
        self._pending = ""  # blank text that may precede calls
        self._began = False  # whether a part of the text was sent

    def whole(self, pieces: dict[int, list[Event]]) -> dict[str, Any]:
        (events,) = pieces.values()
        end = events[-1].end
        assert end is not None
        text, calls, reason = self._calls("".join(each.text for each in events), _REASONS[end.stopped])
        return self.document("" if calls and not text.strip() else text, calls, reason)

    def next(self, event: Event, begins: bool) -> list[dict[str, Any]]:
        documents: list[dict[str, Any]] = []
        self._pending += self._told(0, event.text)
        if event.end is not None:
            rest, calls, reason = self._ended(0, _REASONS[event.end.stopped])
            self._pending += rest
            if not calls or self._began or self._pending.strip():
                documents += self._more()
            return documents + self.end(calls, reason)
        return self._more() if self._began or self._pending.strip() else []

    def last(self) -> list[dict[str, Any]]:
        return []

    def _more(self) -> list[dict[str, Any]]:
        text, self._pending = self._pending, ""
        if not text:
            return []
        begins, self._began = not self._began, True
        return self.piece(text, begins)

    def document(self, text: str, calls: list[dict[str, Any]], reason: str) -> dict[str, Any]:
        """The complete answer."""
        raise NotImplementedError

    def piece(self, text: str, begins: bool) -> list[dict[str, Any]]:
        """Stream documents for a piece of the text."""
        raise NotImplementedError

    def end(self, calls: list[dict[str, Any]], reason: str) -> list[dict[str, Any]]:
        """Stream documents at the end of the text."""
        raise NotImplementedError


def failure(error: Exception) -> ApiError:
    """The API error for an exception that ended a text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError(504, "the answer took too long; ask for fewer tokens, or start the server with a larger --timeout")
    if isinstance(error, ValueError):  # from the library, one sentence
        return ApiError(500, str(error))
    return ApiError(500, f"the model failed with {type(error).__name__}; the server's log has the traceback")
