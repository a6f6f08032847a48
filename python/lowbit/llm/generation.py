"""Generates text with a decoder, token by token, optionally with speculative decoding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from ..machine.numbers import check_whole
from ..machine.one_text import whole_text
from .guessing import MOST, Guesser, check_draft, make_guesser
from .penalties import Constraint, Drawer, TokenLogprobs, token_logprobs
from .sampling import Sampling, SamplingArguments, prompt_ids, token_ids
from .steps import ListStep, gives_rows, inference, rows_after

if TYPE_CHECKING:
    from torch import Tensor


def rate(count: int, seconds: float) -> float:
    """``count`` per second; NaN for no time."""
    return count / seconds if seconds > 0 else math.nan


@dataclass
class Generation:
    """Result of :func:`generate`."""

    tokens: list[int] = field(default_factory=list)  # new tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that the caches held
    prefill_seconds: float = 0.0  # until the first new token
    decode_seconds: float = 0.0  # for all later steps
    decode_steps: int = 0  # one for each new token after the first, and for the stop token
    decode_calls: int = 0  # calls of the model in these steps; fewer with accepted draft tokens
    guessed: int = 0  # draft tokens of speculative decoding
    accepted: int = 0  # draft tokens that became part of the text
    stopped: str = "max_new_tokens"  # why it ended: "max_new_tokens", "max_length", "stop" or "until"
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the new tokens, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt except its first token, if asked for

    @property
    def prefill_rate(self) -> float:
        """Computed prompt tokens per second."""
        return rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """Decoding steps per second; NaN without steps."""
        return rate(self.decode_steps, self.decode_seconds)


@dataclass(eq=False)
class Text:
    """A text to decode, with the arguments of :func:`generate`."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: frozenset[int] = frozenset()
    until: Callable[[int], bool] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # as ``logprobs``, for the prompt's tokens except the first
    constraint: Constraint | None = None
    on_token: Callable[[int], None] | None = None
    on_end: Callable[[Generation], None] | None = None
    on_error: Callable[[Exception], None] | None = None  # called with an error of this text; None: raised
    result: Generation | None = None  # None until the text begins

    @property
    def plain(self) -> list[int]:
        """The prompt with tokens of the vocabulary only: a prompt with images has other numbers for their tokens."""
        plain: list[int] = getattr(self.prompt, "plain", self.prompt)
        return plain


def check_lengths(name: str, prompt: list[int], max_new_tokens: int, max_length: int) -> int:
    """``max_new_tokens`` as a Python int.

    Raises:
        ValueError: an empty prompt, a prompt that leaves no room for a token, or max_new_tokens below 1.
    """
    if not prompt:
        raise ValueError(f"{name} has no tokens; expected at least one")
    if len(prompt) >= max_length:
        raise ValueError(f"{name} has {len(prompt)} tokens; expected fewer than the decoder's max_length of {max_length}")
    return check_whole("max_new_tokens", max_new_tokens, 1)


# States are useless after a rejected draft token, so accepted tokens are computed again together with the next ones, up to
# this number. Then a call without draft tokens updates the states.
AGAIN = 8


def generate(
    step: Callable[[Tensor, Tensor], Tensor] | ListStep,
    prompt: Iterable[int] | Mapping[str, Any] | Tensor,
    max_new_tokens: int,
    *,
    max_length: int | None = None,
    seed: int = 0,
    stop: Iterable[int] = (),
    until: Callable[[int], bool] | None = None,
    logprobs: int | None = None,
    cached: int = 0,
    guesses: int = 0,
    draft: Any = None,
    on_token: Callable[[int], None] | None = None,
    **sampling: Unpack[SamplingArguments],
) -> Generation:
    """Continues a prompt, token by token.

    Args:
        step: a :class:`Decoder`, compiled or not, a loaded file of one, or a :class:`ListStep`.
        prompt: at least one token id, as a tokenizer or ``apply_chat_template`` returns them: a list, a tensor, or a dict with
            ``input_ids``, also as a batch of one text.
        max_new_tokens: largest number of new tokens; fewer at max_length or a stop token.
        max_length: largest number of tokens of the text, prompt included; None: the decoder's.
        seed: the seed of the random generator.
        stop: tokens that end the text and are not part of the result.
        until: called with every new token; True ends the text after it. :class:`TextUntil` ends a text at a string.
        logprobs: return, for each new token, its log-probability and those of this many most likely tokens (may be 0); None:
            no log-probabilities.
        cached: number of tokens at the beginning of the prompt that the step's caches hold.
        guesses: speculative decoding: largest number of draft tokens, which are computed in the same call as the last token.
            A draft token is accepted if the model draws the same token; tokens after a different one are dropped. If all
            linear layers are packed, the text is the same as without, because their results do not depend on the number of
            rows. Requires a :class:`Decoder` that is not compiled. 0: plain decoding.
        draft: a decoder of a smaller model with the same vocabulary, compiled or not, which drafts its most likely tokens;
            its caches are overwritten. Or a :class:`Mtp` of the step. None: draft tokens are looked up in the text.
        on_token: called with every new token as soon as it is known.
        sampling: fields of :class:`Sampling`: temperature, top_k, top_p, min_p, the penalties and logit_bias. Without any,
            decoding is greedy.

    Raises:
        ValueError: an empty prompt, one that leaves no room for a new token, or has a token that is not in the vocabulary;
            a number out of its range; logits that are not finite; guesses with a step that gives no logits for them; or a draft
            with fewer positions than max_length, or without guesses.
        IndexError: ``cached`` is more than the text in the step's caches has.
        RuntimeError: the step or the draft is computing another text, in another thread or a function that this one calls.
    """
    prompt, stop = prompt_ids("the prompt", prompt), token_ids("stop", stop)
    max_length = _checked_length(step, max_length)
    max_new_tokens = check_lengths("the prompt", prompt, max_new_tokens, max_length)
    most = len(prompt) - 1
    cached = check_whole("cached", cached, 0, most, f"0 to {most}, fewer than the prompt has tokens")
    guesses = _checked_guesses(step, guesses, draft, max_length)
    settings = Sampling(**sampling)
    if (vocabulary := getattr(step, "vocabulary", None)) is not None:
        settings.check_vocabulary(vocabulary)
    text = Text(prompt, max_new_tokens, settings, seed, frozenset(stop), until, logprobs, on_token=on_token)
    writer = TextWriter(text, max_length, cached)
    with inference(), whole_text(step), whole_text(draft):
        return _generate(step, writer, cached, min(guesses, MOST), make_guesser(step, draft) if guesses else None)


