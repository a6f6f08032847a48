"""`lowbit import` of MLX's checkpoints and of Gemma's own quantizer, written bit by bit."""

import json
import re

import lowbit
import pytest
import torch
from checkpoints import TOKENS, change_tensors, load
from command_line import invoke
from lowbit.importing import gemma_qat
from safetensors.torch import load_file, save_file
from test_importing_directory import SIZES, check, checkpoint, rows_of_words
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYER = "model.layers.0.mlp.up_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat((E2M1, -E2M1))


def mlx(bits: int, group: int, dtype: torch.dtype = torch.float16, mode: str = "affine"):
    """Layers of MLX: weights and tensors."""
    generator = torch.Generator().manual_seed(bits)

    def make(n: int, k: int):
        groups = k // group
        codes = torch.randint(0, 2**bits, (n, k), generator=generator)
        spread = lambda each: each.float().repeat_interleave(group, 1)  # noqa: E731
        if mode == "affine":
            scales = torch.randn((n, groups), generator=generator).div(5 * 2**bits).to(dtype)  # of either sign
            biases = torch.randn((n, groups), generator=generator).div(10).to(dtype)
            tensors = {"scales": scales, "biases": biases}
            weight = codes * spread(scales) + spread(biases)
        else:
            powers = torch.randint(120, 125, (n, groups), generator=generator, dtype=torch.uint8)
            small = torch.rand((n, groups), generator=generator).div(8).to(torch.float8_e4m3fn)
            scales = small if mode == "nvfp4" else torch.ldexp(torch.ones(powers.shape), powers.int() - 127)
            tensors = {"scales": small.view(torch.uint8) if mode == "nvfp4" else powers}
            if bits == 8:
                codes = torch.randint(0, 119, (n, k), generator=generator)  # positive floats
                tensors["scales"] = powers - 9
                weight = codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * spread(scales) / 2**9
            else:
                weight = E2M1[codes] * spread(scales)
        return weight, {"weight": rows_of_words(codes, bits).view(torch.uint32), **tensors}

    return make


