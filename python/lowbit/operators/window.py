"""Sliding-window attention over caches that hold only the window, not the whole text."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache_layout import window_length as window_length
from .recurrence import _without_gradients


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
    """:func:`lowbit.attention` with a sliding window, for texts of any length over caches of a fixed size.

    The result is bitwise equal to that with caches for the whole text.

    Args:
        q, k, v, scale, softcap, sinks: as for :func:`lowbit.attention`.
        k_cache, v_cache: likewise; ``max_length`` is at least ``window + 528``, such as :func:`window_length`. Updated in
            place.
        held: int64 [2], contiguous: the caches hold positions ``held[0]`` to ``held[1] - 1`` of the text. Start with zeros.
            Updated in place.
        start: int64, one element: number of positions before q. ``held[1]`` continues the text, 0 starts a new one, and an
            earlier position truncates the text, if the ``window - 1`` positions before it are held.
        window: a query attends to its position and the ``window - 1`` before it.

    Returns:
        As :func:`lowbit.attention`; it has no gradients.

    Raises:
        IndexError: ``start`` is negative, beyond the text, or truncates it too far. The caches are unchanged.
        RuntimeError: gradients are requested.
        ValueError: a wrong dtype, shape, stride or device, or caches that are too short. The caches are unchanged.
    """
    _without_gradients("window_attention", q, k, v, k_cache, v_cache, sinks)
    scale = max(1, *q.shape[-1:]) ** -0.5 if scale is None else scale
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected a positive number, or None")
    return torch.ops.lowbit.window_attention(q, k, v, k_cache, v_cache, held, start, scale, window, softcap or 0.0, sinks)
