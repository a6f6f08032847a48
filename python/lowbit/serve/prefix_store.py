"""Prefix caching in memory: keeps keys and values of ended texts for later texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ..llm.batch import Batch
from ..llm.caches import Caches
from ..llm.generation import Text
from ..llm.sampling import common
from ..llm.texts_call import TextsDecoder

_LEAST = 16  # tokens; shorter prefixes are not kept


class PrefixBatch(Batch):
    """A batch that keeps keys and values of the most recently used ended texts, within a number of bytes."""

    def __init__(self, decoder: TextsDecoder, at_once: int, rows: int, most_bytes: int):
        super().__init__(decoder, at_once, rows)
        self._kept: OrderedDict[int, Caches] = OrderedDict()  # in order of use, the most recent last
        self._branches: set[int] = set()  # which of them other texts continue differently
        self._most = most_bytes
        self.kept_bytes = 0

    def beginnings(self) -> Iterator[tuple[Caches, list[int]]]:
        yield from super().beginnings()
        yield from ((each, each.tokens) for each in self._kept.values())

    def _begin(self, text: Text):
        begun = super()._begin(text)
        if begun.source is not None and id(begun.source[0]) in self._kept:
            self._kept.move_to_end(id(begun.source[0]))
        return begun

    def ending(self, text: Text, caches: Caches) -> None:
        self._keep(caches)

    def branching(self, caches: Caches) -> None:
        kept = self._keep(caches)
        if kept is not None:
            self._branches.add(kept)

    def _keep(self, caches: Caches) -> int | None:
        """Keeps a copy of a text's caches, unless others have them; returns its key."""
        tokens, count = caches.tokens, len(caches.tokens)
        kept = self._kept.values()
        if count < _LEAST or any(common(each.tokens, tokens) == count and each.usable(count) for each in kept):
            return None
        # A text's caches have room for all possible tokens; the kept copy only for its actual tokens.
        small = self.decoder.new_caches(-(-count // 16) * 16)
        if small.nbytes > self._most or not caches.usable(count):
            return None
        small.copy_from(caches, count)
        for key, each in list(self._kept.items()):
            needed = key in self._branches and not small.usable(len(each.tokens))
            if common(each.tokens, tokens) == len(each.tokens) and not needed:
                self._drop(key)  # the new text starts with it
        self._kept[id(small)] = small
        self.kept_bytes += small.nbytes
        while self.kept_bytes > self._most:
            self._drop(next(iter(self._kept)))
        return id(small)

    def _drop(self, key: int) -> None:
        self._branches.discard(key)
        self.kept_bytes -= self._kept.pop(key).nbytes
