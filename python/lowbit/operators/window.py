"""Attention with a sliding window over caches that hold the window, not the text."""

from __future__ import annotations

import torch
from torch import Tensor

from .recurrence import _without_gradients

SPAN = 512  # positions by which the caches move on; the kernels add in spans of as many


def window_length(window: int, positions: int = 256) -> int:
    """The ``max_length`` of caches for :func:`window_attention`, in which calls of up to ``positions`` are not cut."""
    return -(-(window + SPAN + max(positions, 16)) // 16) * 16


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    start: Tensor,
    *,
    window: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`lowbit.attention` with a window, over caches of a fixed size: texts of any length.

    The result has the same bits as with caches for the whole text.

    Args:
        q, k, v, scale, softcap, sinks: as of :func:`lowbit.attention`.
        k_cache, v_cache: as there; ``max_length`` is at least ``window + 528``, for example :func:`window_length`. Changed.
        held: int64 [2], contiguous: the caches hold positions ``held[0]`` to ``held[1] - 1`` of the text. Begin with zeros.
            Changed.
        start: int64, one element: how many positions come before q. ``held[1]`` continues the text, 0 starts a new one, and
            an earlier position cuts the text back, if the ``window - 1`` positions before it are held.
        window: a query sees its position and the ``window - 1`` before it.

    Returns:
        As :func:`lowbit.attention`; it has no gradients.

    Raises:
        IndexError: ``start`` is negative, beyond the text, or cuts it back too far. The caches are unchanged.
        RuntimeError: gradients are asked for.
        ValueError: a wrong dtype, shape, stride or device, or caches that are too short. The caches are unchanged.
    """
    _without_gradients("window_attention", q, k, v, k_cache, v_cache, sinks)
    scale = max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected a positive number, or None")
    return torch.ops.lowbit.window_attention(q, k, v, k_cache, v_cache, held, start, scale, window, softcap or 0.0, sinks)
