"""GGUF files for tests, written by the package gguf and byte by byte."""

import struct
from pathlib import Path

import gguf
import numpy as np
import torch

F32, STRING, ARRAY = 0, 8, 9


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(item) -> bytes:
    """A metadata value, preceded by its type."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<Ii", 5, item) if item < 0 else struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + text(item)
    kinds = {
        str: (STRING, text),
        int: (5, lambda each: struct.pack("<i", each)),
        float: (6, lambda each: struct.pack("<f", each)),
    }
    kind, form = kinds[type(item[0])]
    return struct.pack("<IIQ", ARRAY, kind, len(item)) + b"".join(map(form, item))


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """An entry of the list of tensors; `shape` as in the file, the fastest dimension first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_bytes(metadata: dict, tensors: list[tuple[str, tuple[int, ...], int, bytes]], alignment: int = 32) -> bytes:
    """A whole file; shapes of tensors in the file's order."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(text(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, shape, kind, content in tensors:
        data += bytes(-len(data) % alignment)
        header += tensor(name, shape, kind, len(data))
        data += content
    return header + bytes(-len(header) % alignment) + data


# The float16 fields of a block, by type; the rest of a block may be any bytes.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q1_0": [0], "Q2_0": [0], "TQ1_0": [52],
    "TQ2_0": [64], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0],
    "IQ4_XS": [0], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0],
}  # fmt: skip


def random_blocks(name: str, n: int, k: int, block: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """Random blocks with all codes and sub-scales of a type, uint8 [n, bytes of a row]."""
    blocks = generator.integers(0, 256, (n, k // block, size), np.uint8)
    for at in SCALES.get(name, ()):
        scale = generator.uniform(-1, 1, (n, k // block, 1)).astype("<f2")
        blocks[..., at : at + 2] = scale.view(np.uint8)
    if name == "IQ1_M":  # its float16 scale is the high nibbles of the last four numbers
        scale = generator.uniform(-1, 1, (n, k // block, 1)).astype("<f2").view("<u2")
        numbers = blocks[..., 48:].view("<u2")
        numbers[...] = numbers & 0x0FFF | (scale >> np.arange(0, 16, 4, np.uint16) & 0xF) << 12
    if name == "MXFP4":
        blocks[..., 0] = generator.integers(112, 124, blocks.shape[:2])
    if name == "NVFP4":
        blocks[..., :4] &= 0x7F
    return blocks.reshape(n, -1)


ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA, "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3, "mixtral": gguf.MODEL_ARCH.LLAMA, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "lfm2": gguf.MODEL_ARCH.LFM2,
    "qwen2_5_vl_text": gguf.MODEL_ARCH.QWEN2VL,
}  # fmt: skip


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of q and k like llama.cpp's converter."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def experts_as_in_files(name: str, array: np.ndarray, interleaved: bool) -> dict[str, np.ndarray]:
    """The file's tensors for an expert parameter, [experts, n, k] or [experts, n], by "gate", "up", "down". In a parameter with
    two matrices, they are stacked, or their rows alternate and everything is transposed."""
    if interleaved and array.ndim == 3:
        array = array.swapaxes(1, 2)
    if "gate_up" not in name:
        return {"down": array}
    half = array.shape[1] // 2
    return dict(zip(("gate", "up"), (array[:, ::2], array[:, 1::2]) if interleaved else (array[:, :half], array[:, half:])))


def write_model(
    path: Path,
    model: torch.nn.Module,
    kind: str = "F32",
    tokens: list[str] | None = None,
    split: int = 0,
    sentencepiece: list[tuple[str, float, int]] | None = None,
    pre: str = "gpt-2",
    merges: tuple[str, ...] = ("t h", "th e"),
    types: list[int] | None = None,
    template: str = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}",
    **others,
) -> Path:
    """Writes a transformers model like llama.cpp's converter; matrices have type `kind` if their rows fit its blocks.

    Args:
        tokens, pre, merges: byte-level vocabulary, rule for splitting words, and merges.
        types: the types of the tokens; None: two control tokens, then ordinary tokens.
        template: the chat template.
        split: tensors per part; 0: one file.
        sentencepiece: tokens with their scores and types instead.
        others: more metadata of the architecture.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    convolutions = config.model_type == "lfm2"
    heads = [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types] if convolutions else None
    writer.add_head_count_kv(heads or config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if convolutions else config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for name, item in others.items():
        key = f"{gguf.MODEL_ARCH_NAMES[architecture]}.{name.replace('__', '.')}"
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        kinds[type(item)](key, item)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types or [3, 3, *[1] * (len(tokens) - 2)])
        writer.add_token_merges(list(merges))
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1 if types is None else types.index(3))
        writer.add_add_bos_token(types is None)
        writer.add_chat_template(template)
    if sentencepiece is not None:
        texts, scores, types = zip(*sentencepiece)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    number = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[number][0]
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        base, leaf = name.rsplit(".", 1)
        array = parameter.float().numpy()
        if ".experts." in name:
            leaf = "bias" if name.endswith("_bias") else "weight"
            for part, matrices in experts_as_in_files(name, array, config.model_type == "gpt_oss").items():
                called = f"blk.{name.split('.')[2]}.ffn_{part}_exps.{leaf}"
                if leaf == "weight" and kind != "F32":
                    data = np.stack([gguf.quantize(np.ascontiguousarray(matrix), number) for matrix in matrices])
                    writer.add_tensor(called, data, raw_dtype=number)
                else:
                    writer.add_tensor(called, np.ascontiguousarray(matrices))
            continue
        if name.endswith("conv.conv.weight"):
            array = array[:, 0]
        if leaf == "sinks":
            base, leaf = name, "weight"
        if base.endswith("shared_expert_gate"):
            array = array[0]
        if config.model_type in ("llama", "mixtral") and base.endswith(("q_proj", "k_proj")):
            array = permute(array, config.num_key_value_heads if base.endswith("k_proj") else config.num_attention_heads)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        called = f"{names.get_name(base)}.{leaf}"
        router = "ffn_gate_inp" in called  # routers stay float
        if array.ndim == 2 and array.shape[1] % block == 0 and kind != "F32" and not router:
            writer.add_tensor(called, gguf.quantize(array, number), raw_dtype=number)
        else:
            writer.add_tensor(called, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_TOWER = {
    "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
}  # fmt: skip
_BESIDE_TOWER = {
    "embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln", "connector.modality_projection.proj": "mm.model.fc",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm", "multi_modal_projector.layer_norm": "mm.input_norm",
    "multi_modal_projector.linear_1": "mm.1", "multi_modal_projector.linear_2": "mm.2",
}  # fmt: skip


def tower_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The vision tower and projector of an image-text model under the names of mmproj files, as llama.cpp's converter has them.

    It adds 1 to the weight of Gemma's norm, and stores a linear patch embedding as a convolution.
    """
    found: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        if name.startswith("model.visual."):
            found |= _qwen_tensors(name.removeprefix("model.visual."), parameter.float().numpy())
            continue
        if not any(part in name for part in (".vision_model.", ".vision_tower.", ".connector.", ".multi_modal_projector.")):
            continue
        name = name.removeprefix("model.").removeprefix("vision_model.").removeprefix("vision_tower.")
        array = parameter.float().numpy()
        if name.endswith("mm_input_projection_weight"):
            called = "mm.input_projection.weight"
        elif name.startswith("encoder.layers."):
            _, _, layer, *middle, leaf = name.split(".")
            called = f"v.blk.{layer}.{_TOWER['.'.join(middle)]}.{leaf}"
        else:
            holder, leaf = name.rsplit(".", 1)
            called = f"{_BESIDE_TOWER[holder]}.{leaf}"
        if called == "mm.soft_emb_norm.weight":
            array = array + 1
        if called == "v.patch_embd.weight" and array.ndim == 2:
            side = model.config.vision_config.patch_size
            array = array.reshape(len(array), side, side, 3).transpose(0, 3, 1, 2)
        found[called] = np.ascontiguousarray(array)
    return found


_QWEN_TOWER = {
    "norm1": "ln1", "norm2": "ln2", "attn.proj": "attn_out", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _qwen_tensors(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a file for one of Qwen2.5-VL's tower."""
    if name == "patch_embed.proj.weight":
        halves = [np.ascontiguousarray(array[:, :, number]) for number in range(2)]
        return dict(zip(("v.patch_embd.weight", "v.patch_embd.weight.1"), halves, strict=True))
    holder, leaf = name.rsplit(".", 1)
    if holder.startswith("merger."):
        return {f"{holder.replace('merger.mlp.', 'mm.').replace('merger.ln_q', 'v.post_ln')}.{leaf}": array}
    _, layer, place = holder.split(".", 2)
    if place == "attn.qkv":
        return {f"v.blk.{layer}.attn_{part}.{leaf}": third for part, third in zip("qkv", np.split(array, 3), strict=True)}
    return {f"v.blk.{layer}.{_QWEN_TOWER[place]}.{leaf}": array}


def write_tower(path: Path, kind: str, model: torch.nn.Module, tensors: dict[str, np.ndarray] | None = None, **others) -> Path:
    """Writes an mmproj file of an image-text model.

    Args:
        kind: the type of its projector.
        tensors: as from :func:`tower_tensors`; those of two dimensions may be float16.
        others: more metadata of the tower; None leaves a usual key out.
    """
    vision, writer = model.config.vision_config, gguf.GGUFWriter(path, "clip")
    usual = {
        "clip.has_vision_encoder": True, "clip.projector_type": kind, "clip.use_gelu": True,
        "clip.vision.embedding_length": vision.hidden_size, "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": getattr(vision, "depth", None) or vision.num_hidden_layers,
        "clip.vision.attention.head_count": getattr(vision, "num_heads", None) or vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": getattr(vision, "layer_norm_eps", 1e-6),
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.image_size": getattr(vision, "image_size", 256),
        "clip.vision.projection_dim": model.config.text_config.hidden_size,
        "clip.vision.image_mean": [0.5, 0.25, 0.48145467], "clip.vision.image_std": [0.5, 0.5, 0.26862955],
    }  # fmt: skip
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, item in (usual | {f"clip.{name.replace('__', '.')}": value for name, value in others.items()}).items():
        if item is not None:
            kinds.get(type(item), writer.add_array)(key, item)
    for name, array in (tower_tensors(model) if tensors is None else tensors).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
