"""Stop strings: texts that end at a string."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .loading import TextStream

BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's


def breakers(tokenizer: Any, strings: Iterable[str] = BREAKERS) -> tuple[int, ...]:
    """Tokens whose text contains one of the strings: the ``dry_breakers`` of :class:`Sampling`."""
    strings = tuple(strings)
    texts = enumerate(tokenizer.batch_decode([[token] for token in range(len(tokenizer))]))
    return tuple(token for token, text in texts if any(string in text for string in strings))


def check_stop_strings(strings: Iterable[str], name: str = "stop") -> tuple[str, ...]:
    """The strings as a tuple.

    Raises:
        ValueError: a string is empty or not a str.
    """
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{name} has {string!r}; expected texts of at least one character")
    return strings


class TextUntil:
    """The text of tokens as they come, up to a stop string.

    The string is not part of the text, and a possible beginning of it is held back until the next tokens decide. Of several
    strings the first to end counts, and the longest of those that end there, so how tokens divide the text has no effect.
    A call with a token returns whether the text has ended, as ``until`` of :func:`lowbit.llm.generate` does.
    """

    def __init__(
        self, tokenizer: Any, prompt: list[int], strings: Iterable[str] = (), on_text: Callable[[str], None] | None = None
    ):
        """
        Args:
            tokenizer: a fast tokenizer.
            prompt: ids of the text before.
            strings: stop strings.
            on_text: called with each piece of the text as soon as it is certain; :meth:`finish` passes the last piece.

        Raises:
            ValueError: an empty string.
        """
        self._strings = check_stop_strings(strings)
        self._stream, self.on_text = TextStream(tokenizer, prompt), on_text
        self._held = ""
        self.text = ""
        self.ended = False

    def __call__(self, token: int) -> bool:
        """Adds a token; returns whether the text has ended."""
        if self.ended:
            return True
        self._held += self._stream.push(token)
        matches = [(at + len(string), at) for string in self._strings if (at := self._held.find(string)) >= 0]
        if matches:
            self.ended, certain = True, min(matches)[1]
        else:
            certain = len(self._held) - max((_overlap(self._held, string) for string in self._strings), default=0)
        self._release(certain)
        if self.ended:
            self._held = ""
        return self.ended

    def finish(self) -> str:
        """Ends the text and returns it."""
        self._release(len(self._held))
        self.ended = True
        return self.text

    def _release(self, count: int) -> None:
        piece, self._held = self._held[:count], self._held[count:]
        self.text += piece
        if piece and self.on_text is not None:
            self.on_text(piece)


def _overlap(text: str, string: str) -> int:
    """Number of characters at the end of a text that are a beginning of the string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
