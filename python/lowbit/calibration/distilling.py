"""Distillation: scales of a whole model, learned from the float model's answers; codes are fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .capture import StopRun, last_hidden_of, removed_after
from .data import Inputs, rows_in_parts, tokens_of
from .float_products import FloatLinears, outputs
from .learning import adam_steps, learned_weights

STEPS = 120  # smallest number of steps; each is a batch of the text
RATE = 0.004  # peak learning rate of Adam, with warmup and decay to zero
_FACTOR, _SLOWER = 4, 2  # if the first passes over the text make the model worse, the rate is divided by 4, at most twice
_LOGITS = 1 << 27  # number of logits computed at a time
_WARM = 10  # warmup steps
_POOLED = 1.0  # weight of the loss of means over a text's tokens, relative to that of tokens


class Teacher:
    """The answers of a float model to parts of the text: the inputs of its head, or its last hidden states."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[Inputs]):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self.head = head if isinstance(head, torch.nn.Linear) else None  # this layer stays float
        self.parts = [(i, part) for i, batch in enumerate(inputs) for part in self._parts(batch)]
        self.answers = [self._answer(model, part)[0].detach() for _, part in self.parts]

    def _parts(self, batch: Inputs) -> list[Inputs]:
        """Splits a batch into parts with a limited number of logits."""
        if self.head is None:
            return [batch]
        return rows_in_parts(batch, max(1, _LOGITS // (batch["input_ids"].shape[1] * self.head.out_features)))

    def _answer(self, model: torch.nn.Module, batch: Inputs) -> tuple[Tensor, Tensor]:
        """Input and output of the head; for a model without a head, the last hidden states twice."""
        if self.head is None:
            with FloatLinears():
                states = last_hidden_of(model(**batch))
            states = states if isinstance(states, Tensor) else states[0]
            return states, states
        seen: list[tuple[Tensor, Tensor]] = []

        def take(_: Any, args: Any, output: Any) -> None:
            seen.append((args[0], output))
            raise StopRun  # the rest is the same for both models

        hooks = [model.get_output_embeddings().register_forward_hook(take)]
        with removed_after(hooks), FloatLinears(), suppress(StopRun):
            model(**batch)
        return seen[0]

    def loss(self, model: torch.nn.Module, i: int) -> Tensor:
        """The loss of a model's answers to part i, a mean over its tokens.

        It is the KL divergence of predictions or, for a model without a head, the relative squared error of the last hidden
        states plus the cosine distance of their means over each text, which are often its embeddings.
        """
        batch, expected = self.parts[i][1], self.answers[i]
        answers = self._answer(model, batch)[1].float()
        mask = batch.get("attention_mask")
        mask = expected.new_ones(expected.shape[:2]) if mask is None or mask.shape != expected.shape[:2] else mask
        used = mask != 0
        if self.head is not None:
            bias = None if self.head.bias is None else self.head.bias.detach()
            logits = outputs(expected[used], self.head.weight.detach(), bias).float().log_softmax(-1)
            return (logits.exp() * (logits - answers[used].log_softmax(-1))).sum(-1).mean()
        expected = expected.float()
        error = (answers[used] - expected[used]).square().sum() / expected[used].square().sum().clamp(min=1e-20)
        if expected.dim() != 3:
            return error
        ours, theirs = (normalize((states * used[:, :, None]).sum(1), dim=-1) for states in (answers, expected))
        return error + _POOLED * (1 - (ours * theirs).sum(-1)).mean()


def distilled(
    model: torch.nn.Module,
    teacher: Teacher,
    names: Collection[str],
    held_out: Collection[int],
    tables: Collection[str],
    steps: int | None = None,
    rate: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Learns the scales of a quantized model by distillation from the float model; returns the new packed weights.

    Scales, mins, biases and fitted tables are trained together through the whole model: the second step of
    EfficientQAT (Chen et al.: "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models", ACL 2025),
    with the float model as the teacher, so that the text needs no labels. Codes are fixed. Each pass over the text and the
    packed result are evaluated on held-out batches.

    Args:
        model: with packed layers, in eval mode; unchanged afterwards.
        teacher: the answers of the float model.
        names: the names of the packed layers.
        held_out: indices of the held-out batches.
        tables: layers whose tables of levels are learned.
        steps: smallest number of steps, each a part of a batch. None: 120.
        rate: peak learning rate of Adam. None: 0.004. If the first pass over the text, or the first passes of
            together 10 steps, make the held-out error larger, training starts again with a quarter of it, at most twice.
        progress: called as ``progress(step, steps)``.

    Returns:
        The packed weight of each layer; empty if they are not better on the held-out batches.
    """
    learned = [i for i, (batch, _) in enumerate(teacher.parts) if batch not in held_out]
    judged = [i for i, (batch, _) in enumerate(teacher.parts) if batch in held_out]
    order = torch.Generator().manual_seed(0)

    def error() -> float:
        return sum(float(teacher.loss(model, i)) * tokens_of(teacher.parts[i][1]) for i in judged)

    def epoch() -> list[int]:
        return [learned[at] for at in torch.randperm(len(learned), generator=order).tolist()]

    def fit(parameters: list[torch.nn.Parameter]) -> None:
        """Leaves the parameters as after the pass over the text with the least held-out error."""
        first = [parameter.detach().clone() for parameter in parameters]
        start, least, best, most = error(), math.inf, first, 0
        for slower in range(_SLOWER + 1):
            put(parameters, first)
            peak = (rate or RATE) / _FACTOR**slower
            for done, total in adam_steps(lambda i: teacher.loss(model, i), epoch, parameters, steps or STEPS, peak, _warm):
                most = max(most, done)
                if progress is not None:
                    progress(most, total)
                if done % len(learned):
                    continue
                if (loss := error()) < least:  # false for NaN
                    least, best = loss, [parameter.detach().clone() for parameter in parameters]
                if least >= start and done >= _WARM and slower < _SLOWER:
                    break  # too fast for this model
            else:
                break
        put(parameters, best)

    def put(parameters: list[torch.nn.Parameter], values: list[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)

    return learned_weights(model, sorted(names), tables, fit, error)


def _warm(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.LRScheduler:
    def factor(step: int) -> float:
        return min(1.0, (step + 1) / _WARM) * 0.5 * (1 + math.cos(math.pi * step / total))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
