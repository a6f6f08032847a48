"""Guesses how a text goes on, from the text itself."""

from __future__ import annotations

from collections.abc import Iterable


class Lookup:
    """Finds the last place where a text had the tokens that it ends with now, and guesses that it goes on as it did there.

    Texts that quote, summarise or change what is in the prompt repeat it, and so does code. It is the speculation of prompt
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
