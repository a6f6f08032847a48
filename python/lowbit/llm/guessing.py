"""Guesses how a text goes on: from the text itself, or by a smaller model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .sampling import most_likely


class Lookup:
    """Finds the last place where a text had the tokens that it ends with now, and guesses that it goes on as it did there.

    Texts that quote, summarize or change what is in the prompt repeat it, and so does code. It is the speculation of prompt
    lookup decoding (Saxena, 2023) with the latest match of the longest ending, of 4 tokens down to 2.
    """

    LENGTHS = (4, 3, 2)  # of endings; one token alone comes too often to say anything

    def __init__(self, tokens: Iterable[int]):
        self._text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # some tokens -> where their last occurrence ends
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """The text has one more token."""
        # What the text ended with until now has something behind it from now on.
        end = len(self._text)
        for length in self.LENGTHS:
            if length <= end:
                self._behind[tuple(self._text[end - length :])] = end
        self._text.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none where the text has not ended like this before."""
        for length in self.LENGTHS:
            at = self._behind.get(tuple(self._text[-length:])) if length <= len(self._text) else None
            if at is not None:
                # A match that overlaps the end goes on in the guess itself: what repeats is taken to repeat again.
                found = self._text[at : at + most]
                period = len(self._text) - at
                while len(found) < most:
                    found.append(found[len(found) - period])
                return found
        return []


class Draft:
    """Guesses what a smaller model finds likeliest.

    It is the draft of speculative decoding (Leviathan et al. 2023, Chen et al. 2023), judged otherwise: a guess is right when
    the model itself draws that token. So a drawn text stays the one of plain decoding, for which fewer guesses are right than
    if only its distribution stayed.
    """

    def __init__(self, step: Any, tokens: Iterable[int], vocabulary: int):
        """
        Args:
            step: the small model's decoder; its caches are written anew.
            tokens: the prompt.
            vocabulary: of the model that judges: tokens from there on are never guessed.
        """
        self._step, self._vocabulary = step, vocabulary
        self._text = list(tokens)
        self._cached: list[int] = []  # the tokens whose keys and values the step has
        self._same = 0  # of these, so many are known to be those of the text

    def append(self, token: int) -> None:
        """The text has one more token."""
        self._text.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none where the text has a token that the small model has not."""
        found: list[int] = []
        text, cached = self._text, self._cached
        while self._same < min(len(cached), len(text)) and cached[self._same] == text[self._same]:
            self._same += 1
        start = self._same = min(self._same, len(text) - 1)  # logits come behind a token that is computed
        tokens = text[start:]
        if max(tokens) >= self._step.vocabulary:
            return found
        while len(found) < most:
            logits = self._step(torch.tensor([tokens]), torch.tensor([start]))[0]
            cached[start:] = tokens
            start += len(tokens)
            tokens = [most_likely(logits[: self._vocabulary])]
            found += tokens
        return found
