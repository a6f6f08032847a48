"""Attention of BLOOM, MPT, Falcon and other models that do not use transformers' attention interface.

Their code only supports transformers' caches. While a decoder uses such a model, modules from here replace its attention, with
the same layers under the same names.

ALiBi (Press, Smith and Lewis, Train Short, Test Long, 2022) adds to each score a bias b_j that grows with the position j of the
key. Queries and keys carry it to lowbit's attention as additional leading inputs: (-b_i, w) times (1, p_j) is b_j - b_i, where
p_j are one or two numbers that every float cache holds exactly, and w turns them into the bias b_j. Softmax cancels what a
query adds to all of its scores, so b_i only improves rounding: attention sums products in the order of inputs, so a score
starts as b_j - b_i, which is proportional to the distance of the two, and not as b_j, which is proportional to the length of
the text.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import rotary
from .unsupported import Unsupported

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what an attention that uses the interface calls, as GPT-J's since transformers 5.24
_INPUTS = 16  # additional inputs that carry the bias, as widths are multiples of 16
# A position is 256 * a + b. Both numbers are below 257, so bfloat16 with its 8 bits represents them exactly.
_DIGIT = 256
MOST_POSITIONS = _DIGIT * _DIGIT


class Alibi(torch.nn.Module):
    """The additional leading inputs of queries and keys."""

    def __init__(self, weights: Tensor, parts: Tensor, scale: float):
        """
        Args:
        weights: [heads, n] float32.
        parts: [heads or 1, positions, n] float32; a position's bias is the sum of products of its parts and the weights.
        scale: attention's factor of the products of queries and keys.
        """
        super().__init__()
        self.register_buffer("weights", weights / scale, persistent=False)
        self.register_buffer("parts", parts, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs for queries and keys at positions [s] int64: float32 [1, heads, s, 16] each."""
        if torch.compiler.is_compiling():  # attention refuses positions beyond the caches
            positions = positions.clamp(0, self.parts.shape[1] - 1)
        heads, count = self.weights.shape
        parts = self.parts[:, positions].expand(heads, -1, -1)
        weights = self.weights[:, None].expand(parts.shape)
        zeros = parts.new_zeros(heads, parts.shape[1], _INPUTS - 1 - count)
        ones = parts.new_ones(heads, parts.shape[1], 1)
        queries = torch.cat([-(weights * parts).sum(-1, keepdim=True), weights, zeros], dim=-1)
        return queries[None], torch.cat([ones, parts, zeros], dim=-1)[None]


