"""Collects calibration inputs of experts stored in one tensor: for each expert, the tokens that are routed to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import nn
from ..layers.expert_stacks import Experts, between, experts_of
from .capture import MeanSquares, StopRun, removed_after
from .data import Inputs, mask_of
from .grid import MatrixConfig


def holders_in(module: torch.nn.Module, targets: Mapping[str, MatrixConfig], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the modules that hold experts to calibrate, with the names of their parameters, in the model's order.

    Args:
        targets: configs by names in the model.
        prefix: the prefix of the module's names in the model.
    """
    for name, holder in module.named_modules():
        path = f"{prefix}{name}." if name else prefix
        leaves = [leaf for leaf in experts_of(holder) if path + leaf in targets]
        if leaves:
            yield name, leaves


def _routing_of(holder: torch.nn.Module, take: Callable[[Tensor, Tensor], None]) -> AbstractContextManager[None]:
    """Calls ``take(hidden states, experts of each)`` before each run of the holder."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        named = (kwargs[name] for name in ("top_k_index", "router_indices") if name in kwargs)
        take(hidden, args[1] if len(args) > 1 else next(named))

    return removed_after([holder.register_forward_pre_hook(hook, with_kwargs=True)])


def _without_padding(hidden: Tensor, index: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Hidden states [tokens, hidden] and their experts [tokens, e], without padding."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    index = index.reshape(len(rows), -1)
    if mask is None or mask.numel() != len(rows):
        return rows, index
    return rows[mask.flatten()], index[mask.flatten()]


def routed(holder: torch.nn.Module, runs: Iterable[tuple[Callable[[], Any], Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Hidden states that enter a module of experts, float32 [tokens, hidden], and their experts, int64 [tokens, e].

    Args:
        runs: functions that run the model on a batch, with the mask of its tokens or None.
    """
    rows: list[Tensor] = []
    chosen: list[Tensor] = []
    for run, mask in runs:

        def take(hidden: Tensor, index: Tensor, mask: Tensor | None = mask) -> None:
            states, experts = _without_padding(hidden, index, mask)
            rows.append(states.float().clone())
            chosen.append(experts.clone())
            raise StopRun

        with _routing_of(holder, take), suppress(StopRun):
            run()
    return torch.cat(rows), torch.cat(chosen)


def inputs_of_expert(holder: torch.nn.Module, number: int, rows: Tensor, chosen: Tensor, first: Tensor | None) -> Tensor:
    """Inputs of an expert's matrix, float32 [tokens, k].

    Args:
        rows, chosen: from :func:`routed`.
        first: packed weights of the experts' first matrices, uint8 [experts, bytes], for the second; None: for the first.
    """
    states = rows[(chosen == number).any(1)]
    if first is None or not len(states):
        return states
    return between(holder, nn.Linear(first[number])(states)).float()


def weight_of(experts: Experts, number: int) -> tuple[Tensor, Tensor | None]:
    """The matrix [out, in] of an expert, and its bias [out] or None."""
    bias = experts.bias
    return experts.weight[number].detach().contiguous(), None if bias is None else bias[number].detach()


def mean_squares(model: torch.nn.Module, targets: Mapping[str, MatrixConfig], batches: Iterable[Inputs]) -> dict[str, Tensor]:
    """Mean squares of the inputs of experts' matrices in a float model, float32 [k] for each tensor of experts.

    Args:
        targets: configs by the tensors' names.
        batches: inputs of the model.
    """
    squares = MeanSquares()
    mask: Tensor | None = None  # of the batch that runs

    def take(at: str, holder: torch.nn.Module, hidden: Tensor, index: Tensor) -> None:
        rows, index = _without_padding(hidden, index, mask)
        first, second = experts_of(holder).items()
        squares.add(f"{at}{first[0]}", rows)
        for number in index.unique().tolist():
            weight, bias = weight_of(first[1], number)
            squares.add(f"{at}{second[0]}", between(holder, linear(rows[(index == number).any(1)], weight, bias)))

    with ExitStack() as hooks:
        for name, _ in holders_in(model, targets, ""):
            holder = model.get_submodule(name)
            hooks.enter_context(_routing_of(holder, partial(take, f"{name}." if name else "", holder)))
        for batch in batches:
            mask = mask_of(batch)
            model(**batch)
    return {name: mean for name, mean in squares.means().items() if name in targets}
