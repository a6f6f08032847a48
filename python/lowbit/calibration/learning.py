"""Packed layers with trainable scales, mins, biases and tables of levels, and fixed codes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from .. import nn
from ..packed.groups import in_groups
from ..packed.matrix import pack, unpack
from ..packed.rotation import rotate, rotate_back
from .grid import stored

_LARGEST_LEVEL = 127.0


class _Weight(torch.autograd.Function):
    """Dequantizes a matrix [n, k] from levels by code, scales (and mins) [n, groups], and codes uint8 [n, k].

    Only the codes are saved for the backward pass, and gradients are summed in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, levels: Tensor, scales: Tensor, mins: Tensor | None, codes: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(levels, scales, codes)
        ctx.group = group
        weight = in_groups(levels[codes.int()], group) * scales[:, :, None]
        if mins is not None:
            weight = weight + mins[:, :, None]
        return weight.flatten(1)[:, : codes.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        levels, scales, codes = ctx.saved_tensors
        grouped = in_groups(grads[0], ctx.group)
        to_levels = None
        if ctx.needs_input_grad[0]:
            by_weight = (grouped * scales[:, :, None]).flatten(1)[:, : codes.shape[1]]
            to_levels = torch.bincount(codes.flatten(), by_weight.flatten().double(), minlength=len(levels)).float()
        to_scales = (grouped * in_groups(levels[codes.int()], ctx.group)).sum(2)
        return to_levels, to_scales, grouped.sum(2) if ctx.needs_input_grad[2] else None, None, None


class Learning(torch.nn.Module):
    """Trainable parameters of a packed weight: factors of its scales, shifts of its mins, its bias, and its table.

    Args:
        packed: from :func:`lowbit.pack`.
        table: also train the levels; only for fitted tables, because named tables have fixed levels.
    """

    def __init__(self, packed: Tensor, table: bool):
        super().__init__()
        self.unpacked = unpacked = unpack(packed)
        self.group = unpacked.group_size or unpacked.codes.shape[1]
        self.levels = unpacked.factors()
        self.scale = torch.nn.Parameter(torch.ones_like(unpacked.scales))
        self.shift = None if unpacked.mins is None else torch.nn.Parameter(torch.zeros_like(unpacked.mins))
        self.moved = torch.nn.Parameter(torch.zeros_like(self.levels)) if table and unpacked.levels is not None else None
        self.bias = None if unpacked.bias is None else torch.nn.Parameter(unpacked.bias.clone())

    def values(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The current levels by code, scales and mins."""
        levels = self.levels if self.moved is None else self.levels + _LARGEST_LEVEL * self.moved
        scales = self.unpacked.scales * self.scale
        return levels, scales, None if self.shift is None else self.unpacked.mins + self.unpacked.scales * self.shift

    def linear(self, x: Tensor) -> Tensor:
        weight = _Weight.apply(*self.values(), self.unpacked.codes, self.group)
        rotated = rotate(x, self.unpacked.rotated_inputs).to(x.dtype)
        return linear(rotated, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def embedding(self, indices: Tensor) -> Tensor:
        levels, scales, mins = self.values()
        rows, numbers = indices.unique(return_inverse=True)
        of_rows = None if mins is None else mins[rows]
        weight = _Weight.apply(levels, scales[rows], of_rows, self.unpacked.codes[rows], self.group)
        return embedding(numbers, rotate_back(weight, self.unpacked.rotated_inputs))

    def pack(self) -> Tensor:
        """The packed weight uint8 [bytes], with learned values rounded as the format stores them."""
        unpacked, levels = self.unpacked, self.unpacked.levels
        learned, scales, mins = self.values()
        learned, scales, mins = learned.detach(), scales.detach(), None if mins is None else mins.detach()
        # Unchanged rows keep their stored bits.
        rows = (scales == unpacked.scales).all(1, keepdim=True)
        if mins is not None:
            rows &= (mins == unpacked.mins).all(1, keepdim=True)
        if self.moved is not None and bool(self.moved.any()):
            factor = _LARGEST_LEVEL / learned.abs().max().clamp(min=1e-6)
            levels, scales, rows = (learned * factor).round().to(torch.int8), scales / factor, torch.zeros_like(rows)
        largest = scales.abs().amax(1, keepdim=True)
        if mins is not None:
            largest = torch.maximum(largest, mins.abs().amax(1, keepdim=True))
            mins = torch.where(rows, mins, stored(mins, largest))
        return pack(
            unpacked.codes, torch.where(rows, scales, stored(scales, largest)), mins,
            None if self.bias is None else self.bias.detach(), bits=unpacked.bits, group_size=unpacked.group_size,
            mapping=unpacked.mapping, levels=levels, rotated_inputs=unpacked.rotated_inputs,
            activation_bits=unpacked.activation_bits,
        )  # fmt: skip


class LearningStack(torch.nn.Module):
    """Trainable parameters of the packed weights of experts, uint8 [experts, bytes]."""

    def __init__(self, packed: Tensor, table: bool):
        super().__init__()
        self.experts = torch.nn.ModuleList(Learning(weight, table) for weight in packed)

    def linear(self, x: Tensor, experts: Tensor) -> Tensor:
        """The same as :func:`lowbit.linear_experts`: [..., k] and the e experts of each row, int64 [..., e] -> [..., e, n]."""
        rows, index = x.reshape(-1, x.shape[-1]), experts.flatten()
        outputs, places = [], []
        for number in index.unique().tolist():
            at = (index == number).nonzero()[:, 0]
            # Lookup rather than indexing, because its gradients are summed in a fixed order.
            outputs.append(self.experts[number].linear(embedding(at // experts.shape[-1], rows)))
            places.append(at)
        return embedding(torch.cat(places).argsort(), torch.cat(outputs)).view(*experts.shape, -1)

    def pack(self) -> Tensor:
        return torch.stack([expert.pack() for expert in self.experts])


def learning_of(packed: Tensor, table: bool) -> Learning | LearningStack:
    """Trainable parameters of a packed weight, or of the packed weights of experts."""
    return (Learning if packed.dim() == 1 else LearningStack)(packed, table)


class _InPlaceOf(torch.nn.Module):
    """A layer that computes with a trainable weight, which several layers may share."""

    shared: Any  # a LearningStack for experts, otherwise a Learning

    def __init__(self, layer: nn.Packed, shared: Learning | LearningStack):
        super().__init__()
        self.layer, self.shared = layer, shared

    @property
    def weight(self) -> Tensor:
        """The packed weight, because some blocks read its dtype."""
        return self.layer.weight


class LearningLinear(_InPlaceOf):
    def forward(self, x: Tensor) -> Tensor:
        return self.shared.linear(x)


class LearningEmbedding(_InPlaceOf):
    def forward(self, indices: Tensor) -> Tensor:
        return self.layer.finish(self.shared.embedding(indices).to(self.layer.weight.dtype))


class LearningExperts(_InPlaceOf):
    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        return self.shared.linear(x, experts)


_IN_PLACE_OF: dict[type, type[_InPlaceOf]] = {
    nn.Linear: LearningLinear, nn.Embedding: LearningEmbedding, nn.LinearExperts: LearningExperts
}  # fmt: skip


def learning_in_place_of(layer: nn.Packed, shared: Learning | LearningStack) -> torch.nn.Module:
    """The trainable module for a packed layer."""
    return _IN_PLACE_OF[type(layer)](layer, shared)


def put_weights(module: torch.nn.Module, packed: dict[str, Tensor]) -> None:
    """Replaces weights of packed layers by others of the same shape, width and group size."""
    for name, weight in packed.items():
        layer = module.get_submodule(name)
        layer.packed_weight = weight
        layer.verify()  # reads the new table of levels


def learned_weights(
    module: torch.nn.Module,
    names: Iterable[str],
    tables: Collection[str],
    fit: Callable[[list[torch.nn.Parameter]], None],
    error: Callable[[], float],
) -> dict[str, Tensor]:
    """Learns scales, mins, biases and fitted tables of packed layers; the module is unchanged afterwards.

    Args:
        names: the names of the layers.
        tables: layers whose tables of levels are learned.
        fit: changes the trainable parameters, with which the layers compute meanwhile.
        error: returns the error of the module on held-out batches.

    Returns:
        The packed weight of each layer; empty if they are not better on the held-out batches.
    """
    layers = {name: module.get_submodule(name) for name in names}
    earlier = {name: layer.packed_weight for name, layer in layers.items()}
    before = error()
    frozen = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        shared: dict[int, Learning | LearningStack] = {}
        for name, layer in layers.items():
            key = earlier[name].data_ptr()
            if key not in shared:
                shared[key] = learning_of(earlier[name], name in tables)
            module.set_submodule(name, learning_in_place_of(layer, shared[key]))
        parameters = [parameter for learned in shared.values() for parameter in learned.parameters()]
        fit(parameters)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
            return {}
        packed = {key: learned.pack() for key, learned in shared.items()}
    finally:
        for name, layer in layers.items():
            module.set_submodule(name, layer)
        for parameter in frozen:
            parameter.requires_grad_(True)
    weights = {name: packed[weight.data_ptr()] for name, weight in earlier.items()}
    put_weights(module, weights)
    after = error()
    put_weights(module, earlier)
    return weights if after < before else {}


def adam_steps(
    loss: Callable[[int], Tensor],
    epoch: Callable[[], Sequence[int]],
    parameters: list[torch.nn.Parameter],
    steps: int,
    rate: float,
    schedule: Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler],
) -> Iterator[tuple[int, int]]:
    """Runs Adam for whole epochs; yields the number of steps done and their total after each step.

    Args:
        loss: returns the loss of part i.
        epoch: the parts of the next epoch, in their order.
        steps: smallest number of steps.
        rate: learning rate, which ``schedule`` (optimizer, total) changes.
    """
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.95))
    parts = epoch()
    epochs = -(-steps // len(parts))
    total, done = epochs * len(parts), 0
    scheduler = schedule(optimizer, total)
    while True:
        for i in parts:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss(i).backward()
            optimizer.step()
            scheduler.step()
            done += 1
            yield done, total
        if done == total:
            return
        parts = epoch()
