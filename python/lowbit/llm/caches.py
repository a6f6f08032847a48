"""KV caches of single texts, and copies of common beginnings between them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_PANEL = 16  # positions whose keys are interleaved in memory, see docs/internals/operators.md


class Caches:
    """Keys and values of one text, outside a decoder; from :meth:`Decoder.new_caches` and :meth:`Decoder.read`."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, model: torch.nn.Module):
        """
        Args:
            layers: keys and values of each layer, as the attention operators store them.
            dtype: of keys and values; ``torch.int4`` stands for 4 bits.
            model: the model that computes them.
        """
        self.layers = list(layers)
        self.dtype = dtype
        self.tokens: list[int] = []  # the tokens whose keys and values are stored
        self._model: weakref.ref[torch.nn.Module] | None = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_model": None}  # a weak reference cannot be pickled

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether this model computes them; True for unpickled caches, whose model is unknown."""
        return self._model is None or self._model() is model

    @property
    def length(self) -> int:
        """Capacity in tokens."""
        return int(self.layers[0][0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, unused positions included."""
        return sum(cache.nbytes for pair in self.layers for cache in pair)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens that two texts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def copy_layer(source: Iterable[Tensor], target: Iterable[Tensor], count: int) -> None:
    """Copies keys and values of a layer for the first ``count`` positions; the caches may differ in length.

    Whole panels are copied: positions after ``count`` in the last one are overwritten before they are read.
    """
    count = -(-count // _PANEL) * _PANEL
    for read, write in zip(source, target, strict=True):
        # A head has the values of all positions, then, for int8 and int4, their float32 scales. A width is in bytes for int4.
        scale_bytes = 4 if read.dtype is torch.int8 else 0
        width = read.shape[3] - scale_bytes
        from_, to = (cache.view(cache.shape[1], -1) for cache in (read, write))
        to[:, : count * width] = from_[:, : count * width]
        if scale_bytes:
            begins, size = [cache.shape[2] * width for cache in (read, write)], count * scale_bytes
            to[:, begins[1] : begins[1] + size] = from_[:, begins[0] : begins[0] + size]
