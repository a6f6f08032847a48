"""Scales of a whole model, learned towards the answers of the float model; codes stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from .capture import Stop, hidden_of
from .data import Batch, rows_in_parts, tokens_of
from .learning import Learning, LearningEach, learning_in_place_of, learning_of, put_weights

STEPS = 120  # at the least; each is a batch of the text
RATE = 0.004  # of Adam, at the most: it rises, and falls to zero
_LOGITS = 1 << 27  # at a time
_WARM = 10  # steps in which the rate rises
_POOLED = 1.0  # what means over a text's tokens count, beside the tokens themselves


class Teacher:
    """The answers of a float model to parts of the text: what goes into its head, or its last hidden states."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[Batch]):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        self.head = head if isinstance(head, torch.nn.Linear) else None  # the layer itself: it stays float
        self.parts = [(i, part) for i, batch in enumerate(inputs) for part in self._parts(batch)]
        self.answers = [self._answer(model, part)[0].detach() for _, part in self.parts]

    def _parts(self, batch: Batch) -> list[Batch]:
        """Rows of a batch, so that their logits are not too many at once."""
        if self.head is None:
            return [batch]
        return rows_in_parts(batch, max(1, _LOGITS // (batch["input_ids"].shape[1] * self.head.out_features)))

    def _answer(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The input of the head and its output; of a model without one twice the last hidden states."""
        if self.head is None:
            output = model(**batch)
            states = getattr(output, "last_hidden_state", None)
            states = hidden_of(output) if states is None else states
            states = states if isinstance(states, Tensor) else states[0]
            return states, states
        seen: list[tuple[Tensor, Tensor]] = []

        def take(_: Any, args: Any, output: Any) -> None:
            seen.append((args[0], output))
            raise Stop  # what comes behind it is the same for both models

        handle = model.get_output_embeddings().register_forward_hook(take)
        try:
            model(**batch)
        except Stop:
            pass
        finally:
            handle.remove()
        return seen[0]

    def loss(self, model: torch.nn.Module, i: int) -> Tensor:
        """How far a model's answers to a part are from the float model's, a mean over its tokens.

        The Kullback-Leibler divergence of predictions; of a model without a head for its vocabulary the relative squared
        error of the last hidden states, and the cosine of their means over each text, which embeddings are often made of.
        """
        batch, wanted = self.parts[i][1], self.answers[i]
        found = self._answer(model, batch)[1].float()
        mask = batch.get("attention_mask")
        mask = wanted.new_ones(wanted.shape[:2]) if mask is None or mask.shape != wanted.shape[:2] else mask
        used = mask != 0
        if self.head is not None:
            bias = None if self.head.bias is None else self.head.bias.detach()
            logits = linear(wanted[used], self.head.weight.detach(), bias).float().log_softmax(-1)
            return (logits.exp() * (logits - found[used].log_softmax(-1))).sum(-1).mean()
        wanted = wanted.float()
        error = (found[used] - wanted[used]).square().sum() / wanted[used].square().sum().clamp(min=1e-20)
        if wanted.dim() != 3:
            return error
        ours, theirs = (normalize((states * used[:, :, None]).sum(1), dim=-1) for states in (found, wanted))
        return error + _POOLED * (1 - (ours * theirs).sum(-1)).mean()


def distilled(
    model: torch.nn.Module,
    teacher: Teacher,
    names: Collection[str],
    held: Collection[int],
    tables: Collection[str],
    steps: int | None = None,
    rate: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Packed weights of a quantized model, with which its answers are nearer to the float model's.

    Scales, mins, biases and fitted tables are learned together by gradients through the whole model: the second step of
    EfficientQAT (Chen et al.: "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models", ACL 2025),
    with the float model as the teacher, so that the text needs no labels. Codes stay. Each pass over the text is judged by
    batches that are held back, and so is the result, as it is packed.

    Args:
        model: with packed layers, in eval mode. It is the same afterwards.
        teacher: of the float model.
        names: of the packed layers.
        held: batches that are not learned from.
        tables: layers whose tables of levels may move.
        steps: at the least; each is a part of a batch. None: 120.
        rate: of Adam, at the most. None: 0.004.
        progress: called as ``progress(step, steps)``.

    Returns:
        For each layer its packed weight; empty: nothing that is better on the batches held back.
    """
    layers = {name: model.get_submodule(name) for name in sorted(names)}
    earlier = {name: layer.packed_weight for name, layer in layers.items()}
    learned = [i for i, (batch, _) in enumerate(teacher.parts) if batch not in held]
    judged = [i for i, (batch, _) in enumerate(teacher.parts) if batch in held]

    def error() -> float:
        return sum(float(teacher.loss(model, i)) * tokens_of(teacher.parts[i][1]) for i in judged)

    before = error()
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        shared: dict[int, Learning | LearningEach] = {}
        for name, layer in layers.items():
            key = earlier[name].data_ptr()
            if key not in shared:
                shared[key] = learning_of(earlier[name], name in tables)
            model.set_submodule(name, learning_in_place_of(layer, shared[key]))
        parameters = [parameter for own in shared.values() for parameter in own.parameters()]
        best = _fit(model, teacher, parameters, learned, error, steps or STEPS, rate or RATE, progress)
        for parameter, value in zip(parameters, best, strict=True):
            parameter.data.copy_(value)
        packed = {key: own.pack() for key, own in shared.items()}
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        for parameter in frozen:
            parameter.requires_grad_(True)
    found = {name: packed[weight.data_ptr()] for name, weight in earlier.items()}
    put_weights(model, found)
    after = error()
    put_weights(model, earlier)
    return found if after < before else {}


def _fit(
    model: torch.nn.Module,
    teacher: Teacher,
    parameters: Sequence[torch.nn.Parameter],
    learned: Sequence[int],
    error: Callable[[], float],
    steps: int,
    rate: float,
    progress: Callable[[int, int], None] | None,
) -> list[Tensor]:
    """The parameters after the pass over the text with the least error on what is held back."""
    epochs = -(-steps // len(learned))
    total, done = epochs * len(learned), 0
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARM) * 0.5 * (1 + math.cos(math.pi * step / total))
    )
    order = torch.Generator().manual_seed(0)
    least, best = math.inf, [parameter.detach().clone() for parameter in parameters]
    for _ in range(epochs):
        for at in torch.randperm(len(learned), generator=order).tolist():
            optimizer.zero_grad()
            with torch.enable_grad():
                teacher.loss(model, learned[at]).backward()
            optimizer.step()
            schedule.step()
            done += 1
            if progress is not None:
                progress(done, total)
        now = error()
        if now < least:  # never with NaN
            least, best = now, [parameter.detach().clone() for parameter in parameters]
    return best
