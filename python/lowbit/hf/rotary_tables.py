"""Sines and cosines of rotary positions, the same on every CPU, computed once for all positions of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _C

_TYPES = {"default", "linear", "llama3", "yarn"}  # those that do not change with the length of a text
_FREQUENCIES = "_inv_freq"


class _OwnSines(TorchDispatchMode):
    """Computes cos and sin by lowbit, whose results do not depend on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        quarter = {torch.ops.aten.sin.default: 0, torch.ops.aten.cos.default: 1}.get(func)
        if quarter is None or args[0].dtype is not torch.float32:
            return func(*args, **(kwargs or {}))
        x = args[0].contiguous()
        result = torch.empty_like(x)
        _C.sine(x.data_ptr(), x.numel(), quarter, result.data_ptr())
        return result


class RotaryTable(torch.nn.Module):
    """Replaces a model's rotary embedding while a decoder uses it."""

    computes = False  # while a plan is recorded: the model's own operators, which need no table

    def __init__(self, original: torch.nn.Module, tables: Mapping[str, tuple[Tensor, Tensor]]):
        """
        Args:
            tables: for each type of layer, or "" if the model has one type, cosines and sines [1, positions, rotary].
        """
        super().__init__()
        self._original = (original,)  # in a tuple, so that it is not registered as a submodule
        self._kinds = tuple(tables)
        for kind, (cos, sin) in tables.items():
            self.register_buffer(f"{kind}cos", cos[0].clone(), persistent=False)
            self.register_buffer(f"{kind}sin", sin[0].clone(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        kind = layer_type or ""
        if RotaryTable.computes:
            return self._original[0](x, position_ids, *([layer_type] if kind else []))
        cos, sin = (self.get_buffer(kind + name) for name in ("cos", "sin"))
        if torch.compiler.is_compiling():
            # The decoder or attention refuses positions beyond the caches. Without the clamp compiled code would abort
            # the process here.
            position_ids = position_ids.clamp(0, cos.shape[0] - 1)
        if position_ids.dim() == 3:  # time, height and width, which are equal for text
            position_ids = position_ids[0]
        try:
            return cos[position_ids], sin[position_ids]
        except IndexError as error:  # not reached by the decoder
            raise ValueError("this model belongs to a lowbit.llm.Decoder; call the decoder, or its release() first") from error


@contextmanager
def computed() -> Iterator[None]:
    """A context in which models compute sines and cosines instead of looking them up."""
    RotaryTable.computes = True
    try:
        yield
    finally:
        RotaryTable.computes = False


def tabulated(rotary: Any, positions: int, dtype: torch.dtype) -> RotaryTable | None:
    """The table of a rotary embedding for the first positions; None if it changes with the text, or has another form."""
    types = getattr(rotary, "rope_type", None)
    found = types.values() if isinstance(types, dict) else [types]
    if not isinstance(rotary, torch.nn.Module) or not {*map(str, found)} <= _TYPES:
        return None
    parameters = list(signature(rotary.forward).parameters)
    if parameters == ["x", "position_ids"]:
        kinds = [""]
    elif parameters == ["x", "position_ids", "layer_type"]:
        kinds = [name.removesuffix(_FREQUENCIES) for name, _ in rotary.named_buffers() if name.endswith(_FREQUENCIES)]
        kinds = [kind for kind in kinds if not kind.endswith("_original")]
    else:
        return None
    x, places, tables = torch.zeros(1, dtype=dtype), torch.arange(positions)[None], {}
    with torch.no_grad(), _OwnSines():
        for kind in kinds:
            table = rotary(x, places, *([kind] if kind else []))
            if not isinstance(table, tuple) or len(table) != 2:
                return None  # complex numbers
            tables[kind] = table
    return RotaryTable(rotary, tables)
