"""What the layers of a module get while it runs: their moments, and the order of their calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .capture import Stop, inputs_of
from .gptq import Moments
from .grid import Config

HELD = 1024  # the most tokens that are held back, by which choices are made, ...
HELD_PART = 4  # ... and which part of the text they are at the most


def rows_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """[..., k] -> float32 [tokens, k], without padding."""
    if mask is not None and x.shape[:-1] == mask.shape:
        return x[mask].float()
    if mask is not None and x.dim() == 2 and x.shape[0] == mask.numel():
        return x[mask.flatten()].float()
    return x.reshape(-1, x.shape[-1]).float()


def part_held(chosen: bool, alone: bool) -> float:
    """The part of a batch's tokens that is held back: all, or of a batch that is the only one its end."""
    return (1 / HELD_PART if alone else 1.0) if chosen else 0.0


def add_to(moments: dict[str, Moments], name: str, x: Tensor, y: Tensor | None, *, diagonal: bool, held: float = 0.0) -> None:
    """Adds inputs of a layer to its moments; the last ones are held back, a part of `held`, if there are float ones."""
    k = x.shape[1]
    if name not in moments:
        square = x.new_zeros(k if diagonal else (k, k), dtype=torch.float32)
        moments[name] = Moments(square, None if y is None else x.new_zeros(k, k, dtype=torch.float32), 0)
    known = moments[name]
    count = round(held * len(x))
    if y is not None and count:
        known.held.append((x[-count:].clone(), y[-count:].clone()))
        x, y = x[:-count], y[:-count]
    known.add(x, y)


def inputs_in_a_run(module: torch.nn.Module, names: list[str], call: Callable[[], Any]) -> dict[str, list[Tensor]]:
    """What goes into some layers in one run, which ends when there is nothing more to come."""
    found: dict[str, list[Tensor]] = {}

    def take(name: str, x: Tensor) -> None:
        found.setdefault(name, []).append(x.detach())
        if len(names) == 1 and "expert" not in name:
            raise Stop

    with inputs_of({name: module.get_submodule(name) for name in names}, take):
        try:
            call()
        except Stop:
            pass
    return found


def sets_of(module: torch.nn.Module, targets: Mapping[str, Config], call: Callable[[], Any]) -> Iterable[dict[str, str]]:
    """Layers that can be quantized at the same time, in the order of their calls: layer -> one with the same input.

    All experts of a block are one layer as far as the order goes.
    """
    order: list[tuple[str, Tensor]] = []
    missing = set(targets)

    def take(name: str, x: Tensor) -> None:
        order.append((name, x))
        missing.discard(name)
        if not missing:
            raise Stop

    with inputs_of({name: module.get_submodule(name) for name in targets}, take):
        try:
            call()
        except Stop:
            pass
    sets: list[dict[str, str]] = []
    place: dict[str, int] = {}
    leaders: list[tuple[str, Tensor]] = []
    for name, x in order:
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
    # Layers that the first run did not use: experts that got no token, or what is used in training only.
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
