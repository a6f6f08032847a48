"""GGUF architectures of 2025 and later: models with recurrent layers, latent attention or shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..files.gguf_reader import Gguf
from .gguf_layouts import Layout, Order, depthwise, flat, log_of_negative, tiled, without_last
from .gguf_metadata import REQUIRED, Metadata
from .gguf_models import (
    DENSE,
    HEAD_BEHIND,
    HEAD_BESIDE,
    MIXTURE,
    NORMED,
    OUTSIDE,
    SHARED,
    Architecture,
    Part,
    common,
    expert_width,
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


def _scales(metadata: Metadata) -> dict[str, float]:
    """Granite's multipliers."""
    names = {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    return {ours: metadata.real(name, 1.0) for ours, name in names.items()}


def _granite(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "granite", "GraniteForCausalLM", head_dim=False)
    return config | _scales(metadata) | {
        "rope_parameters": rope_of(metadata, config), "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors, "hidden_act": "silu",
    }  # fmt: skip


def _granite_moe(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    shared = metadata.whole("expert_shared_feed_forward_length", 0)
    kind = ("granitemoeshared", "GraniteMoeSharedForCausalLM") if shared else ("granitemoe", "GraniteMoeForCausalLM")
    config = common(metadata, *kind, head_dim=False, experts="num_local_experts")
    config |= {"shared_intermediate_size": shared} if shared else {}
    return config | _scales(metadata) | {"rope_parameters": rope_of(metadata, config), "hidden_act": "silu"}


def _granite_hybrid(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    experts = "num_local_experts" if metadata.whole("expert_count", 0) else ""
    config = common(metadata, "granitemoehybrid", "GraniteMoeHybridForCausalLM", head_dim=False, experts=experts, hybrid=True)
    kinds = {"ssm_in.weight": "mamba", "attn_k.weight": "attention"}
    inner, heads = metadata.whole("ssm.inner_size"), metadata.whole("ssm.time_step_rank")
    width = config["hidden_size"]
    metadata.ignore("expert_shared_feed_forward_length")  # the tensors show it
    if not heads or inner % heads or inner % width:
        raise ValueError(f"{metadata.path} has {inner} inner values for {heads} heads and {width} values; expected multiples")
    config.setdefault("num_local_experts", 0)
    if not config["num_key_value_heads"]:  # llama.cpp's converter does not know the current layer names of transformers
        stored = next(tensor for name, tensor in gguf.tensors.items() if name.endswith("attn_k.weight"))
        config["num_key_value_heads"] = stored.shape[0] // max(width // config["num_attention_heads"], 1)
    return config | _scales(metadata) | {
        "layer_types": _kinds(metadata, gguf, config["num_hidden_layers"], kinds),
        "shared_intermediate_size": _width(gguf, "blk.0.ffn_down_shexp.weight", "blk.0.ffn_down.weight"),
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", False) else None,
        "rope_parameters": rope_of(metadata, config),
        "mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_expand": inner // width,
        "mamba_n_groups": metadata.whole("ssm.group_count"), "mamba_d_state": metadata.whole("ssm.state_size"),
        "mamba_d_conv": metadata.whole("ssm.conv_kernel"), "hidden_act": "silu",
    }  # fmt: skip


def _nemotron_h(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    experts = "n_routed_experts" if metadata.whole("expert_count", 0) else ""
    epsilon = (
        "attention.layer_norm_epsilon" if "attention.layer_norm_epsilon" in metadata else "attention.layer_norm_rms_epsilon"
    )
    config = common(metadata, "nemotron_h", "NemotronHForCausalLM", experts=experts, epsilon=epsilon, hybrid=True)
    metadata.ignore("rope.dimension_count", "rope.freq_base")  # it has no rotation
    kinds = {
        "ssm_in.weight": "mamba", "attn_q.weight": "attention", "ffn_up_exps.weight": "moe", "ffn_up.weight": "mlp",
    }  # fmt: skip
    inner, heads = metadata.whole("ssm.inner_size"), metadata.whole("ssm.time_step_rank")
    if not heads or inner % heads:
        raise ValueError(f"{metadata.path} has {inner} inner values for {heads} heads; expected a multiple")
    biases = any(name.endswith("ssm_conv1d.bias") for name in gguf.tensors)
    config |= {
        "layers_block_type": _kinds(metadata, gguf, config.pop("num_hidden_layers"), kinds),
        "layer_norm_epsilon": config.pop("rms_norm_eps"), "mlp_hidden_act": "relu2", "use_conv_bias": biases,
        "mamba_num_heads": heads, "mamba_head_dim": inner // heads, "n_groups": metadata.whole("ssm.group_count"),
        "ssm_state_size": metadata.whole("ssm.state_size"), "conv_kernel": metadata.whole("ssm.conv_kernel"),
    }  # fmt: skip
    config["num_hidden_layers"] = len(config["layers_block_type"])
    if experts:
        config |= _routing(metadata) | {
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length"),
        }
    return config


def _smollm3(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "smollm3", "SmolLM3ForCausalLM", head_dim=False)
    return config | {"rope_parameters": rope_of(metadata, config, 2e6), "no_rope_layer_interval": 4, "hidden_act": "silu"}


def _glm4(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "glm4", "Glm4ForCausalLM")
    rope, bias = rope_of(metadata, config, partial=True), "blk.0.attn_q.bias" in gguf.tensors
    return config | {"rope_parameters": rope, "attention_bias": bias, "hidden_act": "silu"}


def _glm4_moe(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "glm4_moe", "Glm4MoeForCausalLM", experts="n_routed_experts")
    metadata.expect("expert_gating_func", _SIGMOID)
    return config | _routing(metadata) | {
        "rope_parameters": rope_of(metadata, config, partial=True), "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in gguf.tensors,
        "first_k_dense_replace": metadata.whole("leading_dense_block_count", 0),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"), "hidden_act": "silu",
    }  # fmt: skip


def _olmo2(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "olmo2", "Olmo2ForCausalLM", head_dim=False)
    return config | {"rope_parameters": rope_of(metadata, config), "hidden_act": "silu"}


def _seed_oss(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "seed_oss", "SeedOssForCausalLM")
    biases = {name: f"blk.0.{tensor}.bias" in gguf.tensors for name, tensor in (
        ("attention_bias", "attn_q"), ("attention_out_bias", "attn_output"), ("mlp_bias", "ffn_up"),
    )}  # fmt: skip
    return config | biases | {"rope_parameters": rope_of(metadata, config), "hidden_act": "silu"}


def _ernie(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "ernie4_5", "Ernie4_5ForCausalLM")
    bias = "blk.0.attn_q.bias" in gguf.tensors
    return config | {"rope_parameters": rope_of(metadata, config, 500000.0), "use_bias": bias, "hidden_act": "silu"}


def _lfm2(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "lfm2", "Lfm2ForCausalLM", head_dim=False, hybrid=True)
    return _short_convolutions(metadata, gguf, config) | {"block_auto_adjust_ff_dim": False}


def _lfm2_moe(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "lfm2_moe", "Lfm2MoeForCausalLM", head_dim=False, experts="num_experts", hybrid=True)
    metadata.expect("expert_gating_func", _SIGMOID)
    routing = _routing(metadata, groups=False)
    return _short_convolutions(metadata, gguf, config) | {
        "num_dense_layers": metadata.whole("leading_dense_block_count", 0), "norm_topk_prob": True,
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "routed_scaling_factor": routing["routed_scaling_factor"],
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in gguf.tensors),
    }  # fmt: skip


def _short_convolutions(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    kinds = {"shortconv.conv.weight": "conv", "attn_q.weight": "full_attention"}
    return config | {
        "layer_types": _kinds(metadata, gguf, config["num_hidden_layers"], kinds),
        "rope_parameters": rope_of(metadata, config, 1e6), "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "conv_bias": any("shortconv" in name and name.endswith(".bias") for name in gguf.tensors),
    }  # fmt: skip


def _delta_rule(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    """Settings of gated delta networks, and of experts if there are any."""
    metadata.ignore("full_attention_interval", "attention.recurrent_layers")  # the tensors show it
    kinds = {"ssm_out.weight": "linear_attention", "attn_q.weight": "full_attention"}
    inner, heads = metadata.whole("ssm.inner_size"), metadata.whole("ssm.time_step_rank")
    keys = metadata.whole("ssm.group_count")
    if not heads or not keys or inner % heads or heads % keys:
        raise ValueError(
            f"{metadata.path} has {inner} inner values, {heads} value heads and {keys} key heads; expected multiples"
        )
    config |= {
        "layer_types": _kinds(metadata, gguf, config["num_hidden_layers"], kinds),
        "rope_parameters": rope_of(metadata, config, 1e7, partial=True), "attention_bias": False, "hidden_act": "silu",
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"), "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_num_key_heads": keys, "linear_num_value_heads": heads, "linear_value_head_dim": inner // heads,
    }  # fmt: skip
    if "num_experts" in config:
        shared = _width(gguf, "blk.0.ffn_down_shexp.weight")
        config |= {
            "moe_intermediate_size": expert_width(metadata, gguf), "norm_topk_prob": True,
            "shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length", shared or REQUIRED),
        }  # fmt: skip
    return config


def _sections(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The sections of a multimodal rotation (time, height, width), which coincide for text."""
    sections = [size for size in metadata.wholes("rope.dimension_sections", [11, 11, 10, 0]) if size]
    config["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    return config


def _qwen35(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "qwen3_5_text", "Qwen3_5ForCausalLM")
    return _sections(metadata, _delta_rule(metadata, gguf, config))


def _qwen35_moe(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", experts="num_experts")
    return _sections(metadata, _delta_rule(metadata, gguf, config))


def _qwen3_next(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "qwen3_next", "Qwen3NextForCausalLM", experts="num_experts")
    return _delta_rule(metadata, gguf, config) | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _deepseek(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    biased = any(name.endswith("exp_probs_b.bias") for name in gguf.tensors)
    model_type, class_name = ("deepseek_v3", "DeepseekV3ForCausalLM") if biased else ("deepseek_v2", "DeepseekV2ForCausalLM")
    metadata.expect("expert_gating_func", *((_SIGMOID, 0) if biased else (1, 0)))
    rotated, rank = metadata.whole("rope.dimension_count"), metadata.whole("attention.kv_lora_rank")
    # Newer files have the sizes of llama.cpp's computation, with one head for all queries, and separately the model's.
    key = metadata.whole("attention.key_length_mla", metadata.whole("attention.key_length"))
    value = metadata.whole("attention.value_length_mla", metadata.whole("attention.value_length"))
    heads, dense = metadata.whole("attention.head_count"), metadata.whole("leading_dense_block_count", 0)
    metadata.ignore("attention.head_count_kv")
    metadata.expect("attention.causal", True)
    if not heads or key <= rotated:
        raise ValueError(f"{metadata.path} has {heads} heads of {key} values, {rotated} of them rotated; expected more values")
    layers = metadata.whole("block_count") - metadata.whole("nextn_predict_layers", 0)
    if not 1 <= layers <= metadata.tensors:
        raise ValueError(f"{metadata.path} has {layers} layers; expected 1 or more, and at most its {metadata.tensors} tensors")
    length = metadata.whole("context_length")
    rope = rope_of(metadata, {"head_dim": rotated, "max_position_embeddings": length})
    if rope["rope_type"] == "yarn":
        scale = metadata.real("rope.scaling.yarn_log_multiplier", 0.0) * 10
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    config: dict[str, Any] = {
        "architectures": [class_name], "model_type": model_type, "hidden_size": metadata.whole("embedding_length"),
        "intermediate_size": metadata.of_layers("feed_forward_length"), "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": length,
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"), "rope_parameters": rope, "kv_lora_rank": rank,
        "q_lora_rank": metadata.whole("attention.q_lora_rank", None), "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated, "v_head_dim": value, "first_k_dense_replace": dense,
        "n_routed_experts": metadata.whole("expert_count"), "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"), "hidden_act": "silu", "attention_bias": False,
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


ARCHITECTURES = {
    "granite": Architecture(_granite, DENSE, permuted=True),
    "granitemoe": Architecture(_granite_moe, _GRANITE_MOE, permuted=True, experts="block_sparse_moe.experts"),
    "granitehybrid": Architecture(
        _granite_hybrid, _GRANITE_HYBRID, _MAMBA_PARAMETERS, layouts=lambda _: _mamba_layouts("mamba"), permuted=True,
        experts="block_sparse_moe.experts",
    ),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), Architecture(
        _nemotron_h, _NEMOTRON_H, _NEMOTRON_PARAMETERS,
        OUTSIDE | {"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
        lambda _: _mamba_layouts("mixer"), permuted=True, experts="mixer.experts", ungated=True,
    )),
    "smollm3": Architecture(_smollm3, DENSE, permuted=True),
    "glm4": Architecture(_glm4, _PLAIN_ATTENTION | {
        "ffn_norm": "post_attention_layernorm", "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
    }),
    "glm4moe": Architecture(
        _glm4_moe,
        NORMED | MIXTURE | _SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
        _EXPERT_BIAS, experts="mlp.experts", head=HEAD_BEHIND,
    ),
    "olmo2": Architecture(_olmo2, {ours: name for ours, name in NORMED.items() if ours not in ("attn_norm", "ffn_norm")} | {
        "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    }),
    "seed_oss": Architecture(_seed_oss, DENSE | {"post_attention_norm": "post_attention_layernorm"}),
    "ernie4_5": Architecture(_ernie, DENSE),
    "lfm2": Architecture(
        _lfm2, _LFM2, outside=_LFM2_OUTSIDE, layouts=lambda _: {"conv.conv.weight": Layout(shape=depthwise)}
    ),
    "lfm2moe": Architecture(
        _lfm2_moe, _LFM2 | {"ffn_gate_inp": "feed_forward.gate"}, {"exp_probs_b.bias": "feed_forward.expert_bias"},
        _LFM2_OUTSIDE, lambda _: {"conv.conv.weight": Layout(shape=depthwise)}, experts="feed_forward.experts",
    ),
    "qwen3next": Architecture(
        _qwen3_next, _QWEN3_NEXT | MIXTURE | SHARED, _DELTA_PARAMETERS, layouts=_next_layouts, norm_offset=1.0,
        experts="mlp.experts", head=HEAD_BESIDE,
    ),
    "qwen35": Architecture(_qwen35, _QWEN35, _DELTA_PARAMETERS, layouts=_delta_layouts, norm_offset=1.0, head=HEAD_BESIDE),
    "qwen35moe": Architecture(
        _qwen35_moe, _QWEN35 | MIXTURE | SHARED, _DELTA_PARAMETERS, layouts=_delta_layouts, norm_offset=1.0,
        experts="mlp.experts", head=HEAD_BESIDE,
    ),
    "deepseek2": Architecture(
        _deepseek, _LATENT | _MLP | MIXTURE | _SHARED_EXPERTS, _EXPERT_BIAS, experts="mlp.experts", head=HEAD_BEHIND
    ),
}  # fmt: skip
