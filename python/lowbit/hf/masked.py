"""lowbit's attention without caches as an attention implementation of transformers, which skips padding.

transformers makes a mask once per call of a model and passes it to the attention of every layer. Here it is the tensor of
bounds of :func:`lowbit.masked_attention`. Other masks, and calls that lowbit does not support (gradients, dropout, a cache with
earlier tokens, position biases), go to transformers' sdpa with an equivalent mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .activations import is_computed

ATTENTION = "lowbit_masked"
_MOST_WIDTH = 256
# A function that makes masks instead of :func:`make_mask`, with its arguments.
_MAKER: ContextVar[Callable[..., Tensor | None] | None] = ContextVar("_MAKER", default=None)


def register() -> None:
    """Registers :data:`ATTENTION` with transformers."""
    import_module("transformers").AttentionInterface.register(ATTENTION, attend)
    import_module("transformers").AttentionMaskInterface.register(ATTENTION, make_mask)


@contextmanager
def masks_made_by(function: Callable[..., Tensor | None]) -> Iterator[None]:
    """A context in which ``function`` makes the masks of this thread's calls; its arguments are those of :func:`make_mask`."""
    token = _MAKER.set(function)
    try:
        yield
    finally:
        _MAKER.reset(token)


def _bounds(visible: Tensor, causal: bool) -> Tensor:
    """Bounds for full or causal attention within each text, from the padding mask ``visible`` [batch, positions]."""
    batch, length = visible.shape
    positions = torch.arange(length, dtype=torch.int32)
    end = positions + 1 if causal else torch.full_like(positions, length)
    columns = (visible.to(torch.int32), torch.zeros_like(positions).expand(batch, length), end.expand(batch, length))
    return torch.stack(columns, dim=-1)


def _bounds_of(mask: Tensor, visible: Tensor) -> Tensor | None:
    """Bounds from sdpa's mask, bool [batch, 1, positions, positions]; None if the keys visible to a token are not contiguous,
    or if bounds decrease."""
    seen = mask[:, 0] & visible[:, None]
    length = seen.shape[-1]
    first, after = seen.int().argmax(-1), length - seen.flip(-1).int().argmax(-1)
    # Padding gets the bounds of the token before it.
    begin, end = (torch.where(visible, x, 0).cummax(-1).values for x in (first, after))
    keys = torch.arange(length)
    ranges = (keys >= begin[..., None]) & (keys < end[..., None]) & visible[:, None]
    if not bool(((ranges == seen).all(-1) & seen.any(-1) | ~visible).all()):
        return None
    return torch.stack([visible.int(), begin.int(), end.int()], dim=-1)


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """The mask for :func:`attend`: bounds int32 [batch, positions, 3], None for full attention, or sdpa's mask."""
    masks = import_module("transformers.masking_utils")
    compiling = torch.compiler.is_compiling()
    if not compiling and (maker := _MAKER.get()) is not None:
        return maker(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, **others,
        )  # fmt: skip
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    places = {"q_offset": q_offset, "kv_offset": kv_offset}
    plain = {masks.bidirectional_mask_function: False, masks.causal_mask_function: True}
    whole = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset == 0
    if attention_mask is not None:
        whole = whole and attention_mask.shape == (batch_size, kv_length) and attention_mask.device.type == "cpu"
    visible = torch.ones(batch_size, kv_length, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    if whole and mask_function in plain:
        causal = plain[mask_function]
        if not causal and not compiling and bool(visible.all()):
            return None
        return _bounds(visible, causal)
    if whole and not compiling:
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = masks.sdpa_mask(**sizes, **places, mask_function=mask_function, attention_mask=attention_mask, **others)
    if not whole or compiling or mask is None or mask.dtype is not torch.bool or mask.ndim != 4 or mask.shape[1] != 1:
        return mask
    bounds = _bounds_of(mask.expand(batch_size, -1, -1, -1), visible)
    return mask if bounds is None else bounds


def _is_bounds(mask: Tensor | None) -> bool:
    return mask is not None and mask.ndim == 3 and mask.dtype is torch.int32


def _as_mask(bounds: Tensor) -> Tensor:
    """Converts bounds to sdpa's mask, bool [batch, 1, positions, positions]."""
    keys = torch.arange(bounds.shape[1])
    seen = (keys >= bounds[..., 1:2]) & (keys < bounds[..., 2:3]) & (bounds[..., 0] != 0)[:, None]
    # A row without visible keys (leading padding in causal texts) would be NaN, so let it see everything.
    return (seen | ~seen.any(-1, keepdim=True))[:, None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers: [batch, heads, positions, width] -> [batch, positions, heads, width]."""
    if others.get("s_aux") is not None:
        raise ValueError(f"the attention of {type(module).__name__} has sinks; expected none: call the model without fuse_")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    widths = (query.shape[-1], value.shape[-1])
    fits = (
        is_computed(query, key, value, compiled=True)
        and dropout == 0.0
        and all(width % 16 == 0 and 16 <= width <= _MOST_WIDTH for width in widths)
        and query.dtype == key.dtype == value.dtype
        and query.shape[1] % key.shape[1] == 0
        and all(others.get(name) is None for name in ("position_bias", "cache", "softcap"))
        and not others.get("output_attentions")  # sdpa does not support them either, and warns
    )
    bounds = attention_mask if _is_bounds(attention_mask) else None
    if attention_mask is None and causal and query.shape[2] > 1:
        if query.shape[2] == key.shape[2]:
            bounds = _bounds(torch.ones(query.shape[0], query.shape[2], dtype=torch.bool), True)
        else:
            fits = False
    elif attention_mask is not None and bounds is None:
        fits = False
    if not fits:
        mask = attention_mask if bounds is None else _as_mask(bounds)
        more = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal if mask is None else False}
        attention = import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
        output: tuple[Tensor, None] = attention(module, query, key, value, mask, **more, **others)
        return output
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tensors = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    return torch.ops.lowbit.masked_attention(*tensors, bounds, scale, 0.0), None
