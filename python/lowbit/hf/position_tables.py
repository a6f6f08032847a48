"""Position embeddings that count positions by themselves (BART, Marian, Whisper): lets a decoder set the positions."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor


class Positions:
    """The positions of the tokens in a call."""

    now: Tensor | None = None


class Table:
    """Makes a position embedding look up the positions of the current call, until :meth:`end`."""

    def __init__(self, module: torch.nn.Module, positions: Positions):
        self.module = module
        own = module.forward

        def forward(
            inputs: Any, cache_length: int = 0, position_ids: Tensor | None = None, past_key_values_length: int = 0
        ) -> Any:
            return own(inputs, position_ids=positions.now)

        module.forward = forward

    def end(self) -> None:
        del self.module.forward


def find(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The position embeddings of a model that :class:`Table` supports."""
    for module in model.modules():
        if "Positional" in type(module).__name__ and "forward" not in vars(module):
            names = signature(module.forward).parameters
            # The first has two names: that of transformers 5.24 is the shorter one.
            if names.keys() & {"cache_length", "past_key_values_length"} and "position_ids" in names:
                yield module
