"""Maps GGUF metadata to transformers: config.json and tensor names of each architecture.

transformers has such tables too, but they silently ignore what they do not know (llama 3's frequencies, soft caps, partial
rotation of heads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..files.gguf_reader import Gguf, StoredBlocks
from ..files.io import read_bytes
from .gguf_layouts import Layout
from .gguf_metadata import REQUIRED, Metadata

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Part(NamedTuple):
    """A tensor that is part ``number`` of ``parts`` of a transformers tensor, concatenated by rows."""

    name: str
    number: int
    parts: int


@dataclass(frozen=True)
class Architecture:
    """How a GGUF architecture maps to transformers.

    ``names`` maps tensors of layers, without "blk.*", "model.layers.*" and "weight" or "bias". ``parameters`` maps, by full
    name, those that are neither a weight nor a bias in transformers or in the file.
    """

    config: Callable[[Metadata, Gguf], dict[str, Any]]
    names: Mapping[str, str | Part]
    parameters: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)  # tensors outside of layers
    layouts: Callable[[Mapping[str, Any]], Mapping[str, Layout]] | None = None  # by tensor name in transformers
    permuted: bool = False  # rows of q and k are permuted: ggml rotates adjacent pairs, transformers halves
    norm_offset: float = 0.0  # ggml adds this to the weights of norms
    experts: str = ""  # the module of a layer that holds the experts; "": no experts
    interleaved: bool = False  # experts' rows of gate and up alternate, and their float parameters are transposed
    ungated: bool = False  # experts have no gate
    # Names in transformers' checkpoints of the extra tensors ("nextn.*") of a multi-token prediction head, which is the
    # layer after the model's last one. None: the head is not imported.
    head: Mapping[str, str] | None = None

    def offset_of(self, name: str) -> float:
        """What ggml adds to the tensor with this name in transformers."""
        is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        return self.norm_offset if is_norm or name.startswith("mtp.pre_fc_norm") else 0.0


# A multi-token prediction head either as "mtp.*", with its layer as "mtp.layers.0.*", or as an additional model layer.
HEAD_BESIDE = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm"}
HEAD_BEHIND = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}


DENSE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMED = DENSE | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH = DENSE | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_BITNET = DENSE | {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
MIXTURE = {"ffn_gate_inp": "mlp.gate"}
ATTENTION = {ours: name for ours, name in NORMED.items() if not name.startswith("mlp.")}
SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GPT_OSS = {ours: name for ours, name in ATTENTION.items() if not ours.endswith("norm")} | {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def common(
    metadata: Metadata,
    model_type: str,
    class_name: str,
    *,
    head_dim: bool = True,
    experts: str = "",
    hybrid: bool = False,
    epsilon: str = "attention.layer_norm_rms_epsilon",
) -> dict[str, Any]:
    """The part of config.json that all architectures have.

    Args:
        experts: name of the config's field for the number of experts; "": the model has none.
        hybrid: some layers have no attention or no feed-forward network.
    """
    heads, width = metadata.whole("attention.head_count"), metadata.whole("embedding_length")
    if not heads or not width:
        raise ValueError(f"{metadata.path} has {heads} attention heads for {width} values; expected 1 or more")
    size = metadata.whole("attention.key_length", width // heads)
    metadata.expect("attention.value_length", size)
    if not experts:
        metadata.expect("expert_count", 0)
        metadata.expect("expert_used_count", 0)
    metadata.expect("attention.causal", True)
    layers = metadata.whole("block_count") - metadata.whole("nextn_predict_layers", 0)
    if not 1 <= layers <= metadata.tensors:
        raise ValueError(
            f"{metadata.path} has {metadata.architecture}.block_count {layers}; expected 1 or more, and not more than "
            f"its {metadata.tensors} tensors"
        )
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": metadata.of_layers("feed_forward_length", 0 if experts else REQUIRED, zeros=hybrid),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.of_layers("attention.head_count_kv", heads, zeros=hybrid),
        "max_position_embeddings": metadata.whole("context_length"),
        "rms_norm_eps": metadata.real(epsilon),
    }
    if experts:
        count, used = metadata.whole("expert_count"), metadata.whole("expert_used_count")
        if not 1 <= used <= count:
            raise ValueError(f"{metadata.path} has {count} experts and uses {used} of them; expected 1 to {count} of 1 or more")
        config |= {experts: count, "num_experts_per_tok": used}
    if head_dim:
        config["head_dim"] = size
    elif size != width // heads:
        raise ValueError(f"{metadata.path} has heads of {size} values; expected {width // heads}, as {class_name} has")
    return config


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_of(metadata: Metadata, config: Mapping[str, Any], theta: float = 10000.0, *, partial: bool = False) -> dict[str, Any]:
    """The rotation settings, except for frequencies stored as tensors; ``partial``: only part of a head may be rotated."""
    rope: dict[str, Any] = {"rope_theta": metadata.positive("rope.freq_base", theta), "rope_type": "default"}
    size = _head_dim(config)
    if partial:
        rotated = metadata.whole("rope.dimension_count", size)
        if not 0 < rotated <= size:
            raise ValueError(f"{metadata.path} rotates {rotated} values of heads of {size}; expected 1 to {size}")
        rope["partial_rotary_factor"] = rotated / size
    else:
        metadata.expect("rope.dimension_count", size)
    # As in ggml: without a type the factor is a linear one, with type "none" it is ignored, and a factor of 0 means none.
    kind = metadata.text("rope.scaling.type", None)
    factor = metadata.real("rope.scaling.factor", metadata.real("rope.scale_linear", 0.0)) or 1.0
    if factor < 0:
        raise ValueError(f"{metadata.path} stretches positions by the factor {factor:g}; expected one above 0, or 0 for none")
    length = metadata.whole("rope.scaling.original_context_length", None)
    if kind == "yarn":
        metadata.expect("rope.scaling.attn_factor", 1.0)
        metadata.expect("rope.scaling.yarn_attn_factor", 1.0)
        metadata.expect("rope.scaling.yarn_ext_factor", 1.0)
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", 1.0),
            "original_max_position_embeddings": length or config["max_position_embeddings"],
        }
    elif kind == "linear" or (kind is None and factor != 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in (None, "none"):
        raise ValueError(
            f"{metadata.path} has {metadata.architecture}.rope.scaling.type {kind!r}; expected none, linear or yarn"
        )
    return rope


def values_of_factors(stored: StoredBlocks, count: int) -> np.ndarray:
    """Reads a small float32 tensor of ``count`` elements."""
    if stored.type.name != "F32" or stored.shape != (count,):
        raise ValueError(f"{stored.path}: {stored.name} is {stored.type.name} {list(stored.shape)}; expected F32 [{count}]")
    values = read_bytes(stored).numpy().view("<f4").astype(np.float64)
    if not np.isfinite(values).all() or (values <= 0).any():
        raise ValueError(f"{stored.path}: {stored.name} has values that are no factors; expected finite ones above 0")
    return values


def _llama3_rope(gguf: Gguf, rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Recovers the four parameters of Llama 3's frequency scaling; the file has only the resulting factors."""
    stored = gguf.tensors.get("rope_freqs.weight")
    if stored is None:
        return rope
    factors = values_of_factors(stored, head_dim // 2)
    if rope["rope_type"] != "default":
        raise ValueError(f"{stored.path} has both rope_freqs.weight and rope.scaling.type; expected one of them")
    if (factors == 1).all():
        return rope
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    largest, low, high = float(factors.max()), 1.0, 4.0
    for length in (8192, 4096, 16384, 32768):
        smooth = np.clip((length / waves - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / largest + smooth), factors, rtol=1e-4):
            return rope | {
                "rope_type": "llama3", "factor": largest, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }  # fmt: skip
    raise ValueError(f"{stored.path}: rope_freqs.weight has factors up to {largest:g} that are not those of Llama 3")


def _llama(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "llama", "LlamaForCausalLM")
    has = gguf.tensors.keys()
    rope = _llama3_rope(gguf, rope_of(metadata, config), config["head_dim"])
    attention, mlp = "blk.0.attn_q.bias" in has, "blk.0.ffn_up.bias" in has
    return config | {"rope_parameters": rope, "attention_bias": attention, "mlp_bias": mlp, "hidden_act": "silu"}


def _qwen2(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "qwen2", "Qwen2ForCausalLM", head_dim=False)
    return config | {"rope_parameters": rope_of(metadata, config), "use_sliding_window": False, "hidden_act": "silu"}


def _qwen3(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "qwen3", "Qwen3ForCausalLM")
    rope, bias = rope_of(metadata, config), "blk.0.attn_q.bias" in gguf.tensors
    return config | {
        "rope_parameters": rope, "attention_bias": bias, "use_sliding_window": False, "hidden_act": "silu"
    }  # fmt: skip


def _gemma(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "gemma", "GemmaForCausalLM")
    activation = "gelu_pytorch_tanh"
    return config | {
        "rope_parameters": rope_of(metadata, config), "hidden_act": activation, "hidden_activation": activation
    }  # fmt: skip


def _gemma2(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "gemma2", "Gemma2ForCausalLM")
    # ggml recognizes the 27B by its number of layers. It alone scales queries by hidden_size / heads instead of head_dim.
    large = config["num_hidden_layers"] == 46
    return config | {
        "rope_parameters": rope_of(metadata, config),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"],
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0),
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
    }


