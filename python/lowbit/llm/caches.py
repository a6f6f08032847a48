"""KV caches of single texts, and copying common prefixes between them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..operators.cache_layout import PANEL, can_continue, copy_layer, states_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .texts_call import TextsDecoder

# Types of the KV cache: one type for keys and values, or the type of keys, then that of values.
CACHES = ("float32", "bfloat16", "float16", "int8", "int8,int4", "int4")
# The attributes of pickled caches.
_PICKLED = frozenset({"layers", "cache_type", "length", "tokens", "_windows", "_model", "_key_of", "_key", "_planned"})


class Caches:
    """Keys, values and states of one text, outside a decoder; from :meth:`Decoder.new_caches` and :meth:`Decoder.read`."""

    def __init__(
        self, layers: Sequence[tuple[Any, ...]], cache_type: str, decoder: TextsDecoder, length: int, windows: Mapping[int, int]
    ):
        """
        Args:
            layers: for each layer, keys and values in the layout of the attention operators, and states if it is recurrent;
                tensors of torch, or arrays of numpy.
            cache_type: the cache type of keys and values, as :class:`Decoder` takes it.
            decoder: whose model computes them.
            length: capacity in tokens.
            windows: the windows of layers that do not keep the whole of a long text.
        """
        self.layers = list(layers)
        self.cache_type = cache_type
        self.length = length
        self._windows = dict(windows)
        self.tokens: list[int] = []  # the tokens whose keys and values are stored
        self._model: weakref.ref[Any] | None = weakref.ref(decoder.model)
        self._key_of, self._key = type(decoder).model_key, b""  # what identifies the model, in unpickled caches
        self._planned: tuple[weakref.ref[Any], list[Any], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._model is None:
            return vars(self)
        model = self._model()
        if model is None and not self._key:
            raise TypeError("the model of these caches no longer exists; expected to pickle them while it does")
        key = self._key if model is None else self._key_of(model)
        return vars(self) | {"_model": None, "_key_of": None, "_planned": None, "_key": key}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.keys() != _PICKLED:
            differ = ", ".join(sorted(state.keys() ^ _PICKLED))
            raise ValueError(f"these caches are of another version of lowbit (they differ in {differ}); compute them again")
        vars(self).update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Caches:
        try:
            state = self.__getstate__()
        except ValueError:  # nothing identifies the model, so the copy belongs to this one
            state = vars(self) | {"_planned": None}
        made = memo[id(self)] = object.__new__(type(self))
        shared = ("_model", "_key_of")
        vars(made).update({name: each if name in shared else copy.deepcopy(each, memo) for name, each in state.items()})
        return made

    def planned(self, plan: Any, arrange: Callable[[Any], Any]) -> Any:
        """The layers as ``plan`` uses them: the result of ``arrange``, which is kept until they change."""
        known = self._planned
        # A batch replaces states. The replaced ones are kept here, because new ones could have their id().
        if known is None or known[0]() is not plan or any(a is not b for a, b in zip(known[1], self.layers, strict=True)):
            known = self._planned = weakref.ref(plan), list(self.layers), arrange(self.layers)
        return known[2]

    def is_of(self, decoder: TextsDecoder) -> bool:
        """Whether the decoder's model computes them. Unpickled caches belong to the first model that has their key."""
        if self._model is None or (self._key and self._model() is None):
            try:
                if self._key != decoder.model_key(decoder.model):
                    return False
            except ValueError:  # nothing identifies the model
                return False
            self._model, self._key_of = weakref.ref(decoder.model), type(decoder).model_key
        return self._model() is decoder.model

    @property
    def recurrent(self) -> bool:
        """Whether there are states, which depend on all tokens and cannot be truncated."""
        return bool(states_of(self.layers))

    def usable(self, count: int) -> int:
        """``count``, if the first ``count`` tokens can be copied from here, else 0.

        States are those after all tokens. Caches of windows hold the end of a text, so a few hundred tokens can be cut off.
        """
        if self.recurrent and count != len(self.tokens):
            return 0
        return count if can_continue(self.layers, self._windows, count) else 0

    def copy_from(self, other: Caches, count: int) -> None:
        """Copies the keys and values of the first ``count`` tokens, and the states; ``count`` must be usable."""
        for source, target in zip(other.layers, self.layers, strict=True):
            copy_layer(source, target, count)
        self.tokens = other.tokens[:count]

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
    import torch

    names = cache_type.split(",")
    return getattr(torch, names[0]), getattr(torch, names[-1])


def empty_caches(heads: int, widths: Sequence[int], positions: int, cache_type: str) -> list[Tensor]:
    """Empty keys and values of a layer; neither if there are no ``widths``.

    Raises:
        Unsupported: values of this width have no such type.
    """
    import torch

    from ..hf.decoding import Unsupported
    from ..operators.ops import cache_storage, cache_width

    rows, dtypes = -(-positions // PANEL) * PANEL, dtypes_of(cache_type)
    try:
        shapes = [(1, heads, rows, cache_width(width, dtype)) for width, dtype in zip(widths, dtypes)]
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return [torch.zeros(shape, dtype=cache_storage(dtype)) for shape, dtype in zip(shapes, dtypes)]