def _of_slopes(slopes: Tensor, positions: int, scale: float) -> Alibi:
    """ALiBi from slopes [heads], the increase of the bias per position."""
    index = torch.arange(positions)
    parts = torch.stack([index // _DIGIT, index % _DIGIT], dim=-1).float()
    return Alibi(torch.stack([slopes * _DIGIT, slopes], dim=-1), parts[None], scale)


class Call:
    """The state of a decoder call that the attention of all layers uses."""

    def __init__(self, attend: Callable[..., Any], takes_positions: bool):
        """
        Args:
        attend: an attention function of transformers.
        takes_positions: whether the model takes positions as well.
        """
        self.attend, self.takes_positions = attend, takes_positions
        self.alibi: Alibi | None = None
        self.caches: Any = None
        self.start: Tensor | None = None
        self.inputs: tuple[Tensor, Tensor] | None = None  # leading inputs of queries and keys

    def give(self, caches: Any, start: Tensor, positions: Tensor) -> None:
        self.caches, self.start = caches, start
        if self.alibi is not None:
            self.inputs = self.alibi(positions)

    def clear(self) -> None:
        """Drops all tensors at the end of a call."""
        self.caches = self.start = self.inputs = None

    def run(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attention of queries [1, heads, s, d] to keys and values with as many or fewer heads: [1, s, heads * d]."""
        dtype = query.dtype
        if self.inputs is not None:
            # In float32, because 16-bit types cannot represent the slopes.
            query, key = (
                torch.cat([more.expand(-1, inputs.shape[1], -1, -1), inputs.float()], dim=-1)
                for more, inputs in zip(self.inputs, (query, key), strict=True)
            )
            value = value.float()
        output, _ = self.attend(
            module, query, key, value, None, scaling=scale, caches=self.caches, start=self.start, sliding_window=window
        )
        return output.flatten(2).to(dtype)


class _Own(torch.nn.Module):
    """Base class of the replacements for a model's attention."""

    needs_mask = False  # whether the model's code modifies the mask

    def __init__(self, attention: Any, call: Call):
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self.call = call
        self.layer_idx = attention.layer_idx if hasattr(attention, "layer_idx") else attention.layer_id
        self.scale: float
        self.heads: int

    @staticmethod
    def is_relative(attention: Any) -> bool:
        """Whether attention depends only on relative positions, up to rounding."""
        return True

    def alibi(self, model: Any, positions: int) -> Alibi | None:
        """The ALiBi inputs for all layers of the model; None without ALiBi."""
        return None


class _Bloom(_Own):
    def __init__(self, attention: Any, call: Call):
        super().__init__(attention, call)
        self.scale, self.heads = attention.inv_norm_factor, attention.num_heads

    def alibi(self, model: Any, positions: int) -> Alibi:
        table = model.transformer.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), self.heads, torch.float32)
        return _of_slopes(table[:, 0, 1], positions, self.scale)

    def forward(self, hidden_states: Tensor, residual: Tensor, **others: Any) -> tuple[Tensor, None]:
        mixed = self.query_key_value(hidden_states).unflatten(-1, (self.heads, 3, -1))
        query, key, value = mixed.transpose(1, 2).unbind(3)
        return self.dense(self.call.run(self, query, key, value, self.scale)) + residual, None


class _Mpt(_Own):
    needs_mask = True

    def __init__(self, attention: Any, call: Call):
        super().__init__(attention, call)
        self.scale, self.heads, self.clip = attention.softmax_scale, attention.n_heads, attention.clip_qkv

    def alibi(self, model: Any, positions: int) -> Alibi:
        table = model.transformer.build_mpt_alibi_tensor(self.heads, 2)
        return _of_slopes(table[:, 0, 1] - table[:, 0, 0], positions, self.scale)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip:
            mixed = mixed.clamp(-self.clip, self.clip)
        query, key, value = mixed.unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        return self.out_proj(self.call.run(self, query, key, value, self.scale)), None


class _Falcon(_Own):
    def __init__(self, attention: Any, call: Call):
        super().__init__(attention, call)
        self.scale, self.heads, self.width = attention.inv_norm_factor, attention.num_heads, attention.head_dim
        # The keys of a group follow its queries.
        self.kv_heads = attention.num_kv_heads
        self.has_alibi = bool(attention.config.alibi)
        self.rotate = rotary.fused(sys.modules[type(attention).__module__].apply_rotary_pos_emb)

    @staticmethod
    def is_relative(attention: Any) -> bool:
        return not attention.config.alibi

    def alibi(self, model: Any, positions: int) -> Alibi | None:
        if not self.has_alibi:
            return None
        # transformers rounds the bias to bfloat16 for every dtype, so use its table rather than slopes. Each head has its own
        # keys.
        build = sys.modules[type(model).__module__].build_alibi_tensor
        table = build(torch.ones(1, positions, dtype=torch.int64), self.heads, torch.float32)[:, 0]
        return Alibi(torch.full((self.heads, 1), self.scale), table[..., None], self.scale)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        group = self.heads // self.kv_heads
        mixed = self.query_key_value(hidden_states).unflatten(-1, (self.kv_heads, group + 2, self.width))
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in mixed.split([group, 1, 1], dim=3))
        if self.has_alibi:
            key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        elif position_embeddings is not None:
            query, key = self.rotate(query, key, *position_embeddings)
        return self.dense(self.call.run(self, query, key, value, self.scale)), None