def as_mlx(directory, settings: dict, both: bool = True) -> None:
    """Writes the settings as mlx-lm does, without a method."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config | {"quantization": settings} | ({"quantization_config": settings} if both else {})))


@pytest.mark.parametrize(("bits", "group"), [*((bits, 32) for bits in (1, 2, 3, 4, 5, 6, 8)), (4, 16), (4, 64)])
def test_mlx(tmp_path, bits, group):
    if group == 64:  # of 64 and 96 inputs, as one layer has 32
        with pytest.raises(ValueError, match="expected those of 4 bits in groups of 64"):
            settings = {"group_size": 64, "bits": 4}
            checkpoint(tmp_path / "in", settings, mlx(4, 32))
            as_mlx(tmp_path / "in", settings)
            lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
        return
    settings = {"group_size": group, "bits": bits, "mode": "affine", "lm_head": False}
    model = checkpoint(tmp_path / "in", settings, mlx(bits, group))
    as_mlx(tmp_path / "in", settings, both=bits % 2 == 0)
    summary = check(tmp_path, model, "exact")
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {f"MLX, {bits} bits"}
    assert not {"quantization"} & json.loads((tmp_path / "out" / "config.json").read_text()).keys()


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_floats_of_mlx(tmp_path, mode, bits, group):
    settings = {"group_size": group, "bits": bits, "mode": mode}
    model = checkpoint(tmp_path / "in", settings, mlx(bits, group, mode=mode))
    as_mlx(tmp_path / "in", settings)
    if mode != "mxfp8":
        check(tmp_path, model, "exact")
        return
    with pytest.warns(UserWarning, match="requantized"):
        summary = lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {"MLX, MXFP8"}
    found = lowbit.nn.Linear(load_file(tmp_path / "out" / "model.safetensors")[f"{LAYER}.packed_weight"]).dequantize()
    expected = model.get_submodule(LAYER).weight
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_width_of_each_layer(tmp_path, mode):
    """Settings of single layers, which are affine without a mode of their own; an embedding table is a layer, too."""
    settings = {"group_size": 32, "bits": 4, "mode": mode, LAYER: {"group_size": 16, "bits": 6}}
    made = {"others": mlx(4, 32, torch.bfloat16, mode), LAYER: mlx(6, 16, torch.bfloat16)}
    model = checkpoint(tmp_path / "in", settings, made["others"])
    as_mlx(tmp_path / "in", settings)
    weight, tensors = made[LAYER](*model.get_submodule(LAYER).weight.shape)
    table, of_table = mlx(4, 32, mode=mode)(*model.model.embed_tokens.weight.shape)
    new = {f"{LAYER}.{leaf}": tensor for leaf, tensor in tensors.items()}
    new |= {f"model.embed_tokens.{leaf}": tensor for leaf, tensor in of_table.items()}
    change_tensors(tmp_path / "in" / "model.safetensors", lambda stored: stored.update(new))
    summary = lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    sources = {tensor.name.rpartition(".")[0]: tensor.source for tensor in summary.tensors}
    assert (
        sources[LAYER] == "MLX, 6 bits" and sources["model.embed_tokens"] == f"MLX, {'4 bits' if mode == 'affine' else 'MXFP4'}"
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    found = lowbit.embedding(torch.arange(len(table)), stored["model.embed_tokens.packed_weight"], table.shape[1])
    assert torch.equal(found, table)
    torch.testing.assert_close(lowbit.nn.Linear(stored[f"{LAYER}.packed_weight"]).dequantize(), weight, rtol=0, atol=1e-3)


def test_experts_of_mlx(tmp_path):
    """One tensor for all experts, as mlx-lm's switch layers have them."""
    sizes = SIZES | {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 3, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "model.safetensors"
    tensors, make = load_file(path), mlx(4, 32)
    for name in ("gate_proj", "up_proj", "down_proj"):
        made = []
        for expert in range(3):
            stored = tensors.pop(f"model.layers.0.mlp.experts.{expert}.{name}.weight")
            made.append(make(*stored.shape))
        for leaf in ("weight", "scales", "biases"):
            parts = [one[leaf].view(torch.int32) if leaf == "weight" else one[leaf] for _, one in made]
            stack = torch.stack(parts)
            tensors[f"model.layers.0.mlp.switch_mlp.{name}.{leaf}"] = stack.view(torch.uint32) if leaf == "weight" else stack
        experts = model.model.layers[0].mlp.experts
        for expert, (weight, _) in enumerate(made):
            whole = experts.down_proj if name == "down_proj" else experts.gate_up_proj
            rows = slice(None) if name == "down_proj" else slice(0, 32) if name == "gate_proj" else slice(32, 64)
            whole.data[expert, rows] = weight
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}}))
    lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    found, expected = load(tmp_path / "out", dtype="auto")(TOKENS).logits, model(TOKENS).logits
    assert (found - expected).norm() / expected.norm() < 0.05
    renamed = {name.replace("switch_mlp", "stack"): tensor for name, tensor in tensors.items()}
    save_file(renamed, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"a stack of matrices model\.layers\.0\.mlp\.stack\.\w+\.weight; lowbit imports"):
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"bits": 7}, {}, "expected those of 7 bits in groups of 32"),
        ({"bits": "4"}, {}, "expected those of '4' bits in groups of 32"),
        ({"bits": True}, {}, "expected those of True bits"),
        ({"group_size": 0}, {}, "in groups of 0"),
        ({"group_size": 64}, {}, "in groups of 64"),
        ({"mode": "affine2"}, {}, "has the mode 'affine2'"),
        ({"mode": ["affine"]}, {}, "has the mode ['affine']"),
        ({"mode": "mxfp4"}, {}, "scales in"),
        ({}, {"biases": torch.zeros(96, 1)}, "expected F32 or F16 or BF16 [96, 2]"),
        ({}, {"scales": torch.zeros(96, 0)}, "scales in"),
        ({}, {"weight": torch.zeros(2, 96, 8, dtype=torch.uint32)}, "expected those of 4 bits"),
        ({}, {"weight": torch.zeros(96, dtype=torch.uint32)}, "expected those of 4 bits"),
        ({}, {"weight": torch.zeros(96, 8, dtype=torch.int32)}, "is I32 [96, 8]; expected U32"),
        ({}, {"scales": torch.full((96, 2), torch.nan)}, "finite"),
    ],
)
def test_damaged_mlx_is_refused(tmp_path, settings, tensors, message):
    settings = {"group_size": 32, "bits": 4} | settings
    checkpoint(tmp_path / "in", settings, mlx(4, 32))
    as_mlx(tmp_path / "in", settings)
    new = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    change_tensors(tmp_path / "in" / "model.safetensors", lambda stored: stored.update(new))
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mlx_is_named_where_a_packed_model_is_expected(tmp_path):
    settings = {"group_size": 32, "bits": 4}
    checkpoint(tmp_path / "in", settings, mlx(4, 32))
    as_mlx(tmp_path / "in", settings)
    found = invoke("generate", tmp_path / "in", "--prompt", "x")
    assert found.exit_code == 1 and "quantized by the method 'mlx'" in found.stderr


