"""Chooses the method for layers with the same inputs, by the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from .gptq_solver import Moments, Solver, best_correction, finite, gptq
from .grid import MatrixConfig, Quantized, with_table
from .importance import search

# A config, whose table of levels is fitted, and the function that quantizes rows of the weight (packed_in_bands).
Quantizer = tuple[MatrixConfig, Callable[[Tensor, slice], Quantized]]


def choose(
    weights: Mapping[str, Tensor],
    configs: Mapping[str, MatrixConfig],
    moments: Moments | None,
    method: str,
    options: Mapping[str, Any],
    first_not_finite: Callable[[], str],
) -> tuple[str, dict[str, Quantizer]]:
    """The method for layers with the same inputs, and a quantizer for each.

    Args:
        weights: the weights of the layers, [n, k] each.
        configs: by the same names; may contain further names.
        moments: the moments of their inputs, to which the held-out ones are added; None: unknown.
        method: one of METHODS.
        options: keyword arguments of :func:`gptq`.
        first_not_finite: names the layer whose inputs are not finite.

    Raises:
        ValueError: the inputs are not finite.
    """
    if moments is not None and moments.tokens == 0:
        moments.join()
    if moments is None or moments.tokens == 0 or not weights:
        return "nearest", _searching(weights, configs, None)
    held = moments.held
    if not all(map(finite, (moments.square, *(x for pair in held for x in pair)))):
        raise ValueError(f"the inputs of {first_not_finite()} have NaN or infinite values on the calibration text")
    enough = moments.tokens + sum(len(x) for x, _ in held) >= len(moments.importance())
    if moments.square.dim() == 1 or (method in ("auto", "tuned", "distilled") and not enough):
        moments.join()
        return "importance", _searching(weights, configs, moments.importance())
    importance = moments.importance()
    fitted = {name: with_table(configs[name], weight, importance) for name, weight in weights.items()}
    corrections = {}
    if held:
        if "correction" not in options:
            trial = Solver(moments, quick=True)
            for name, weight in weights.items():
                corrections[name] = best_correction(trial, weight, held)
            del trial
        moments.join()
    if options.keys() - {"correction"}:

        def by_options(weight: Tensor, rows: slice, name: str) -> Quantized:
            return gptq(weight, moments, fitted[name], rows=rows, **options)

        return "gptq", {name: (fitted[name], partial(by_options, name=name)) for name in weights}
    solver = Solver(moments)

    def quantize(weight: Tensor, rows: slice, name: str) -> Quantized:
        correction = options.get("correction", corrections.get(name, 1.0))
        return solver.quantize(weight, fitted[name], correction, rows=rows)

    return "gptq", {name: (fitted[name], partial(quantize, name=name)) for name in weights}


def _searching(
    weights: Mapping[str, Tensor], configs: Mapping[str, MatrixConfig], importance: Tensor | None
) -> dict[str, Quantizer]:
    fitted = {name: with_table(configs[name], weight, importance) for name, weight in weights.items()}

    def quantize(weight: Tensor, _: slice, name: str) -> Quantized:
        return search(weight, importance, fitted[name])

    return {name: (fitted[name], partial(quantize, name=name)) for name in weights}
