"""What a text has already changes what comes next: penalties, and draws by them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
from torch import Tensor

from .sampling import Sampling, check_seed, draw

_LARGEST = 88.0  # exp of it is in float32


def penalize(logits: Tensor, tokens: set[int], penalty: float) -> Tensor:
    """Makes tokens that have come before less likely (Keskar et al. 2019, CTRL; as transformers does it).

    Args:
        logits: [vocabulary].
        tokens: that have come, prompt included, each once.
        penalty: divides their positive logits, multiplies the negative ones; 1 changes nothing.
    """
    if penalty == 1:
        return logits
    logits = logits.float().clone()
    came = torch.tensor(list(tokens))
    logits[came] = torch.where(logits[came] < 0, logits[came] * penalty, logits[came] / penalty)
    return logits


class Repetitions:
    """Knows at every token of a text how long the text's end stands there, too."""

    def __init__(self, tokens: Iterable[int], breakers: Iterable[int]):
        """
        Args:
            tokens: of the text until now.
            breakers: tokens that no repetition goes beyond.
        """
        self._breakers = frozenset(breakers)
        self._text = numpy.zeros(256, dtype=numpy.int64)
        self._count = 0
        self._same = numpy.zeros(0, dtype=numpy.int64)  # by tokens but the last: so many up to there are the text's end
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """The text has one more token."""
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
        """The tokens that would go on with a repetition of `least` tokens or more, and how many the longest one has."""
        (at,) = numpy.nonzero(self._same >= least)
        at = at[numpy.argsort(self._same[at], kind="stable")]  # the longest of a token comes last, and stays
        following = zip(self._text[at + 1].tolist(), self._same[at].tolist())
        return {token: length for token, length in following if token not in self._breakers}


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was to the model, before temperature, bias and penalties."""

    token: int
    logprob: float  # natural logarithm of its probability
    top: list[tuple[int, float]]  # the likeliest tokens and theirs, the likeliest first


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """The log-probability of a token, and those of the `count` likeliest, by logits [vocabulary]."""
    values = logits.float().log_softmax(0)
    top = values.topk(min(count, values.numel()))
    return TokenLogprobs(token, float(values[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))


class Constraint(Protocol):
    """What a text must be: a grammar, a schema."""

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [vocabulary] of which those of tokens that may not come next are minus infinity."""

    def append(self, token: int) -> None:
        """The text has one more token."""


class Drawer:
    """Draws the tokens of one text, whatever is drawn for others at the same time."""

    def __init__(self, sampling: Sampling, prompt: Iterable[int], seed: int, constraint: Constraint | None = None):
        """
        Args:
            constraint: lets only some tokens come, whatever else is said.

        Raises:
            ValueError: a seed that torch does not take.
        """
        check_seed(seed)
        prompt = list(prompt)
        self._sampling, self._generator = sampling, torch.Generator().manual_seed(seed)
        self._constraint = constraint
        self._came = set(prompt)
        self._counts: Counter[int] = Counter()
        self._repetitions = Repetitions(prompt, sampling.dry_breakers) if sampling.dry_multiplier else None
        bias = sampling.logit_bias
        self._bias = (torch.tensor(list(bias)), torch.tensor(list(bias.values()))) if bias else None

    def draw(self, logits: Tensor) -> int:
        """The next token by the model's logits [vocabulary]; :meth:`append` says that it has come."""
        by, changed = self._sampling, self._changed(logits)
        if self._constraint is not None:
            changed = self._constraint.mask(changed)
        return draw(changed, by.temperature, by.top_k, by.top_p, self._generator, by.min_p)

    def append(self, token: int) -> None:
        """The text has one more token."""
        self._came.add(token)
        self._counts[token] += 1
        if self._constraint is not None:
            self._constraint.append(token)
        if self._repetitions is not None:
            self._repetitions.append(token)

    def _changed(self, logits: Tensor) -> Tensor:
        """Logits with their bias and penalties; those that are given stay as they are."""
        by = self._sampling
        counted = self._counts and (by.presence_penalty or by.frequency_penalty)
        repeated = {} if self._repetitions is None else self._repetitions.lengths(by.dry_allowed_length)
        if not (self._bias or counted or repeated):
            return penalize(logits, self._came, by.repetition_penalty)
        logits = logits.float().clone()
        if self._bias:
            logits.index_add_(0, *self._bias)
        logits = penalize(logits, self._came, by.repetition_penalty)
        if counted:
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            logits[list(self._counts)] -= by.presence_penalty + by.frequency_penalty * counts
        if repeated:
            most = math.inf if by.dry_base == 1 else _LARGEST / math.log(by.dry_base)
            lengths = [by.dry_base ** min(length - by.dry_allowed_length, most) for length in repeated.values()]
            # Doubles, and no more than a float32 holds: a long repetition must not make a logit infinite.
            logits[list(repeated)] -= torch.tensor([min(by.dry_multiplier * each, 1e30) for each in lengths])
        return logits
