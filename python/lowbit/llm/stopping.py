"""Stop strings: ends a text at a string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from typing import Any

from .loading import TextStream

BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's


def breakers(tokenizer: Any, strings: Iterable[str] = BREAKERS) -> tuple[int, ...]:
    """Tokens whose text contains one of the strings: the ``dry_breakers`` of :class:`Sampling`."""
    strings = tuple(strings)
    backend = tokenizer.backend_tokenizer
    ids = [[token] for token in range(backend.get_vocab_size())]
    texts = enumerate(backend.decode_batch(ids, skip_special_tokens=False))
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
    """Decodes tokens to text one by one, up to a stop string; use it as ``until`` of :func:`lowbit.llm.generate`.

    The stop string is not part of the text, and a possible beginning of it is held back until the next tokens decide. It may
    contain special tokens, which the text does not show. Of several strings the first to end counts, and the longest of those
    that end there, so the result does not depend on how tokens divide the text.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: list[int],
        strings: Iterable[str] = (),
        on_text: Callable[[str], None] | None = None,
        shown: Collection[str] = (),
    ):
        """
        Args:
            tokenizer: a fast tokenizer.
            prompt: ids of the preceding text.
            strings: stop strings.
            on_text: called with each piece of the text as soon as it is final; :meth:`finish` passes the last piece.
            shown: special tokens that are part of the text.

        Raises:
            ValueError: an empty string.
        """
        self._strings = check_stop_strings(strings)
        special = getattr(tokenizer, "added_tokens_decoder", {}) if self._strings or shown else {}
        # Id -> text of the special tokens that a string contains or the text shows, and whether it does.
        self._special = {
            token: (str(each), str(each) in shown) for token, each in special.items()
            if each.special and (str(each) in shown or any(str(each) in string for string in self._strings))
        }  # fmt: skip
        self._stream, self.on_text = TextStream(tokenizer, prompt), on_text
        self._held = ""
        self._shown: list[bool] = []  # for each held character, whether it is part of the text
        self._starts: list[int] = []  # start of each token in the text
        self.text = ""
        self.ended = self._whole = False
        self.string: str | None = None  # the stop string that has ended the text

    def __call__(self, token: int) -> bool:
        """Adds a token; returns whether the text has ended."""
        if self.ended:
            return True
        self._starts.append(len(self.text) + sum(self._shown))
        for piece, shown in ((self._stream.push(token), True), self._special.get(token, ("", False))):
            self._held += piece
            self._shown += [shown] * len(piece)
        matches = [(at + len(string), at) for string in self._strings if (at := self._held.find(string)) >= 0]
        if matches:
            self.ended, (end, certain) = True, min(matches)
            self.string = self._held[certain:end]
        else:
            certain = len(self._held) - max((overlap(self._held, string) for string in self._strings), default=0)
        self._release(certain)
        if self.ended:
            self._held, self._shown = "", []
        return self.ended

    @property
    def tokens(self) -> int:
        """The number of tokens that contribute to the final text; those of a stop string do not."""
        return len(self._starts) if self._whole else bisect_left(self._starts, len(self.text))

    def finish(self) -> str:
        """Ends the text and returns it."""
        self._whole = not self.ended
        self._release(len(self._held))
        self.ended = True
        return self.text

    def _release(self, count: int) -> None:
        piece = "".join(character for character, shown in zip(self._held[:count], self._shown) if shown)
        self._held, self._shown = self._held[count:], self._shown[count:]
        self.text += piece
        if piece and self.on_text is not None:
            self.on_text(piece)


def overlap(text: str, string: str) -> int:
    """Length of the longest suffix of a text that is a prefix of the string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
