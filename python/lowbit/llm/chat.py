"""Conversations with a chat template, decoded over a KV cache that is reused from turn to turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .generation import generate
from .loading import check_tokens
from .sampling import Sampling, common
from .stopping import TextUntil
from .templates import render

if TYPE_CHECKING:
    import torch

    from .prefixes import PrefixCache

Message = dict[str, str]

# Sampling settings of transformers that lowbit does not support -> values that have no effect.
_OTHER_SETTINGS = {
    "top_h": (1,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "num_beams": (1,),
    "no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,), "guidance_scale": (1,),
    "bad_words_ids": (), "sequence_bias": (), "suppress_tokens": ([],), "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "stop_strings": ([],),
    "penalty_alpha": (0,),
}  # fmt: skip
# All settings that are read from a generation_config.json.
SETTINGS = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", *_OTHER_SETTINGS
)  # fmt: skip


def sampling_of(model: torch.nn.Module) -> tuple[Sampling, int | None, list[str]]:
    """Settings of a model's generation_config.json, with transformers' defaults.

    Returns:
        The sampling settings; ``max_new_tokens`` or None; and the names of unsupported settings.

    Raises:
        ValueError: a setting is not a number, or out of its range.
    """
    config = getattr(model, "generation_config", None)

    def number(name: str, default: Any, *kinds: type[int] | type[float]) -> Any:
        value = getattr(config, name, None)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise ValueError(f"generation_config.json has {name} {value!r}; expected a number")
        return value

    do_sample = getattr(config, "do_sample", None)
    if not isinstance(do_sample, bool | None):
        raise ValueError(f"generation_config.json has do_sample {do_sample!r}; expected true or false")
    ignored = [
        name
        for name, neutral in _OTHER_SETTINGS.items()
        if (value := getattr(config, name, None)) is not None and value not in neutral
    ]
    try:
        drawn = (number("temperature", 1.0, int, float), number("top_k", 50, int), number("top_p", None, int, float))
        penalty, min_p = number("repetition_penalty", 1.0, int, float), number("min_p", 0.0, int, float)
        most = number("max_new_tokens", None, int)
        if most is not None and most < 1:
            raise ValueError(f"max_new_tokens is {most}; expected 1 or more")
        temperature, top_k, top_p, min_p = (*drawn, min_p) if do_sample else (0.0, None, None, 0.0)
        return Sampling(temperature, top_k or None, top_p, penalty, min_p), most, ignored  # top_k 0: all
    except ValueError as error:
        raise ValueError(f"the generation_config.json of the model: {error}") from error


@dataclass(frozen=True)
class Answer:
    """Result of :meth:`Chat.answer`."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int  # tokens of the prompt that the caches held
    stopped: str  # "stop", "until" (a stop string), "max_new_tokens", "max_length" or "interrupted"
    forgotten: int  # number of oldest turns dropped because the context was full
    seconds: float  # time until the last token


