"""Learns the scales of a block from the float block's outputs; codes are fixed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from .learning import learning_in_place_of, learning_of, put_weights

STEPS = 96  # smallest number of steps; each is a batch of the text
RATE = 0.004  # initial learning rate of Adam, for factors of scales; decays to zero


def _minimize(
    loss: Callable[[int], Tensor], batches: list[int], parameters: list[torch.nn.Parameter], steps: int, rate: float
) -> None:
    """Runs Adam for whole epochs of the batches, at least ``steps`` steps, with a learning rate that decays to zero."""
    epochs = -(-steps // len(batches))
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * len(batches))
    with torch.enable_grad():
        for _ in range(epochs):
            for i in batches:
                optimizer.zero_grad()
                loss(i).backward()
                optimizer.step()
                schedule.step()


def tuned(
    block: torch.nn.Module,
    names: Sequence[str],
    run: Callable[[torch.nn.Module, int], Tensor],
    expected: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    held_out: set[int],
    tables: Collection[str],
    steps: int = STEPS,
    rate: float = RATE,
) -> dict[str, Tensor]:
    """Learns the scales of a block's linear layers and experts; returns the new packed weights.

    Gradient descent minimizes the squared error of the block's outputs (as BRECQ does for rounding; Li et al.: "BRECQ: Pushing
    the Limit of Post-Training Quantization by Block Reconstruction", ICLR 2021). Only scales, mins, biases and fitted tables
    change. They are few, so a short text is enough. The result is evaluated on held-out batches.

    Args:
        block: with packed layers.
        names: of the layers to change.
        run: computes the outputs of a block with these layers for batch i.
        expected: the outputs of the float block for each batch.
        masks: for each batch, which tokens count; None: all.
        held_out: indices of the held-out batches.
        tables: layers whose tables of levels are learned.
        steps: smallest number of steps, each a batch.
        rate: initial learning rate of Adam; decays to zero.

    Returns:
        The changed packed weights by name; empty if they are not better on the held-out batches.
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
        errors = (run(module, i).float() - expected[i].float()).square()
        mask = masks[i]
        return errors[mask].sum() if mask is not None and errors.shape[: mask.dim()] == mask.shape else errors.sum()

    before = sum(float(error(block, i)) for i in sorted(held_out))
    learned = [i for i in range(len(expected)) if i not in held_out]
    size = sum(float(expected[i].float().square().sum()) for i in learned) / len(learned)
    _minimize(lambda i: error(student, i) / size, learned, parameters, steps, rate)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        return {}
    weights = {}
    for name, learned_layer in learning.items():
        layer, packed = student.get_submodule(name).layer, learned_layer.pack()
        if not torch.equal(packed, layer.packed_weight):  # an expert may have had no tokens
            weights[name] = packed
        student.set_submodule(name, layer)
    put_weights(student, weights)
    after = sum(float(error(student, i)) for i in sorted(held_out))
    return weights if after < before else {}
