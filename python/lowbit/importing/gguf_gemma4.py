"""Gemma 4 in GGUF files: config and tensor names."""

from __future__ import annotations

from typing import Any

from ..files.gguf_reader import Gguf
from .gguf_metadata import Metadata
from .gguf_models import NORMED, OUTSIDE, SANDWICH, Architecture, values_of_factors


class _Gemma4(Architecture):
    """Gemma 4, whose sliding-window and full-attention layers differ in the size and number of heads."""

    def config(self, metadata: Metadata, gguf: Gguf) -> dict[str, Any]:
        heads, width, layers = (metadata.whole(name) for name in ("attention.head_count", "embedding_length", "block_count"))
        shared, experts = metadata.whole("attention.shared_kv_layers", 0), metadata.whole("expert_count", 0)
        windows = metadata.wholes("attention.sliding_window_pattern")
        if not heads or not 1 <= layers <= metadata.tensors or len(windows) != layers or not shared < layers:
            raise ValueError(
                f"{metadata.path} has {heads} heads, {layers} layers, {len(windows)} values of sliding_window_pattern and "
                f"{shared} shared_kv_layers; expected heads, a value for each layer, and fewer shared layers than layers"
            )
        metadata.expect("attention.causal", True)
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]

        def of(kind: str, values: list[int]) -> int:
            chosen = {value for value, one in zip(values, kinds, strict=True) if one == kind}
            if len(values) != layers or len(chosen) > 1:
                raise ValueError(f"{metadata.path} has {values} for {kinds}; expected one value for each kind of layer")
            return chosen.pop() if chosen else 0

        keys = metadata.of_each_layer("attention.head_count_kv", layers, heads)
        sizes = metadata.of_each_layer("feed_forward_length", layers)
        first = sizes[0]
        wide = [first * (1 + (layer >= layers - shared)) for layer in range(layers)]
        if sizes not in (wide, [first] * layers):
            raise ValueError(
                f"{metadata.path} has feed_forward_length {sizes}; expected {first}, or twice that in the last {shared}"
            )
        full, sliding = metadata.whole("attention.key_length"), metadata.whole("attention.key_length_swa")
        metadata.expect("attention.value_length", full)
        metadata.expect("attention.value_length_swa", sliding)
        metadata.expect("rope.dimension_count", full)
        rotated = 1.0
        if "rope_freqs.weight" in gguf.tensors:
            factors = values_of_factors(gguf.tensors["rope_freqs.weight"], full // 2)
            if not ((factors == 1) | (factors >= 1e30)).all() or (factors[:-1] > factors[1:]).any():
                raise ValueError(f"{metadata.path}: rope_freqs.weight has other factors than 1 and then 1e30")
            rotated = float((factors == 1).mean())
        alone = any(
            f"blk.{layer}.attn_k.weight" in gguf.tensors and f"blk.{layer}.attn_v.weight" not in gguf.tensors
            for layer in range(layers - shared)
        )
        per_layer = gguf.tensors.get("per_layer_token_embd.weight")
        activation = {"hidden_activation": "gelu_pytorch_tanh"}
        config: dict[str, Any] = {
            "architectures": [self.class_name], "model_type": self.model_type, "hidden_size": width, "intermediate_size": first,
            "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": sliding, "global_head_dim": full,
            "num_key_value_heads": of("sliding_attention", keys) or of("full_attention", keys),
            "num_global_key_value_heads": of("full_attention", keys) if alone else None, "attention_k_eq_v": alone,
            "max_position_embeddings": metadata.whole("context_length"), "layer_types": kinds, "num_kv_shared_layers": shared,
            "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
            "use_double_wide_mlp": sizes == wide and shared > 0,
            "sliding_window": metadata.whole("attention.sliding_window"),
            "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
            "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input", 0),
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "partial_rotary_factor": rotated,
                    "rope_theta": metadata.positive("rope.freq_base", 1e6),
                },
                "sliding_attention": {
                    "rope_type": "default", "rope_theta": metadata.positive("rope.freq_base_swa", 1e4),
                    "partial_rotary_factor": metadata.whole("rope.dimension_count_swa", sliding) / max(sliding, 1),
                },
            },
        } | activation  # fmt: skip
        if per_layer is not None:
            config["vocab_size_per_layer_input"] = per_layer.shape[0]
        if experts:
            config |= {
                "enable_moe_block": True, "num_experts": experts, "top_k_experts": metadata.whole("expert_used_count"),
                "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
            }  # fmt: skip
        return config


_NAMES = SANDWICH | NORMED | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
}  # fmt: skip
_PARAMETERS = {
    "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}  # fmt: skip
_OUTSIDE = OUTSIDE | {
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip


GEMMA4 = _Gemma4("gemma4_text", "Gemma4ForCausalLM", _NAMES, _PARAMETERS, _OUTSIDE, experts="experts")
