"""`lowbit import` of I2_S, bitnet.cpp's GGUF type, written byte by byte like its `quantize_i2_s` on x86, on Arm and by rows."""

import re
import struct

import gguf
import lowbit
import numpy as np
import pytest
import torch
from checkpoints import TOKENS, load
from command_line import error, invoke
from gguf_files import file_bytes, permute, write_model
from lowbit.importing.gguf_source import open_gguf
from safetensors.torch import load_file
from transformers import BitNetConfig, BitNetForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 403, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
Q = "blk.0.attn_q.weight"
# gguf has these layers by the names of BitNet's original code.
SUB_NORMS = {
    "model.layers.0.self_attn.attn_sub_norm": "blk.0.attn_sub_norm",
    "model.layers.0.mlp.ffn_sub_norm": "blk.0.ffn_sub_norm",
}


def i2s(digits: np.ndarray, scale: float, order: str) -> bytes:
    """Digits -1, 0, 1 [n, k], code by code."""
    n, k = digits.shape
    data, flat = bytearray(n * k // 4), (digits + 1).reshape(-1)
    for place, code in enumerate(flat.tolist()):
        if order == "rows":
            row, column = divmod(place, k)
            byte, shift = row // 4 * k + column, 6 - 2 * (row % 4)
        else:
            run = 32 if order == "x86" else 16  # 128 weights in 32 bytes, or 64 in 16
            block, inside = divmod(place, 4 * run)
            byte, shift = block * run + inside % run, 6 - 2 * (inside // run)
        data[byte] |= code << shift
    return bytes(data) + struct.pack("<f", scale) + bytes(28)


def ternary(kind: str):
    """A model with ternary weights, and the digits and scale of each layer."""
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    else:
        model = BitNetForCausalLM(BitNetConfig(**SIZES, hidden_act="silu" if kind == "bitnet" else "relu2")).eval()
    layers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            digits, scale = torch.randint(-1, 2, layer.weight.shape), torch.rand(()) * 0.1 + 0.02
            layer.weight.data = digits * scale
            layers[name] = digits.numpy().astype(np.int8), float(scale)
    return model, layers


def written(path, kind: str, order: str, change=None):
    """Writes a GGUF file of such a model; returns the model."""
    model, layers = ternary(kind)
    metadata = {
        "general.architecture": kind, f"{kind}.context_length": 128, f"{kind}.embedding_length": 128,
        f"{kind}.block_count": 1, f"{kind}.feed_forward_length": 256, f"{kind}.attention.head_count": 4,
        f"{kind}.attention.head_count_kv": 2, f"{kind}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{kind}.rope.dimension_count": 32, f"{kind}.rope.freq_base": model.config.rope_parameters["rope_theta"],
        f"{kind}.vocab_size": 403,
    }  # fmt: skip
    architecture = gguf.MODEL_ARCH.LLAMA if kind == "llama" else gguf.MODEL_ARCH.BITNET
    names, tensors = gguf.get_tensor_name_map(architecture, 1), []
    for name, parameter in model.named_parameters():
        base = name.removesuffix(".weight")
        shape, called = tuple(parameter.shape)[::-1], f"{names.get_name(base) or SUB_NORMS[base]}.weight"
        if base in layers:
            digits, scale = layers[base]
            if kind == "llama" and base.endswith(("q_proj", "k_proj")):
                digits = permute(digits, 4 if base.endswith("q_proj") else 2)
            tensors.append((called, shape, 36, i2s(digits, scale, order)))
        else:
            tensors.append((called, shape, 0, parameter.detach().numpy().tobytes()))
    if change is not None:
        tensors = [change(each) if each[0] == Q else each for each in tensors]
    path.write_bytes(file_bytes(metadata, tensors))
    return model


@pytest.mark.parametrize(
    ("kind", "order"),
    [("bitnet-b1.58", "x86"), ("bitnet-b1.58", "arm"), ("bitnet-b1.58", "rows"), ("bitnet", "x86"), ("llama", "rows")],
)
def test_weights_and_logits(tmp_path, kind, order):
    model = written(tmp_path / "m.gguf", kind, order)
    with pytest.warns(UserWarning, match="has no tokenizer"):
        summary = lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out", i2s_order=order)
    assert [tensor.kind for tensor in summary.tensors if tensor.source == "I2_S"] == ["exact"] * 7
    for name, packed in load_file(tmp_path / "out" / "model.safetensors").items():
        if name.endswith("packed_weight"):
            weight = model.get_submodule(name.removesuffix(".packed_weight")).weight
            assert lowbit.info(packed).bits == 2
            assert torch.equal(lowbit.embedding(torch.arange(len(weight)), packed, weight.shape[1]), weight)
    found, expected = load(tmp_path / "out", dtype="auto")(TOKENS).logits, model(TOKENS).logits
    assert (found - expected).norm() / expected.norm() < 0.05  # 8-bit activations


@pytest.mark.parametrize("order", ["x86", "arm", "rows"])
def test_any_rows_are_read(tmp_path, order):
    """An import reads bands of rows, which may begin and end between rows that share bytes."""
    written(tmp_path / "m.gguf", "bitnet-b1.58", order)
    matrix = next(each for each in open_gguf(tmp_path / "m.gguf", order).tensors if "q_proj" in each.name)
    whole = matrix.read(0, 128)
    for begin, end in ((0, 1), (3, 4), (3, 9), (126, 128)):
        part = matrix.read(begin, end)
        assert torch.equal(part.codes, whole.codes[begin:end]) and torch.equal(part.scales, whole.scales[begin:end])


def test_the_wrong_order_gives_other_weights(tmp_path):
    """So lowbit must not assume an order."""
    written(tmp_path / "m.gguf", "bitnet-b1.58", "x86")
    read = lambda order: open_gguf(tmp_path / "m.gguf", order).tensors[1].read(0, 128).codes  # noqa: E731
    assert not torch.equal(read("x86"), read("arm")) and not torch.equal(read("x86"), read("rows"))


def change_data(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.filterwarnings("ignore:.* has no tokenizer")
@pytest.mark.parametrize(
    ("change", "order", "message"),
    [
        (None, None, "has the type I2_S of bitnet.cpp, whose order of codes depends on the processor"),
        (None, "mips", "the order of I2_S is 'mips'; expected x86, arm, rows"),
        (lambda t: (*t[:3], change_data(t[3], 5, b"\xff")), "x86", f"{Q} has the digit 3; expected 0 to 2"),
        (lambda t: (*t[:3], change_data(t[3], 4096, struct.pack("<f", np.nan))), "x86", "finite"),
        (lambda t: (t[0], (64, 256), *t[2:]), "x86", "has rows of 64 values; expected a multiple of 128 for I2_S"),
        (lambda t: (t[0], (16384 // 130 // 64 * 64, 130), *t[2:]), "rows", "has 130 rows; expected a multiple of 4"),
        (lambda t: (t[0], (96, 128), *t[2:]), "x86", "has rows of 96 values; expected a multiple of 64"),
    ],
)
def test_refusals(tmp_path, change, order, message):
    written(tmp_path / "m.gguf", "bitnet-b1.58", "x86", change)
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out", i2s_order=order)
    assert not (tmp_path / "out").exists()


def test_the_scale_belongs_to_the_file(tmp_path):
    """The 32 bytes after the rows must be in the file and not belong to another tensor."""
    one = ("t.weight", (128, 4), 36, i2s(np.zeros((4, 128), np.int8), 1.0, "x86"))
    data = file_bytes({"general.architecture": "llama"}, [one])
    (tmp_path / "short.gguf").write_bytes(data[:-1])
    with pytest.raises(ValueError, match="would end at byte"):
        open_gguf(tmp_path / "short.gguf", "x86")
    lying = file_bytes({"general.architecture": "llama"}, [(*one[:3], one[3][:128]), ("u.weight", (8,), 0, bytes(32))])
    (tmp_path / "lying.gguf").write_bytes(lying)
    with pytest.raises(ValueError, match="the tensor 'u.weight' overlaps the tensor 't.weight'"):
        open_gguf(tmp_path / "lying.gguf", "x86")


def test_the_command_takes_the_order(tmp_path):
    written(tmp_path / "m.gguf", "bitnet-b1.58", "arm")
    assert "--i2s-order" in error(invoke("import", tmp_path / "m.gguf", tmp_path / "out"))
    result = invoke("import", tmp_path / "m.gguf", tmp_path / "out", "--i2s-order", "arm")
    assert result.exit_code == 0 and "I2_S" in result.output and "exact" in result.output


def test_the_order_is_refused_for_other_types(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=403, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=False,
    ))  # fmt: skip
    write_model(tmp_path / "m.gguf", model, "Q8_0")
    result = invoke("import", tmp_path / "m.gguf", tmp_path / "out", "--i2s-order", "arm")
    assert result.exit_code == 2 and "--i2s-order" in result.output and "I2_S" in result.output
    assert not (tmp_path / "out").exists()
