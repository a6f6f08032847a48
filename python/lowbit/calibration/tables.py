"""Second moments for quantizing the embedding tables of embedding models by GPTQ."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .capture import last_hidden_of
from .collect import add_to, rows_of
from .data import Inputs, mask_of, rows_in_parts, tokens_of
from .gptq_solver import Moments

DAMPING = 0.1  # of GPTQ: the moments are estimated from few draws, and a table's errors are large
_TOKENS = 512  # per backward pass, unless a text is longer


def moments_of_tables(model: torch.nn.Module, inputs: Sequence[Inputs], names: Collection[str]) -> dict[str, Moments]:
    """Second moments of the gradients of a float model's answers with respect to the outputs of its tables.

    For a table they play the role of the second moments of inputs of a linear layer: an error e of a row changes the answers
    by e^T H e, so :func:`lowbit.calibration.gptq_solver.gptq` compensates for errors of the first features in later ones.
    H is J^T J of the answers' derivatives J, estimated with random projections of the answers (Hutchinson: "A stochastic
    estimator of the trace of the influence matrix", 1989). H is the same for all rows, so rows that do not occur in the text
    improve too.

    The answers are last hidden states and the directions of their means over each text, as in
    :class:`lowbit.calibration.distilling.Teacher`.

    Args:
        model: a float model in eval mode.
        inputs: the text.
        names: the names of embedding tables.

    Returns:
        The moments of each table that the answers depend on; empty for a model with a head, which is often tied to its table.
    """
    if not names or getattr(model, "get_output_embeddings", lambda: None)() is not None:
        return {}
    moments: dict[str, Moments] = {}
    generator = torch.Generator().manual_seed(0)
    seen: list[tuple[str, Tensor]] = []  # a table may be used several times in a run

    def hook(name: str) -> Callable[..., Tensor]:
        def give(_: Any, __: Any, output: Tensor) -> Tensor:
            seen.append((name, output.detach().requires_grad_(True)))
            return seen[-1][1].clone()  # a copy, which the model may change in place

        return give

    with ExitStack() as stack:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                stack.callback(parameter.requires_grad_, True)
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(hook(name)).remove)
        for batch in inputs:
            for part in rows_in_parts(batch, max(1, _TOKENS // batch["input_ids"].shape[1])):
                seen.clear()
                with torch.enable_grad():
                    answer = _projected(model, part, generator)
                    if answer is None or not answer.requires_grad:
                        return {}
                    leaves = [values for _, values in seen]
                    gradients = torch.autograd.grad(answer, leaves, allow_unused=True)
                for (name, _), gradient in zip(seen, gradients, strict=True):
                    if gradient is not None:
                        rows = rows_of(gradient, mask_of(part))
                        add_to(moments, name, rows, None, diagonal=False)
    return {name: sums for name, sums in moments.items() if bool(torch.isfinite(sums.square).all())}


def _projected(model: torch.nn.Module, batch: Inputs, generator: torch.Generator) -> Tensor | None:
    """A random projection of the answers, the second moments of whose gradients estimate H; None: no answers."""
    states = last_hidden_of(model(**batch))
    if not isinstance(states, Tensor) or states.dim() != 3:
        return None
    states, mask = states.float(), mask_of(batch)
    if mask is not None and mask.shape == states.shape[:2]:
        states = states * mask[:, :, None]
    of_tokens = torch.randn(states.shape, generator=generator, dtype=torch.float32)
    answer = (states * of_tokens).sum() / states.detach().norm().clamp(min=1e-20)
    means = normalize(states.sum(1), dim=-1)
    of_texts = torch.randn(means.shape, generator=generator, dtype=torch.float32)
    return math.sqrt(tokens_of(batch)) * (answer + math.sqrt(0.5 / len(means)) * (means * of_texts).sum())
