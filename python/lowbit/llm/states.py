"""What the states of a decoder hold, and copies from which a text goes on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_MOST = 2  # copies; of hybrids with 1B parameters each is some 20 MB


class StateKeeper:
    """Knows of how many tokens a decoder's states are: unlike keys and values, they cannot be cut back.

    A text continues where the states are, at a position that there is a copy of, or from its beginning.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = list(tensors)
        self._copies: dict[int, list[Tensor]] = {}
        self.position: int | None = None  # None: not known

    def kept(self, count: int) -> int:
        """The most tokens, up to `count`, that a text can continue behind."""
        places = [*self._copies, *(() if self.position is None else (self.position,))]
        return max((place for place in places if place <= count), default=0)

    def begin(self, start: int, keep: bool = False) -> None:
        """Makes the states those of `start` tokens, before a call.

        Args:
            keep: also keep a copy of them.

        Raises:
            ValueError: they cannot be had.
        """
        if start and start != self.position and start not in self._copies:
            raise ValueError(
                f"start is {start}; expected 0, or {self.kept(start) or 'a place'} that the states of the model's recurrent "
                "layers are those of: they cannot be cut back (Decoder.kept says how far a text is there)"
            )
        if start and start != self.position:
            for tensor, copy in zip(self._tensors, self._copies[start], strict=True):
                tensor.copy_(copy)
        self._copies = {place: copies for place, copies in self._copies.items() if 0 < place <= start}
        self.position = None  # until the call has ended well
        if keep and start:
            self._keep(start)

    def end(self, position: int, keep: bool = False) -> None:
        """After a call: the states are those of `position` tokens."""
        self.position = position
        if keep:
            self._keep(position)

    def _keep(self, place: int) -> None:
        if place not in self._copies:
            self._copies[place] = [tensor.clone() for tensor in self._tensors]
        for old in sorted(self._copies)[:-_MOST]:
            del self._copies[old]
