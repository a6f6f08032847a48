"""Tracks the states of a decoder's recurrent layers, and keeps copies from which a text can continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..operators.cache_layout import copied

_MOST = 2  # copies; each takes about 20 MB for hybrids with 1B parameters


class StateKeeper:
    """Tracks how many tokens a decoder's states include, because states, unlike keys and values, cannot be truncated.

    A text can continue at the position of the states, at the position of a copy, or from its beginning.
    """

    def __init__(self, tensors: Sequence[Any]):
        self._tensors = list(tensors)
        self._copies: dict[int, list[Any]] = {}
        self.position: int | None = None  # number of tokens in the states; None: unknown

    def kept(self, count: int) -> int:
        """The largest position, up to `count`, from which a text can continue."""
        places = [*self._copies, *(() if self.position is None else (self.position,))]
        return max((place for place in places if place <= count), default=0)

    def begin(self, start: int, keep: bool = False) -> None:
        """Restores the states after `start` tokens, before a call.

        Args:
            keep: also keep a copy of them.

        Raises:
            ValueError: these states are not available.
        """
        if start and start != self.position and start not in self._copies:
            place = self.kept(start) or "a place"
            raise ValueError(
                f"start is {start}; expected 0, or {place}, where the states of the model's recurrent layers are kept: states "
                "cannot be truncated (Decoder.kept returns the place)"
            )
        if start and start != self.position:
            for tensor, copy in zip(self._tensors, self._copies[start], strict=True):
                tensor[...] = copy
        self._copies = {place: copies for place, copies in self._copies.items() if 0 < place <= start}
        self.position = None  # until the call has succeeded
        if keep and start:
            self._keep(start)

    def end(self, position: int, keep: bool = False) -> None:
        """Records that after a call the states are those of `position` tokens."""
        self.position = position
        if keep:
            self._keep(position)

    def _keep(self, place: int) -> None:
        if place not in self._copies:
            self._copies[place] = [copied(tensor) for tensor in self._tensors]
        for old in sorted(self._copies)[:-_MOST]:
            del self._copies[old]
