"""Which method suits layers that have the same inputs: by how much of the text they have seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .gptq import Moments, Solver, best_correction, gptq
from .grid import Config, Quantized, with_table
from .importance import search

# A config, with its table of levels if it has one, and what quantizes rows of the weight.
Quantizer = tuple[Config, Callable[[Tensor], Quantized]]


def choose(
    weights: Mapping[str, Tensor],
    configs: Mapping[str, Config],
    moments: Moments | None,
    method: str,
    options: Mapping[str, Any],
    first_not_finite: Callable[[], str],
) -> tuple[str, dict[str, Quantizer]]:
    """The method for layers with the same inputs, and what quantizes each.

    Args:
        weights: of the layers, [n, k] each.
        configs: of these and others, by the same names.
        moments: of their inputs; None: nothing is known of them. They are joined with those that were held back.
        method: that was asked for, of METHODS.
        options: keyword arguments of :func:`gptq`.
        first_not_finite: names the layer to blame for inputs that are not finite.

    Raises:
        ValueError: the inputs are not finite.
    """
    if moments is not None and moments.tokens == 0:
        moments.join()
    if moments is None or moments.tokens == 0 or not weights:
        return "nearest", _searching(weights, configs, None)
    held = moments.held
    if not all(bool(torch.isfinite(x).all()) for x in (moments.square, *(x for pair in held for x in pair))):
        raise ValueError(f"the inputs of {first_not_finite()} have NaN or infinite values on the calibration text")
    enough = moments.tokens + sum(len(x) for x, _ in held) >= len(moments.importance())
    if moments.square.dim() == 1 or (method in ("auto", "tuned", "distilled") and not enough):
        moments.join()
        return "importance", _searching(weights, configs, moments.importance())
    importance = moments.importance()
    own = {name: with_table(configs[name], weight, importance) for name, weight in weights.items()}
    corrections = {}
    if held:
        trial = Solver(moments)
        for name, weight in weights.items():
            corrections[name] = best_correction(trial, weight, own[name], held)
        del trial
        moments.join()
    if options.keys() - {"correction"}:
        return "gptq", {name: (own[name], partial(gptq, moments=moments, config=own[name], **options)) for name in weights}
    solver = Solver(moments)

    def quantize(rows: Tensor, name: str) -> Quantized:
        return solver.quantize(rows, own[name], options.get("correction", corrections.get(name, 1.0)))

    return "gptq", {name: (own[name], partial(quantize, name=name)) for name in weights}


def _searching(weights: Mapping[str, Tensor], configs: Mapping[str, Config], importance: Tensor | None) -> dict[str, Quantizer]:
    own = {name: with_table(configs[name], weight, importance) for name, weight in weights.items()}
    return {name: (own[name], partial(search, importance=importance, config=own[name])) for name in weights}
