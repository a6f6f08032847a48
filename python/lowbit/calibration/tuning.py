"""Scales that bring the outputs of a whole block nearer to those of the float block; codes stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from .learning import learning_in_place_of, learning_of, put_weights

STEPS = 96  # at the least; each is a batch of the text
RATE = 0.004  # of Adam, for factors of scales; it falls to zero


def tuned(
    block: torch.nn.Module,
    names: Sequence[str],
    run: Callable[[torch.nn.Module, int], Tensor],
    wanted: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    held: set[int],
    tables: Collection[str],
    steps: int = STEPS,
    rate: float = RATE,
) -> dict[str, Tensor]:
    """Packed weights of linear layers and experts of a block, with scales that are learned for the block's outputs.

    By gradients, on the squared error of the outputs (as BRECQ does for roundings; Li et al.: "BRECQ: Pushing the Limit of
    Post-Training Quantization by Block Reconstruction", ICLR 2021). Only scales, mins, biases and fitted tables move,
    which are few: a short text does. Batches that are held back say whether it was worth it.

    Args:
        block: with packed layers.
        names: of those to change.
        run: of a block with these layers, on batch i: the outputs.
        wanted: for each batch, the outputs of the float block.
        masks: for each batch, which tokens count; None: all.
        held: batches that are not learned from.
        tables: layers whose tables of levels may move.
        steps: at the least; each is a batch.
        rate: of Adam, at the beginning; it falls to zero.

    Returns:
        For each layer its packed weight; empty: nothing that is better on the batches held back.
    """
    student = copy.deepcopy(block)
    learning = {}
    for name in names:
        layer = student.get_submodule(name)
        learning[name] = learning_of(layer.packed_weight, name in tables)
        student.set_submodule(name, learning_in_place_of(layer, learning[name]))
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
    learned = [i for i in range(len(wanted)) if i not in held]
    size = sum(float(wanted[i].float().square().sum()) for i in learned) / len(learned)
    epochs = -(-steps // len(learned))
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * len(learned))
    with torch.enable_grad():
        for _ in range(epochs):
            for i in learned:
                optimizer.zero_grad()
                (error(student, i) / size).backward()
                optimizer.step()
                schedule.step()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        return {}
    found = {}
    for name, learned_layer in learning.items():
        layer, packed = student.get_submodule(name).layer, learned_layer.pack()
        if not torch.equal(packed, layer.packed_weight):  # an expert may have seen no token
            found[name] = packed
        student.set_submodule(name, layer)
    put_weights(student, found)
    after = sum(float(error(student, i)) for i in sorted(held))
    return found if after < before else {}
