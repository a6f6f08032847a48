"""What decoders by torch and by the plan in a file share: caches of texts, and calls with several texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .caches import CACHES, Caches

Source: TypeAlias = tuple[Caches, int]  # caches to copy a prefix from, and its number of tokens
TextPart: TypeAlias = tuple[Caches, Sequence[int]] | tuple[Caches, Sequence[int], Source]


@dataclass
class Part:
    """The rows of one text in a call."""

    begin: int  # range of its rows
    end: int
    start: int  # number of earlier tokens of the text
    caches: Caches
    source: Caches | None  # caches from which the earlier tokens are copied first


class TextsCall:
    """Collects the rows of a :meth:`TextsDecoder.run_texts` call text by text."""

    def __init__(self, decoder: TextsDecoder) -> None:
        self.decoder = decoder
        self.rows: list[int] = []  # the tokens of all texts, one after the other
        self.positions: list[int] = []  # of each row in its text
        self.parts: list[Part] = []  # one for each text
        self.lengths: dict[int, int] = {}  # of caches after this call, by id()
        self.copies_within = False  # whether a text copies caches that the call changes

    def add(self, caches: Caches, tokens: Sequence[int], source: Source | None = None) -> None:
        start, begin = self.lengths.get(id(caches), len(caches.tokens)), len(self.rows)
        if source is not None:
            other, count = source
            self.decoder.check_caches(other, caches.cache_type)
            available = self.lengths.get(id(other), len(other.tokens))
            start = min(count, available)
            if self.decoder.recurrent and start != available:
                raise ValueError(
                    f"a text copies {start} tokens from caches with {available}; expected all, because states cannot be "
                    "truncated"
                )
            self.copies_within |= id(other) in self.lengths or id(caches) in self.lengths
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
        self.lengths[id(caches)] = end
        self.parts.append(Part(begin, len(self.rows), start, caches, None if source is None else source[0]))

    def groups(self) -> Iterator[list[Part]]:
        """Yields the texts in groups that can be computed at once: none copies caches that an earlier one of it changes."""
        group: list[Part] = []
        for part in self.parts:
            if any(part.caches is each.caches or part.source is each.caches for each in group):
                yield group
                group = []
            group.append(part)
        if group:
            yield group


class TextsDecoder:
    """A decoder of texts whose caches are outside of it."""

    model: Any
    max_length: int
    vocabulary: int
    cache_type: str

    def takes(self, token: int) -> bool:
        """Whether a call can have this token."""
        return 0 <= token < self.vocabulary

    def whole(self, tokens: Sequence[int], count: int) -> int:
        """The number of a text's next tokens that a call can have, at least ``count``: some must be computed together."""
        return count

    @property
    def windowed(self) -> bool:
        """Whether caches of some layers hold only a window, so that a text cannot be truncated at any place."""
        return False

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
        if length <= 0 or length % 16:
            raise ValueError(f"length is {length}; expected a positive multiple of 16")
        if cache_type not in CACHES:
            raise ValueError(f"cache_type is {cache_type!r}; expected one of {', '.join(map(repr, CACHES))}")
        return Caches(self.make_caches(length, cache_type), cache_type, self.model, length)

    def check_caches(self, caches: Caches, cache_type: str | None = None) -> None:
        """Checks that caches can be copied from.

        Args:
            cache_type: the cache type of the caches to copy to; None: the decoder's.

        Raises:
            ValueError: they have another type, or another model computed them.
        """
        cache_type = cache_type or self.cache_type
        if caches.cache_type != cache_type:
            raise ValueError(f"the caches are of {caches.cache_type}; expected {cache_type}")
        if not caches.is_of(self.model):
            raise ValueError("the caches have keys and values of another model; expected those of the decoder's")

    def run_texts(self, texts: Sequence[TextPart], everywhere: bool = False) -> list[Any]:
        """Continues several texts in one call of the model, each by any number of tokens.

        Args:
            texts: for each text its caches and the tokens to add; for a new text optionally also caches with a common prefix
                and the number of tokens to copy from them first. These may be the caches of an earlier text of the call.
            everywhere: return logits after each token instead of after the last token of each text.

        Returns:
            Logits of each text, [vocabulary], or [s, vocabulary] with ``everywhere``.

        Raises:
            ValueError: no texts, a text without tokens, a token that is not in the vocabulary, or caches to copy from
                that belong to another model or dtype, or whose states include further tokens.
            IndexError: a text is longer than its caches.
            RuntimeError: the decoder was released.
        """
        self.check()
        if not texts:
            raise ValueError("there are no texts; expected at least one")
        call = TextsCall(self)
        for text in texts:
            call.add(*text)
        for caches, _, *source in texts:
            if source:
                caches.tokens = []  # their content is overwritten
        logits = self.run_call(call, everywhere)
        # Recorded only now, because a failed call has not computed these tokens.
        for caches, tokens, *source in texts:
            if source:
                caches.tokens = source[0][0].tokens[: source[0][1]]
            caches.tokens += tokens
        return [logits[part.begin : part.end] for part in call.parts] if everywhere else list(logits)
