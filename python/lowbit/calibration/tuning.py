"""Learns the scales of a block from the float block's outputs; codes are fixed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from .learning import adam_steps, learned_weights

STEPS = 96  # smallest number of steps; each is a batch of the text
RATE = 0.004  # initial learning rate of Adam, for factors of scales; decays to zero


def _to_zero(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total)


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
        names: the names of the layers to change.
        run: computes the outputs of a block with these layers for batch i.
        expected: the outputs of the float block for each batch.
        masks: for each batch, which tokens count; None: all.
        held_out: indices of the held-out batches.
        tables: layers whose tables of levels are learned.
        steps: smallest number of steps, each a batch.
        rate: initial learning rate of Adam; decays to zero.

    Returns:
        The packed weight of each layer; empty if they are not better on the held-out batches.
    """

    def error(i: int) -> Tensor:
        errors = (run(block, i).float() - expected[i].float()).square()
        mask = masks[i]
        return errors[mask].sum() if mask is not None and errors.shape[: mask.dim()] == mask.shape else errors.sum()

    learned = [i for i in range(len(expected)) if i not in held_out]
    size = sum(float(expected[i].float().square().sum()) for i in learned) / len(learned)

    def fit(parameters: list[torch.nn.Parameter]) -> None:
        for _ in adam_steps(lambda i: error(i) / size, lambda: learned, parameters, steps, rate, _to_zero):
            pass

    return learned_weights(block, names, tables, fit, lambda: sum(float(error(i)) for i in sorted(held_out)))
