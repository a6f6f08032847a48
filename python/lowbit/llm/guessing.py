"""Draft tokens for speculative decoding: from the text itself, from a draft model, or from a multi-token prediction head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .sampling import most_likely
from .steps import rows_after

# Draft tokens of a call, at most: a text over caches of a window can be cut back by this many after any call.
MOST = 128


class Lookup:
    """Drafts the tokens that followed the last earlier occurrence of the text's final tokens.

    This is prompt lookup decoding (Saxena, 2023) with the latest match of the longest suffix, of 4 tokens down to 2. It helps
    with code and with texts that quote, summarize or edit the prompt.
    """

    LENGTHS = (4, 3, 2)  # of suffixes; single tokens occur too often

    def __init__(self) -> None:
        self._count = 0  # tokens of the text that were recorded
        self._ends: dict[tuple[int, ...], int] = {}  # tokens -> end of their last occurrence

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` draft tokens; none if no suffix has occurred before."""
        # A suffix is recorded only now if a token follows it.
        for end in range(self._count, len(text)):
            for length in self.LENGTHS:
                if length <= end:
                    self._ends[tuple(text[end - length : end])] = end
        self._count = len(text)
        for length in self.LENGTHS:
            at = self._ends.get(tuple(text[-length:])) if length <= len(text) else None
            if at is not None:
                # A match that overlaps the end continues periodically.
                guess = list(text[at : at + most])
                period = len(text) - at
                while len(guess) < most:
                    guess.append(guess[len(guess) - period])
                return guess
        return []


class Draft:
    """Drafts the most likely tokens of a draft model.

    As in speculative decoding (Leviathan et al. 2023, Chen et al. 2023), but a draft token is accepted only if the model draws
    the same token. So the text itself, not only its distribution, is that of plain decoding; fewer draft tokens are accepted.
    """

    def __init__(self, step: Any, vocabulary: int):
        """
        Args:
            step: the draft model's decoder; its caches are overwritten.
            vocabulary: size of the large model's vocabulary; larger token ids are not drafted.
        """
        self._step, self._vocabulary = step, vocabulary
        self._cached: list[int] = []  # the tokens in the step's caches
        self._same = 0  # length of their common prefix with the text

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` draft tokens; none if the text has a token that the draft model does not have."""
        guess: list[int] = []
        cached = self._cached
        while self._same < min(len(cached), len(text)) and cached[self._same] == text[self._same]:
            self._same += 1
        start = self._same = min(self._same, len(text) - 1)  # at least one token must be computed
        tokens = list(text[start:])
        if max(tokens) >= self._step.vocabulary:
            return guess
        while len(guess) < most:
            (logits,) = rows_after(self._step, tokens, start)
            cached[start:] = tokens
            start += len(tokens)
            tokens = [most_likely(logits[: self._vocabulary])]
            guess += tokens
        return guess


class Guesser(Protocol):
    """Drafts the next tokens of one text."""

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` draft tokens; the text of a call begins with those of earlier calls."""


def make_guesser(step: Any, draft: Any) -> Guesser:
    """The guesser for a text, chosen by the argument ``draft`` of :func:`lowbit.llm.generate`."""
    if draft is None:
        return Lookup()
    return draft if _is_head(draft) else Draft(draft, step.vocabulary)


def _is_head(draft: Any) -> bool:
    """Whether a draft is a :class:`lowbit.llm.Mtp`, which needs torch."""
    return hasattr(draft, "is_of")


def check_draft(step: Any, draft: Any, max_length: int) -> None:
    """Raises ValueError for a draft with fewer positions, and for a multi-token prediction head of another model."""
    if _is_head(draft) and not draft.is_of(step):
        raise ValueError("the draft is the multi-token prediction head of another decoder; expected an Mtp of this one")
    if draft is not None and draft.max_length < max_length:
        raise ValueError(f"the draft's max_length is {draft.max_length}; expected the decoder's {max_length} or more")
