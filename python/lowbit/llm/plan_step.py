"""Decoding by the plan in a file, without torch."""

from __future__ import annotations

import os

import numpy

from .. import _C
from ..machine.one_text import OneText


class PlanStep:
    """A step of :func:`lowbit.llm.generate` by a plan, with caches for one text."""

    def __init__(self, model: _C.PlanModel, max_length: int, cache: str):
        """
        Args:
            max_length: the longest text in tokens.
            cache: the type of the KV cache, as for :class:`Decoder`.

        Raises:
            ValueError: the model's texts are shorter, or an unknown type.
        """
        self.model, self.max_length, self.vocabulary = model, max_length, model.vocabulary
        self.one_text = OneText()
        keys, _, values = cache.partition(",")
        self._text = model.begin(max_length, keys, values or keys)
        self.recurrent = self._text.recurrent  # whether the text cannot be cut back

    def kept(self, count: int) -> int:
        """The number of the first ``count`` tokens of the text after which a call can continue."""
        return count if not self.recurrent or count == self._text.position else 0

    @property
    def position(self) -> int:
        """The number of tokens of the text."""
        return self._text.position

    def save(self, file: str) -> int:
        """Writes the text and its caches to a file; returns the number of its tokens."""
        self._text.save(os.fsencode(file))
        return self._text.position

    def load(self, file: str) -> int:
        """Replaces the text by that of a file; returns the number of its tokens."""
        self._text.load(os.fsencode(file))
        return self._text.position

    def feed(self, tokens: list[int], start: int) -> numpy.ndarray:
        """Logits [vocabulary], float32, after tokens that follow the first ``start`` ones of the text."""
        with self.one_text:
            self._text.cut(start)
            logits = numpy.empty(self.vocabulary, dtype=numpy.float32)
            self.model.feed(self._text, tokens, logits.__array_interface__["data"][0])
            return logits