def gemma(bits: int, groups: int = 1):
    """Layers of Gemma's quantizer: weights and tensors."""
    generator = torch.Generator().manual_seed(bits)

    def make(n: int, k: int):
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), generator=generator)
        scales = torch.rand((n, groups), generator=generator).add(0.1).div(4 * 2**bits).half().float()
        stored = codes.to(torch.int8)
        if bits < 8:
            offset = (codes + 2 ** (bits - 1)).view(n, -1, 8 // bits)
            stored = sum(offset[:, :, place] << bits * place for place in range(8 // bits)).to(torch.uint8)
        weight = codes * scales.repeat_interleave(k // groups, 1)
        return weight, {"weight": stored, "weight_scale": scales, "input_activation_scale": torch.tensor(0.01)}

    return make


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gemma(tmp_path, bits):
    """The same weights as transformers' own layers read from the file."""
    settings = {"quant_method": "gemma", "num_bits": bits, "modules_to_not_convert": ["lm_head"]}
    model = checkpoint(tmp_path / "in", settings, gemma(bits))
    with pytest.warns(UserWarning, match="7 scales of activations or caches"):
        summary = check(tmp_path, model, "exact")
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {f"Gemma, {bits} bits"}
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "in")
    for name, module in theirs.named_modules():
        if hasattr(module, "weight_scale"):
            assert torch.equal(module._dequantize_weights(), model.get_submodule(name).weight), name


def test_widths_and_tables_of_gemma(tmp_path):
    settings = {
        "quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True,
        "module_quant_configs": {r"mlp\.(gate|up)_proj$": {"num_bits": 2}, "embed_tokens": {"num_bits": 8}, "mlp": {}},
    }  # fmt: skip
    model = checkpoint(tmp_path / "in", settings, gemma(4))
    table, tensors = gemma(8, groups=4)(*model.model.embed_tokens.weight.shape)
    new = {
        "model.embed_tokens.embedding_quantized": tensors["weight"],
        "model.embed_tokens.embedding_scale": tensors["weight_scale"],
    }
    for name in ("gate_proj", "up_proj"):
        layer = f"model.layers.0.mlp.{name}"
        weight, tensors = gemma(2)(*model.get_submodule(layer).weight.shape)
        model.get_submodule(layer).weight.data.copy_(weight)
        new |= {f"{layer}.{leaf}": tensor for leaf, tensor in tensors.items()}
    model.model.embed_tokens.weight.data.copy_(table)

    def change(stored: dict) -> None:
        del stored["model.embed_tokens.weight"]
        stored.update(new)

    change_tensors(tmp_path / "in" / "model.safetensors", change)
    with pytest.warns(UserWarning, match="scales of activations"):
        summary = lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    bits = {tensor.name.rpartition(".")[0]: tensor.source for tensor in summary.tensors if tensor.kind != "float"}
    assert bits[LAYER] == "Gemma, 2 bits" and bits["model.embed_tokens"] == "Gemma, 8 bits"
    assert bits["model.layers.0.mlp.down_proj"] == "Gemma, 4 bits"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    found = lowbit.embedding(torch.arange(len(table)), stored["model.embed_tokens.packed_weight"], table.shape[1])
    assert torch.equal(found, table)
    found, expected = load(tmp_path / "out", dtype="auto")(TOKENS).logits, model(TOKENS).logits
    assert (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"num_bits": 3}, {}, "has 3 bits for"),
        ({"num_bits": 2}, {}, "has shape [64, 192]; expected [64, 96]"),
        ({"num_bits": 8}, {}, "expected I8"),
        ({"module_quant_configs": ["x"]}, {}, "has module_quant_configs ['x']; expected an object"),
        ({"module_quant_configs": {"(": {}}}, {}, "has the expression '('"),
        ({"module_quant_configs": {"^" + "(.*)" * 8 + r"\1\2\3\d$": {}}}, {}, "regex timed out"),
        ({}, {"weight_scale": torch.zeros(96, 5)}, "expected whole groups"),
        ({}, {"weight_scale": torch.full((96, 1), torch.inf)}, "finite"),
    ],
)
def test_damaged_gemma_is_refused(tmp_path, monkeypatch, settings, tensors, message):
    monkeypatch.setattr(gemma_qat, "_SECONDS", 0.1)
    checkpoint(tmp_path / "in", {"quant_method": "gemma"} | settings, gemma(4))
    new = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    change_tensors(tmp_path / "in" / "model.safetensors", lambda stored: stored.update(new))
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
