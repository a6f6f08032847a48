"""A static KV cache around a causal language model of transformers."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

ATTENTION = "lowbit"  # the name of :func:`_attend` among transformers' attention functions


def _attend(module, query, key, value, attention_mask, scaling=None, caches=None, start=None, **kwargs):
    """Attention over the decoder's caches, as transformers calls it.

    query [1, heads, s, d], key and value [1, kv_heads, s, d].
    """
    if caches is None:
        raise ValueError(
            "this model belongs to a lowbit.llm.Decoder; call that, or set another attention implementation"
        )
    k_cache, v_cache = caches[module.layer_idx]
    _check_attention(kwargs, k_cache.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.lowbit.attention(query, key, value, k_cache, v_cache, start, scale), None


def _check_attention(arguments: dict[str, Any], max_length: int) -> None:
    """Refuses what the operator does not compute."""
    for name in ("softcap", "s_aux"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"the model's attention has {name}={arguments[name]}; lowbit's decoder does not support that"
            )
    window = arguments.get("sliding_window")
    if window is not None and window < max_length:
        raise ValueError(
            f"the model's attention sees {window} positions only (a sliding window) and max_length is {max_length}; "
            "lowbit's decoder needs a max_length within the window"
        )


def _window(config: Any) -> int | None:
    """The sliding window of a model, when any of its layers has one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any("sliding" in kind for kind in kinds):
        return None
    return getattr(config, "sliding_window", None)


class _RotaryTable(torch.nn.Module):
    """Sines and cosines of rotary embeddings, once for all positions instead of once for each layer, head and call."""

    def __init__(self, rotary: torch.nn.Module, positions: int, dtype: torch.dtype):
        super().__init__()
        cos, sin = rotary(torch.zeros(1, dtype=dtype), torch.arange(positions)[None])
        self.register_buffer("cos", cos[0].clone(), persistent=False)
        self.register_buffer("sin", sin[0].clone(), persistent=False)
        self.original = (rotary,)  # no submodule: its buffers are not needed

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # Attention refuses positions beyond the caches. Compiled code would end the process over them here.
        position_ids = position_ids.clamp(0, self.cos.shape[0] - 1)
        return self.cos[position_ids], self.sin[position_ids]


def _tabulate_rotary(model: torch.nn.Module, positions: int) -> None:
    for module in list(model.modules()):
        rotary = getattr(module, "rotary_emb", None)
        if isinstance(rotary, _RotaryTable):  # of an earlier decoder
            rotary = rotary.original[0]
        # Some kinds change with the length of the text, or have tables for several kinds of layers.
        if (
            isinstance(rotary, torch.nn.Module)
            and getattr(rotary, "rope_type", None) in ("default", "linear", "llama3", "yarn")
            and list(signature(rotary.forward).parameters) == ["x", "position_ids"]
        ):
            module.rotary_emb = _RotaryTable(rotary, positions, model.dtype)


class Decoder(torch.nn.Module):
    """One step of a causal language model, with static KV caches of its own.

    The same module runs in eager, under torch.compile, and exported to .pte and .pt2. Its caches are buffers that each
    call updates, so a text may come in any pieces; ``start`` says how many tokens came before. A new text starts at 0.
    """

    def __init__(self, model: torch.nn.Module, max_length: int = 2048):
        """Args:
            model: a transformers causal language model, quantised or not, in eval mode. It belongs to the decoder from
                then on: its attention runs over the decoder's caches.
            max_length: the longest text in tokens, prompt included; a multiple of 16.

        Raises:
            ValueError: max_length is no positive multiple of 16 or beyond the model's positions; or the model's
                attention has what this decoder does not support: a sliding window within max_length, or capped scores.
        """
        super().__init__()
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if max_length <= 0 or max_length % 16:
            raise ValueError(f"max_length is {max_length}; expected a positive multiple of 16")
        if limit is not None and max_length > limit:
            raise ValueError(f"max_length is {max_length}; expected at most the model's {limit} positions")
        cap = getattr(config, "attn_logit_softcapping", None)
        _check_attention({"sliding_window": _window(config), "softcap": cap}, max_length)
        import_module("transformers").AttentionInterface.register(ATTENTION, _attend)
        model.set_attn_implementation(ATTENTION)
        _tabulate_rotary(model, max_length)
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
