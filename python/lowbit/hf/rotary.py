"""Computes the rotary position embedding of transformers models in one pass with :func:`lowbit.rotary`.

transformers uses about sixteen torch operators per layer. Every model has a function of its own; a few forms differ in the
pairs of numbers and in rounding. So a function is replaced only where the operator has its bits on random inputs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..operators.elementwise import ROTARY_LAYOUTS, is_fused
from .activations import DTYPES
from .rebinding import with_globals

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
# The parameters of these functions.
_PARAMETERS = (("q", "k", "cos", "sin", "unsqueeze_dim"), ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"))


def _same_bits(function: Callable[..., Any], inputs: tuple[Tensor, ...], heads_dim: int, form: tuple[int, bool]) -> bool:
    try:
        expected = function(*inputs, unsqueeze_dim=heads_dim)
        results = torch.ops.lowbit.rotary(*inputs, heads_dim, *form)
    except Exception:  # one of the two does not accept such inputs
        return False
    return (
        isinstance(expected, tuple)
        and len(expected) == 2
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    )


def _form(function: Callable[..., Any], dtype: torch.dtype, table: torch.dtype, rotary: int) -> tuple[int, bool] | None:
    """Layout and rounding of the operator that has the function's bits for these dtypes; None if there are none."""
    random = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 3, 64), (2, 3, 3, 64), (2, 3, rotary), (2, 3, rotary))
    inputs = tuple(torch.randn(shape, generator=random) for shape in shapes)
    inputs = tuple(each.to(kind) for each, kind in zip(inputs, (dtype, dtype, table, table), strict=True))
    for layout in range(len(ROTARY_LAYOUTS)):
        for round_once in (False, True):
            if all(_same_bits(function, inputs, heads_dim, (layout, round_once)) for heads_dim in (1, 2)):
                return layout, round_once
    return None


class Rotary:
    """A function of transformers that applies rotary positions to queries and keys, computed by lowbit where it has its bits.

    Calls with gradients, code of a compiler that fuses operators, and other inputs use the function itself.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        # Dtypes of q and of the tables -> layout and rounding, for whole heads and for the first part of each head.
        self.whole: dict[tuple[torch.dtype, torch.dtype], tuple[int, bool]] = {}
        self.part = dict(self.whole)
        parameters = inspect.signature(function).parameters
        if tuple(parameters) not in _PARAMETERS or parameters["unsqueeze_dim"].default != 1:
            return
        with torch.no_grad():
            for dtype in DTYPES:
                for table in {dtype, torch.float32}:
                    for forms, rotary in ((self.whole, 64), (self.part, 32)):
                        if (form := _form(function, dtype, table, rotary)) is not None:
                            forms[dtype, table] = form

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor]
        if not others and more.keys() <= {"unsqueeze_dim"} and not is_fused() and q.is_cpu:
            forms = self.whole if q.shape[-1] == cos.shape[-1] == k.shape[-1] else self.part
            form = forms.get((q.dtype, cos.dtype))
            gradients = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, cos, sin))
            if form is not None and not gradients:
                try:
                    result = torch.ops.lowbit.rotary(q, k, cos, sin, more.get("unsqueeze_dim", 1), *form)
                    return result
                except ValueError:
                    pass  # shapes or strides that only the function accepts
        result = self.function(q, k, cos, sin, *others, **more)
        return result


@functools.cache
def _rotary_of(function: Callable[..., Any]) -> Rotary:
    return Rotary(function)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a function of transformers if lowbit computes the same bits, else the function itself."""
    rotary = _rotary_of(function)
    return rotary if rotary.whole or rotary.part else function


@functools.cache
def _with_rotary(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of a class with lowbit's rotary positions; unchanged if it calls no function that they replace."""
    inner = inspect.unwrap(forward)  # newer versions of transformers put functions around it that rename arguments
    if not isinstance(inner, FunctionType):
        return forward
    functions = {name: inner.__globals__[name] for name in _NAMES if name in inner.__code__.co_names}
    replaced = {name: each for name, function in functions.items() if (each := fused(function)) is not function}
    try:
        own: Callable[..., Any] = with_globals(forward, replaced) if replaced else forward
    except ValueError:  # a wrapper that holds the function in another way
        return forward
    return own


def _forward(module: torch.nn.Module, *arguments: Any, **more: Any) -> Any:
    forward = type(module).forward
    # Inductor fuses the function with other operators.
    return (forward if is_fused() else _with_rotary(forward))(module, *arguments, **more)


def replace(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Makes lowbit compute the rotary positions of a model's attention by replacing ``forward``; returns these modules."""
    replaced = []
    for module in model.modules():
        forward = type(module).forward
        if "forward" not in vars(module) and _with_rotary(forward) is not forward:
            module.forward = functools.partial(_forward, module)
            replaced.append(module)
    return replaced
