"""Scales that bring the outputs of a whole block nearer to those of the float block; codes stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import nn, ops
from ..layers import leave_fused_paths
from .grid import stored

STEPS = 96  # at the least; each is a batch of the text
RATE = 0.004  # of Adam, for factors of scales; it falls to zero


class _Learning(torch.nn.Module):
    """A linear layer with the codes of a packed one, and factors of its scales (and mins) to learn."""

    def __init__(self, packed: Tensor, in_features: int):
        super().__init__()
        self.unpacked = unpacked = ops.unpack(packed)
        self.group = unpacked.group_size or in_features
        codes = unpacked.codes.float()
        if unpacked.levels is not None:
            codes = unpacked.levels.float()[unpacked.codes.long()]
        elif unpacked.mapping == "symmetric":
            codes = 2 * codes - 1 if unpacked.bits == 1 else codes - 2 ** (unpacked.bits - 1)
        self.levels = codes
        self.scale = torch.nn.Parameter(torch.ones_like(unpacked.scales))
        self.shift = None if unpacked.mins is None else torch.nn.Parameter(torch.zeros_like(unpacked.mins))
        self.bias = None if unpacked.bias is None else torch.nn.Parameter(unpacked.bias.clone())

    def spread(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.group, 1)[:, : self.levels.shape[1]]

    def forward(self, x: Tensor) -> Tensor:
        scales = self.unpacked.scales * self.scale
        weight = self.levels * self.spread(scales)
        if self.shift is not None:
            weight = weight + self.spread(self.unpacked.mins + self.unpacked.scales * self.shift)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    def pack(self) -> Tensor:
        scales = self.unpacked.scales * self.scale.detach()
        mins = None if self.shift is None else self.unpacked.mins + self.unpacked.scales * self.shift.detach()
        largest = scales.abs().amax(1, keepdim=True)
        if mins is not None:
            largest = torch.maximum(largest, mins.abs().amax(1, keepdim=True))
            mins = stored(mins, largest)
        return ops.pack(
            self.unpacked.codes, stored(scales, largest), mins, None if self.bias is None else self.bias.detach(),
            bits=self.unpacked.bits, group_size=self.unpacked.group_size, mapping=self.unpacked.mapping,
            levels=self.unpacked.levels,
        )  # fmt: skip


def tuned(
    block: torch.nn.Module,
    names: Sequence[str],
    run: Callable[[torch.nn.Module, int], Tensor],
    wanted: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    held: set[int],
    steps: int = STEPS,
    rate: float = RATE,
) -> dict[str, Tensor]:
    """Packed weights of linear layers of a block, with scales that are learnt for the block's outputs.

    By gradients, on the squared error of the outputs (as BRECQ does for roundings; Li et al.: "BRECQ: Pushing the Limit of
    Post-Training Quantization by Block Reconstruction", ICLR 2021). Only scales, mins and biases move, which are few:
    a short text does. Batches that are held back say whether it was worth it.

    Args:
        block: with packed layers.
        names: of those to change.
        run: of a block with these layers, on batch i: the outputs.
        wanted: for each batch, the outputs of the float block.
        masks: for each batch, which tokens count; None: all.
        held: batches that are not learnt from.
        steps: at the least; each is a batch.
        rate: of Adam, at the beginning; it falls to zero.

    Returns:
        For each layer its packed weight; empty: nothing that is better on the batches held back.
    """
    student = copy.deepcopy(block)
    learning = {}
    for name in names:
        layer = student.get_submodule(name)
        learning[name] = _Learning(layer.packed_weight, layer.in_features)
        student.set_submodule(name, learning[name])
    parameters = [p for layer in learning.values() for p in layer.parameters()]
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)

    def error(module: torch.nn.Module, i: int) -> Tensor:
        missed = (run(module, i).float() - wanted[i].float()).square()
        mask = masks[i]
        return missed[mask].sum() if mask is not None and missed.shape[: mask.dim()] == mask.shape else missed.sum()

    before = sum(float(error(block, i)) for i in sorted(held))
    learnt = [i for i in range(len(wanted)) if i not in held]
    size = sum(float(wanted[i].float().square().sum()) for i in learnt) / len(learnt)
    epochs = -(-steps // len(learnt))
    optimiser = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, epochs * len(learnt))
    with torch.enable_grad():
        for _ in range(epochs):
            for i in learnt:
                optimiser.zero_grad()
                (error(student, i) / size).backward()
                optimiser.step()
                schedule.step()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        return {}
    found = {}
    for name, learnt_layer in learning.items():
        layer, packed = block.get_submodule(name), learnt_layer.pack()
        if not torch.equal(packed, layer.packed_weight):  # an expert may have seen no token
            found[name] = packed
        student.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
    leave_fused_paths(student)
    after = sum(float(error(student, i)) for i in sorted(held))
    return found if after < before else {}
