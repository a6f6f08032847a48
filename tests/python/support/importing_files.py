"""The smallest complete models in the formats that lowbit imports, made byte by byte, for tests that damage them."""

import json
import struct

import numpy as np
import torch
from gguf_files import file_bytes
from test_importing_bitsandbytes import NF4
from test_importing_directory import Quantized, act_order, awq, compressed, gptq, gptq_p
from test_importing_others import hqq

METADATA = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32, "llama.block_count": 1,
    "llama.feed_forward_length": 32, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"], "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1], "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": False,
}  # fmt: skip
MATRICES = {
    "token_embd": (32, 4), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (32, 16), "blk.0.attn_v": (32, 16),
    "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
}  # fmt: skip


def tensors() -> list:
    """All tensors of a small llama: Q4_0 with scales of 1, and norms."""
    block = struct.pack("<e", 1.0) + bytes(range(16))
    found = [(f"{name}.weight", shape, 2, block * shape[1]) for name, shape in MATRICES.items()]
    ones = np.ones(32, "<f4").tobytes()
    return found + [(f"{name}.weight", (32,), 0, ones) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")]


def expert_file() -> bytes:
    """A file of a small Mixtral, likewise."""
    block = struct.pack("<e", 1.0) + bytes(range(16))
    found = [each for each in tensors() if "ffn_" not in each[0] or "norm" in each[0]]
    found += [(f"blk.0.ffn_{part}_exps.weight", (32, 32, 2), 2, block * 64) for part in ("gate", "up", "down")]
    found.append(("blk.0.ffn_gate_inp.weight", (32, 2), 0, np.ones(64, "<f4").tobytes()))
    return file_bytes(METADATA | {"llama.expert_count": 2, "llama.expert_used_count": 1}, found)


def i2s_file() -> bytes:
    """A file of a small llama in bitnet.cpp's type: digits 0, 1, 2, 1 and a scale of 1."""
    wider = {"llama.embedding_length": 128, "llama.feed_forward_length": 128}
    found = []
    for name, (k, n) in MATRICES.items():
        k, n = 4 * k, n if name == "token_embd" else 4 * n
        found.append((f"{name}.weight", (k, n), 36, b"\x19" * (k * n // 4) + struct.pack("<f", 1.0) + bytes(28)))
    ones = np.ones(128, "<f4").tobytes()
    found += [(f"{name}.weight", (128,), 0, ones) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")]
    return file_bytes(METADATA | wider, found)


def layers_of_others(n: int = 32, k: int = 32) -> dict[str, tuple[dict, dict, dict]]:
    """A layer of n x k weights in each format: settings, tensors, metadata of a file of a layer model.a."""
    generator = torch.Generator().manual_seed(0)
    layer = Quantized(n, k, 4, 32, "free", generator)
    halves = Quantized(n, k, 4, 16, "free", generator)
    five = Quantized(n, k, 5, 32, "free", generator)
    order = gptq(halves, 4, 16, 1) | {"g_idx": act_order(halves)}
    matrix = {
        "_type": "IntxUnpackedToInt8Tensor",
        "_data": {"target_dtype": {"_data": "int4"}, "block_size": [1, 32], "activation_quantization": None},
    }
    integers = {
        "_weight_qdata": (layer.codes - 8).to(torch.int8), "_weight_scale": layer.scales,
        "_weight_zero_point": (layer.zeros - 8).to(torch.int8),
    }  # fmt: skip
    state = json.dumps({"quant_type": "nf4", "blocksize": 32, "dtype": "float16", "shape": [n, k]})
    nf4 = {
        "weight": torch.randint(0, 256, (n * k // 2, 1), generator=generator, dtype=torch.uint8),
        "weight.absmax": torch.rand(n * k // 32, generator=generator), "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }  # fmt: skip
    ternary = {"weight": torch.full((n // 4, k), 0b01100100, dtype=torch.uint8), "weight_scale": torch.ones(1)}
    plain: dict = {"format": "pt"}
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False}}}
    return {
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(layer, 4, 32, 1), plain),
        "gptq in planes": (
            {"quant_method": "gptq", "group_size": 32, "checkpoint_format": "gptq_p"}, gptq_p(five, 5, 32), plain,
        ),
        "gptq with act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, order, plain),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq(layer), plain),
        "compressed-tensors": (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups},
            compressed(layer, 4), plain,
        ),
        "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4, plain),
        "bitnet": ({"quant_method": "bitnet"}, ternary, plain),
        "hqq": ({"quant_method": "hqq"}, hqq(4, 32)(n, k)[1], plain),
        "torchao": ({"quant_method": "torchao"}, integers, plain | {"model.a.weight": json.dumps(matrix)}),
    }  # fmt: skip
