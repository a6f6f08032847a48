"""Operators between linear layers: attention without caches, activation functions, norms and rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .recurrence import _without_gradients

# In the order of kernels/elementwise.h.
ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_quick", "silu")
ROTARY_LAYOUTS = ("halves", "adjacent", "adjacent_half_table", "adjacent_to_halves")

_alone = False  # the traced program will run its operators one by one


@contextmanager
def each_operator_alone() -> Iterator[None]:
    """A context for traces of programs that run their operators one by one, such as ExecuTorch's."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def is_fused() -> bool:
    """Whether a compiler is tracing; it fuses torch's elementwise operators with each other, but not with lowbit's."""
    return torch.compiler.is_compiling() and not _alone


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None = None, *, scale: float | None = None, softcap: float = 0.0
) -> Tensor:
    """Attention without caches that skips padding.

    The result of a text is bitwise independent of its padding, the other texts of the batch, the CPU and the thread count.

    Args:
        q: [batch, heads, positions, width] float32, bfloat16 or float16; the last dimension has stride 1.
        k: [batch, kv_heads, length, width] of q's dtype, likewise. ``heads`` is a multiple of ``kv_heads``. Widths are
            multiples of 16 up to 512.
        v: [batch, kv_heads, length, value_width], likewise.
        bounds: [batch, positions, 3] int32, contiguous; requires ``length`` equal to ``positions``. For each position: 1, or 0
            for padding; the first position that it attends to; and the position after the last. The latter two never decrease
            within a text. None: each query attends to all keys.
        scale: factor of the products of q and k; None: ``width ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: no soft cap.

    Returns:
        [batch, positions, heads, value_width] of q's dtype, contiguous; zeros for padding. It has no gradients.

    Raises:
        RuntimeError: gradients are requested.
        ValueError: a wrong dtype, shape, stride or device, bounds out of range, or a number out of its range.
    """
    _without_gradients("masked_attention", q, k, v)
    scale = max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale
    return torch.ops.lowbit.masked_attention(q, k, v, bounds, scale, softcap)


def activate(x: Tensor, activation: str, gate: Tensor | None = None) -> Tensor:
    """Applies an activation function elementwise and, if a gate is given, multiplies by it.

    Computed in float32 and rounded once. Each result depends, bit for bit, only on its own element.

    Args:
        x: [..., n] float32, bfloat16 or float16; equidistant rows, stride 1 in the last dimension.
        activation: "gelu" (within 2e-7 of x times the normal distribution's Phi, relative to x), "gelu_tanh" (the usual
            approximation by tanh), "gelu_quick" (``x * sigmoid(1.702 * x)``) or "silu".
        gate: a factor with the shape and dtype of x.

    Returns:
        A contiguous tensor with the shape and dtype of x. It has no gradients.

    Raises:
        RuntimeError: gradients are requested.
        ValueError: an unknown activation, or a wrong dtype, shape, stride or device.
    """
    _without_gradients("activate", x, gate)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    return torch.ops.lowbit.activate(x, gate, ACTIVATIONS.index(activation))


def rms_norm(x: Tensor, weight: Tensor | None = None, *, epsilon: float = 1e-6, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x ** 2) + epsilon) * (weight_offset + weight)`` over the last dimension (Zhang and Sennrich, 2019).

    Computed in float32 and rounded once. Each row of the result depends, bit for bit, only on its row of x.

    Args:
        x: [..., n] float32, bfloat16 or float16; equidistant rows, stride 1 in the last dimension.
        weight: [n] of x's dtype, contiguous; None: 1.
        epsilon: 0 to 1.
        weight_offset: added to each weight, -1 to 1. Gemma stores its weights minus 1.

    Returns:
        A contiguous tensor with the shape and dtype of x. It has no gradients.

    Raises:
        RuntimeError: gradients are requested.
        ValueError: a wrong dtype, shape, stride or device, or a number out of its range.
    """
    _without_gradients("rms_norm", x, weight)
    return torch.ops.lowbit.rms_norm(x, weight, epsilon, weight_offset)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, epsilon: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension (Ba et al., 2016): ``(x - mean) / sqrt(variance + epsilon) * weight + bias``.

    The mean comes first, then the variance as the mean of squared differences. Computed in float32 and rounded once. Each row
    of the result depends, bit for bit, only on its row of x.

    Args:
        x: [..., n] float32, bfloat16 or float16; equidistant rows, stride 1 in the last dimension.
        weight: [n] of x's dtype, contiguous; None: 1.
        bias: likewise; None: 0.
        epsilon: 0 to 1.

    Returns:
        A contiguous tensor with the shape and dtype of x. It has no gradients.

    Raises:
        RuntimeError: gradients are requested.
        ValueError: a wrong dtype, shape, stride or device, or an epsilon out of its range.
    """
    _without_gradients("layer_norm", x, weight, bias)
    return torch.ops.lowbit.layer_norm(x, weight, bias, epsilon)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int = 1, layout: str = "halves", round_once: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., RoFormer, 2021) of queries and keys.

    The first ``rotary`` numbers of a head are pairs (a, b), which become ``a * cos - b * sin`` and ``b * cos + a * sin``; the
    others are copied. The bits are those of separate torch operators: each product and each sum is rounded to q's dtype.

    Args:
        q: [batch, heads, positions, width] float32, bfloat16 or float16; the last dimension has stride 1.
        k: [batch, kv_heads, positions, width of k] of q's dtype, likewise.
        cos, sin: [batch or 1, positions, rotary] of q's dtype; ``rotary`` is even and at most the widths.
        heads_dim: 1, or 2 if q and k are [batch, positions, heads, width].
        layout: "halves": elements i and ``i + rotary // 2`` are a pair (Llama, GPT-NeoX). "adjacent": elements 2i and 2i + 1
            are (Cohere). "adjacent_half_table": likewise, and both numbers use the factors at index i (GLM).
            "adjacent_to_halves": likewise, and the result has its pairs as in "halves" (DeepSeek).
        round_once: compute in float32 and round only the result; cos and sin may then be float32.

    Returns:
        Contiguous tensors with the shapes and dtype of q and k. They have no gradients.

    Raises:
        RuntimeError: gradients are requested.
        ValueError: an unknown layout, or a wrong dtype, shape, stride or device.
    """
    _without_gradients("rotary", q, k, cos, sin)
    if layout not in ROTARY_LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(ROTARY_LAYOUTS)}")
    result: tuple[Tensor, Tensor] = torch.ops.lowbit.rotary(q, k, cos, sin, heads_dim, ROTARY_LAYOUTS.index(layout), round_once)
    return result
