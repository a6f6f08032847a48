"""Keys and values of one text, which can begin as another one's do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..hf.recurrent import is_state

_PANEL = 16  # positions of a head's keys lie together, docs/internals/operators.md


class Caches:
    """Keys and values of one text, apart from a decoder's own: :meth:`Decoder.new_caches` and :meth:`Decoder.read` make
    them."""

    def __init__(self, layers: Sequence[tuple[Tensor, ...]], dtype: torch.dtype, model: torch.nn.Module, length: int):
        """
        Args:
            layers: keys, values and states of each.
            length: tokens that there is room for.
            dtype: of keys and values; ``torch.int4`` stands for 4 bits.
            model: that computes them.
        """
        self.layers = list(layers)
        self.dtype = dtype
        self.length = length
        self.tokens: list[int] = []  # whose keys and values these are
        self._model: weakref.ref[torch.nn.Module] | None = weakref.ref(model)

    def __getstate__(self) -> dict:
        return vars(self) | {"_model": None}  # of which model a file's are nobody knows

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether this model computes them, as far as is known."""
        return self._model is None or self._model() is model

    @property
    def recurrent(self) -> bool:
        """Whether layers have states, which are those of all tokens and cannot be cut back."""
        return any(is_state(tensor) for layer in self.layers for tensor in layer)

    def usable(self, count: int) -> int:
        """How many of the first `count` tokens can be copied from here: with states all that there are, or none."""
        return count if not self.recurrent or count == len(self.tokens) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, those that hold nothing yet included."""
        return sum(cache.nbytes for layer in self.layers for cache in layer)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def copy_layer(source: Iterable[Tensor], target: Iterable[Tensor], count: int, states: bool | None = None) -> None:
    """Copies keys and values of a layer for the first `count` positions, and its states, which must be those of so many tokens;
    the caches may differ in length. With `states` only these, or (False) all but these.

    Whole panels are copied: what is behind `count` in the last one is written anew before it is read.
    """
    count = -(-count // _PANEL) * _PANEL
    for read, write in zip(source, target, strict=True):
        if states is not None and is_state(read) is not states:
            continue
        if is_state(read):
            write.copy_(read)
            continue
        # Of each head first the values, then, with codes, the scales of all positions. A width in bytes, of 4-bit codes.
        bytes_of_scale = 4 if read.dtype is torch.int8 else 0
        width = read.shape[3] - bytes_of_scale
        (from_, to), lengths = (each.view(each.shape[1], -1) for each in (read, write)), (read.shape[2], write.shape[2])
        to[:, : count * width] = from_[:, : count * width]
        if bytes_of_scale:
            begins = [length * width for length in lengths]
            many = count * bytes_of_scale
            to[:, begins[1] : begins[1] + many] = from_[:, begins[0] : begins[0] + many]
