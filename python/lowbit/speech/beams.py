"""Beam search: several texts of a window are continued side by side, as rows of one step of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from ..operators.cache_layout import copy_layer

Queries = list[np.ndarray]  # of a row, in each layer with alignment heads: float32 [heads, width]


class Place(NamedTuple):
    """The caches of a beam."""

    layers: Sequence[Sequence[Any]]  # keys and values of the text in each layer
    described: Any  # as a plan takes them; None: without a plan


class Text(NamedTuple):
    """A text of a call: the range of its rows, the number of earlier tokens, and its caches."""

    begin: int
    end: int
    start: int
    place: Place


class BeamDecoder:
    """A decoder of one text that can continue it in several ways, its beams. They have caches of their own."""

    queries: list[Queries]  # after the last call: of the text's last token, or of that of each beam
    _places: list[Place]
    _beams: list[int]  # the place of each beam

    def compute(self, tokens: list[int], positions: list[int], keep: list[int], texts: list[Text]) -> np.ndarray:
        """Logits [kept rows, vocabulary], float32; sets ``queries`` to those of the kept rows.

        Args:
            tokens, positions: the token and position of each row; the rows of a text follow each other.
            keep: the rows with logits.
        """
        raise NotImplementedError

    def new_place(self) -> Place:
        """Caches for another beam; all beams share the keys and values of the audio."""
        raise NotImplementedError

    def text(self, rows: int, start: int) -> Text:
        """The text with its next rows, of which it has one beam from now on."""
        self._beams = [0]
        return Text(0, rows, start, self._places[0])

    def feed(self, tokens: list[int], start: int) -> np.ndarray:
        """Logits [vocabulary], float32, after tokens that follow the first ``start`` ones of the text."""
        rows = len(tokens)
        logits: np.ndarray = self.compute(tokens, list(range(start, start + rows)), [rows - 1], [self.text(rows, start)])[0]
        return logits

    def feed_beams(self, tokens: list[int], sources: list[int], start: int) -> np.ndarray:
        """Logits [beams, vocabulary], float32, after one more token of each beam.

        Args:
            sources: the beam of the last call that each one continues; :meth:`feed` leaves one beam.
            start: the number of earlier tokens, the same for all.
        """
        continued = [self._beams[source] for source in sources]
        spare = (number for number in count() if number not in continued)
        self._beams = []
        for place in continued:
            # The first beam that continues a text keeps its caches; others copy them to caches that no beam continues.
            at = next(spare) if place in self._beams else place
            if at == len(self._places):
                self._places.append(self.new_place())
            if at != place:
                for read, write in zip(self._places[place].layers, self._places[at].layers, strict=True):
                    copy_layer(read, write, start)
            self._beams.append(at)
        rows = list(range(len(tokens)))
        texts = [Text(row, row + 1, start, self._places[at]) for row, at in enumerate(self._beams)]
        return self.compute(tokens, [start] * len(rows), rows, texts)


@dataclass(frozen=True)
class Hypothesis:
    """A text that a search has found, or that it continues."""

    tokens: list[int]  # with those that were known before the search
    logprobs: list[float]  # of the tokens found, and of the end
    queries: list[Queries]  # after each token that the model has read

    @property
    def logprob(self) -> float:
        return sum(self.logprobs)

    def followed_by(self, token: int | None, logprob: float) -> Hypothesis:
        """The text with another token; None: with its end."""
        return Hypothesis(self.tokens if token is None else [*self.tokens, token], [*self.logprobs, logprob], self.queries)


def search(
    beams: int,
    logits: np.ndarray,
    known: list[int],
    end: int,
    limit: Callable[[np.ndarray, list[int]], None],
    advance: Callable[[list[int], list[int]], tuple[np.ndarray, list[Queries]] | None],
) -> Hypothesis:
    """The likeliest of several texts, by the mean log-probability of their tokens and end.

    Each step keeps the ``beams`` likeliest texts, by the sum of log-probabilities. Texts that end leave the search; it is over
    when ``beams`` texts have ended (Whisper's search with patience 1), or when no further token fits.

    Args:
        logits: [vocabulary], after the known tokens.
        known: the first tokens of the text.
        end: the token that ends a text.
        limit: sets logits of tokens that may not follow a text to -infinity.
        advance: the logits [beams, vocabulary] and queries after a token of each beam, with the number of the beam that it
            continues; None if no further token fits.
    """
    running, ended, rows = [Hypothesis(known, [], [])], list[Hypothesis](), logits[None]
    while True:
        found = []
        for number, (text, row) in enumerate(zip(running, rows, strict=True)):
            limit(row, text.tokens)
            total = text.logprob
            found += [(-(total + value), number, token, value) for token, value in _likeliest(row, beams + 1)]
        before, running, sources = running, [], []
        for _, number, token, value in sorted(found):
            if token == end:
                ended.append(before[number].followed_by(None, value))
            else:
                running.append(before[number].followed_by(token, value))
                sources.append(number)
            if len(running) == beams:
                break
        if not running and not ended:
            raise ValueError("no token may follow the text; expected logits that are numbers")
        if len(ended) >= beams or not running:
            break
        step = advance([text.tokens[-1] for text in running], sources)
        if step is None:
            ended += sorted(running, key=lambda text: -text.logprob)
            break
        rows, queries = step
        running = [
            Hypothesis(text.tokens, text.logprobs, [*text.queries, each])
            for text, each in zip(running, queries, strict=True)
        ]  # fmt: skip
    return max(ended[:beams], key=lambda text: text.logprob / len(text.logprobs))


def _likeliest(logits: np.ndarray, most: int) -> list[tuple[int, float]]:
    """The likeliest tokens with their log-probabilities, without those of probability 0; more of them if some are alike."""
    least = np.partition(logits, -most)[-most] if most < len(logits) else -np.inf
    tokens = np.flatnonzero((logits >= least) & (logits > -np.inf))
    return list(zip(tokens.tolist(), (logits[tokens] - log_sum(logits)).tolist(), strict=True))


def log_sum(logits: np.ndarray) -> Any:
    """The logarithm of the sum of exp(logits)."""
    most = logits.max()
    return most + np.log(np.exp(logits - most).sum())
