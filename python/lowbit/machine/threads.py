"""Finds the best number of threads for a model.

Decoding is memory-bound: beyond some number of threads it gets no faster. It gets slower if cores have different speeds, or
if other programs run. The best number depends on the machine and on the layers, so it is measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .. import nn
from ..operators import ops
from .cpus import available_cpus

_LOG = logging.getLogger(__name__)
_SHAPES_BYTES = 128 << 20  # bytes of weights that are made for shapes: more than any cache holds, as in a whole model


@dataclass(frozen=True)
class ThreadTuning:
    """The result of :func:`tune_threads`."""

    threads: int  # the fastest number
    seconds: dict[int, float]  # number of threads -> median time of one pass over all layers


def _candidates(cpus: int) -> list[int]:
    """The thread counts to try: 1 to 8, then eight per doubling, and all CPUs."""
    counts = list(range(1, min(cpus, 8) + 1))
    while counts[-1] < cpus:
        counts.append(min(cpus, counts[-1] + max(1, 1 << (counts[-1].bit_length() - 4))))
    return counts


def _weights(
    model_or_shapes: torch.nn.Module | Iterable[tuple[int, int]], bits: int, group_size: int | None, activation_bits: int
) -> list[torch.Tensor]:
    if isinstance(model_or_shapes, torch.nn.Module):
        weights = [module.packed_weight for module in model_or_shapes.modules() if isinstance(module, nn.Linear)]
        if not weights:
            raise ValueError(
                "the model has no lowbit.nn.Linear; quantize it first, or pass shapes [(out_features, in_features), ...]"
            )
        return weights
    weights = []
    for shape in model_or_shapes:
        if not (isinstance(shape, tuple | list) and len(shape) == 2 and all(isinstance(size, int) for size in shape)):
            raise ValueError(f"a shape is {shape!r}; expected (out_features, in_features)")
        n, k = shape
        codes = torch.zeros(n, k, dtype=torch.uint8, device="cpu")
        groups = 1 if group_size is None else -(-k // group_size)
        scales = torch.ones(n, groups, dtype=torch.float32, device="cpu")
        weights.append(ops.pack(codes, scales, bits=bits, group_size=group_size, activation_bits=activation_bits))
    if not weights:
        raise ValueError("there are no shapes; expected [(out_features, in_features), ...]")
    copies = -(-_SHAPES_BYTES // sum(weight.numel() for weight in weights))
    return weights + [weight.clone() for _ in range(copies - 1) for weight in weights]


def tune_threads(
    model_or_shapes: torch.nn.Module | Iterable[tuple[int, int]],
    *,
    rows: int = 1,
    bits: int = 4,
    group_size: int | None = 32,
    activation_bits: int = 8,
    seconds: float = 2.0,
    apply: bool = True,
) -> ThreadTuning:
    """Finds the number of threads with which the linear layers of a model run fastest.

    Runs all layers one after another, as a decoding step does, with each thread count in turn, up to
    :func:`available_cpus` (above 8 only some numbers). The smallest number within 2 % of the best median wins.

    Args:
        model_or_shapes: a model with ``lowbit.nn.Linear`` layers, or the shapes (out_features, in_features) of layers;
            for shapes, enough weights are made to exceed the caches.
        rows: rows of activations per call; 1 for decoding.
        bits, group_size, activation_bits: for the weights that are made for shapes.
        seconds: approximate time to measure; every number is measured at least three times.
        apply: set the number with ``torch.set_num_threads``.

    Raises:
        ValueError: no packed layer, an invalid shape, or ``rows`` or ``seconds`` that are not positive.
    """
    if rows < 1:
        raise ValueError(f"rows is {rows}; expected 1 or more")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; expected more than 0")
    layers = [(weight, ops.info(weight)) for weight in _weights(model_or_shapes, bits, group_size, activation_bits)]
    inputs = {info.in_features: torch.randn(rows, info.in_features, dtype=torch.float32, device="cpu") for _, info in layers}

    def run() -> float:
        begin = time.perf_counter()
        for weight, info in layers:
            torch.ops.lowbit.linear(inputs[info.in_features], weight, info.out_features)
        return time.perf_counter() - begin

    import statistics  # imported late: every `import torch` imports lowbit, and statistics is slow to import

    before = torch.get_num_threads()
    counts = _candidates(available_cpus())
    times: dict[int, list[float]] = {count: [] for count in counts}
    try:
        end = time.perf_counter() + seconds
        while len(times[counts[-1]]) < 3 or time.perf_counter() < end:
            for count in counts:
                torch.set_num_threads(count)
                if not times[count]:
                    run()  # warm-up: starts the threads and touches the weights
                times[count].append(run())
    finally:
        torch.set_num_threads(before)
    medians = {count: statistics.median(measured) for count, measured in times.items()}
    best = min(medians.values())
    threads = next(count for count in counts if medians[count] <= 1.02 * best)
    if apply:
        torch.set_num_threads(threads)
    _LOG.info("%d threads are fastest, of %s", threads, ", ".join(map(str, medians)))
    return ThreadTuning(threads, medians)
