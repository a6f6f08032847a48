"""Makes tiny versions of every causal language model of transformers, with random weights."""

from __future__ import annotations

import os
import re
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configurations and random weights only

import lowbit
import torch
import transformers
from lowbit.layers.packable import kind_of

# Sizes of tiny models, by the names in configurations. The first matching pattern counts.
SIZES: list[tuple[str, Any]] = [
    (r"(vocab_size|n_vocab|n_words)", 128),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|max_sequence_length)", 128),
    (r"(num_hidden_layers|num_layers|n_layer|n_layers|decoder_layers|encoder_layers|num_decoder_layers)", 4),
    (r"(hidden_size|d_model|n_embd|emb_dim|embed_dim|dim_model|embedding_size|attention_hidden_size)", 64),
    (r"(word_embed_proj_dim|lru_width)", 64),
    (r"(intermediate_size|ffn_dim|decoder_ffn_dim|encoder_ffn_dim|n_inner|d_ff|dff|dim_ff|d_inner)", 128),
    (r"(moe_|shared_expert_|ffn_|expert_|shared_)\w*(intermediate_size|hidden_size|ffn_dim)", 32),
    (r"(num_attention_heads|n_head|n_heads|num_heads|decoder_attention_heads|encoder_attention_heads)", 4),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads)", 2),
    (r"(head_dim|attention_head_dim|d_kv|global_head_dim)", 16),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)", 4),
    (r"(num_experts_per_tok|moe_top_k|moe_topk|moe_k|num_experts_per_token|top_k_experts)", 2),
    (r"(mamba_chunk_size|chunk_size)", 8),  # shorter than the texts here
    (r"(n_group|topk_group)", 1),
    (r"(n_shared_experts|moe_num_shared_experts)", 1),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank)", 32),
    (r"(qk_nope_head_dim|v_head_dim)", 16),
    (r"qk_rope_head_dim", 16),
    (r"(rotary_dim)", 8),
    (r"(first_k_dense_replace|first_k_dense_layers)", 1),
    (r"(vocab_size_per_layer_input)", 128),
    (r"(hidden_size_per_layer_input)", 8),
    (r"(linear_num_key_heads|linear_num_value_heads)", 2),
    (r"(linear_key_head_dim|linear_value_head_dim)", 16),
    (r"(mamba_n_heads|mamba_num_heads)", 8),
    (r"(mamba_d_head|mamba_head_dim)", 16),
    (r"(mamba_d_ssm)", 128),
    (r"(mamba_d_state|ssm_state_size|state_size)", 8),
    (r"(mamba_n_groups|n_groups|mamba_ngroups)", 1),
    (r"(time_step_rank|mamba_dt_rank)", 4),
    (r"(sliding_window)", 6),  # shorter than the texts here and than the decoder's chunk
    (r"(image_size)", 32),
    (r"(patch_size)", 8),
]
# Values that depend on the number of layers; without them a configuration uses defaults.
DERIVED = ("layer_types", "layers_block_type", "mlp_layer_types", "attention_types", "no_rope_layers", "layers_types")
DERIVED += ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "mlp_only_layers", "kv_share_map")
# Special cases.
_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
_ALPHA = {"head_dim": 16, "rope_parameters": _ROPE}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "linear_head_dim": 16, "linear_num_heads": 4, "num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": _ALPHA,
    "hunyuan_v1_moe": _ALPHA,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [32, 32],
    },
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "xglm": {"attention_heads": 4},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
}
SPECIAL_FLOATS = {"initializer_range": 0.2, "init_std": 0.2, "initializer_factor": 1.0}
NO_TOKENS = ("bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id", "mask_token_id")


def tiny(value: Any, model_type: str = "") -> dict[str, Any]:
    """The arguments of a tiny configuration, derived from the default one."""
    arguments: dict[str, Any] = {}
    for name, usual in vars(value).items():
        if name in DERIVED or name.startswith("_"):
            continue
        if isinstance(usual, transformers.PreTrainedConfig):
            arguments[name] = tiny(usual)
            continue
        if isinstance(usual, int) and not isinstance(usual, bool):
            for pattern, size in SIZES:
                if re.fullmatch(pattern, name):
                    arguments[name] = min(size, usual) if usual > 0 else usual
                    break
        if name in SPECIAL_FLOATS and isinstance(usual, float):
            arguments[name] = SPECIAL_FLOATS[name]
        if name in NO_TOKENS and isinstance(usual, int):
            arguments[name] = 1
        if name == "pad_token_id" and isinstance(usual, int):
            arguments[name] = 0
    if "qk_rope_head_dim" in vars(value):  # in this attention all heads share the keys
        arguments |= {"num_key_value_heads": arguments["num_attention_heads"]}
    return arguments | SPECIAL.get(model_type, {})


def make(model_type: str) -> torch.nn.Module:
    """A tiny model with random weights, the same each time."""
    torch.manual_seed(0)
    kind = transformers.CONFIG_MAPPING[model_type]
    config = kind(**tiny(kind(), model_type))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Parameters that start as 0 or 1 would hide errors.
            if parameter.is_floating_point() and parameter.numel() > 1 and parameter.std() < 0.01:
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    return model


def quantize(model: torch.nn.Module) -> int:
    """Quantizes all supported linear layers, including experts, to 4 bits in groups of 16; returns their number."""

    def chosen(module, name):
        return kind_of(module) is lowbit.LinearConfig and module.in_features >= 16

    lowbit.quantize_(model, lowbit.LinearConfig(4, 16), chosen)
    return sum(isinstance(module, lowbit.nn.Linear | lowbit.nn.LinearExperts) for module in model.modules())


def experts_in(model: torch.nn.Module) -> str:
    """State of a quantized model's experts that are in one tensor: "packed", "float", or empty without such experts."""
    if any(isinstance(module, lowbit.nn.LinearExperts) for module in model.modules()):
        return "packed"
    return "float" if any("expert" in name and value.dim() == 3 for name, value in model.named_parameters()) else ""


def float_share(model_type: str) -> float:
    """The share of parameters that stay float at the class's default sizes, if all layers and tables are quantized."""
    model = make(model_type)
    for config in (lowbit.LinearConfig(4, 16), lowbit.EmbeddingConfig(4, 16)):
        lowbit.quantize_(model, config, lambda module, name, kind=type(config): kind_of(module) is kind)
    floats = {_without_numbers(name) for name, value in model.state_dict().items() if value.is_floating_point()}
    with torch.device("meta"):
        usual = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type]())
    usual.tie_weights()
    sizes = {id(value): (name, value.numel()) for name, value in usual.named_parameters()}
    return sum(size for name, size in sizes.values() if _without_numbers(name) in floats) / sum(
        size for _, size in sizes.values()
    )


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
