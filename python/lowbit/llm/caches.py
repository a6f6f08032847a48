"""Keys and values of one text, which can begin as another one's do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_PANEL = 16  # positions of a head's keys lie together, docs/internals/operators.md


class Caches:
    """Keys and values of one text, apart from a decoder's own: :meth:`Decoder.new_caches` and :meth:`Decoder.read` make
    them."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, model: torch.nn.Module):
        """
        Args:
            dtype: of keys and values; ``torch.int4`` stands for 4 bits.
            model: that computes them.
        """
        self.layers = list(layers)
        self.dtype = dtype
        self.tokens: list[int] = []  # whose keys and values these are
        self._model: weakref.ref[torch.nn.Module] | None = weakref.ref(model)

    def __getstate__(self) -> dict:
        return vars(self) | {"_model": None}  # of which model a file's are nobody knows

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether this model computes them, as far as is known."""
        return self._model is None or self._model() is model

    @property
    def length(self) -> int:
        """Tokens that there is room for."""
        return self.layers[0][0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, those that hold nothing yet included."""
        return sum(cache.nbytes for pair in self.layers for cache in pair)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def stretches(cache: Tensor, begin: int, end: int) -> list[Tensor]:
    """The parts [heads, n] of a layer's keys or values that hold these positions, whole panels.

    Of each head first the values of all positions, then, with codes, their scales.
    """
    bytes_of_scale = 4 if cache.dtype is torch.int8 else 0
    flat, length, width = (
        cache.view(cache.shape[1], -1),
        cache.shape[2],
        cache.shape[3] - bytes_of_scale,
    )  # of 4-bit codes in bytes
    found = [flat[:, begin * width : end * width]]
    if bytes_of_scale:
        found.append(flat[:, length * width + begin * bytes_of_scale : length * width + end * bytes_of_scale])
    return found


def copy_layer(source: Iterable[Tensor], target: Iterable[Tensor], count: int) -> None:
    """Copies keys and values of a layer for the first `count` positions; the caches may differ in length.

    Whole panels are copied: what is behind `count` in the last one is written anew before it is read.
    """
    count = -(-count // _PANEL) * _PANEL
    for read, write in zip(source, target, strict=True):
        for from_, to in zip(stretches(read, 0, count), stretches(write, 0, count), strict=True):
            to.copy_(from_)
