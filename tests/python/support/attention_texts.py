"""Queries, keys, values and static caches for tests of attention."""

import lowbit
import torch
from lowbit.operators.ops import cache_storage, cache_width


def at(start: int) -> torch.Tensor:
    return torch.tensor([start])


def text(batch, heads, kv_heads, length, width, dtype=torch.float32, seed=0):
    """q, k and v as transposed views, as in models."""
    generator = torch.Generator().manual_seed(seed)

    def make(heads):
        return torch.randn(batch, length, heads, width, generator=generator).to(dtype).transpose(1, 2)

    return make(heads), make(kv_heads), make(kv_heads)


def caches(batch, kv_heads, max_length, width, dtype=torch.float32):
    """Caches filled with values that must not affect results."""
    shape = (batch, kv_heads, max_length, width)
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.inf, dtype=dtype)


def run(q, k, v, k_cache, v_cache, lengths, scale=None):
    """Runs the text in calls of the given numbers of positions."""
    assert sum(lengths) == q.shape[2]
    out, start = [], 0
    for length in lengths:
        new = slice(start, start + length)
        out.append(lowbit.attention(q[:, :, new], k[:, :, new], v[:, :, new], k_cache, v_cache, at(start), scale=scale))
        start += length
    return torch.cat(out, 1)


def new_caches(batch, kv_heads, max_length, width, value_width, kind):
    """Caches filled with values that must not affect results; scales of codes are NaN. ``kind``: a dtype, or a pair for keys
    and values."""
    return [
        torch.full((batch, kv_heads, max_length, cache_width(each, dtype)),
                   torch.nan if dtype.is_floating_point else -1, dtype=cache_storage(dtype))
        for each, dtype in zip((width, value_width), kind if isinstance(kind, tuple) else (kind, kind))
    ]  # fmt: skip


# window, softcap, sinks, width of the values
OTHER_SCORES = [(7, None, False, 32), (None, 20.0, False, 32), (None, None, True, 64), (130, 5.0, True, 16)]
