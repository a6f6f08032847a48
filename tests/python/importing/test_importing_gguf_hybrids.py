"""`lowbit import` of GGUF files with recent architectures, written by this file like llama.cpp's converter, and by the
converter."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import lowbit
import numpy as np
import pytest
import torch
import transformers
from command_line import FLOAT
from lowbit.llm import Decoder, Mtp, generate
from lowbit.llm.loading import load_model
from safetensors.torch import load_file

SOURCES = Path(__file__).parents[3] / "build/bench-peers/vendor/llama.cpp"  # from make bench-peers
WIDTH, ATTENTION = 128, ("attention", "full_attention")
SIZES = {
    "vocab_size": 320, "hidden_size": WIDTH, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "head_dim": 32, "chunk_size": 8,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GEMMA4 = {
    "head_dim": 32, "global_head_dim": 64, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True,
}  # fmt: skip
SCALES = {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
# model type: the file's architecture, and the configuration besides SIZES
MODELS = {
    "granite": ("granite", SCALES),
    "granitemoe": ("granitemoe", SCALES | {"num_local_experts": 4}),
    "granitemoeshared": ("granitemoe", SCALES | {"num_local_experts": 4, "shared_intermediate_size": 64}),
    "granitemoehybrid": ("granitehybrid", SCALES | MAMBA | {
        "num_local_experts": 4, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"] * 2,
    }),
    "nemotron_h": ("nemotron_h_moe", NEMOTRON | ROUTED | {
        "layers_block_type": ["mamba", "moe", "attention", "moe"], "moe_shared_expert_intermediate_size": 96,
        "intermediate_size": 64, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    }),
    "smollm3": ("smollm3", {}),
    "glm4": ("glm4", {"head_dim": 32}),
    "glm4_moe": ("glm4moe", ROUTED | {"head_dim": 32, "use_qk_norm": True, "routed_scaling_factor": 1.5}),
    "olmo2": ("olmo2", {}),
    "seed_oss": ("seed_oss", {"head_dim": 32}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2moe", EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}),
    "qwen3_next": ("qwen3next", DELTA | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_5_text": ("qwen35", DELTA),
    "qwen3_5_moe_text": ("qwen35moe", DELTA | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "gemma4_text": ("gemma4", GEMMA4 | {
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 320, "final_logit_softcapping": 3.0,
    }),
    "gemma4_text, experts": ("gemma4", GEMMA4 | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64,
    }),
    "deepseek_v3": ("deepseek2", ROUTED | LATENT | {"routed_scaling_factor": 2.5}),
}  # fmt: skip


def model_of(kind: str) -> torch.nn.Module:
    """A random model in which norms, gates and offsets affect the logits."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind.split(",")[0]](**SIZES | MODELS[kind][1])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-1, 1)
        elif parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
        else:
            parameter.data.mul_(4)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            buffer.add_(0.1 * torch.randn(buffer.shape))
    return model


