"""The models of a server, and the conversion of requests to their tokens and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..llm.chat import sampling_of
from ..llm.generation import Text
from ..llm.sampling import Sampling
from ..llm.stopping import BREAKERS, breakers
from ..llm.templates import render
from ..llm.texts_call import TextsDecoder
from .errors import ApiError, bad
from .prefix_store import PrefixBatch
from .protocol import Conversation, Writing


def decoded(tokenizer: Any, tokens: Sequence[int], special: bool = False) -> str:
    """The text of tokens as streams have it; with ``special`` also the texts of special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)  # some encoders' are written in Python
    text: str = backend.decode(tokens, skip_special_tokens=not special)
    return text


@dataclass(eq=False)
class LanguageModel:
    """A model that generates texts."""

    name: str
    tokenizer: Any  # a fast tokenizer of transformers
    template: str | None  # chat template; None: the model only continues texts
    batch: PrefixBatch
    usual: Sampling  # defaults for requests
    most: int | None  # default number of new tokens; None: until the context is full
    stop: frozenset[int]
    created: int = field(default_factory=lambda: int(time.time()))
    parent: str | None = None  # the base model's name, if this one has an adapter
    grammar_tokenizer: Any = None  # llguidance's tokenizer, made on first use

    @classmethod
    def of(
        cls, name: str, decoder: TextsDecoder, model: Any, tokenizer: Any, template: str | None, stop: Iterable[int], *,
        at_once: int, rows: int, prefix_bytes: int,
    ) -> LanguageModel:  # fmt: skip
        """Prepares a loaded model.

        Args:
            decoder: its KV caches must hold whole texts, also in layers with a sliding window.
            model: has a ``generation_config``.
            stop: tokens that end a text.
            at_once, rows: as for :class:`lowbit.llm.batch.Batch`, the limits of a batch.
            prefix_bytes: bytes of keys and values of ended texts that are kept for later texts.

        Raises:
            ValueError: the model's files have invalid settings, or it does not support several texts.
        """
        usual, most, _ = sampling_of(model)
        return cls(name, tokenizer, template, PrefixBatch(decoder, at_once, rows, prefix_bytes), usual, most, frozenset(stop))

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a text, including the prompt."""
        return self.batch.decoder.max_length

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def conversation(self, asked: Conversation, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """The tokens of a conversation.

        Args:
            tools: tools that the model may call.

        Raises:
            ApiError: the model has no chat template, or the template refuses the messages.
        """
        if self.template is None:
            raise ApiError(
                400, f"the model {self.name} has no chat template, it only continues texts; expected /v1/completions",
                code="no_chat_template",
            )  # fmt: skip
        self.check_tools(tools)
        try:
            return render(self.tokenizer, self._documents(asked), self.template, tools, **asked.rendering)
        except ValueError as error:
            raise bad("messages", str(error)) from error

    def check_tools(self, tools: list[dict[str, Any]] | None) -> None:
        """Raises ApiError for tools if the chat template does not show them."""
        if tools and "tools" not in (self.template or ""):
            raise bad(
                "tools", f"the chat template of {self.name} has no tools; expected a request without them, or a server with a "
                "--template that has tools", "no_tools",
            )  # fmt: skip

    def _documents(self, asked: Conversation) -> list[dict[str, Any]]:
        """The messages as the chat template takes them."""
        return asked.documents

    def check_prompt(self, tokens: list[int], name: str) -> None:
        """Raises ApiError for a prompt that the model cannot continue."""
        if not tokens:
            raise bad(name, f"{name} has no tokens; expected at least one")
        if len(tokens) >= self.max_length:
            raise bad(
                name,
                f"{name} has {len(tokens)} tokens; expected fewer than the {self.max_length} of the context",
                "context_length_exceeded",
            )
        decoder = self.batch.decoder
        wrong = next((token for token in tokens if not decoder.takes(token)), None)
        if wrong is not None:
            raise bad(name, f"{name} has a token {wrong}; expected 0 to {decoder.vocabulary - 1}")

    def text(self, tokens: list[int], asked: Writing, number: int, usual_tokens: int | None) -> Text:
        """Makes a text of a request, without its callback.

        Args:
            tokens: its prompt, already checked by :meth:`check_prompt`.
            number: index among the texts with the same prompt.
            usual_tokens: default limit of new tokens; None: until the context is full.

        Raises:
            ApiError: a token of the request is not in the vocabulary.
        """
        sampling = asked.sampling(self.usual)
        if sampling.dry_multiplier:
            sampling = replace(sampling, dry_breakers=self.breakers(asked))
        most = next((each for each in (asked.max_tokens, usual_tokens, self.most) if each is not None), self.max_length)
        made = Text(
            tokens,
            max(1, most),
            sampling,
            (asked.seed + number) % 2**64 if asked.seed >= 0 else asked.seed + number,
            frozenset() if asked.ignore_eos and asked.grammar is None else self.stop,
            logprobs=asked.scores,
            prompt_logprobs=asked.scores if asked.echo else None,
        )
        try:
            self.batch.check(made)
        except ValueError as error:
            name = str(error).partition(" ")[0]
            raise ApiError(400, str(error), param=name if name in Writing.model_fields else None) from error
        return made

    def breakers(self, asked: Writing) -> tuple[int, ...]:
        """Tokens that end a repetition for DRY; cached by strings, because finding them reads the whole vocabulary."""
        strings = asked.dry_sequence_breakers
        return self._breakers(BREAKERS if strings is None else tuple(strings))

    @lru_cache(8)  # noqa: B019  the cache keeps the model alive, which lives as long as the server
    def _breakers(self, strings: tuple[str, ...]) -> tuple[int, ...]:
        return breakers(self.tokenizer, strings)

    @lru_cache(65536)  # noqa: B019
    def piece(self, token: int) -> str:
        """A token's text, including special tokens."""
        return decoded(self.tokenizer, [token], special=True)

    @lru_cache(65536)  # noqa: B019
    def visible(self, token: int) -> str:
        """The part of a token that is visible in a text."""
        return decoded(self.tokenizer, [token])
