"""Texts that end at a string."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .loading import TextStream

BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's


def breakers(tokenizer: Any, strings: Iterable[str] = BREAKERS) -> tuple[int, ...]:
    """The tokens whose text has one of these strings: the ``dry_breakers`` of :class:`Sampling`."""
    wanted = tuple(strings)
    texts = enumerate(tokenizer.batch_decode([[token] for token in range(len(tokenizer))]))
    return tuple(token for token, text in texts if any(string in text for string in wanted))


def check_stop_strings(strings: Iterable[str], name: str = "stop") -> tuple[str, ...]:
    """Raises ValueError for one that is no text, or empty."""
    found = (strings,) if isinstance(strings, str) else tuple(strings)
    for string in found:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{name} has {string!r}; expected texts of at least one character")
    return found


class TextUntil:
    """The text of tokens as they come, which ends where it has one of some strings.

    The string itself is not part of the text, and neither is what may become its beginning, until that is known. Of several
    strings the one that ends first counts, the longest of those that end there: how tokens cut the text changes nothing.
    Called with each token it returns whether the text has ended, as ``until`` of :func:`lowbit.llm.generate` takes it.
    """

    def __init__(
        self, tokenizer: Any, prompt: list[int], strings: Iterable[str] = (), on_text: Callable[[str], None] | None = None
    ):
        """
        Args:
            tokenizer: a fast one.
            prompt: ids of the text before.
            strings: that end the text.
            on_text: called with each piece of the text as soon as it is certain; :meth:`finish` gives the last one.

        Raises:
            ValueError: an empty string.
        """
        self._strings = check_stop_strings(strings)
        self._stream, self.on_text = TextStream(tokenizer, prompt), on_text
        self._held = ""
        self.text = ""
        self.ended = False

    def __call__(self, token: int) -> bool:
        """Takes a token, and says whether the text has ended."""
        if self.ended:
            return True
        self._held += self._stream.push(token)
        found = [(at + len(string), at) for string in self._strings if (at := self._held.find(string)) >= 0]
        if found:
            self.ended, sure = True, min(found)[1]
        else:
            sure = len(self._held) - max((_begins(self._held, string) for string in self._strings), default=0)
        self._give(sure)
        if self.ended:
            self._held = ""
        return self.ended

    def finish(self) -> str:
        """The whole text, of which no more comes."""
        self._give(len(self._held))
        self.ended = True
        return self.text

    def _give(self, count: int) -> None:
        piece, self._held = self._held[:count], self._held[count:]
        self.text += piece
        if piece and self.on_text is not None:
            self.on_text(piece)


def _begins(text: str, string: str) -> int:
    """How many characters at the end of a text may be the beginning of a string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
