"""Guesses for speculative decoding: from the text itself, by a draft model, or by the model's own head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from .mtp import Mtp, MtpDraft
from .sampling import most_likely


class Lookup:
    """Guesses that a text continues as after the last earlier occurrence of its final tokens.

    This is prompt lookup decoding (Saxena, 2023) with the latest match of the longest ending, of 4 tokens down to 2. It helps
    with code, and with texts that quote, summarize or change the prompt.
    """

    LENGTHS = (4, 3, 2)  # of endings; single tokens occur too often

    def __init__(self, tokens: Iterable[int]):
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # tokens -> end of their last occurrence
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Adds a token to the text."""
        # Endings are recorded now, because only now a token follows them.
        end = len(self._text)
        for length in self.LENGTHS:
            if length <= end:
                self._ends[tuple(self._text[end - length :])] = end
        self._text.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to ``most`` next tokens; none without an earlier occurrence of the ending."""
        for length in self.LENGTHS:
            at = self._ends.get(tuple(self._text[-length:])) if length <= len(self._text) else None
            if at is not None:
                # A match that overlaps the end continues in the guess, as a repetition with this period.
                guess = self._text[at : at + most]
                period = len(self._text) - at
                while len(guess) < most:
                    guess.append(guess[len(guess) - period])
                return guess
        return []


class Draft:
    """Guesses the most likely tokens of a draft model.

    As in speculative decoding (Leviathan et al. 2023, Chen et al. 2023), but a guess is accepted only if the model draws the
    same token. So the text is that of plain decoding, not only its distribution; fewer guesses are accepted.
    """

    def __init__(self, step: Any, tokens: Iterable[int], vocabulary: int):
        """
        Args:
            step: the draft model's decoder; its caches are overwritten.
            tokens: the prompt.
            vocabulary: size of the large model's vocabulary; larger tokens are not guessed.
        """
        self._step, self._vocabulary = step, vocabulary
        self._text = list(tokens)
        self._cached: list[int] = []  # the tokens in the step's caches
        self._same = 0  # number of these that equal the text's

    def append(self, token: int) -> None:
        """Adds a token to the text."""
        self._text.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to ``most`` next tokens; none if the text has a token that the draft model does not have."""
        guess: list[int] = []
        text, cached = self._text, self._cached
        while self._same < min(len(cached), len(text)) and cached[self._same] == text[self._same]:
            self._same += 1
        start = self._same = min(self._same, len(text) - 1)  # at least one token must be computed
        tokens = text[start:]
        if max(tokens) >= self._step.vocabulary:
            return guess
        while len(guess) < most:
            logits = self._step(torch.tensor([tokens]), torch.tensor([start]))[0]
            cached[start:] = tokens
            start += len(tokens)
            tokens = [most_likely(logits[: self._vocabulary])]
            guess += tokens
        return guess


Guesser: TypeAlias = Lookup | Draft | MtpDraft


def make_guesser(step: Any, prompt: Sequence[int], draft: Any) -> Guesser:
    """What guesses the tokens after a prompt, by the ``draft`` of :func:`lowbit.llm.generate`."""
    if isinstance(draft, Mtp):
        return MtpDraft(draft, prompt)
    return Lookup(prompt) if draft is None else Draft(draft, prompt, step.vocabulary)


def check_draft(step: Any, draft: Any) -> None:
    """Raises ValueError for a head of another model."""
    if isinstance(draft, Mtp) and not draft.is_of(step):
        raise ValueError("the draft is the multi-token prediction head of another decoder; expected an Mtp of this one")
