"""Computes packed layers with the same input (q, k and v; gate and up) by one ``lowbit.linears`` call, which quantizes it once.

transformers calls these layers one after the other. While a decoder uses the model, the first of them computes the outputs of
all, and the others return theirs. This applies only to several rows: with one row, separate calls are faster
(docs/measurements/design.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import nn
from ..operators import ops

_MOST = 16  # matrices per call


def _has_rows(x: Tensor) -> bool:
    """Whether x has several rows; in traced code a dynamic size counts as several."""
    return x.dim() > 1 and bool(statically_known_true(x.shape[-2] > 1))


class SharedInput:
    """Makes layers with the same input, listed in the order of their calls, compute together, until :meth:`end`."""

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers
        self._out_features = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self._replace(0, layers[0])
        for number, layer in enumerate(layers[1:], 1):
            self._replace(number, layer)

    def _replace(self, number: int, layer: nn.Linear) -> None:
        def first(x: Tensor) -> Tensor:
            if not _has_rows(x):
                return ops.linear(x, layer.packed_weight, self._out_features[0])
            self._outputs = ops.linears(x, [layer.packed_weight for layer in self.layers], self._out_features)
            self._input = x
            return self._outputs[0]

        def later(x: Tensor) -> Tensor:
            if x is not self._input:
                return ops.linear(x, layer.packed_weight, self._out_features[number])
            output = self._outputs[number]
            if number == len(self.layers) - 1:
                self._input, self._outputs = None, ()  # keeps no tensor alive after the call
            return output

        layer.forward = later if number else first  # type: ignore[method-assign]

    def end(self) -> None:
        self._input, self._outputs = None, ()
        for layer in self.layers:
            del layer.forward


class _Calls:
    """Records layers with their inputs, and copies of the inputs, because a model might modify one between two calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def __call__(self, layer: nn.Linear, arguments: tuple[Tensor, ...]) -> None:
        self.seen.append((layer, arguments[0], arguments[0].clone()))


@contextmanager
def observed(model: torch.nn.Module) -> Iterator[list[list[nn.Linear]]]:
    """A context that yields a list; a call of the model inside fills it with the groups of layers for :class:`SharedInput`."""
    groups: list[list[nn.Linear]] = []
    calls = _Calls()
    candidates = [
        child
        for module in model.modules()
        for child in module.children()
        if type(child) is nn.Linear and child.input_order is None and "forward" not in vars(child)
    ]
    hooks = [layer.register_forward_pre_hook(calls) for layer in dict.fromkeys(candidates)]
    try:
        yield groups
    finally:
        for hook in hooks:
            hook.remove()
    times = {id(layer): sum(other is layer for other, *_ in calls.seen) for layer in candidates}
    for module in model.modules():
        own = {id(child) for child in module.children()}
        called = [call for call in calls.seen if id(call[0]) in own and times[id(call[0])] == 1]
        while called:
            (_, x, value), later = called[0], called[1:]
            same = [call for call in later if call[1] is x and torch.equal(call[2], value)]
            if 0 < len(same) < _MOST:
                groups.append([called[0][0], *(call[0] for call in same)])
            called = [call for call in later if not any(call is other for other in same)]
