"""Experts of a mixture whose weights are one tensor: each is calibrated with the tokens that are routed to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import nn
from .._experts import Experts, between, experts_of
from .capture import MeanSquares, Stop
from .data import Batch, mask_of
from .grid import Config


def holders_in(module: torch.nn.Module, targets: Mapping[str, Config], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """The modules that hold experts to calibrate, in the order of the model, with the names of their parameters.

    Args:
        targets: by qualified names in the model.
        prefix: the module's own name and a dot, or "".
    """
    for name, holder in module.named_modules():
        at = f"{prefix}{name}." if name else prefix
        leaves = [leaf for leaf in experts_of(holder) if at + leaf in targets]
        if leaves:
            yield name, leaves


@contextmanager
def _routing_of(holder: torch.nn.Module, take: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Calls ``take(hidden states, experts of each)`` whenever the holder is about to run."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        named = (kwargs[name] for name in ("top_k_index", "router_indices") if name in kwargs)
        take(hidden, args[1] if len(args) > 1 else next(named))

    handle = holder.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _without_padding(hidden: Tensor, index: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Hidden states [tokens, hidden], and the experts of each [tokens, e]."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    index = index.reshape(len(rows), -1)
    if mask is None or mask.numel() != len(rows):
        return rows, index
    return rows[mask.flatten()], index[mask.flatten()]


def routed(holder: torch.nn.Module, runs: Iterable[tuple[Callable[[], Any], Tensor | None]]) -> tuple[Tensor, Tensor]:
    """What goes into a module of experts while a model runs.

    Args:
        runs: each with the mask of its tokens, or None.

    Returns:
        float32 [tokens, hidden], and int64 [tokens, e], the experts of each.
    """
    rows: list[Tensor] = []
    chosen: list[Tensor] = []
    for run, mask in runs:

        def take(hidden: Tensor, index: Tensor, mask: Tensor | None = mask) -> None:
            own, experts = _without_padding(hidden, index, mask)
            rows.append(own.float().clone())
            chosen.append(experts.clone())
            raise Stop  # what comes behind is not needed

        with _routing_of(holder, take):
            try:
                run()
            except Stop:
                pass
    return torch.cat(rows), torch.cat(chosen)


def inputs_of_expert(holder: torch.nn.Module, number: int, rows: Tensor, chosen: Tensor, first: Tensor | None) -> Tensor:
    """The inputs of one expert's matrix, float32 [tokens routed to it, k].

    Args:
        first: the packed weights of the matrices before it, uint8 [experts, bytes]; None: it is the first.
    """
    own = rows[(chosen == number).any(1)]
    if first is None or not len(own):
        return own
    return between(holder, nn.Linear(first[number])(own)).float()


def weight_of(experts: Experts, number: int) -> tuple[Tensor, Tensor | None]:
    """The matrix [out, in] of an expert, and its bias."""
    bias = experts.bias
    return experts.weight[number].detach().contiguous(), None if bias is None else bias[number].detach()


def mean_squares(model: torch.nn.Module, targets: Mapping[str, Config], batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Of what goes into the matrices of experts in a float model: for each tensor float32 [inputs], a mean over its experts.

    Args:
        targets: by the tensors' qualified names.
        batches: arguments of the model.
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