class _Projected(_Own):
    """Attention of XGLM, MVP and TrOCR, with separate projections for queries, keys and values."""

    window: int | None = None

    def __init__(self, attention: Any, call: Call):
        super().__init__(attention, call)
        self.scale, self.heads = getattr(attention, "scaling", 1.0), attention.num_heads

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        for name in ("key_value_states", "attn_prompt"):
            if others.get(name) is not None:
                raise Unsupported(f"its attention has {name}, which the decoder's attention does not support")
        projected = (layer(hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        return self.out_proj(self.call.run(self, query, key, value, self.scale, self.window)), None


class _GptNeo(_Projected):
    def __init__(self, attention: Any, call: Call):
        super().__init__(attention, call)
        self.window = attention.config.window_size if attention.attention_type == "local" else None


class _GptJ(_Own):
    def __init__(self, attention: Any, call: Call):
        super().__init__(attention, call)
        self.register_buffer("embed_positions", attention.embed_positions, persistent=False)
        self.scale, self.heads, self.rotated = 1 / attention.scale_attn, attention.num_attention_heads, attention.rotary_dim
        self.rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb

    def forward(self, hidden_states: Tensor, position_ids: Tensor, **others: Any) -> tuple[Tensor, None]:
        if torch.compiler.is_compiling():  # attention refuses positions beyond the caches
            position_ids = position_ids.clamp(0, self.embed_positions.shape[0] - 1)
        sin, cos = self.embed_positions[position_ids].to(hidden_states.dtype).chunk(2, dim=-1)
        query, key, value = (
            layer(hidden_states).unflatten(-1, (self.heads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        count = query.shape[-1] if self.rotated is None else self.rotated
        query, key = (
            torch.cat([self.rotate(each[..., :count], sin, cos), each[..., count:]], dim=-1).transpose(1, 2)
            for each in (query, key)
        )
        return self.out_proj(self.call.run(self, query, key, value.transpose(1, 2), self.scale)), None


class _GptNeoXJapanese(_Own):
    def __init__(self, attention: Any, call: Call):
        super().__init__(attention, call)
        self.scale, self.heads, self.rotated = 1 / attention.norm_factor, attention.num_attention_heads, attention.rotary_ndims
        self.dense_bias = attention.dense_bias
        self.rotate = rotary.fused(sys.modules[type(attention).__module__].apply_rotary_pos_emb)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: Any
    ) -> tuple[Tensor, None, Tensor | None]:
        mixed = self.query_key_value(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        query, key, value = mixed.chunk(3, dim=-1)
        count = self.rotated
        rotated = self.rotate(query[..., :count], key[..., :count], *position_embeddings)
        query, key = (torch.cat([part, each[..., count:]], dim=-1) for part, each in zip(rotated, (query, key), strict=True))
        return self.dense(self.call.run(self, query, key, value, self.scale)), None, self.dense_bias


_KINDS: dict[str, type[_Own]] = {
    "BloomAttention": _Bloom,
    "MptAttention": _Mpt,
    "FalconAttention": _Falcon,
    **dict.fromkeys(("XGLMAttention", "MvpAttention", "TrOCRAttention"), _Projected),
    "GPTNeoSelfAttention": _GptNeo,
    "GPTJAttention": _GptJ,
    "GPTNeoXJapaneseAttention": _GptNeoXJapanese,
}


def find(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module, type[_Own]]]:
    """The replaceable attention modules of a model: parent, name in the parent, module, and replacement class."""
    for module in model.modules():
        for name, child in module.named_children():
            kind = _KINDS.get(type(child).__name__)
            if (
                kind is not None
                and type(child).__module__.startswith("transformers.models.")
                and _INTERFACE not in inspect.unwrap(type(child).forward).__code__.co_names
                and not getattr(child, "slow_but_exact", False)  # BLOOM: splits the layer after attention
            ):
                yield module, name, child, kind
