"""Collects moments of the inputs of layers, and the order in which a module calls its layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .capture import StopRun, inputs_of
from .gptq_solver import Moments


def rows_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Rows of activations [..., k] as float32 [tokens, k], without padding."""
    if mask is not None and x.shape[:-1] == mask.shape:
        return x[mask].float()
    if mask is not None and x.dim() == 2 and x.shape[0] == mask.numel():
        return x[mask.flatten()].float()
    return x.reshape(-1, x.shape[-1]).float()


def add_to(
    moments: dict[str, Moments],
    name: str,
    x: Tensor,
    y: Tensor | None,
    *,
    diagonal: bool,
    held: float = 0.0,
    weight: Tensor | None = None,
) -> None:
    """Adds inputs of a layer to its moments.

    Args:
        x: float32 [tokens, k].
        y: the same tokens in the float model; None: unknown.
        diagonal: for new moments, whether only mean squares are needed.
        held: fraction of the tokens, at the end, that is held out if ``y`` is known.
        weight: for new moments, the weight [n, k] of the only layer with these inputs, if there is only one.
    """
    k = x.shape[1]
    if name not in moments:
        square = x.new_zeros(k if diagonal else (k, k), dtype=torch.float32)
        # Per token and weight 2nk operations, without k * k.
        weight = weight.float() if weight is not None and y is not None and 2 * len(weight) < k else None
        drift = None if y is None else x.new_zeros(k if weight is None else len(weight), k, dtype=torch.float32)
        moments[name] = Moments(square, drift, 0, weight=weight)
    sums = moments[name]
    count = round(held * len(x))
    if y is not None and count:
        sums.held.append((x[-count:].clone(), y[-count:].clone()))
        x, y = x[:-count], y[:-count]
    sums.add(x, y)


def inputs_in_a_run(module: torch.nn.Module, names: list[str], call: Callable[[], Any]) -> dict[str, list[Tensor]]:
    """Inputs of layers in one run of a module, by name; a run for a single layer ends with its call."""
    inputs: dict[str, list[Tensor]] = {}

    def take(name: str, x: Tensor) -> None:
        inputs.setdefault(name, []).append(x.detach())
        if len(names) == 1 and "expert" not in name:
            raise StopRun

    with inputs_of({name: module.get_submodule(name) for name in names}, take), suppress(StopRun):
        call()
    return inputs


def calls_in_a_run(
    module: torch.nn.Module, names: Iterable[str], call: Callable[[], Any], whole: bool
) -> list[tuple[str, Tensor]]:
    """Layers and their inputs in one run of a module, in the order of the calls.

    Args:
        whole: copy the inputs, once for all layers that are called with the same tensor; otherwise the run ends once all layers
            were called.
    """
    calls: list[tuple[str, Tensor]] = []
    copies: list[tuple[Tensor, int, Tensor]] = []  # a tensor, its version and its copy
    layers = {name: module.get_submodule(name) for name in names}
    missing = set(layers)

    def take(name: str, x: Tensor) -> None:
        if whole:
            version = 0 if x.is_inference() else x._version
            copy = next((copy for other, before, copy in copies if x is other and version == before), None)
            if copy is None:
                copy = x.detach().clone()
                copies.append((x, version, copy))
            x = copy
        calls.append((name, x))
        missing.discard(name)
        if not whole and not missing:
            raise StopRun

    with inputs_of(layers, take), suppress(StopRun):
        call()
    return calls


def sets_of(calls: Iterable[tuple[str, Tensor]], targets: Iterable[str]) -> list[dict[str, str]]:
    """Sets of layers that can be quantized at the same time, in the order of their calls: layer -> a layer with its input.

    All experts of a block count as one layer.

    Args:
        calls: from :func:`calls_in_a_run`.
        targets: the names of all layers.
    """
    sets: list[dict[str, str]] = []
    place: dict[str, int] = {}
    leaders: list[tuple[str, Tensor]] = []
    for name, x in calls:
        if any(name in layers for layers in sets):
            continue
        leader = next((other for other, y in leaders if x is y), None)
        key = _without_expert(name)
        if leader is not None:
            index = place[_without_expert(leader)]
        else:
            leaders.append((name, x))
            leader = name
            if key not in place:
                sets.append({})
            index = place.get(key, len(sets) - 1)
        place.setdefault(key, index)
        sets[index][name] = leader
    # Layers that the first run did not use: experts without tokens, or layers used only in training.
    for name in targets:
        if not any(name in layers for layers in sets):
            key = _without_expert(name)
            if key not in place:
                place[key] = len(sets)
                sets.append({})
            sets[place[key]][name] = name
    return sets


def _without_expert(name: str) -> str:
    return re.sub(r"(experts?)\.\d+\.", r"\1.*.", name)
