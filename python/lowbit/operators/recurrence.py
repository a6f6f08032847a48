"""Operators with a state of fixed size: linear attention and short causal convolutions."""

from __future__ import annotations

import torch
from torch import Tensor


def _without_gradients(operator: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"lowbit.{operator} has no gradients; call it under torch.no_grad(), or train with the model's own code"
        )


def state_shape(batch: int, heads: int, width: int, value_width: int) -> tuple[int, int, int, int, int]:
    """The shape of a state for :func:`linear_attention`, stored in panels of 16 columns."""
    return batch, heads, -(-value_width // 16), width, 16


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor,
    start: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    norm_epsilon: float = 0.0,
) -> Tensor:
    """Linear attention with decay, over a state of fixed size that is updated in place.

    For each token, with the state S of a head, [width, value_width]::

        S = exp(decay) * S;  u = beta * (v - k @ S), or v without beta;  S = S + outer(k, u);  out = scale * q @ S

    With beta this is the gated delta rule (Yang et al., Gated Delta Networks, 2024), or that of Kimi Linear (2025) if there is
    a decay per row of S. Without beta it is Mamba-2's scan (Dao and Gu, Transformers are SSMs, 2024) and retention. Computed
    in float32. Results are bitwise independent of the CPU, the thread count and how a text is split into calls.

    Args:
        q, k: [batch, positions, key_heads, width] float32, bfloat16 or float16; the last dimension has stride 1.
        v: [batch, positions, heads, value_width] of q's dtype, likewise. Head h uses head ``h // (heads // key_heads)`` of q
            and k. Widths are 1 to 1024.
        decay: [batch, positions, heads], contiguous, or [batch, positions, heads, width] float32: natural logarithms of the
            factors of S. Numbers above 0 count as 0.
        state: float32, contiguous, of the shape :func:`state_shape`. Updated in place.
        start: int64, one element: number of positions that the state has seen. 0 starts a new text and ignores the state.
        beta: [batch, positions, heads] float32, contiguous.
        scale: factor of q; None: ``width ** -0.5``.
        norm_epsilon: q and k are multiplied by ``(sum of squares + norm_epsilon) ** -0.5``; 0: no normalization.

    Returns:
        [batch, positions, heads, value_width] of q's dtype, contiguous. It has no gradients.

    Raises:
        IndexError: ``start`` is negative.
        RuntimeError: gradients are requested.
        ValueError: a wrong dtype, shape, stride or device, or a number out of its range. The state is unchanged.
    """
    _without_gradients("linear_attention", q, k, v, decay, beta, state)
    scale = max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale
    return torch.ops.lowbit.linear_attention(q, k, v, decay, beta, state, start, scale, norm_epsilon)


def short_conv(
    x: Tensor, weight: Tensor, state: Tensor, start: Tensor, *, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    """A causal depthwise convolution with few taps, over a state that is updated in place.

    ``out[t] = bias + sum over j of weight[j] * x[t - taps + 1 + j]``, then, with ``silu``, ``out * sigmoid(out)``; computed in
    float32. Results are bitwise independent of the CPU, the thread count and how a text is split into calls.

    Args:
        x: [batch, positions, channels] float32, bfloat16 or float16; the last dimension has stride 1.
        weight: [taps, channels] of x's dtype, contiguous; up to 16 taps. A ``Conv1d`` stores it as [channels, 1, taps].
        state: [batch, taps - 1, channels] of x's dtype, contiguous: the inputs before x, oldest first. Updated in place.
        start: int64, one element: number of preceding positions. 0 starts a new text, preceded by zeros.
        bias: [channels] of x's dtype.

    Returns:
        [batch, positions, channels] of x's dtype, contiguous. It has no gradients.

    Raises:
        IndexError: ``start`` is negative.
        RuntimeError: gradients are requested.
        ValueError: a wrong dtype, shape, stride or device. The state is unchanged.
    """
    _without_gradients("short_conv", x, weight, bias, state)
    return torch.ops.lowbit.short_conv(x, weight, bias, state, start, silu)
