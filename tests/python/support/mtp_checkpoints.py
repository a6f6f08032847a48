"""Tiny random checkpoints with a multi-token prediction head, in the authors' layouts."""

import json
import re
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
ROUTED = {
    "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4,
}  # fmt: skip
# By model type, the configuration besides SIZES. Layer 1 has the kind of the head's layer.
KINDS = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "qwen3_next": DELTA | EXPERTS,
    "deepseek_v3": ROUTED | LATENT,
    "glm4_moe": ROUTED | {"head_dim": 32},
}


def is_beside(kind: str) -> bool:
    """Whether the layout is Qwen's."""
    return kind.startswith("qwen")


def write(kind: str, directory: Path, agreeing: bool = False, vocabulary: int = 320) -> dict[str, torch.Tensor]:
    """Writes a checkpoint, and returns the tensors of its file.

    Args:
        agreeing: in the model and the head, each token depends only on the previous one, so the head is always right.
        vocabulary: number of tokens.
    """
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**SIZES | KINDS[kind] | {"vocab_size": vocabulary})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    size = config.hidden_size
    prefix, ends = "model.layers.2.", ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    if is_beside(kind):
        prefix, ends = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
    block = f"{prefix}layers.0." if is_beside(kind) else prefix
    tensors |= {
        block + name.removeprefix("model.layers.1."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    tensors |= {f"{prefix}{end}.weight": torch.zeros(size) if is_beside(kind) else torch.ones(size) for end in ends[:3]}
    tensors[f"{prefix}{ends[3]}.weight"] = torch.zeros(size, 2 * size)
    for name, tensor in sorted(tensors.items()):
        if tensor.dim() > 1:
            tensor.copy_(torch.randn(tensor.shape) * 2 / tensor.shape[-1] ** 0.5)
        elif not name.endswith("A_log"):
            tensor.add_(0.1 * torch.randn(tensor.shape))
        if agreeing and re.search(r"(o_proj|out_proj|down_proj)(\.weight)?$", name):
            tensor.zero_()
        if agreeing and "norm" in name and "linear_attn" not in name:
            tensor.fill_(0.0 if is_beside(kind) else 1.0)
    if agreeing:
        tensors[f"{prefix}{ends[3]}.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    if not is_beside(kind):  # DeepSeek's files contain them twice
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


def without_head(directory: Path, tensors: dict[str, torch.Tensor], *names: str) -> None:
    """Rewrites a checkpoint without these tensors; without names, without the whole head."""
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in names and (names or not name.startswith(("mtp.", "model.layers.2.")))
    }
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


def reference(kind: str, tensors: dict[str, torch.Tensor], config: dict, directory: Path):
    """The head's guesses by definition, in plain torch over a whole text.

    The block runs as the only layer of a transformers model, with transformers' attention and no caches.

    Returns:
        A function of the hidden states [s, size] of a text and the tokens after each: results [s, size] and guesses [s].
    """
    prefix = "mtp." if is_beside(kind) else "model.layers.2."
    block = f"{prefix}layers.0." if is_beside(kind) else prefix
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc") if is_beside(kind) else ("enorm", "hnorm", "eh_proj")
    embedding_norm, hidden_norm, projection = (tensors[f"{prefix}{name}.weight"] for name in names)
    norm = tensors[f"{prefix}norm.weight" if is_beside(kind) else f"{prefix}shared_head.norm.weight"]
    table, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    layer = {
        "model.layers.0." + name.removeprefix(block): tensor
        for name, tensor in tensors.items()
        if name.startswith(block) and not any(part in name for part in (*names, "shared_head", "embed_tokens"))
    }
    directory.mkdir()
    one = config | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if "layer_types" in config:
        one["layer_types"] = ["full_attention"]
    (directory / "config.json").write_text(json.dumps(one))
    shared = {"model.embed_tokens.weight": table, "lm_head.weight": head, "model.norm.weight": norm}
    save_file(layer | shared, directory / "model.safetensors", {"format": "pt"})
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * (weight + is_beside(kind))

    @torch.no_grad()
    def guesses(hidden: torch.Tensor, following: list[int]) -> tuple[torch.Tensor, list[int]]:
        inputs = torch.cat([rms(table[following], embedding_norm), rms(hidden, hidden_norm)], dim=-1) @ projection.T
        result = model.model(inputs_embeds=inputs[None]).last_hidden_state[0]
        return result, (result @ head.T).argmax(-1).tolist()

    return guesses
