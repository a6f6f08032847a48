"""Penalties for repetition, log-probabilities, constraints, and drawing tokens with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy

from .sampling import Sampling, check_seed, draw, floats, likeliest, random_generator

_LARGEST = 88.0  # exp(88) fits into float32


def penalize(logits: Any, tokens: set[int], penalty: float) -> Any:
    """Logits [vocabulary] with the repetition penalty (Keskar et al. 2019, CTRL), as in transformers.

    Args:
        logits: [vocabulary], of torch or numpy.
        tokens: the tokens of the prompt and the text.
        penalty: divides their positive logits and multiplies negative ones; 1 has no effect.

    Returns:
        The same logits, or float32 of numpy.
    """
    if penalty == 1:
        return logits
    values, ids = floats(logits).copy(), list(tokens)
    with numpy.errstate(all="ignore"):  # a penalty may be too large or too small for float32
        values[ids] = numpy.where(values[ids] < 0, values[ids] * penalty, values[ids] / penalty)
    return values


class Repetitions:
    """For every position of a text, the length of the longest suffix of the text that also ends there."""

    def __init__(self, tokens: Iterable[int], breakers: Iterable[int]):
        """
        Args:
            tokens: the tokens of the text so far.
            breakers: tokens that end a repetition.
        """
        self._breakers = frozenset(breakers)
        known = list(tokens)
        self._text = numpy.array(known + [0] * (256 + len(known)), dtype=numpy.int64)
        self._count = len(known)
        self._same = _ends(known, self._breakers)  # by position, without the last

    def append(self, token: int) -> None:
        """Adds a token to the text."""
        count = self._count
        if count == len(self._text):
            self._text = numpy.concatenate([self._text, numpy.zeros_like(self._text)])
        same = numpy.zeros(count, dtype=numpy.int64)
        if count and token not in self._breakers:
            same[:1] = 1
            same[1:] += self._same + 1
            same[self._text[:count] != token] = 0
        self._text[count] = token
        self._count, self._same = count + 1, same

    def lengths(self, least: int) -> dict[int, int]:
        """Tokens that would continue a repetition of at least `least` tokens -> length of the longest such repetition."""
        (at,) = numpy.nonzero(self._same >= least)
        at = at[numpy.argsort(self._same[at], kind="stable")]  # the longest of each token comes last and wins
        following = zip(self._text[at + 1].tolist(), self._same[at].tolist())
        return {token: length for token, length in following if token not in self._breakers}


def _ends(text: list[int], breakers: frozenset[int]) -> numpy.ndarray:
    """For every position of a text except the last, the length of the longest suffix of the text that also ends there.

    Uses the Z algorithm on the reversed text, because a comparison per position takes quadratic time.
    """
    text = text[::-1]
    most = next((place for place, token in enumerate(text) if token in breakers), len(text))
    same = [0] * len(text)
    left = right = 0
    for place in range(1, len(text)):
        length = min(right - place, same[place - left]) if place < right else 0
        while place + length < len(text) and text[length] == text[place + length]:
            length += 1
        same[place] = length
        if place + length > right:
            left, right = place, place + length
    return numpy.minimum(numpy.array(same[:0:-1], dtype=numpy.int64), most)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token according to the model, before temperature, bias and penalties."""

    token: int
    logprob: float  # natural logarithm of its probability
    top: list[tuple[int, float]]  # most likely tokens and their log-probabilities, in descending order


def token_logprobs(logits: Any, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of a token and of the ``count`` most likely tokens, from logits [vocabulary] of torch or numpy."""
    values = floats(logits).astype(numpy.float64)
    with numpy.errstate(invalid="ignore"):  # damaged logits give NaN
        values -= values.max()
    total = numpy.log(numpy.exp(values).sum())
    top = likeliest(values, count) if 0 < count < len(values) else numpy.arange(len(values))
    top = top[numpy.argsort(-values[top], kind="stable")][:count]
    said = (values[[token, *top]] - total).astype(numpy.float32).tolist()
    return TokenLogprobs(token, said[0], list(zip(top.tolist(), said[1:], strict=True)))


class Constraint(Protocol):
    """A constraint on a text, such as a grammar or a schema."""

    def mask(self, logits: numpy.ndarray) -> numpy.ndarray:
        """Logits [vocabulary], float32, with minus infinity for tokens that are not allowed next."""

    def append(self, token: int) -> None:
        """Adds a token to the text."""

    def check(self, text: str) -> None:
        """Raises an exception if a text has ended before it was complete."""


class Drawer:
    """Draws the tokens of one text, independent of other texts."""

    def __init__(self, sampling: Sampling, prompt: Iterable[int], seed: int, constraint: Constraint | None = None):
        """
        Args:
            constraint: restricts the allowed tokens; applied last.

        Raises:
            ValueError: a seed of more than 64 bits.
        """
        check_seed(seed)
        prompt = list(prompt)
        self._sampling = sampling
        # Greedy decoding needs no random numbers, and numpy.random takes longer to import than all else here.
        self._generator: Any = random_generator(seed) if sampling.temperature else None
        self._constraint = constraint
        self._tokens = set(prompt)
        self._counts: Counter[int] = Counter()
        self._repetitions = Repetitions(prompt, sampling.dry_breakers) if sampling.dry_multiplier else None
        bias = sampling.logit_bias
        self._bias = (list(bias), numpy.array(list(bias.values()), dtype=numpy.float32)) if bias else None

    def draw(self, logits: Any) -> int:
        """Draws the next token from the model's logits [vocabulary], of torch or numpy; call :meth:`append` with it."""
        sampling, logits = self._sampling, self._penalized(logits)
        if self._constraint is not None:
            logits = self._constraint.mask(floats(logits))
        return draw(logits, sampling.temperature, sampling.top_k, sampling.top_p, self._generator, sampling.min_p)

    def append(self, token: int) -> None:
        """Adds a token to the text."""
        self._tokens.add(token)
        self._counts[token] += 1
        if self._constraint is not None:
            self._constraint.append(token)
        if self._repetitions is not None:
            self._repetitions.append(token)

    def _penalized(self, logits: Any) -> Any:
        """Logits with bias and penalties, in a new array if they change."""
        sampling = self._sampling
        counted = self._counts and (sampling.presence_penalty or sampling.frequency_penalty)
        repeated = {} if self._repetitions is None else self._repetitions.lengths(sampling.dry_allowed_length)
        if not (self._bias or counted or repeated):
            return penalize(logits, self._tokens, sampling.repetition_penalty)
        logits = floats(logits).copy()
        if self._bias:
            tokens, biases = self._bias
            logits[tokens] += biases
        logits = penalize(logits, self._tokens, sampling.repetition_penalty)
        if counted:
            counts = numpy.array(list(self._counts.values()), dtype=numpy.float32)
            logits[list(self._counts)] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if repeated:
            most = math.inf if sampling.dry_base == 1 else _LARGEST / math.log(sampling.dry_base)
            factors = [sampling.dry_base ** min(length - sampling.dry_allowed_length, most) for length in repeated.values()]
            # Clamped to float32's range, so that a long repetition does not make a logit infinite.
            least = [min(sampling.dry_multiplier * factor, 1e30) for factor in factors]
            logits[list(repeated)] -= numpy.array(least, dtype=numpy.float32)
        return logits
