"""GGUF architectures of 2025 and later: models with recurrent layers, latent attention or shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..files.gguf_reader import Gguf
from .gguf_layouts import Layout, Order, depthwise, flat, log_of_negative, tiled, without_last
from .gguf_metadata import REQUIRED, Metadata
from .gguf_models import (
    ATTENTION_BIAS,
    DENSE,
    HEAD_BEHIND,
    HEAD_BESIDE,
    LLAMA_BIASES,
    MIXTURE,
    NORMED,
    OUTSIDE,
    SHARED,
    SILU,
    Architecture,
    Part,
    expert_widths,
    layers_of,
    rope_of,
)

_PLAIN_ATTENTION = {ours: name for ours, name in DENSE.items() if ours.startswith("attn_")}
_EXPERT_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_SHARED_EXPERTS = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_SIGMOID = 2  # of expert_gating_func


def _kinds(metadata: Metadata, gguf: Gguf, layers: int, kinds: Mapping[str, str]) -> list[str]:
    """The kind of each layer, recognized by a tensor that only this kind has."""
    found = []
    for layer in range(layers):
        kind = next((kind for tensor, kind in kinds.items() if f"blk.{layer}.{tensor}" in gguf.tensors), None)
        if kind is None:
            raise ValueError(f"{metadata.path} has no blk.{layer}.{' nor '.join(kinds)}; expected one of them")
        found.append(kind)
    return found


def _width(gguf: Gguf, *names: str) -> int:
    """Number of inputs of the first of these matrices that the file has; 0 if it has none."""
    stored = next((gguf.tensors[name] for name in names if name in gguf.tensors), None)
    return 0 if stored is None else int(stored.shape[-1])


def _routing(metadata: Metadata, *, groups: bool = True) -> dict[str, Any]:
    """The routing settings of experts, under the names of DeepSeek's models and their successors."""
    routing: dict[str, Any] = {
        "n_shared_experts": metadata.whole("expert_shared_count", 0),
        "routed_scaling_factor": metadata.real("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
    }
    if groups:
        routing["n_group"] = metadata.whole("expert_group_count", 1)
        routing["topk_group"] = metadata.whole("expert_group_used_count", 1)
    return routing


# Granite's multipliers.
_SCALES = {
    "attention_multiplier": ("attention.scale", 1.0), "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0), "logits_scaling": ("logit_scale", 1.0),
}  # fmt: skip


def _inner(metadata: Metadata) -> tuple[int, int]:
    """The inner width of recurrent layers, and their heads."""
    inner, heads = metadata.whole("ssm.inner_size"), metadata.whole("ssm.time_step_rank")
    if not heads or inner % heads:
        raise ValueError(f"{metadata.path} has {inner} inner values for {heads} heads; expected a multiple")
    return inner, heads


def _granite_moe(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    shared = metadata.whole("expert_shared_feed_forward_length", 0)
    if not shared:
        return {}
    return {
        "architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared", "shared_intermediate_size": shared,
    }  # fmt: skip


def _granite_hybrid(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    kinds = {"ssm_in.weight": "mamba", "attn_k.weight": "attention"}
    (inner, heads), width = _inner(metadata), config["hidden_size"]
    metadata.ignore("expert_shared_feed_forward_length")  # the tensors show it
    if inner % width:
        raise ValueError(f"{metadata.path} has {inner} inner values for {width} values; expected a multiple")
    kv_heads = config["num_key_value_heads"]
    if not kv_heads:  # llama.cpp's converter does not know the current layer names of transformers
        stored = next((tensor for name, tensor in gguf.tensors.items() if name.endswith(".attn_k.weight")), None)
        if stored is None:
            raise ValueError(f"{metadata.path} has 0 KV heads and no attn_k.weight; expected one in a layer")
        kv_heads = stored.shape[0] // max(width // config["num_attention_heads"], 1)
    return {
        "num_local_experts": config.get("num_local_experts", 0), "num_key_value_heads": kv_heads,
        "layer_types": _kinds(metadata, gguf, config["num_hidden_layers"], kinds),
        "shared_intermediate_size": _width(gguf, "blk.0.ffn_down_shexp.weight", "blk.0.ffn_down.weight"),
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", False) else None,
        "mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_expand": inner // width,
    }  # fmt: skip


def _nemotron_h(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    metadata.ignore("rope.dimension_count", "rope.freq_base")  # it has no rotation
    kinds = {
        "ssm_in.weight": "mamba", "attn_q.weight": "attention", "ffn_up_exps.weight": "moe", "ffn_up.weight": "mlp",
    }  # fmt: skip
    inner, heads = _inner(metadata)
    more = {
        "layers_block_type": _kinds(metadata, gguf, config["num_hidden_layers"], kinds),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in gguf.tensors),
        "mamba_num_heads": heads, "mamba_head_dim": inner // heads,
    }  # fmt: skip
    if "n_routed_experts" in config:
        more |= _routing(metadata) | {
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length"),
        }
    return more


def _glm4_moe(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    metadata.expect("expert_gating_func", _SIGMOID)
    return _routing(metadata) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in gguf.tensors}


def _lfm2(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    kinds = {"shortconv.conv.weight": "conv", "attn_q.weight": "full_attention"}
    return {
        "layer_types": _kinds(metadata, gguf, config["num_hidden_layers"], kinds), "norm_eps": config["rms_norm_eps"],
        "conv_bias": any("shortconv" in name and name.endswith(".bias") for name in gguf.tensors),
    }  # fmt: skip


def _lfm2_moe(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    metadata.expect("expert_gating_func", _SIGMOID)
    return _lfm2(metadata, gguf, config) | {
        "routed_scaling_factor": _routing(metadata, groups=False)["routed_scaling_factor"],
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in gguf.tensors),
    }


def _delta_rule(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    """Settings of gated delta networks, and of experts if there are any."""
    metadata.ignore("full_attention_interval", "attention.recurrent_layers")  # the tensors show it
    kinds = {"ssm_out.weight": "linear_attention", "attn_q.weight": "full_attention"}
    (inner, heads), keys = _inner(metadata), config["linear_num_key_heads"]
    if not keys or heads % keys:
        raise ValueError(f"{metadata.path} has {heads} value heads and {keys} key heads; expected a multiple")
    return {
        "layer_types": _kinds(metadata, gguf, config["num_hidden_layers"], kinds),
        "linear_num_value_heads": heads, "linear_value_head_dim": inner // heads,
    } | (expert_widths(metadata, gguf) if "num_experts" in config else {})  # fmt: skip


def _qwen35(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    # The sections of a multimodal rotation (time, height, width) coincide for text.
    sections = [size for size in metadata.wholes("rope.dimension_sections", [11, 11, 10, 0]) if size]
    rope = config["rope_parameters"] | {"mrope_section": sections, "mrope_interleaved": True}
    return _delta_rule(metadata, gguf, config) | {"rope_parameters": rope}


class _Deepseek(Architecture):
    """Models with latent attention, whose files have other keys for the sizes of heads."""

    def config(self, metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
        biased = any(name.endswith("exp_probs_b.bias") for name in gguf.tensors)
        model_type, class_name = (
            ("deepseek_v3", "DeepseekV3ForCausalLM") if biased else ("deepseek_v2", "DeepseekV2ForCausalLM")
        )
        metadata.expect("expert_gating_func", *((_SIGMOID, 0) if biased else (1, 0)))
        rotated, rank = metadata.whole("rope.dimension_count"), metadata.whole("attention.kv_lora_rank")
        # Newer files have the sizes of llama.cpp's computation, with one head for all queries, and separately the model's.
        key = metadata.whole("attention.key_length_mla", metadata.whole("attention.key_length"))
        value = metadata.whole("attention.value_length_mla", metadata.whole("attention.value_length"))
        heads, dense = metadata.whole("attention.head_count"), metadata.whole("leading_dense_block_count", 0)
        metadata.ignore("attention.head_count_kv")
        metadata.expect("attention.causal", True)
        if not heads or key <= rotated:
            raise ValueError(
                f"{metadata.path} has {heads} heads of {key} values, {rotated} of them rotated; expected more values"
            )
        length = metadata.whole("context_length")
        rope = rope_of(metadata, {"head_dim": rotated, "max_position_embeddings": length})
        if rope["rope_type"] == "yarn":
            scale = metadata.real("rope.scaling.yarn_log_multiplier", 0.0) * 10
            rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
        config: dict[str, Any] = {
            "architectures": [class_name], "model_type": model_type, "hidden_size": metadata.whole("embedding_length"),
            "intermediate_size": metadata.of_layers("feed_forward_length"), "num_hidden_layers": layers_of(metadata),
            "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": length,
            "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"), "rope_parameters": rope, "kv_lora_rank": rank,
            "q_lora_rank": metadata.whole("attention.q_lora_rank", None), "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": key - rotated, "v_head_dim": value, "first_k_dense_replace": dense,
            "n_routed_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
            "hidden_act": "silu", "attention_bias": False,
        }  # fmt: skip
        config |= _routing(metadata)
        if not biased:
            config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
        return config


_MAMBA = {f"ssm_{ours}": f"mamba.{name}" for ours, name in (
    ("in", "in_proj"), ("out", "out_proj"), ("conv1d", "conv1d"), ("norm", "norm"),
)}  # fmt: skip
_MAMBA_PARAMETERS = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
_GRANITE_MOE: dict[str, str | Part] = {
    **_PLAIN_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_shexp": Part("shared_mlp.input_linear", 0, 2),
    "ffn_up_shexp": Part("shared_mlp.input_linear", 1, 2),
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GRANITE_HYBRID: dict[str, str | Part] = _GRANITE_MOE | _MAMBA | {
    "ffn_gate": Part("shared_mlp.input_linear", 0, 2),
    "ffn_up": Part("shared_mlp.input_linear", 1, 2),
    "ffn_down": "shared_mlp.output_linear",
}  # fmt: skip
_NEMOTRON_H = {
    "attn_norm": "norm", "ffn_gate_inp": "mixer.gate", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
} | {
    ours: name.replace("self_attn.", "mixer.") for ours, name in _PLAIN_ATTENTION.items() if ours != "attn_norm"
} | {ours: name.replace("mamba.", "mixer.") for ours, name in _MAMBA.items()}  # fmt: skip
_NEMOTRON_PARAMETERS = {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"} | {
    ours: name.replace("mamba.", "mixer.") for ours, name in _MAMBA_PARAMETERS.items()
}
_LFM2 = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
_LFM2_OUTSIDE = {"token_embd": "model.embed_tokens", "output": "lm_head"} | dict.fromkeys(
    ("token_embd_norm", "output_norm"), "model.embedding_norm"
)
_DELTA = NORMED | {
    "post_attention_norm": "post_attention_layernorm", "ssm_out": "linear_attn.out_proj", "ssm_norm": "linear_attn.norm",
    "ssm_conv1d": "linear_attn.conv1d",
}  # fmt: skip
_DELTA_PARAMETERS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_QWEN35 = _DELTA | {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}  # fmt: skip
_QWEN3_NEXT: dict[str, str | Part] = {
    **_DELTA,
    "attn_qkv": Part("linear_attn.in_proj_qkvz", 0, 2), "attn_gate": Part("linear_attn.in_proj_qkvz", 1, 2),
    "ssm_ba": "linear_attn.in_proj_ba",
}  # fmt: skip
_LATENT: dict[str, str | Part] = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": Part("self_attn.kv_b_proj", 0, 2),
    "attn_v_b": Part("self_attn.kv_b_proj", 1, 2), "attn_output": "self_attn.o_proj",
}  # fmt: skip
_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}


def _mamba_layouts(prefix: str) -> Mapping[str, Layout]:
    return {
        f"{prefix}.A_log": Layout(values=log_of_negative, shape=without_last),
        f"{prefix}.D": Layout(shape=without_last),
        f"{prefix}.conv1d.weight": Layout(shape=depthwise),
        f"{prefix}.norm.weight": Layout(shape=flat),
    }


def _delta_layouts(config: Mapping[str, Any]) -> Mapping[str, Layout]:
    """Layouts of Qwen3.5, whose value heads are stored in another order."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, before = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]
    single, channels, values = tiled(keys, heads, 1), tiled(keys, heads, width, before), tiled(keys, heads, width)
    layouts = {
        "A_log": Layout(rows=single, values=log_of_negative), "dt_bias": Layout(rows=single),
        "in_proj_a.weight": Layout(rows=single), "in_proj_b.weight": Layout(rows=single),
        "in_proj_qkv.weight": Layout(rows=channels), "conv1d.weight": Layout(rows=channels, shape=depthwise),
        "in_proj_z.weight": Layout(rows=values), "out_proj.weight": Layout(columns=values),
    }  # fmt: skip
    return {f"linear_attn.{name}": layout for name, layout in layouts.items()}


def _next_layouts(config: Mapping[str, Any]) -> Mapping[str, Layout]:
    """Layouts of Qwen3-Next: the model stores q, k, v and z of each key head together; files have all q, then all k, v, z."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    sizes = [size, size, values, values]

    def numbers() -> Any:
        starts = [keys * sum(sizes[:part]) for part in range(4)]
        parts = [torch.arange(keys * size).view(keys, size) + start for size, start in zip(sizes, starts, strict=True)]
        return torch.cat(parts, 1).reshape(-1)

    return {
        "linear_attn.A_log": Layout(values=log_of_negative), "linear_attn.conv1d.weight": Layout(shape=depthwise),
        "linear_attn.in_proj_qkvz.weight": Layout(rows=Order(keys * sum(sizes), numbers)),
    }  # fmt: skip


_NEMOTRON = Architecture(
    "nemotron_h", "NemotronHForCausalLM", _NEMOTRON_H, _NEMOTRON_PARAMETERS,
    OUTSIDE | {"token_embd": "model.embeddings", "output_norm": "model.norm_f"}, lambda _: _mamba_layouts("mixer"),
    permuted=True, experts="mixer.experts", ungated=True, count="n_routed_experts", may_be_dense=True, hybrid=True, theta=None,
    epsilons=("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), epsilon_field="layer_norm_epsilon",
    constants={"mlp_hidden_act": "relu2"},
    keys={
        "n_groups": ("ssm.group_count", REQUIRED), "ssm_state_size": ("ssm.state_size", REQUIRED),
        "conv_kernel": ("ssm.conv_kernel", REQUIRED),
    },
    more=_nemotron_h,
)  # fmt: skip
_SHORT_CONVOLUTIONS: dict[str, Any] = {
    "sets_head_dim": False, "hybrid": True, "theta": 1e6, "outside": _LFM2_OUTSIDE,
    "layouts": lambda _: {"conv.conv.weight": Layout(shape=depthwise)},
}  # fmt: skip
_L_CACHE = {"conv_L_cache": ("shortconv.l_cache", REQUIRED)}
_DELTA_RULE: dict[str, Any] = {
    "norm_offset": 1.0, "head": HEAD_BESIDE, "theta": 1e7, "partial": True,
    "keys": {
        "linear_conv_kernel_dim": ("ssm.conv_kernel", REQUIRED), "linear_key_head_dim": ("ssm.state_size", REQUIRED),
        "linear_num_key_heads": ("ssm.group_count", REQUIRED),
    },
}  # fmt: skip
_PLAIN_DELTA = SILU | {"attention_bias": False}
_NORM_TOPK = {"norm_topk_prob": True}
ARCHITECTURES = {
    "granite": Architecture(
        "granite", "GraniteForCausalLM", DENSE, permuted=True, sets_head_dim=False, biases=LLAMA_BIASES, constants=SILU,
        keys=_SCALES,
    ),
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM", _GRANITE_MOE, permuted=True, experts="block_sparse_moe.experts",
        sets_head_dim=False, count="num_local_experts", constants=SILU, keys=_SCALES, more=_granite_moe,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", _GRANITE_HYBRID, _MAMBA_PARAMETERS,
        layouts=lambda _: _mamba_layouts("mamba"), permuted=True, experts="block_sparse_moe.experts", sets_head_dim=False,
        count="num_local_experts", may_be_dense=True, hybrid=True, constants=SILU, more=_granite_hybrid,
        keys=_SCALES | {
            "mamba_n_groups": ("ssm.group_count", REQUIRED), "mamba_d_state": ("ssm.state_size", REQUIRED),
            "mamba_d_conv": ("ssm.conv_kernel", REQUIRED),
        },
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "smollm3": Architecture(
        "smollm3", "SmolLM3ForCausalLM", DENSE, permuted=True, sets_head_dim=False, theta=2e6,
        constants=SILU | {"no_rope_layer_interval": 4},
    ),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _PLAIN_ATTENTION | {
        "ffn_norm": "post_attention_layernorm", "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
    }, partial=True, biases=ATTENTION_BIAS, constants=SILU),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM",
        NORMED | MIXTURE | _SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"}, _EXPERT_BIAS,
        experts="mlp.experts", head=HEAD_BEHIND, count="n_routed_experts", partial=True, biases=ATTENTION_BIAS, constants=SILU,
        keys={
            "first_k_dense_replace": ("leading_dense_block_count", 0),
            "moe_intermediate_size": ("expert_feed_forward_length", REQUIRED),
        },
        more=_glm4_moe,
    ),
    "olmo2": Architecture(
        "olmo2", "Olmo2ForCausalLM", {ours: name for ours, name in NORMED.items() if ours not in ("attn_norm", "ffn_norm")} | {
            "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        }, sets_head_dim=False, constants=SILU,
    ),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM", DENSE | {"post_attention_norm": "post_attention_layernorm"}, constants=SILU,
        biases=LLAMA_BIASES | {"attention_out_bias": "attn_output"},
    ),
    "ernie4_5": Architecture(
        "ernie4_5", "Ernie4_5ForCausalLM", DENSE, theta=500000.0, biases={"use_bias": "attn_q"}, constants=SILU
    ),
    "lfm2": Architecture(
        "lfm2", "Lfm2ForCausalLM", _LFM2, **_SHORT_CONVOLUTIONS, keys=_L_CACHE, constants={"block_auto_adjust_ff_dim": False},
        more=_lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", "Lfm2MoeForCausalLM", _LFM2 | {"ffn_gate_inp": "feed_forward.gate"},
        {"exp_probs_b.bias": "feed_forward.expert_bias"}, **_SHORT_CONVOLUTIONS, experts="feed_forward.experts",
        count="num_experts", constants=_NORM_TOPK, more=_lfm2_moe,
        keys=_L_CACHE | {
            "num_dense_layers": ("leading_dense_block_count", 0),
            "moe_intermediate_size": ("expert_feed_forward_length", REQUIRED),
        },
    ),
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", _QWEN3_NEXT | MIXTURE | SHARED, _DELTA_PARAMETERS, layouts=_next_layouts,
        **_DELTA_RULE, experts="mlp.experts", count="num_experts", more=_delta_rule,
        constants=_PLAIN_DELTA | _NORM_TOPK | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", _QWEN35, _DELTA_PARAMETERS, layouts=_delta_layouts, **_DELTA_RULE,
        constants=_PLAIN_DELTA, more=_qwen35,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _QWEN35 | MIXTURE | SHARED, _DELTA_PARAMETERS, layouts=_delta_layouts,
        **_DELTA_RULE, experts="mlp.experts", count="num_experts", constants=_PLAIN_DELTA | _NORM_TOPK, more=_qwen35,
    ),
    "deepseek2": _Deepseek(
        "deepseek_v3", "DeepseekV3ForCausalLM", _LATENT | _MLP | MIXTURE | _SHARED_EXPERTS, _EXPERT_BIAS,
        experts="mlp.experts", head=HEAD_BEHIND,
    ),
}  # fmt: skip
