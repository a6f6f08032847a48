"""Runs plans from Python: their weights and caches are torch's tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..operators.cache_layout import by_slot as by_slot
from .lowering import Lowered
from .plan_file import ELEMENT_TYPES, Kind, to_bytes


class Caches:
    """The tensors of a text, in the order of a plan's cache buffers."""

    def __init__(self, places: Sequence[tuple[int, int]], tensors: Mapping[tuple[int, int], Tensor]):
        """
        Args:
            places: layer and slot of each cache buffer.
            tensors: the tensors by layer and slot; ``held`` may be missing.
        """
        self._use([tensors.get(place) for place in places])

    def _use(self, tensors: list[Tensor | None]) -> None:
        self.tensors = tensors
        described = [None if t is None else (t.data_ptr(), ELEMENT_TYPES[t.dtype], list(t.shape)) for t in tensors]
        self.native = _C.PlanCaches(described)

    def __deepcopy__(self, memo: dict[int, Any]) -> Caches:
        copy = object.__new__(Caches)
        copy._use(deepcopy(self.tensors, memo))
        return copy


class Planned:
    """A plan with its weights."""

    def __init__(self, made: Lowered):
        self.plan = made.plan
        self._bytes = to_bytes(made.plan)
        self.weights = made.weights
        self.outputs = made.outputs
        self.places = [(b.index, b.slot) for b in made.plan.buffers if b.kind is Kind.CACHE]
        self._runner: Any = None
        self._made_for: tuple[int, int] | None = None  # process and threads of the runner

    def __deepcopy__(self, memo: dict[int, Any]) -> Planned:
        copy = object.__new__(Planned)
        copy.__dict__ |= vars(self) | {"weights": deepcopy(self.weights, memo), "_runner": None, "_made_for": None}
        return copy

    def measured(self, run: Callable[[], object]) -> dict[str, float]:
        """The seconds that each operator takes in ``run()``."""
        runner = self._ready()
        runner.measure()
        before = runner.times()
        run()
        return {name: seconds - before.get(name, 0.0) for name, seconds in runner.times().items()}

    def _ready(self) -> Any:
        # A forked process has none of its parent's threads, and perhaps a runner in the middle of a call.
        made_for = os.getpid(), torch.get_num_threads()
        if made_for != self._made_for:
            runner = _C.PlanRunner(self._bytes, made_for[1])
            # Aliases keep the memory when a parameter gets other data.
            self._bound = [tensor.detach() for tensor in self.weights.values()]
            for buffer, tensor in zip(self.weights, self._bound, strict=True):
                runner.bind(buffer, (tensor.data_ptr(), tensor.nbytes))
            self._runner, self._made_for = runner, made_for
        return self._runner

    def run(self, inputs: Sequence[Tensor], kept: int, texts: Sequence[tuple[int, int, int, Caches]]) -> list[Tensor]:
        """The outputs of a call.

        Args:
            inputs: contiguous, the first of one row per token.
            kept: the number of rows kept for the output.
            texts: for each text the range of its rows, the number of earlier tokens, and its caches.
        """
        for number, tensor in enumerate(inputs):
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"input {number} of a plan has gaps, or is not on the CPU; expected contiguous memory")
        rows = texts[-1][1]
        outputs = [torch.empty([size.at(rows, kept) for size in view.size], dtype=view.dtype) for view in self.outputs]
        self._ready().run(
            rows,
            kept,
            [(tensor.data_ptr(), tensor.nbytes) for tensor in inputs],
            [(tensor.data_ptr(), tensor.nbytes) for tensor in outputs],
            [(begin, end, start, caches.native) for begin, end, start, caches in texts],
        )
        return outputs
