"""Gives a causal language model of transformers the attention of a decoder, and takes it away again."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

ATTENTION = "lowbit"  # the name of :func:`attend` among transformers' attention functions
_TAKEN = "this model belongs to a lowbit.llm.Decoder; call the decoder, or its release() first"
_TAKEOVER = "_lowbit_takeover"  # the attribute of a model that a decoder has

# What transformers may give an attention function besides its inputs without changing what attention computes.
_HARMLESS = frozenset(
    ("cache_position", "dropout", "hidden_states", "is_causal", "output_attentions", "output_hidden_states")
    + ("output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache")
)


def attend(module, query, key, value, attention_mask, scaling=None, caches=None, start=None, **others):
    """Attention over a decoder's caches, as transformers calls it.

    query [1, heads, s, d], key and value [1, kv_heads, s, d].

    Raises:
        ValueError: called without caches, or for attention of another kind.
    """
    if caches is None:
        raise ValueError(_TAKEN)
    k_cache, v_cache = caches[module.layer_idx]
    _check_window(others.pop("sliding_window", None), k_cache.shape[2])
    if attention_mask is not None:
        raise ValueError("its attention has a mask or bias of its own, which the decoder's attention does not know")
    for name, argument in others.items():
        if argument is not None and name not in _HARMLESS:
            raise ValueError(f"its attention has {name}, which the decoder's attention does not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.lowbit.attention(query, key, value, k_cache, v_cache, start, scale), None


def _check_window(window: int | None, max_length: int) -> None:
    if window is not None and window < max_length:
        raise ValueError(
            f"its attention sees {window} positions only (a sliding window) and max_length is {max_length}; "
            f"expected a max_length of at most {window}"
        )


def check_config(config: Any, max_length: int) -> None:
    """Refuses what a short text would not show.

    Args:
        config: the text configuration of a model.

    Raises:
        ValueError: says what the model has; its name stands before that.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None or any("sliding" in kind for kind in kinds):
        window = getattr(config, "sliding_window", None)
        _check_window(window if getattr(config, "use_sliding_window", None) is not False else None, max_length)
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:  # transformers' default attention ignores it
        raise ValueError(f"its attention caps its scores (softcap={cap}), which the decoder's attention does not know")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_length:
        raise ValueError(
            f"its attention sees chunks of {chunk} positions only and max_length is {max_length}; "
            f"expected a max_length of at most {chunk}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *rope.values()] if isinstance(rope, dict) else []:
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind in ("dynamic", "longrope"):
            until = part.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
            if until is not None and max_length > until:
                raise ValueError(
                    f"its rotary embeddings (rope_type={kind}) change when a text grows beyond {until} tokens and "
                    f"max_length is {max_length}; expected a max_length of at most {until}"
                )


class RotaryTable(torch.nn.Module):
    """Sines and cosines of rotary embeddings, once for all positions instead of once for each layer, head and call."""

    def __init__(self, rotary: torch.nn.Module, positions: int, dtype: torch.dtype):
        super().__init__()
        cos, sin = rotary(torch.zeros(1, dtype=dtype), torch.arange(positions)[None])
        self.register_buffer("cos", cos[0].clone(), persistent=False)
        self.register_buffer("sin", sin[0].clone(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            # The decoder, or else attention, refuses positions beyond the caches. Compiled code would end the process
            # over them here.
            position_ids = position_ids.clamp(0, self.cos.shape[0] - 1)
        try:
            return self.cos[position_ids], self.sin[position_ids]
        except IndexError as error:  # no call of the decoder comes here
            raise ValueError(_TAKEN) from error


def _is_tabulated(rotary: Any) -> bool:
    # Some kinds change with the length of the text, or have tables for several kinds of layers.
    return (
        isinstance(rotary, torch.nn.Module)
        and getattr(rotary, "rope_type", None) in ("default", "linear", "llama3", "yarn")
        and list(signature(rotary.forward).parameters) == ["x", "position_ids"]
    )


def _configs(model: torch.nn.Module) -> Iterator[Any]:
    """Every configuration in a model, each once: those of its modules, and theirs."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return iter(found.values())


class Takeover:
    """A model in the hands of a decoder: what was changed in it, and how it was before."""

    def __init__(self, model: torch.nn.Module, positions: int):
        """Gives a model :func:`attend` and rotary tables. An earlier takeover of the same model is ended."""
        previous = getattr(model, _TAKEOVER, None)
        if previous is not None:
            previous.end(model)
        import_module("transformers").AttentionInterface.register(ATTENTION, attend)
        self.active = True
        self._attention = [(config, config._attn_implementation_internal) for config in _configs(model)]
        self._rotary: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        setattr(model, _TAKEOVER, self)
        for config, _ in self._attention:
            config._attn_implementation_internal = ATTENTION
        tables: dict[int, RotaryTable] = {}  # one for layers that share theirs
        for module in list(model.modules()):
            rotary = getattr(module, "rotary_emb", None)
            if _is_tabulated(rotary):
                if id(rotary) not in tables:
                    tables[id(rotary)] = RotaryTable(rotary, positions, model.dtype)
                self._rotary.append((module, rotary))
                module.rotary_emb = tables[id(rotary)]

    def is_whole(self) -> bool:
        """Whether the model still has what it was given."""
        return self.active and all(config._attn_implementation_internal == ATTENTION for config, _ in self._attention)

    def end(self, model: torch.nn.Module) -> None:
        """Makes the model what it was before."""
        if not self.active:
            return
        self.active = False
        for config, attention in self._attention:
            config._attn_implementation_internal = attention
        for module, rotary in self._rotary:
            module.rotary_emb = rotary
        delattr(model, _TAKEOVER)


def is_taken(model: torch.nn.Module) -> bool:
    """Whether a decoder has this model."""
    return hasattr(model, _TAKEOVER)


def give_back(model: torch.nn.Module) -> None:
    """Ends the takeover of a model, if there is one."""
    if is_taken(model):
        getattr(model, _TAKEOVER).end(model)
