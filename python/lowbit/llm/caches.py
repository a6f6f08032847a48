"""KV caches of single texts, and copying common prefixes between them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..hf.decoding import Unsupported, is_held
from ..hf.recurrent import is_state
from ..operators.ops import cache_storage, cache_width
from ..operators.window import SPAN

if TYPE_CHECKING:
    from ..plan.running import Caches as PlanCaches
    from .planning import DecoderPlan

# Types of the KV cache: one type for keys and values, or the type of keys, then that of values.
CACHES = ("float32", "bfloat16", "float16", "int8", "int8,int4", "int4")

_PANEL = 16  # positions whose keys are interleaved in memory, see docs/internals/operators.md


class Caches:
    """Keys, values and states of one text, outside a decoder; from :meth:`Decoder.new_caches` and :meth:`Decoder.read`."""

    def __init__(self, layers: Sequence[tuple[Tensor, ...]], cache_type: str, model: torch.nn.Module, length: int):
        """
        Args:
            layers: for each layer, keys and values in the layout of the attention operators, and states if it is recurrent.
            cache_type: the cache type of keys and values, as :class:`Decoder` takes it.
            model: the model that computes them.
            length: capacity in tokens.
        """
        self.layers = list(layers)
        self.cache_type = cache_type
        self.length = length
        self.tokens: list[int] = []  # the tokens whose keys and values are stored
        self._model: weakref.ref[torch.nn.Module] | None = weakref.ref(model)
        self._planned: tuple[weakref.ref[DecoderPlan], list[tuple[Tensor, ...]], PlanCaches] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_model": None, "_planned": None}  # neither can be pickled

    def planned(self, plan: DecoderPlan) -> PlanCaches:
        """The tensors as a plan uses them."""
        known = self._planned
        # A batch replaces states. The layers are kept, because others could get their addresses.
        if known is None or known[0]() is not plan or not all(map(is_, known[1], self.layers)):
            known = self._planned = weakref.ref(plan), list(self.layers), plan.caches(self.layers)
        return known[2]

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether this model computes them; True for unpickled caches, whose model is unknown."""
        return self._model is None or self._model() is model

    @property
    def recurrent(self) -> bool:
        """Whether there are states, which depend on all tokens and cannot be truncated."""
        return any(is_state(tensor) for layer in self.layers for tensor in layer)

    def usable(self, count: int) -> int:
        """The number of the first ``count`` tokens that can be copied from here; with states, all tokens or none."""
        return count if not self.recurrent or count == len(self.tokens) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, unused positions included."""
        return sum(cache.nbytes for layer in self.layers for cache in layer)


def type_of(cache: str | None, dtype: torch.dtype) -> str:
    """The requested cache type; None: the type for a model of this dtype.

    Raises:
        ValueError: an unknown type.
    """
    if cache is None:
        return name_of(dtype)
    if cache not in CACHES:
        reason = "; rounding keys to 4 bits loses more than rounding values" if cache == "int4,int8" else ""
        raise ValueError(f"cache is {cache!r}; expected one of {', '.join(map(repr, CACHES))}, or None{reason}")
    return cache


def name_of(dtype: torch.dtype) -> str:
    """The cache type that stores keys and values of this dtype unrounded."""
    return str(dtype).removeprefix("torch.")


def dtypes_of(cache_type: str) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of keys and of values; ``torch.int4`` stands for 4 bits."""
    names = cache_type.split(",")
    return getattr(torch, names[0]), getattr(torch, names[-1])


def empty_caches(heads: int, widths: Sequence[int], positions: int, cache_type: str) -> list[Tensor]:
    """Empty keys and values of a layer; neither if there are no ``widths``.

    Raises:
        Unsupported: values of this width have no such type.
    """
    rows, dtypes = -(-positions // _PANEL) * _PANEL, dtypes_of(cache_type)
    try:
        shapes = [(1, heads, rows, cache_width(width, dtype)) for width, dtype in zip(widths, dtypes)]
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return [torch.zeros(shape, dtype=cache_storage(dtype)) for shape, dtype in zip(shapes, dtypes)]


def stretches(cache: Tensor, begin: int, end: int) -> list[Tensor]:
    """The slices [heads, n] of a layer's keys or values that hold these positions, in whole panels.

    For each head the values of all positions come first, then, in int8 and 4-bit caches, their scales.
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


def copy_layer(source: Iterable[Tensor], target: Iterable[Tensor], count: int, states: bool | None = None) -> None:
    """Copies keys and values of a layer for the first ``count`` positions, and states; the caches may differ in length.

    The states of ``source`` must be those after ``count`` tokens. ``states`` True copies only states, False everything else.

    Whole panels are copied; positions after ``count`` in the last one are overwritten before they are read. A target of
    :func:`lowbit.window_attention` gets as many positions as it has room for; the source must have all positions.
    """
    base, targets = 0, []
    for tensor in target:
        if not is_held(tensor):
            targets.append(tensor)
        elif not states:
            base = max(0, -(-(count - targets[0].shape[2]) // SPAN) * SPAN)
            tensor.copy_(torch.tensor([base, count]))
    count = -(-count // _PANEL) * _PANEL
    for read, write in zip(source, targets, strict=True):
        if states is not None and is_state(read) is not states:
            continue
        if is_state(read):
            write.copy_(read)
            continue
        for from_, to in zip(stretches(read, base, count), stretches(write, 0, count - base), strict=True):
            to.copy_(from_)
