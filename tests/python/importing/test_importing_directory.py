"""`lowbit import` of directories quantized by other tools.

This file writes the published layouts bit by bit.
"""

import json
import math
import os
import re
import struct

import lowbit
import numpy as np
import pytest
import torch
from checkpoints import TOKENS, load
from command_line import document, invoke
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.bitnet import pack_weights

SIZES = {
    "vocab_size": 403, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
GROUP = 32


def stream(codes: list[int], bits: int) -> list[int]:
    """A bit stream of codes, from the lowest bit of the first word on."""
    number = sum(code << (bits * place) for place, code in enumerate(codes))
    words = -(-len(codes) * bits // 32)
    return [struct.unpack("<i", struct.pack("<I", number >> (32 * word) & 0xFFFFFFFF))[0] for word in range(words)]


def rows_of_words(codes: torch.Tensor, bits: int, whole: bool = False) -> torch.Tensor:
    """int32 [rows, words] of codes [rows, count]; with `whole`, no code crosses words."""
    if whole:
        each = 32 // bits
        places = range(0, codes.shape[1], each)
        rows = [[stream(row[at : at + each], bits)[0] for at in places] for row in codes.tolist()]
        return torch.tensor(rows, dtype=torch.int32)
    return torch.tensor([stream(row, bits) for row in codes.tolist()], dtype=torch.int32)


class Quantized:
    """A random layer: `codes` [n, k], `zeros` and `scales` [n, groups], and the weights that they represent."""

    def __init__(self, n: int, k: int, bits: int, group: int, zeros: str, generator: torch.Generator):
        groups = k // group
        self.codes = torch.randint(0, 2**bits, (n, k), generator=generator)
        self.scales = (torch.rand((n, groups), generator=generator) + 0.1).mul(0.2 / 2**bits).half()
        middle = torch.full((n, groups), 2 ** (bits - 1))
        free = torch.randint(1, 2**bits, (n, groups), generator=generator)
        self.zeros = middle if zeros == "middle" else free
        spread = lambda each: each.repeat_interleave(group, 1)  # noqa: E731
        self.weight = spread(self.scales.float()) * (self.codes - spread(self.zeros))


def gptq(layer: Quantized, bits: int, group: int, version: int) -> dict[str, torch.Tensor]:
    n, k = layer.codes.shape
    return {
        "qweight": rows_of_words(layer.codes, bits).T.contiguous(),
        "qzeros": rows_of_words((layer.zeros - int(version == 1)).T, bits),
        "scales": layer.scales.T.contiguous(),
        "g_idx": (torch.arange(k) // group).int(),
    }


def planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """GPTQModel's planes, int32 [rows, words] of codes [rows, count]: for each 32 codes the widest remaining plane."""
    parts = []
    for at in range(0, codes.shape[1], 32):
        left = codes[:, at : at + 32]
        for width in (8, 4, 2, 1):
            if bits & width:
                parts.append(rows_of_words(left % 2**width, width))
                left = left // 2**width
    return torch.cat(parts, 1)


def gptq_p(layer: Quantized, bits: int, group: int) -> dict[str, torch.Tensor]:
    words = {"qweight": planes(layer.codes, bits).T.contiguous(), "qzeros": planes(layer.zeros.T, bits)}
    return gptq(layer, bits, group, 2) | words


def act_order(layer: Quantized, seed: int = 0) -> torch.Tensor:
    """Assigns inputs to groups at random, equally many to each; returns the group of each input, int32 [k]."""
    n, k = layer.codes.shape
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed + n))
    groups = torch.empty(k, dtype=torch.int32)
    groups[order] = (torch.arange(k) // (k // layer.scales.shape[1])).int()
    layer.weight = layer.scales.float()[:, groups.long()] * (layer.codes - layer.zeros[:, groups.long()])
    return groups


def awq(layer: Quantized) -> dict[str, torch.Tensor]:
    def words(codes: torch.Tensor) -> torch.Tensor:  # [rows, n], row by row
        ordered = codes.view(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(codes), -1)
        return rows_of_words(ordered, 4)

    return {
        "qweight": words(layer.codes.T.contiguous()),
        "qzeros": words(layer.zeros.T.contiguous()),
        "scales": layer.scales.T.contiguous(),
    }


def compressed(layer: Quantized, bits: int, whole: bool = False) -> dict[str, torch.Tensor]:
    packed = {
        "weight_packed": rows_of_words(layer.codes, bits, whole),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor(layer.codes.shape),
    }
    if (layer.zeros != 2 ** (bits - 1)).any():
        packed["weight_zero_point"] = rows_of_words(layer.zeros.T, bits, whole).T.contiguous()
    return packed


def checkpoint(directory, settings: dict, make, *, change=None):
    """A small llama whose layers, except the head, come from `make(n, k)`: weights and tensors of the layer.

    Returns the float model of the same weights.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            weight, packed = make(*layer.weight.shape)
            layer.weight.data.copy_(weight)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in packed.items()}
    if change is not None:
        change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return model


def check(tmp_path, model, kind: str) -> lowbit.ImportSummary:
    """Imports a checkpoint, and compares every packed weight and the logits with the float model's."""
    summary = lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert {tensor.kind for tensor in summary.tensors} == {kind, "float"}
    tensors, packed = load_file(tmp_path / "out" / "model.safetensors"), 0
    for name, tensor in tensors.items():
        if name.endswith("packed_weight"):
            packed += 1
            weight = model.get_submodule(name.removesuffix(".packed_weight")).weight
            order = tensors.get(name.replace("packed_weight", "input_order"))
            found = lowbit.nn.Linear(tensor, input_order=order).dequantize()
            if kind == "exact":
                assert torch.equal(found, weight), name
            else:
                most = 4e-3 if kind == "rounded" else 8e-3
                torch.testing.assert_close(found, weight.detach(), rtol=0, atol=float(weight.abs().max()) * most)
    assert packed == 7
    found, expected = load(tmp_path / "out", dtype="auto")(TOKENS).logits, model(TOKENS).logits
    assert (found - expected).norm() / expected.norm() < (0.1 if kind == "requantized" else 0.05)
    return summary


def maker(bits: int, zeros: str, pack, group: int = GROUP):
    generator = torch.Generator().manual_seed(bits)

    def make(n: int, k: int):
        layer = Quantized(n, k, bits, group if group > 0 else k, zeros, generator)
        return layer.weight, pack(layer)

    return make


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("zeros", ["middle", "free"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(tmp_path, bits, zeros, version):
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": zeros == "middle"}
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"
    model = checkpoint(tmp_path / "in", settings, maker(bits, zeros, lambda layer: gptq(layer, bits, GROUP, version)))
    # With zero points, the min is rounded once.
    summary = check(tmp_path, model, "exact" if zeros == "middle" else "rounded")
    assert max(tensor.steps for tensor in summary.tensors) < 2**bits / 1200  # 2**bits steps with 11 significant bits
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {f"GPTQ, {bits} bits"}


def test_the_other_name_of_gptqs_version(tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "format": "gptq_v2"}
    check(tmp_path, checkpoint(tmp_path / "in", settings, maker(4, "free", lambda layer: gptq(layer, 4, GROUP, 2))), "rounded")


def test_the_width_of_few_outputs(tmp_path, monkeypatch):
    """Zero points of eight outputs take one word at 2, 3 and 4 bits."""
    monkeypatch.setitem(SIZES, "head_dim", 8)
    monkeypatch.setitem(SIZES, "num_key_value_heads", 1)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    pack = lambda layer: gptq(layer, 4, layer.codes.shape[1], 1)  # noqa: E731
    check(tmp_path, checkpoint(tmp_path / "in", settings, maker(4, "middle", pack, group=-1)), "exact")


@pytest.mark.parametrize("zeros", ["middle", "free"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_gptq_in_planes(tmp_path, bits, zeros):
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": "gptq_p"}
    model = checkpoint(tmp_path / "in", settings, maker(bits, zeros, lambda layer: gptq_p(layer, bits, GROUP)))
    summary = check(tmp_path, model, "exact" if zeros == "middle" else "rounded")
    assert max(tensor.steps for tensor in summary.tensors) < 2**bits / 1200
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {f"GPTQ, {bits} bits"}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("zeros", ["middle", "free"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_with_act_order(tmp_path, bits, zeros, version):
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": True}
    settings |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    generator = torch.Generator().manual_seed(bits)

    def make(n: int, k: int):
        layer = Quantized(n, k, bits, GROUP, zeros, generator)
        groups = act_order(layer)  # before the weights are computed
        return layer.weight, gptq(layer, bits, GROUP, version) | {"g_idx": groups}

    model = checkpoint(tmp_path / "in", settings, make)
    check(tmp_path, model, "exact" if zeros == "middle" else "rounded")
    orders = [entry for entry in lowbit.inspect_checkpoint(tmp_path / "out") if entry.name.endswith("input_order")]
    assert len(orders) == 7 and {entry.kind for entry in orders} == {"int32"}
    saved = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert saved["format_version"] == 2


def test_groups_that_are_runs_need_no_order(tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}  # with static groups
    model = checkpoint(tmp_path / "in", settings, maker(4, "middle", lambda layer: gptq(layer, 4, GROUP, 1)))
    check(tmp_path, model, "exact")
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "input_order" in name]
    saved = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert saved["format_version"] == 1


def test_compressed_tensors_without_their_zero_points(tmp_path):
    """The settings say that each group has one."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": weights}}}
    pack = lambda layer: compressed(layer, 4)  # noqa: E731
    checkpoint(tmp_path / "in", settings, maker(4, "free", pack), change=lambda tensors: tensors.pop(f"{Q}.weight_zero_point"))
    with pytest.raises(ValueError, match="has no model.layers.0.self_attn.q_proj.weight_zero_point; expected I32"):
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("zeros", ["middle", "free"])
def test_compressed_tensors_with_groups_by_activation(tmp_path, zeros):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "actorder": "group"}
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(4)

    def make(n: int, k: int):
        layer = Quantized(n, k, 4, GROUP, zeros, generator)
        groups = act_order(layer)
        return layer.weight, compressed(layer, 4) | {"weight_g_idx": groups}

    check(tmp_path, checkpoint(tmp_path / "in", settings, make), "exact" if zeros == "middle" else "rounded")


def test_gptq_with_one_group_per_row(tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    pack = lambda layer: gptq(layer, 4, layer.codes.shape[1], 1)  # noqa: E731
    model = checkpoint(tmp_path / "in", settings, maker(4, "middle", pack, group=-1))
    check(tmp_path, model, "exact")
    assert {entry.group_size for entry in lowbit.inspect_checkpoint(tmp_path / "out")} == {None}


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_auto_round(tmp_path, layout):
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": f"auto_round:auto_{layout}"}
    pack = (lambda layer: gptq(layer, 4, GROUP, 1)) if layout == "gptq" else awq
    model = checkpoint(tmp_path / "in", settings, maker(4, "middle", pack))
    assert check(tmp_path, model, "exact").format == "AutoRound"


@pytest.mark.parametrize("zeros", ["middle", "free"])
def test_awq(tmp_path, zeros):
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    model = checkpoint(tmp_path / "in", settings, maker(4, zeros, awq))
    check(tmp_path, model, "exact" if zeros == "middle" else "rounded")


@pytest.mark.parametrize("zeros", ["middle", "free"])
@pytest.mark.parametrize(("bits", "whole"), [*((bits, False) for bits in range(1, 9)), (3, True), (5, True), (7, True)])
def test_compressed_tensors(tmp_path, bits, whole, zeros):
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP}
    weights["symmetric"] = zeros == "middle" or bits == 1
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}},
    }  # fmt: skip
    model = checkpoint(tmp_path / "in", settings, maker(bits, zeros, lambda layer: compressed(layer, bits, whole)))
    check(tmp_path, model, "exact" if zeros == "middle" or bits == 1 else "rounded")


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bitnet(tmp_path, kind):
    generator = torch.Generator().manual_seed(0)

    def make(n: int, k: int):
        digits, scale = torch.randint(-1, 2, (n, k), generator=generator), torch.rand(1, generator=generator) + 0.5
        weight = digits / scale if kind == "bitlinear" else digits * scale
        return weight, {"weight": pack_weights(digits.clone()), "weight_scale": scale}

    model = checkpoint(tmp_path / "in", {"quant_method": "bitnet", "linear_class": kind}, make)
    summary = lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert {tensor.kind for tensor in summary.tensors} == {"exact", "float"}
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        if name.endswith("packed_weight"):
            weight = model.get_submodule(name.removesuffix(".packed_weight")).weight
            found = lowbit.embedding(torch.arange(len(weight)), tensor, weight.shape[1])
            torch.testing.assert_close(found, weight.detach(), rtol=2e-7, atol=0)  # multiplies by 1 / scale instead of dividing


CT = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
Q = "model.layers.0.self_attn.q_proj"


def uneven(tensors: dict) -> None:
    tensors[f"{Q}.g_idx"][0] = 1


def negative(tensors: dict) -> None:
    tensors[f"{Q}.g_idx"] -= 1


def missing(tensors: dict) -> None:
    del tensors[f"{Q}.scales"]


def short(tensors: dict) -> None:
    tensors[f"{Q}.qweight"] = tensors[f"{Q}.qweight"][:-1].contiguous()


def narrow(tensors: dict) -> None:
    for leaf, columns in (("qweight", 24), ("qzeros", 3), ("scales", 24)):
        tensors[f"{Q}.{leaf}"] = tensors[f"{Q}.{leaf}"][:, :columns].contiguous()


def other_zeros(tensors: dict) -> None:
    tensors[f"{Q}.qzeros"] = torch.full_like(tensors[f"{Q}.qzeros"], -1)


def not_a_number(tensors: dict) -> None:
    tensors[f"{Q}.scales"][0, 0] = math.nan


def nan_in_a_norm(tensors: dict) -> None:
    tensors["model.norm.weight"][0] = math.nan


def left_over(tensors: dict) -> None:
    tensors["model.layers.0.more"] = torch.zeros(4, dtype=torch.int32)


def of_control_letters(tensors: dict) -> None:
    tensors["model.\x1b[2J.more"] = torch.zeros(4)


def both(tensors: dict) -> None:
    tensors[f"{Q}.weight"] = torch.zeros(64, 64)


REFUSED = {
    "uneven groups": (GPTQ, uneven, "its inputs are in groups that do not have 32 inputs each"),
    "a group below 0": (GPTQ, negative, "its inputs are in groups that do not have 32 inputs each"),
    "missing": (GPTQ, missing, "has no model.layers.0.self_attn.q_proj.scales"),
    "short": (GPTQ, short, "q_proj.g_idx in"),
    "zeros": (GPTQ, other_zeros, "has a zero point that the format's first version has for both 0 and 16"),
    "nan": (GPTQ, not_a_number, "finite"),
    "nan in a norm": (GPTQ, nan_in_a_norm, "model.norm.weight has NaN values; expected numbers"),
    "left over": (GPTQ, left_over, "model.layers.0.more in"),
    "control letters": (
        GPTQ, of_control_letters, "has a tensor of the name 'model.\\x1b[2J.more'; expected printable characters",
    ),
    "twice": (GPTQ, both, "has two tensors that become model.layers.0.self_attn.q_proj.weight"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, None, "checkpoint_format 'marlin'; lowbit imports 'gptq'"),
    "another version": (GPTQ | {"checkpoint_format": "gptq_v2"}, None, "has the zero point 7 everywhere; expected 8"),
    "two versions": (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, None, "format 'gptq_v2' and checkpoint_format"),
    "planes": (GPTQ | {"checkpoint_format": "gptq_p", "sym": False}, narrow, "expected those of 2, 3, 4, 5, 6, 7 or 8 bits"),
    "group size": (GPTQ | {"group_size": 64}, None, "has 3 groups for 96 inputs; expected 2, of 64 inputs"),
    "group of a text": (GPTQ | {"group_size": "32"}, None, "group_size '32'; expected inputs per group, or -1"),
    "another": ({"quant_method": "quip"}, None, "is quantized by the method 'quip'; lowbit imports gptq, awq"),
    "packed": ({"quant_method": "lowbit"}, None, "is packed already"),
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, None, "version 'gemv'; lowbit imports 'gemm'"),
    "no layers": (CT, None, "has no quantized layer, although its settings say 'compressed-tensors'"),
    "layout": ({"quant_method": "auto-round", "packing_format": "x"}, None, "packing_format 'x'; lowbit imports"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(tmp_path, what):
    settings, change, message = REFUSED[what]
    checkpoint(tmp_path / "in", settings, maker(4, "middle", lambda layer: gptq(layer, 4, GROUP, 1)), change=change)
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_float_checkpoints_are_for_quantize(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match="has float weights: use lowbit quantize"):
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="does not exist; expected a .gguf file"):
        lowbit.import_checkpoint(tmp_path / "none", tmp_path / "out")


def test_other_files_are_copied(tmp_path):
    checkpoint(tmp_path / "in", GPTQ, maker(4, "middle", lambda layer: gptq(layer, 4, GROUP, 1)))
    (tmp_path / "in" / "tokenizer_config.json").write_text("{}")
    said = document(invoke("import", tmp_path / "in", tmp_path / "out", "--json"))
    assert (said["format"], said["packed_layers"]) == ("GPTQ", 7)
    names = {
        "README.md",
        "config.json",
        "generation_config.json",
        "lowbit_import.json",
        "model.safetensors",
        "tokenizer_config.json",
    }
    assert set(os.listdir(tmp_path / "out")) == names


def test_streams_of_every_width():
    from lowbit.importing.bits import from_stream

    generator = np.random.default_rng(0)
    for bits in range(1, 9):
        for count in (1, 31, 32, 33, 97):
            codes = torch.from_numpy(generator.integers(0, 2**bits, (3, count)))
            assert torch.equal(from_stream(rows_of_words(codes, bits), bits, count), codes.to(torch.uint8))


def test_a_second_import_reads_changed_files_again(tmp_path):
    pack = lambda layer: gptq(layer, 4, GROUP, 1)  # noqa: E731
    for number, zeros in enumerate(("middle", "free")):  # equal names, shapes and offsets in the file
        model = checkpoint(tmp_path / "in", GPTQ, maker(4, zeros, pack))
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / str(number))
        packed = load_file(tmp_path / str(number) / "model.safetensors")[f"{Q}.packed_weight"]
        found = lowbit.embedding(torch.arange(64), packed, 64)
        torch.testing.assert_close(found, model.get_submodule(Q).weight.detach(), rtol=0, atol=1e-3)
