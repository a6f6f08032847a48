"""Scales for the channels of keys, so that caches of few bits lose less, and the inverse scales for queries.

The weights of norms of queries and keys (Gemma 3, Qwen3) differ by large factors between channels. A cache rounds all channels
of a key with about the same error, and a query multiplies some errors by large numbers. Balanced channels have the smallest
error of the sum. The scales are powers of two, so products of queries and keys keep their bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import norms

_NAMES = ("lowbit_query_scales", "lowbit_key_scales")
# Attributes of attention modules: norms of queries and of keys.
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
_MOST = 4  # log2 of the largest scale, so that float16 caches keep their range


def _weights(norm: Any) -> Tensor | None:
    """The factors by which a replaced RMSNorm multiplies the channels of a head; None for other modules."""
    formula = norms.formula_of(norm) if isinstance(norm, torch.nn.Module) else None
    weight = getattr(norm, "weight", None)
    if formula is None or formula.offset is None or weight is None:
        return None
    return weight.detach().float() + formula.offset


def _root_mean_square(weights: Tensor) -> Tensor:
    """The root mean square of each channel's weight and that of the channel that rotary positions mix it with in most models.

    At least a sixteenth of the median, because some weights of Gemma are zero.
    """
    means = weights.unflatten(0, (2, -1)).square().mean(0).sqrt().repeat(2)
    return means.clamp_min(means.median() / 16)


def exponents(query: Tensor, key: Tensor) -> Tensor:
    """log2 of the scales of queries for weights [width] of their norms, integers.

    The error of a score grows with the lengths of key and query. It is smallest if keys are divided by the root of the ratio of
    both weights. A common factor of all scales changes nothing, but decides how each is rounded.
    """
    query, key = _root_mean_square(query), _root_mean_square(key)
    best = (key / query).log2() / 2

    def loss(scales: Tensor) -> Tensor:
        return (key / scales).norm() * (query * scales).norm()

    rounded = [(best - best.median() + step / 8).round().clamp(-_MOST, _MOST) for step in range(8)]
    return min(rounded, key=lambda each: float(loss(each.exp2())))


def _exponents_of(attention: torch.nn.Module) -> Tensor | None:
    """As :func:`exponents`; None if the module has no norms of queries and keys, or nothing to balance."""
    names = next((names for names in _NORMS if hasattr(attention, names[0])), _NORMS[0])
    query, key = (_weights(getattr(attention, name, None)) for name in names)
    width = getattr(attention, "head_dim", None)
    if query is None or key is None or not len(query) == len(key) == width or width % 2:
        return None
    if not (query.isfinite().all() and key.isfinite().all() and query.any() and key.any()):
        return None
    found = exponents(query, key)
    return found if found.max() > found.min() else None


def attach(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Adds scales to the attention modules that have norms of queries and keys, which must be replaced by :mod:`.norms`.

    Returns:
        The modules with scales.
    """
    attached = []
    for module in model.modules():
        if hasattr(module, "layer_idx") and (found := _exponents_of(module)) is not None:
            for name, each in zip(_NAMES, (found, -found), strict=True):  # buffers, which compiled code looks for
                module.register_buffer(name, each.exp2().to(model.dtype), persistent=False)
            attached.append(module)
    return attached


def detach(module: torch.nn.Module) -> None:
    """Undoes :func:`attach` for a module."""
    for name in _NAMES:
        delattr(module, name)


def balanced(attention: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with the scales of an attention module, if it has some."""
    buffers = getattr(attention, "_buffers", {})
    if _NAMES[0] not in buffers:
        return query, key
    return query * buffers[_NAMES[0]], key * buffers[_NAMES[1]]