def _generate(step: Any, writer: TextWriter, cached: int, guesses: int, guesser: Guesser | None) -> Generation:
    recurrent = bool(getattr(step, "recurrent", False))
    tokens = writer.tokens[cached:]  # tokens of the text that are not in the step's caches yet
    start = cached  # number of tokens in the caches
    guess: list[int] = []
    while True:
        rows = rows_after(step, tokens, start, guess)
        writer.result.decode_calls += bool(writer.result.tokens)
        new = writer.accept(rows, guess)
        if writer.ended:
            return writer.result
        if recurrent and len(new) <= len(guess):  # the states include rejected draft tokens
            tokens = tokens + new
        else:
            start += len(tokens) + len(new) - 1
            tokens = new[-1:]
        again = recurrent and len(tokens) > AGAIN
        guess = [] if guesser is None or again else guesser.guess(writer.tokens, min(guesses, writer.room - 1))


def _checked_length(step: Any, max_length: int | None) -> int:
    """``max_length``, or by default the step's; raises ValueError for neither, and for more than the step's."""
    limit = getattr(step, "max_length", max_length)
    if limit is None:
        raise ValueError(f"max_length is None; expected a number of tokens, because a {type(step).__name__} has no limit")
    most = check_whole("max_length", limit, 1)
    wanted = most if max_length is None else max_length
    return check_whole("max_length", wanted, 1, most, f"at most {most}, that of the decoder")


def _checked_guesses(step: Any, guesses: int, draft: Any, max_length: int) -> int:
    guesses = check_whole("guesses", guesses, 0)
    if guesses and not gives_rows(step):
        raise ValueError(f"a {type(step).__name__} gives no logits for guesses; expected a Decoder, not compiled")
    if draft is not None and guesses == 0:
        raise ValueError("guesses is 0; expected 1 or more with a draft")
    check_draft(step, draft, max_length)
    return guesses


class TextWriter:
    """Appends tokens to a text, each drawn from a row of logits."""

    def __init__(self, text: Text, max_length: int, cached: int):
        """
        Args:
            max_length: largest number of tokens of the text, prompt included.
            cached: number of tokens of the prompt that the caches hold.
        """
        if text.logprobs is not None:
            check_whole("logprobs", text.logprobs, 0)
        self.result = text.result = Generation(prompt_tokens=len(text.prompt), cached_tokens=cached)
        self.tokens = list(text.prompt)  # prompt and new tokens
        self.room = min(text.max_new_tokens, max_length - len(text.prompt))  # largest number of further tokens
        if len(text.prompt) + text.max_new_tokens > max_length:
            self.result.stopped = "max_length"
        self.ended = False
        self._text, self._drawer = text, Drawer(text.sampling, text.plain, text.seed, text.constraint)
        self._began, self._first = time.perf_counter(), math.nan

    def accept(self, rows: Iterable[Any], guess: Sequence[int]) -> list[int]:
        """Draws tokens while they are the draft tokens, and one more, from the logits after the last token and after each draft
        token; returns them. It stops where the text ends."""
        new: list[int] = []
        self.result.guessed += len(guess)
        for row, guessed in zip(rows, [*guess, None], strict=True):
            token = self.take(row)
            new += [] if token is None else [token]
            if self.ended or token != guessed:
                break
            self.result.accepted += 1
        return new

    def take(self, logits: Any) -> int | None:
        """Draws the next token from logits [vocabulary], of torch or numpy; None if it is a stop token."""
        token = self._drawer.draw(logits)
        result, now = self.result, time.perf_counter()
        if math.isnan(self._first):
            result.prefill_seconds, self._first = now - self._began, now
        else:
            result.decode_seconds = now - self._first
            result.decode_steps += 1
        if token in self._text.stop:
            result.stopped, self.ended = "stop", True
            return None
        result.tokens.append(token)
        self.tokens.append(token)
        if self._text.logprobs is not None:
            result.logprobs.append(token_logprobs(logits, token, self._text.logprobs))
        self._drawer.append(token)
        self.room -= 1
        self.ended = not self.room
        if self._text.on_token is not None:
            self._text.on_token(token)
        if self._text.until is not None and self._text.until(token):
            result.stopped, self.ended = "until", True
        return token