def _gemma3(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "gemma3_text", "Gemma3ForCausalLM")
    large = config["num_hidden_layers"] == 62  # the 27B, as in _gemma2
    pattern = metadata.whole("attention.sliding_window_pattern", 6)
    layers = range(1, config["num_hidden_layers"] + 1)
    soft_cap = metadata.real("final_logit_softcapping", 0.0)
    return config | {
        "rope_parameters": {
            "full_attention": rope_of(metadata, config, 1000000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.positive("rope.freq_base_swa", 10000.0)},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"],
        "final_logit_softcapping": soft_cap or None,
        "attn_logit_softcapping": None,
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": ["sliding_attention" if layer % max(pattern, 1) else "full_attention" for layer in layers],
    }


def _phi3(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "phi3", "Phi3ForCausalLM", head_dim=False)
    size = _head_dim(config)
    if size < 1:
        heads = config["num_attention_heads"]
        raise ValueError(f"{metadata.path} has {heads} attention heads for {config['hidden_size']} values; expected fewer")
    rotated = metadata.whole("rope.dimension_count", size)
    rope: dict[str, Any] = {
        "rope_theta": metadata.positive("rope.freq_base", 10000.0),
        "rope_type": "default",
        "partial_rotary_factor": rotated / size,
    }
    length = metadata.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    names = [f"rope_factors_{which}.weight" for which in ("short", "long")]
    if all(name in gguf.tensors for name in names):
        short, long = (values_of_factors(gguf.tensors[name], rotated // 2).tolist() for name in names)
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope |= {"attention_factor": metadata.real("rope.scaling.attn_factor", 1.0), "original_max_position_embeddings": length}
    else:
        metadata.expect("rope.scaling.attn_factor", 1.0)
    return config | {
        "rope_parameters": rope,
        "original_max_position_embeddings": length,
        "sliding_window": metadata.whole("attention.sliding_window", None) or None,
        "hidden_act": "silu",
    }


def _bitnet(activation: str, metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "bitnet", "BitNetForCausalLM", head_dim=False)
    return config | {"rope_parameters": rope_of(metadata, config), "attention_bias": False, "hidden_act": activation}


def _mixtral(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "mixtral", "MixtralForCausalLM", experts="num_local_experts")
    rope = _llama3_rope(gguf, rope_of(metadata, config), config["head_dim"])
    return config | {"rope_parameters": rope, "sliding_window": None, "hidden_act": "silu"}


def expert_width(metadata: Metadata, gguf: Gguf) -> int:
    stored = gguf.tensors.get("blk.0.ffn_down_exps.weight")
    return int(metadata.whole("expert_feed_forward_length", REQUIRED if stored is None else stored.shape[-1]))


def _qwen2_moe(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "qwen2_moe", "Qwen2MoeForCausalLM", head_dim=False, experts="num_experts")
    shared = gguf.tensors.get("blk.0.ffn_down_shexp.weight")
    return config | {
        "rope_parameters": rope_of(metadata, config),
        "moe_intermediate_size": expert_width(metadata, gguf),
        "shared_expert_intermediate_size": metadata.whole(
            "expert_shared_feed_forward_length", REQUIRED if shared is None else shared.shape[-1]
        ),
        "norm_topk_prob": False, "use_sliding_window": False, "hidden_act": "silu",
    }  # fmt: skip


def _qwen3_moe(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "qwen3_moe", "Qwen3MoeForCausalLM", experts="num_experts")
    return config | {
        "rope_parameters": rope_of(metadata, config), "moe_intermediate_size": expert_width(metadata, gguf),
        "norm_topk_prob": True, "attention_bias": "blk.0.attn_q.bias" in gguf.tensors, "use_sliding_window": False,
        "hidden_act": "silu",
    }  # fmt: skip


def _gpt_oss(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    config = common(metadata, "gpt_oss", "GptOssForCausalLM", experts="num_local_experts")
    rope = rope_of(metadata, config, 150000.0)
    # ggml rounds the ends of YaRN's ramp, but the original model does not.
    rope |= {"truncate": False} if rope["rope_type"] == "yarn" else {}
    layers = range(config["num_hidden_layers"])
    return config | {
        "rope_parameters": rope, "intermediate_size": expert_width(metadata, gguf), "attention_bias": True,
        "sliding_window": metadata.whole("attention.sliding_window", 128),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in layers],
    }  # fmt: skip


ARCHITECTURES = {
    "llama": Architecture(_llama, DENSE, permuted=True),
    "qwen2": Architecture(_qwen2, DENSE),
    "qwen3": Architecture(_qwen3, NORMED),
    "gemma": Architecture(_gemma, DENSE, norm_offset=1.0),
    "gemma2": Architecture(_gemma2, SANDWICH, norm_offset=1.0),
    "gemma3": Architecture(_gemma3, NORMED | SANDWICH, norm_offset=1.0),
    "phi3": Architecture(_phi3, _PHI3),
    "qwen2moe": Architecture(_qwen2_moe, ATTENTION | MIXTURE | SHARED, experts="mlp.experts"),
    "qwen3moe": Architecture(_qwen3_moe, ATTENTION | MIXTURE, experts="mlp.experts"),
    # bitnet.cpp uses squared ReLU, except for its first models, which llama.cpp supports too.
    "bitnet": Architecture(partial(_bitnet, "silu"), _BITNET),
    "bitnet-25": Architecture(partial(_bitnet, "relu2"), _BITNET),
    "bitnet-b1.58": Architecture(partial(_bitnet, "relu2"), _BITNET),
    "gpt-oss": Architecture(
        _gpt_oss, _GPT_OSS, {"attn_sinks.weight": "self_attn.sinks"}, experts="mlp.experts", interleaved=True
    ),
}
MIXTRAL = Architecture(_mixtral, ATTENTION | MIXTURE, permuted=True, experts="mlp.experts")
# Tensors that become numbers in config.json.
IN_CONFIG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
