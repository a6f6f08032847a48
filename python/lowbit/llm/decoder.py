"""A static KV cache around a causal language model of transformers."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

ATTENTION = "lowbit"  # the name of :func:`_attend` among transformers' attention functions


def _attend(module, query, key, value, attention_mask, scaling=None, caches=None, start=None, **kwargs):
    """Attention over the decoder's caches, as transformers calls it: query [1, heads, s, d], key and value [1, kv_heads, s, d]."""
    if caches is None:
        raise ValueError("this model belongs to a lowbit.llm.Decoder; call that, or set another attention implementation")
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"the model's attention has {name}={kwargs[name]}, which lowbit's decoder does not support")
    k_cache, v_cache = caches[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    positions = start + torch.arange(query.shape[2])
    k_cache.index_copy_(2, positions, key)
    v_cache.index_copy_(2, positions, value)
    mask = torch.arange(k_cache.shape[2]) <= positions[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, k_cache, v_cache, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2), None


class Decoder(torch.nn.Module):
    """One step of a causal language model, with static KV caches of its own.

    The same module runs in eager, under torch.compile, and exported to .pte and .pt2. Its caches are buffers that each
    call updates, so a text may come in any pieces; ``start`` says how many tokens came before. A new text starts at 0.
    """

    def __init__(self, model: torch.nn.Module, max_length: int = 2048):
        """Args:
            model: a transformers causal language model, quantised or not, in eval mode. It belongs to the decoder from then
                on: its attention runs over the decoder's caches.
            max_length: the longest text in tokens, prompt included; a multiple of 16.

        Raises:
            ValueError: max_length is no positive multiple of 16 or beyond the model's positions.
        """
        super().__init__()
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if max_length <= 0 or max_length % 16:
            raise ValueError(f"max_length is {max_length}; expected a positive multiple of 16")
        if limit is not None and max_length > limit:
            raise ValueError(f"max_length is {max_length}; expected at most the model's {limit} positions")
        import_module("transformers").AttentionInterface.register(ATTENTION, _attend)
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.max_length = max_length
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.layers = config.num_hidden_layers
        for layer in range(self.layers):
            for name in ("k", "v"):
                cache = torch.zeros(1, kv_heads, max_length, head_dim, dtype=model.dtype)
                self.register_buffer(f"{name}_cache_{layer}", cache, persistent=False)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Args:
            tokens: [1, s] int64.
            start: [1] int64: how many tokens are in the caches already.

        Returns:
            [1, vocabulary] of the model's dtype: the logits behind the last token.
        """
        positions = start + torch.arange(tokens.shape[1])
        caches = [(getattr(self, f"k_cache_{i}"), getattr(self, f"v_cache_{i}")) for i in range(self.layers)]
        output = self.model(
            input_ids=tokens,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=1,
            caches=caches,
            start=start,
        )
        return output.logits[:, -1]
