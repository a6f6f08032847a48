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
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
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
    **others,
) -> Path:
    """Writes a transformers model like llama.cpp's converter; matrices have type `kind` if their rows fit its blocks.

    Args:
        tokens, pre, merges: byte-level vocabulary, rule for splitting words, and merges.
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
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for name, item in others.items():
        key = f"{gguf.MODEL_ARCH_NAMES[architecture]}.{name.replace('__', '.')}"
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(item)](key, item)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
        writer.add_token_merges(list(merges))
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{% for message in messages %}<{{ message['content'] }}>{% endfor %}")
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
