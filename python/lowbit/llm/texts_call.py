"""The rows of a call of the model with several texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..hf import decoding
from .caches import Caches, copy_layer

if TYPE_CHECKING:
    from .decoder import Decoder


class TextsCall:
    """Collects the rows of a :meth:`Decoder.run_texts` call text by text."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.rows: list[int] = []  # the tokens of all texts, one after the other
        self.positions: list[int] = []  # of each row in its text
        self.parts: list[decoding.Part] = []  # one for each text
        self.lengths: dict[int, int] = {}  # of caches after this call, by id()
        self.copies_within = False  # whether a text copies caches that the call changes

    def add(self, caches: Caches, tokens: Sequence[int], source: tuple[Caches, int] | None = None) -> None:
        copy, start, begin = None, self.lengths.get(id(caches), len(caches.tokens)), len(self.rows)
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
            copy = _copy_from(other, caches, start)
            self.copies_within |= id(other) in self.lengths or id(caches) in self.lengths
        if not len(tokens):
            raise ValueError("a text has no tokens; expected at least one")
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        if not 0 <= wrong < self.decoder.vocabulary:
            raise ValueError(f"there is no token {wrong}; expected 0 to {self.decoder.vocabulary - 1}")
        end = start + len(tokens)
        if end > caches.length:
            raise IndexError(f"a text has {end} tokens; expected at most {caches.length}, as its caches")
        self.rows += tokens
        self.positions += range(start, end)
        self.lengths[id(caches)] = end
        self.parts.append(decoding.Part(begin, len(self.rows), torch.tensor([start]), caches.layers, copy))


def _copy_from(source: Caches, target: Caches, count: int) -> Callable[[int, bool], None]:
    def copy(layer: int, states: bool) -> None:
        copy_layer(source.layers[layer], target.layers[layer], count, states)

    return copy