def tiled(array: np.ndarray, config, width: int, axis: int = 0) -> np.ndarray:
    """Reorders value heads from grouped by key to llama.cpp's order: first one head for each key."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if axis:
        return tiled(array.swapaxes(0, 1), config, width).swapaxes(0, 1)
    return array.reshape(keys, values // keys, width, -1).swapaxes(0, 1).reshape(array.shape)


def parts(config, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The file's tensors for a parameter, by names in gguf's table or by names in a file."""
    kind, leaf = config.model_type, name.split(".", 3)[-1]
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if kind.startswith(("granite", "smollm3", "nemotron")) and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_key_value_heads if "k_proj" in name else config.num_attention_heads
        array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    if kind.startswith("qwen3_") and name.endswith("norm.weight") and "linear_attn" not in name:
        array = array + 1
    if kind.startswith("qwen3_5") and "linear_attn" in name:
        width, before = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
        if "qkv" in name or "conv1d" in name:
            array = np.concatenate([array[:before], tiled(array[before:], config, width)])
        elif "in_proj_z" in name:
            array = tiled(array, config, width)
        elif "out_proj" in name:
            array = tiled(array, config, width, 1)
        elif not name.endswith("norm.weight"):
            array = tiled(array, config, 1)
    if leaf.endswith("A_log"):
        array = -np.exp(array)
        return {f"{layer}.ssm_a": array if "linear_attn" in leaf else array[:, None]}
    if leaf in ("mamba.D", "mixer.D"):
        return {f"{layer}.ssm_d": array[:, None]}
    if leaf.endswith("dt_bias"):
        return {f"{layer}.ssm_dt.bias": array}
    if leaf.endswith(("e_score_correction_bias", "expert_bias")):
        return {f"{layer}.exp_probs_b.bias": array}
    if leaf in ("mamba.norm.weight", "mixer.norm.weight"):
        return {f"{layer}.ssm_norm.weight": array.reshape(2, -1)}
    if leaf in ("layer_scalar", "router.scale", "router.per_expert_scale"):
        called = {"layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale"}
        return {f"{layer}.{called.get(leaf, 'ffn_down_exps.scale')}": array}
    if kind == "gemma4_text" and "gate_up_proj" in name:
        return {f"{layer}.ffn_gate_up_exps.weight": array}
    if ".experts." in name:
        if "gate_up" in name:
            gate, up = np.split(array, 2, 1)
            return {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}
        return {f"{layer}.ffn_{'up' if 'up_proj' in name else 'down'}_exps.weight": array}
    if leaf == "block_sparse_moe.router.weight":
        return {f"{layer}.ffn_gate_inp.weight": array}
    if "shared_mlp" in name:
        suffix = "_shexp" if config.num_local_experts else ""
        if "output" in name:
            return {f"{layer}.ffn_down{suffix}.weight": array}
        return dict(zip((f"{layer}.ffn_{part}{suffix}.weight" for part in ("gate", "up")), np.split(array, 2)))
    if "in_proj_qkvz" in name:
        keys, size = config.linear_num_key_heads, config.linear_key_head_dim
        cuts = np.cumsum([size, size, config.linear_value_head_dim * config.linear_num_value_heads // keys])
        q, k, v, z = (part.reshape(-1, WIDTH) for part in np.split(array.reshape(keys, -1, WIDTH), cuts, 1))
        return {f"{layer}.attn_qkv.weight": np.concatenate([q, k, v]), f"{layer}.attn_gate.weight": z}
    if "kv_b_proj" in name:
        k, v = np.split(array.reshape(config.num_attention_heads, -1, array.shape[1]), [config.qk_nope_head_dim], 1)
        return {f"{layer}.attn_k_b.weight": k.swapaxes(1, 2), f"{layer}.attn_v_b.weight": v}
    if "conv1d.weight" in name or "conv.conv" in name:
        array = array[:, 0]
    return {name: array}


# Keys of a file -> names in the configuration.
KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip


def metadata_of(config) -> dict:
    """The converter's metadata for a model, besides the common part."""
    kind, values, plain = config.model_type, {}, config.to_dict()
    for key, name in KEYS.items():
        value = plain.get(name, getattr(config, name, None) if kind != "gemma4_text" else None)
        if value is not None:
            values[key] = value
    epsilon = getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None) or config.layer_norm_epsilon
    values["attention.layer_norm_" + ("epsilon" if kind == "nemotron_h" else "rms_epsilon")] = epsilon
    experts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if any(experts):
        values["expert_count"] = next(filter(None, experts))
    rope = getattr(config, "rope_parameters", None)
    if rope and kind != "gemma4_text":
        size = config.hidden_size // config.num_attention_heads
        values["rope.freq_base"] = float(rope["rope_theta"])
        values["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    if kind.startswith("granite"):
        names = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
        names |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
        values |= {key: getattr(config, name) for name, key in names.items()}
        if hasattr(config, "shared_intermediate_size"):
            values["expert_shared_feed_forward_length"] = config.shared_intermediate_size
        for name in ("attention.key_length", "attention.value_length"):
            values.pop(name, None)
    if kind == "granitemoehybrid":
        values |= {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.inner_size": 256}
        values |= {"ssm.time_step_rank": 8, "rope.scaling.finetuned": False}
        values["attention.head_count_kv"] = [2 * (layer in ATTENTION) for layer in config.layer_types]
    if kind == "nemotron_h":
        blocks = config.layers_block_type
        values |= {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.inner_size": 256}
        values |= {"ssm.time_step_rank": 8, "rope.scaling.finetuned": False, "rope.dimension_count": 32}
        values |= {"feed_forward_length": [64 * (block == "moe") for block in blocks], "block_count": len(blocks)}
        values["attention.head_count_kv"] = [2 * (block in ATTENTION) for block in blocks]
        values["expert_shared_feed_forward_length"] = config.moe_shared_expert_intermediate_size
    if kind in ("nemotron_h", "glm4_moe", "deepseek_v3"):
        values |= {"expert_shared_count": 1, "expert_weights_norm": True, "expert_group_count": 1}
        values |= {"expert_weights_scale": config.routed_scaling_factor, "expert_group_used_count": 1}
    if kind in ("glm4_moe", "deepseek_v3"):
        values |= {"leading_dense_block_count": 1, "expert_gating_func": 2}
    if kind == "deepseek_v3":
        values |= {"attention.key_length": 80, "attention.value_length": 64, "attention.head_count_kv": 1}
        values |= {"attention.key_length_mla": 48, "attention.value_length_mla": 32, "rope.dimension_count": 16}
        values |= {"attention.q_lora_rank": 64, "attention.kv_lora_rank": 64}
    if kind.startswith("lfm2"):
        values |= {"shortconv.l_cache": 3, "vocab_size": config.vocab_size}
        values["attention.head_count_kv"] = [2 * (layer in ATTENTION) for layer in config.layer_types]
    if kind == "lfm2_moe":
        values |= {"leading_dense_block_count": 1, "expert_gating_func": 2}
    if kind.startswith("qwen3_"):
        values |= {"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4}
        values |= {"ssm.inner_size": 128, "full_attention_interval": 2}
        if "shared_expert_intermediate_size" in vars(config):
            values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if kind.startswith("qwen3_5"):
        values["rope.dimension_sections"] = [11, 11, 10, 0]
    if kind == "gemma4_text":
        windows = [layer == "sliding_attention" for layer in config.layer_types]
        shared, first = config.num_kv_shared_layers, config.intermediate_size
        wide = [first * (1 + config.use_double_wide_mlp * (layer >= 4 - shared)) for layer in range(4)]
        values |= {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.dimension_count": 64, "rope.dimension_count_swa": 32}
        values |= {"attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32}
        values |= {"attention.value_length_swa": 32, "attention.sliding_window": 6, "attention.shared_kv_layers": shared}
        values |= {"attention.sliding_window_pattern": windows, "feed_forward_length": wide}
        values["embedding_length_per_layer_input"] = config.hidden_size_per_layer_input
        if config.attention_k_eq_v:
            values["attention.head_count_kv"] = [2 if window else 1 for window in windows]
        if config.final_logit_softcapping:
            values["final_logit_softcapping"] = config.final_logit_softcapping
        if config.enable_moe_block:
            values["expert_used_count"] = config.top_k_experts
    return values


def write(path: Path, model: torch.nn.Module, kind: str = "F32", change=lambda metadata, tensors: None) -> Path:
    """Writes a file of a model with matrices of type ``kind``."""
    config = model.config
    name = MODELS[config.model_type][0]
    if name == "gemma4":
        before = change

        def change(metadata, tensors):
            tensors["rope_freqs.weight"] = np.array([1.0] * 8 + [1e30] * 24, "f4")
            before(metadata, tensors)

    number = next(number for number, arch in gguf.MODEL_ARCH_NAMES.items() if arch == name)
    names = gguf.get_tensor_name_map(number, SIZES["num_hidden_layers"])
    metadata, tensors = metadata_of(config), {}
    for parameter, value in model.state_dict().items():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for called, array in parts(config, parameter, value.numpy()).items():
            if not called.startswith("blk."):
                base, _, leaf = called.rpartition(".")
                called = f"{names.get_name(base) or names.get_name(base.replace('model.', 'backbone.', 1))}.{leaf}"
            assert "None" not in called, parameter
            tensors[called] = np.ascontiguousarray(array)
    change(metadata, tensors)
    writer = gguf.GGUFWriter(path, name)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{name}.{key}", value)
    code = gguf.GGMLQuantizationType[kind]
    for called, array in tensors.items():
        if kind != "F32" and array.ndim > 1 and array.shape[-1] % 32 == 0 and "conv" not in called and "_norm" not in called:
            writer.add_tensor(called, gguf.quantize(array, code), raw_dtype=code)
        else:
            writer.add_tensor(called, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check(model: torch.nn.Module, directory: Path, near: float = 1e-6) -> None:
    """The model in a directory equals this one, except for rounding of ``exp``, ``log`` and sums with 1."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory).float().eval()
    expected, actual = model.state_dict(), loaded.state_dict()
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        if name.endswith(("A_log", "norm.weight")):
            torch.testing.assert_close(actual[name], value, atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(actual[name], value), name
    tokens = torch.arange(5, 29)[None]
    with torch.inference_mode():
        ours, theirs = (each(tokens).logits for each in (loaded, model))
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("kind", MODELS)
def test_floats(tmp_path, kind):
    model = model_of(kind)
    with pytest.warns(UserWarning, match="has no tokenizer"):
        lowbit.import_checkpoint(write(tmp_path / "m.gguf", model), tmp_path / "out")
    check(model, tmp_path / "out")


HEADS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "deepseek_v3"]


def with_head(kind: str, tables: bool, count: int = 1):
    """Adds multi-token prediction heads to a file: layers like the model's last, with extra tensors."""

    def change(metadata, tensors):
        generator = np.random.default_rng(5)
        for layer in range(4, 4 + count):
            for name in [name for name in tensors if name.startswith("blk.3.")]:
                tensors[name.replace("blk.3.", f"blk.{layer}.")] = tensors[name]
            tensors[f"blk.{layer}.nextn.eh_proj.weight"] = generator.normal(size=(WIDTH, 2 * WIDTH)).astype("f4")
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                tensors[f"blk.{layer}.nextn.{norm}.weight"] = generator.normal(1, 0.1, WIDTH).astype("f4")
            if tables:
                tensors[f"blk.{layer}.nextn.embed_tokens.weight"] = tensors["token_embd.weight"]
                tensors[f"blk.{layer}.nextn.shared_head_head.weight"] = tensors["output.weight"]
        metadata |= {"block_count": 4 + count, "nextn_predict_layers": count}

    return change


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_for_multi_token_prediction_is_kept(tmp_path, kind):
    """The head is made from the model's last layer; the model itself is as without it. The quantized head predicts tokens."""
    model, written = model_of(kind), {}

    def change(metadata, tensors):
        with_head(kind, tables=kind == "deepseek_v3")(metadata, tensors)
        written.update(tensors)

    with pytest.warns(UserWarning, match="has no tokenizer") as caught:
        lowbit.import_checkpoint(write(tmp_path / "m.gguf", model, change=change), tmp_path / "out")
    assert len(caught) == 1
    check(model, tmp_path / "out")
    decoder = Decoder(load_model(tmp_path / "out").float(), 64)
    head = Mtp(decoder)._head
    parts = [part.state_dict() for part in head.parts]
    one = float(kind.startswith("qwen"))  # added to norm weights in their files
    for part, name in zip((parts[0], parts[1], parts[4]), ("enorm", "hnorm", "shared_head_norm"), strict=True):
        torch.testing.assert_close(part["weight"].numpy() + one, written[f"blk.4.nextn.{name}.weight"], atol=1e-6, rtol=1e-6)
    assert np.array_equal(parts[2]["weight"], written["blk.4.nextn.eh_proj.weight"])
    for name, value in model.model.layers[3].state_dict().items():
        torch.testing.assert_close(parts[3][name], value, atol=1e-6, rtol=1e-6)
    with pytest.warns(UserWarning, match="has no tokenizer"):
        file = write(tmp_path / "q.gguf", model, "Q8_0", change)
        lowbit.import_checkpoint(file, tmp_path / "packed")
    decoder = Decoder(load_model(tmp_path / "packed"), 64)
    plain = generate(decoder, [5, 9, 3, 22], 12).tokens
    found = generate(decoder, [5, 9, 3, 22], 12, guesses=2, draft=Mtp(decoder))
    assert found.tokens == plain and found.guessed > 0


def test_further_heads_are_left_out(tmp_path):
    model = model_of("glm4_moe")
    with pytest.warns(
        UserWarning, match="has 1 layers for multi-token prediction that lowbit does not import; they are left out"
    ):
        lowbit.import_checkpoint(write(tmp_path / "m.gguf", model, change=with_head("glm4_moe", False, 2)), tmp_path / "out")
    assert not any(".layers.5." in name for name in load_file(tmp_path / "out/model.safetensors"))

    def change(metadata, tensors):
        with_head("glm4_moe", False)(metadata, tensors)
        del tensors["blk.4.nextn.eh_proj.weight"]

    with pytest.warns(
        UserWarning, match="has layers for multi-token prediction that lowbit does not import; they are left out"
    ):
        lowbit.import_checkpoint(write(tmp_path / "none.gguf", model, change=change), tmp_path / "none")
    check(model, tmp_path / "none")


def on_the_grid(model: torch.nn.Module) -> None:
    """Rounds all matrices to values that Q8_0 can hold."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.shape[-1] % 32 == 0:
            parameter.data = torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), q8), q8)).view(parameter.shape)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "nemotron_h", "lfm2_moe", "qwen3_next", "qwen3_5_text", "deepseek_v3"])
@torch.no_grad()
def test_codes(tmp_path, kind, recwarn):
    """Reordered rows and columns keep their codes."""
    model = model_of(kind)
    on_the_grid(model)
    summary = lowbit.import_checkpoint(write(tmp_path / "m.gguf", model, "Q8_0"), tmp_path / "out")
    # Only rows of keys, which are transposed in the file, are requantized.
    again = {tensor.name for tensor in summary.tensors if tensor.kind == "requantized"}
    assert all("kv_b_proj" in name for name in again) and bool(again) == (kind == "deepseek_v3")
    tensors, checked = load_file(tmp_path / "out" / "model.safetensors"), 0
    for name, packed in tensors.items():
        if not name.endswith("packed_weight") or name in again:
            continue
        layer = name.removesuffix(".packed_weight")
        expected = model.state_dict().get(f"{layer}.weight", model.state_dict().get(layer))
        for one, weight in zip(packed.view(-1, packed.shape[-1]), expected.view(-1, *expected.shape[-2:]), strict=True):
            assert torch.equal(lowbit.embedding(torch.arange(weight.shape[0]), one, weight.shape[1]), weight), name
            checked += 1
    assert checked >= 9
    Decoder(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), 32)


BAD = {
    "no tensor of a kind": (
        "qwen3_5_text", lambda m, t: t.pop("blk.0.ssm_out.weight"), "has no blk.0.ssm_out.weight nor attn_q"
    ),
    "heads": ("qwen3_5_text", lambda m, t: m.update({"ssm.time_step_rank": 3}), "128 inner values for 3 heads"),
    "rows": ("qwen3_5_text", lambda m, t: m.update({"ssm.state_size": 64}), "expected 384 rows"),
    "a part": ("qwen3_next", lambda m, t: t.pop("blk.0.attn_gate.weight"), "without the tensor that belongs to it"),
    "columns": ("granitemoehybrid", lambda m, t: t.update({"blk.0.ffn_up_shexp.weight": np.zeros((64, 64), "f4")}), "columns"),
    "a key": ("lfm2", lambda m, t: m.update({"attention.something": 1}), "which lowbit does not know"),
    "kv heads": ("lfm2", lambda m, t: m.update({"attention.head_count_kv": [0, 2, 0, 4]}), "expected one for all layers"),
    "latent": ("deepseek_v3", lambda m, t: m.update({"attention.key_length_mla": 16}), "16 of them rotated"),
    "gating": ("glm4_moe", lambda m, t: m.update({"expert_gating_func": 1}), "expected 2"),
    "flag": ("deepseek_v3", lambda m, t: m.update({"expert_weights_norm": 1}), "expected true or false"),
    "transposed": (
        "deepseek_v3", lambda m, t: t.update({"blk.0.attn_k_b.weight": t["blk.0.attn_v_b.weight"]}), "expected .heads, rank, k."
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_files_that_do_not_fit(tmp_path, case):
    kind, change, said = BAD[case]
    with pytest.raises(ValueError, match=said):
        lowbit.import_checkpoint(write(tmp_path / "m.gguf", model_of(kind), change=change), tmp_path / "out")


CONVERT = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base as base, gguf, torch
from conversion import get_model_class

def classes(kind):
    yield kind
    for one in kind.__subclasses__():
        yield from classes(one)

directory = Path(sys.argv[2])
base.ModelBase.no_mtp = True
kind = get_model_class(base.get_model_architecture(base.ModelBase.load_hparams(directory, False), base.ModelType.TEXT))
for one in classes(base.TextModel):
    if "set_vocab" in vars(one):
        one.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("no_vocab")
with torch.inference_mode():
    kind(directory, gguf.LlamaFileType.ALL_F32, Path(sys.argv[3]), eager=True).write()
"""


@pytest.mark.skipif(not os.environ.get("LOWBIT_LLAMA_CPP"), reason="needs the sources of llama.cpp: make test-llama-cpp")
@pytest.mark.parametrize("kind", MODELS)
def test_what_llama_cpps_converter_writes(tmp_path, kind):
    model = model_of(kind)
    model.save_pretrained(tmp_path / "model")
    if kind == "granitemoehybrid":  # names in published checkpoints, whose files are converted
        path = tmp_path / "model" / "config.json"
        config = json.loads(path.read_text())
        names = {"full_attention": "attention", "linear_attention": "mamba"}
        path.write_text(json.dumps(config | {"layer_types": [names.get(each, each) for each in config["layer_types"]]}))
    if kind.startswith("gemma4"):  # its converter reads this from a tokenizer
        shutil.copy(FLOAT / "tokenizer.json", tmp_path / "model")
    command = [sys.executable, "-c", CONVERT, str(SOURCES), str(tmp_path / "model"), str(tmp_path / "m.gguf")]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    with pytest.warns(UserWarning, match="has no tokenizer"):
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    check(model, tmp_path / "out")
