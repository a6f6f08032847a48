"""Maps GGUF metadata to transformers: config.json and tensor names of each architecture.

transformers has such tables too, but they silently ignore what they do not know (llama 3's frequencies, soft caps, partial
rotation of heads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    name, those that are neither a weight nor a bias in transformers or in the file. :meth:`config` makes config.json.
    """

    model_type: str
    class_name: str
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
    constants: Mapping[str, Any] = field(default_factory=dict)  # of config.json
    keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # field of config.json -> key and default
    biases: Mapping[str, str] = field(default_factory=dict)  # field of config.json -> tensor that has a bias or not
    more: Callable[[Metadata, Gguf, dict[str, Any]], dict[str, Any]] | None = None  # fields that depend on others
    sets_head_dim: bool = True  # config.json has head_dim
    hybrid: bool = False  # some layers have no attention or no feed-forward network
    count: str = ""  # field of config.json with the number of experts
    may_be_dense: bool = False  # files without experts exist
    theta: float | None = 10000.0  # default base of the rotation; None: `more` adds the rotation if there is one
    partial: bool = False  # only a part of each head may be rotated
    epsilons: tuple[str, ...] = ("attention.layer_norm_rms_epsilon",)  # possible keys; the first that the file has is used
    epsilon_field: str = "rms_norm_eps"

    def config(self, metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
        """config.json, without what all architectures share (:func:`.gguf_architectures.config_of`)."""
        config = self._common(metadata)
        if self.theta is not None:
            rope = rope_of(metadata, config, self.theta, partial=self.partial)
            config["rope_parameters"] = _llama3_rope(gguf, rope, head_dim_of(config))
        config |= self.constants
        config |= {name: f"blk.0.{tensor}.bias" in gguf.tensors for name, tensor in self.biases.items()}
        config |= {name: metadata.like(key, default) for name, (key, default) in self.keys.items()}
        return config | ({} if self.more is None else self.more(metadata, gguf, config))

    def _common(self, metadata: Metadata) -> dict[str, Any]:
        heads, width = metadata.whole("attention.head_count"), metadata.whole("embedding_length")
        if not heads or not width:
            raise ValueError(f"{metadata.path} has {heads} attention heads for {width} values; expected 1 or more")
        size = metadata.whole("attention.key_length", width // heads)
        metadata.expect("attention.value_length", size)
        metadata.expect("attention.causal", True)
        config: dict[str, Any] = {}
        experts = bool(self.count and not (self.may_be_dense and metadata.whole("expert_count", 0) == 0))
        if experts:
            count, used = metadata.whole("expert_count"), metadata.whole("expert_used_count")
            if not 1 <= used <= count:
                raise ValueError(
                    f"{metadata.path} has {count} experts and uses {used} of them; expected 1 to {count} of 1 or more"
                )
            config |= {self.count: count, "num_experts_per_tok": used}
        else:
            metadata.expect("expert_count", 0)
            metadata.expect("expert_used_count", 0)
        if self.sets_head_dim:
            config["head_dim"] = size
        elif size != width // heads:
            raise ValueError(f"{metadata.path} has heads of {size} values; expected {width // heads}, as {self.class_name} has")
        epsilon = next((name for name in self.epsilons if name in metadata), self.epsilons[-1])
        return config | {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "hidden_size": width,
            "intermediate_size": metadata.of_layers("feed_forward_length", 0 if experts else REQUIRED, zeros=self.hybrid),
            "num_hidden_layers": layers_of(metadata),
            "num_attention_heads": heads,
            "num_key_value_heads": metadata.of_layers("attention.head_count_kv", heads, zeros=self.hybrid),
            "max_position_embeddings": metadata.whole("context_length"),
            self.epsilon_field: metadata.real(epsilon),
        }

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


def layers_of(metadata: Metadata) -> int:
    """The number of layers without those that predict further tokens."""
    layers = metadata.whole("block_count") - metadata.whole("nextn_predict_layers", 0)
    if not 1 <= layers <= metadata.tensors:
        raise ValueError(
            f"{metadata.path} has {metadata.architecture}.block_count {layers}; expected 1 or more, and not more than "
            f"its {metadata.tensors} tensors"
        )
    return int(layers)


def head_dim_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_of(metadata: Metadata, config: Mapping[str, Any], theta: float = 10000.0, *, partial: bool = False) -> dict[str, Any]:
    """The rotation settings, except for frequencies stored as tensors; ``partial``: only part of a head may be rotated."""
    rope: dict[str, Any] = {"rope_theta": metadata.positive("rope.freq_base", theta), "rope_type": "default"}
    size = head_dim_of(config)
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
        raise ValueError(f"{stored.path}: {stored.name} has invalid factors; expected finite numbers above 0")
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


def gemmas_query_scale(architecture: str, config: Mapping[str, Any]) -> int:
    """query_pre_attn_scalar. Only the 27B scales queries by width / heads; ggml recognizes it by its number of layers."""
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[architecture]
    return int(config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"])


def _gemma2(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": gemmas_query_scale("gemma2", config)}


def _gemma3(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    pattern = metadata.whole("attention.sliding_window_pattern", 6)
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.positive("rope.freq_base_swa", 10000.0)},
        },
        "query_pre_attn_scalar": gemmas_query_scale("gemma3", config),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
        "layer_types": ["sliding_attention" if layer % max(pattern, 1) else "full_attention" for layer in layers],
    }


def _phi3(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    size = head_dim_of(config)
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
    window = metadata.whole("attention.sliding_window", None) or None
    return {"rope_parameters": rope, "original_max_position_embeddings": length, "sliding_window": window}


def _qwen2_vl(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    """Which part of the positions' three axes rotates which values; texts alone have the same position on all axes."""
    sections = metadata.wholes("rope.dimension_sections")
    if len(sections) < 3 or any(sections[3:]) or 2 * sum(sections) != head_dim_of(config):
        raise ValueError(
            f"{metadata.path} has rope.dimension_sections {sections} for heads of {head_dim_of(config)}; expected three "
            "numbers whose sum is half of that"
        )
    return {"rope_parameters": config["rope_parameters"] | {"mrope_section": sections[:3]}}


def _expert_width(metadata: Metadata, gguf: Gguf) -> int:
    stored = gguf.tensors.get("blk.0.ffn_down_exps.weight")
    return int(metadata.whole("expert_feed_forward_length", REQUIRED if stored is None else stored.shape[-1]))


def _qwen3_moe(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    return {"moe_intermediate_size": _expert_width(metadata, gguf)}


def expert_widths(metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
    """The widths of Qwen's experts and its shared expert."""
    stored = gguf.tensors.get("blk.0.ffn_down_shexp.weight")
    shared = metadata.whole("expert_shared_feed_forward_length", REQUIRED if stored is None else stored.shape[-1])
    return {"moe_intermediate_size": _expert_width(metadata, gguf), "shared_expert_intermediate_size": shared}


def _qwen2_moe(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    return expert_widths(metadata, gguf)


def _gpt_oss(metadata: Metadata, gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    # ggml rounds the ends of YaRN's ramp, but the original model does not.
    truncated = {"truncate": False} if config["rope_parameters"]["rope_type"] == "yarn" else {}
    return {
        "rope_parameters": config["rope_parameters"] | truncated,
        "intermediate_size": _expert_width(metadata, gguf),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config["num_hidden_layers"])],
    }


SILU = {"hidden_act": "silu"}
_TANH = {"hidden_activation": "gelu_pytorch_tanh"}
_ONE_WINDOW = {"use_sliding_window": False}
LLAMA_BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
ATTENTION_BIAS = {"attention_bias": "attn_q"}
# bitnet.cpp uses squared ReLU, except for its first models, which llama.cpp supports too.
_BITNETS = {
    name: Architecture(
        "bitnet", "BitNetForCausalLM", _BITNET, sets_head_dim=False,
        constants={"hidden_act": activation, "attention_bias": False},
    )
    for name, activation in (("bitnet", "silu"), ("bitnet-25", "relu2"), ("bitnet-b1.58", "relu2"))
}  # fmt: skip
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", DENSE, permuted=True, biases=LLAMA_BIASES, constants=SILU),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", DENSE, sets_head_dim=False, constants=SILU | _ONE_WINDOW),
    "qwen2vl": Architecture(
        "qwen2", "Qwen2ForCausalLM", DENSE, sets_head_dim=False, constants=SILU | _ONE_WINDOW, more=_qwen2_vl
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", NORMED, biases=ATTENTION_BIAS, constants=SILU | _ONE_WINDOW),
    "gemma": Architecture(
        "gemma", "GemmaForCausalLM", DENSE, norm_offset=1.0, constants=_TANH | {"hidden_act": "gelu_pytorch_tanh"}
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", SANDWICH, norm_offset=1.0, constants=_TANH, more=_gemma2,
        keys={
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
            "sliding_window": ("attention.sliding_window", 4096),
        },
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", NORMED | SANDWICH, norm_offset=1.0, theta=1e6, more=_gemma3,
        constants=_TANH | {"attn_logit_softcapping": None}, keys={"sliding_window": ("attention.sliding_window", REQUIRED)},
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3, sets_head_dim=False, theta=None, constants=SILU, more=_phi3),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", ATTENTION | MIXTURE | SHARED, experts="mlp.experts", count="num_experts",
        sets_head_dim=False, constants=SILU | _ONE_WINDOW | {"norm_topk_prob": False}, more=_qwen2_moe,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", ATTENTION | MIXTURE, experts="mlp.experts", count="num_experts",
        biases=ATTENTION_BIAS, constants=SILU | _ONE_WINDOW | {"norm_topk_prob": True}, more=_qwen3_moe,
    ),
    **_BITNETS,
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", _GPT_OSS, {"attn_sinks.weight": "self_attn.sinks"}, experts="mlp.experts",
        interleaved=True, count="num_local_experts", theta=150000.0, constants={"attention_bias": True},
        keys={"sliding_window": ("attention.sliding_window", 128)}, more=_gpt_oss,
    ),
}  # fmt: skip
MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", ATTENTION | MIXTURE, permuted=True, experts="mlp.experts", count="num_local_experts",
    constants=SILU | {"sliding_window": None},
)  # fmt: skip
# Tensors that become numbers in config.json.
IN_CONFIG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