@dataclass
class Chat:
    """A conversation that reuses its KV cache, so that each turn computes only its new tokens."""

    step: Any  # a Decoder, compiled or not, or another step of generate()
    model: torch.nn.Module  # of the decoder
    tokenizer: Any  # a fast tokenizer
    template: str
    max_length: int  # of the decoder
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 1024
    seed: int = 0  # answer i uses seed + i
    stop: Iterable[int] = ()
    stop_strings: Iterable[str] = ()  # strings that end an answer and are not part of it
    prefix_cache: PrefixCache | None = None  # on disk
    turns: list[tuple[str, str]] = field(default_factory=list)  # messages and answers that the model sees
    answers: int = 0  # number of answers
    _cached: list[int] = field(default_factory=list)  # the tokens in the caches

    @property
    def messages(self) -> list[Message]:
        """The conversation in the format of chat templates."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        pairs = [
            {"role": role, "content": content}
            for turn in self.turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        return system + pairs

    def reset(self, system: str | None) -> None:
        """Starts a new conversation with this system prompt.

        Raises:
            ValueError: the template refuses the system prompt; the conversation is unchanged.
        """
        before = self.system
        self.system = system
        try:
            self.check()
        except ValueError:
            self.system = before
            raise
        self.turns = []

    def check(self) -> None:
        """Raises ValueError if the template cannot begin a conversation, or its system prompt fills the context."""
        count = self._system_tokens()
        if count >= self.max_length:
            raise ValueError(
                f"the system prompt takes {count} tokens with its template; expected fewer than the {self.max_length} "
                "of the context"
            )

    def _system_tokens(self) -> int:
        """The number of tokens of the system prompt with a short message."""
        system = self.messages[: self.system is not None]
        return len(render(self.tokenizer, [*system, {"role": "user", "content": "?"}], self.template))

    def _tokens(self, forgotten: int, text: str) -> list[int]:
        """The tokens of the conversation with a new message, without the oldest turns."""
        system, pairs = self.messages[: self.system is not None], self.messages[self.system is not None :]
        messages = [*system, *pairs[2 * forgotten :], {"role": "user", "content": text}]
        return render(self.tokenizer, messages, self.template)

    def _prompt(self, text: str) -> tuple[list[int], int]:
        """The tokens before the answer, and the number of oldest turns that are dropped to fit."""
        ids, forgotten = self._tokens(0, text), 0
        if len(ids) + min(self.max_new_tokens, self.max_length // 4) > self.max_length:
            # Free half of the context at once, because all remaining tokens move and must be computed again.
            while forgotten < len(self.turns) and len(ids) > self.max_length // 2:
                forgotten += 1
                ids = self._tokens(forgotten, text)
        if len(ids) >= self.max_length:
            raise ValueError(
                f"the message takes {len(ids)} tokens with its template; expected fewer than the {self.max_length} of "
                "the context: shorten it, or begin with a larger --max-length"
            )
        check_tokens(self.model, ids, self.tokenizer.name_or_path)
        return ids, forgotten

    def answer(self, text: str, on_text: Callable[[str], None] | None = None) -> Answer:
        """Answers a message.

        A KeyboardInterrupt ends the answer. What was generated so far stays in the conversation; if nothing was, the message
        is removed.

        Args:
            text: the user's message.
            on_text: called with each new piece of the answer.

        Raises:
            ValueError: the message does not fit into the context, or the template refuses it. The conversation is
                unchanged.
        """
        ids, forgotten = self._prompt(text)
        same = min(len(ids) - 1, common(ids, self._cached))
        same = getattr(self.step, "kept", int)(same)  # a Fallback may have to start over
        if self.prefix_cache is not None:
            same = self.prefix_cache.read(ids, self.step.caches(), same)
        self._cached = ids[:same]  # later ones are overwritten
        output = TextUntil(self.tokenizer, ids, self.stop_strings, on_text)
        tokens: list[int] = []

        stopped, seconds = "interrupted", 0.0
        try:
            generation = generate(
                self.step,
                ids,
                self.max_new_tokens,
                max_length=self.max_length,
                seed=self.seed + self.answers,
                stop=self.stop,
                until=output,
                cached=same,
                on_token=tokens.append,
                **vars(self.sampling),
            )
            stopped, seconds = generation.stopped, generation.prefill_seconds + generation.decode_seconds
            self._cached = ids + tokens[: generation.decode_steps]
        except KeyboardInterrupt:
            if tokens:  # the last token may not be in the caches
                self._cached = ids + tokens[:-1]
        if self.prefix_cache is not None:
            self.prefix_cache.write(self._cached, self.step.caches())
        if tokens or stopped != "interrupted":
            self.turns = [*self.turns[forgotten:], (text, output.finish())]
            self.answers += 1
        else:
            forgotten = 0
        return Answer(output.text, tokens, len(ids), same, stopped, forgotten, seconds)
