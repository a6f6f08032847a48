"""What decoders by torch and by the plan in a file share: caches of texts, and calls with several texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..machine.numbers import check_whole
from ..operators.cache_layout import SPAN, first_held
from .caches import CACHES, Caches
from .sampling import token_ids

# Prompt tokens computed at a time. With more, activations take so many megabytes that malloc returns them to the system after
# each use, and every page costs a page fault the next time.
PIECE = 256


@dataclass
class Part:
    """The rows of one text in a call."""

    begin: int  # range of its rows
    end: int
    start: int  # number of earlier tokens of the text
    caches: Caches


class TextsCall:
    """Collects the rows of a :meth:`TextsDecoder.run_texts` call text by text."""

    def __init__(self, decoder: TextsDecoder) -> None:
        self.decoder = decoder
        self.rows: list[int] = []  # the tokens of all texts, one after the other
        self.positions: list[int] = []  # of each row in its text
        self.parts: list[Part] = []  # one for each text

    def add(self, caches: Caches, tokens: Sequence[int]) -> None:
        self.decoder.check_model(caches)
        start, begin = len(caches.tokens), len(self.rows)
        if any(part.caches is caches for part in self.parts):
            raise ValueError("a call has two parts of the same text; expected one, with the tokens of both")
        if not len(tokens):
            raise ValueError("a text has no tokens; expected at least one")
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        if not self.decoder.takes(wrong):
            raise ValueError(f"there is no token {wrong}; expected 0 to {self.decoder.vocabulary - 1}")
        end = start + len(tokens)
        if end > caches.length:
            raise IndexError(f"a text has {end} tokens; expected at most {caches.length}, as its caches")
        self.rows += tokens
        self.positions += range(start, end)
        self.parts.append(Part(begin, len(self.rows), start, caches))


class TextsDecoder:
    """A decoder of texts whose caches are outside of it."""

    model: Any
    max_length: int
    vocabulary: int
    cache_type: str
    windows: Mapping[int, int] = {}  # of layers that do not keep the whole of a long text, by layer

    def takes(self, token: int) -> bool:
        """Whether a call can have this token."""
        return 0 <= token < self.vocabulary

    def whole(self, tokens: Sequence[int], count: int) -> int:
        """The number of a text's next tokens that a call can have, at least ``count``: some must be computed together."""
        return count

    def keep_windows(self, windows: Mapping[int, int | None]) -> None:
        """Sets ``windows`` to those of layers that lose the beginning of the decoder's longest texts."""
        self.windows = {layer: size for layer, size in windows.items() if size and size + SPAN < self.max_length}

    def window_of(self, layer: int, length: int) -> int | None:
        """The window that a layer keeps of a text of ``length`` tokens; None if it keeps all of it."""
        # Caches of a window have room for a piece more than this. A text is cut back by less than a piece, so if it could
        # be copied to caches that keep all of it, its own caches still have all of it, too.
        window = self.windows.get(layer)
        return window if window is not None and length > window + SPAN else None

    @property
    def windowed(self) -> bool:
        """Whether caches of some layers hold only a window, so that a text cannot be truncated at any place."""
        return bool(self.windows)

    @property
    def recurrent(self) -> bool:
        """Whether layers have states, which cannot be truncated."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises RuntimeError if the decoder cannot be used any more."""

    def check_texts(self) -> None:
        """Raises ValueError if texts in one call change each other's logits."""

    def make_caches(self, length: int, cache_type: str) -> list[tuple[Any, ...]]:
        """Empty keys, values and states of each layer, for a text of ``length`` tokens."""
        raise NotImplementedError

    def run_call(self, call: TextsCall, everywhere: bool) -> Any:
        """Logits [rows, vocabulary] of a call: of each row, or of the last row of each text."""
        raise NotImplementedError

    def prefix_key(self) -> bytes:
        """What identifies the model in a prefix cache; raises ValueError if it supports none."""
        raise NotImplementedError

    @staticmethod
    def model_key(model: Any) -> bytes:
        """What identifies a model in pickled caches; raises ValueError if nothing does."""
        raise NotImplementedError

    def new_caches(self, length: int, cache_type: str | None = None) -> Caches:
        """Empty caches for another text.

        Args:
            length: capacity in tokens, a multiple of 16.
            cache_type: the cache type of keys and values, as the decoder's ``cache``; None: the decoder's.

        Raises:
            ValueError: an invalid length or type.
            RuntimeError: the decoder was released.
        """
        self.check()
        cache_type = cache_type or self.cache_type
        length = check_whole("length", length, 1, expected="a positive multiple of 16")
        if length % 16:
            raise ValueError(f"length is {length}; expected a positive multiple of 16")
        if cache_type not in CACHES:
            raise ValueError(f"cache_type is {cache_type!r}; expected one of {', '.join(map(repr, CACHES))}")
        return Caches(self.make_caches(length, cache_type), cache_type, self, length, self.windows)

    def check_caches(self, caches: Caches) -> None:
        """Checks that caches can be copied from.

        Raises:
            ValueError: they have another type, another model computed them, or they lack the beginning of a text that this
                decoder keeps.
        """
        if caches.cache_type != self.cache_type:
            raise ValueError(f"the caches are of {caches.cache_type}; expected {self.cache_type}")
        self.check_model(caches)
        if any(first_held(layer) for number, layer in enumerate(caches.layers) if number not in self.windows):
            raise ValueError("the caches hold only the windows of some layers; expected those of a decoder with windows=False")

    def check_model(self, caches: Caches) -> None:
        """Raises ValueError if another model computed the caches."""
        if not caches.is_of(self):
            raise ValueError("the caches have keys and values of another model; expected those of the decoder's")

    def run_texts(self, texts: Sequence[tuple[Caches, Sequence[int]]], everywhere: bool = False) -> list[Any]:
        """Continues several texts in one call of the model, each by any number of tokens.

        Args:
            texts: for each text its caches and the tokens to add.
            everywhere: return logits after each token instead of after the last token of each text.

        Returns:
            Logits of each text, [vocabulary], or [s, vocabulary] with ``everywhere``.

        Raises:
            ValueError: no texts, a text without tokens or in two parts, caches of another model, or a token that is not a whole
                number or not in the vocabulary.
            IndexError: a text is longer than its caches.
            RuntimeError: the decoder was released.
        """
        self.check()
        if not texts:
            raise ValueError("there are no texts; expected at least one")
        call = TextsCall(self)
        texts = [(caches, token_ids("a text", tokens)) for caches, tokens in texts]
        for caches, tokens in texts:
            call.add(caches, tokens)
        logits = self.run_call(call, everywhere)
        # Recorded only now, because a failed call has not computed these tokens.
        for caches, tokens in texts:
            caches.tokens += tokens
        return [logits[part.begin : part.end] for part in call.parts] if everywhere else list(logits)
