"""`lowbit import` of checkpoints with other content: unused biases, buffers, placeholders, settings in other files, and several
kinds of experts."""

import json
import re

import lowbit
import pytest
import torch
from checkpoints import TOKENS, change_tensors, load
from importing_files import layers_of_others
from safetensors.torch import load_file, save_file
from test_importing_directory import GPTQ, GROUP, Quantized, act_order, awq, check, checkpoint, compressed, gptq, maker
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
LAYER = "model.layers.0.mlp.up_proj"


def ct(**weights) -> dict:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP} | weights
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def simple(pack=lambda layer: gptq(layer, 4, GROUP, 1)):
    return maker(4, "middle", pack)


def imported(path):
    return lowbit.import_checkpoint(path / "in", path / "out")


@pytest.mark.parametrize("name", layers_of_others())
def test_unused_biases_are_dropped_if_zero_and_else_refused(tmp_path, name):
    """For every format."""
    settings, layer, metadata = layers_of_others()[name]
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "in")
    q = "model.layers.0.self_attn.q_proj"
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    del tensors[f"{q}.weight"]
    tensors |= {f"{q}.{leaf}": tensor for leaf, tensor in layer.items()}
    described = {key.replace("model.a", q): value for key, value in metadata.items()}
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    for value in (0.0, 0.5):
        extra = {f"{q}.bias": torch.full((32,), value), f"{LAYER}.bias": torch.full((32,), value)}
        save_file(tensors | extra, tmp_path / "in" / "model.safetensors", metadata=described)
        if value:
            message = (
                f"has 2 tensors beside weights that LlamaForCausalLM has no place for, {LAYER}.bias, {q}.bias: they are not"
            )
            with pytest.raises(ValueError, match=re.escape(message)):
                lowbit.import_checkpoint(tmp_path / "in", tmp_path / "other")
        else:
            imported(tmp_path)
            written = load_file(tmp_path / "out" / "model.safetensors")
            assert f"{q}.packed_weight" in written and not [key for key in written if key.endswith("bias")]


def test_an_unused_bias_in_a_float_checkpoint(tmp_path):
    """transformers ignores it, and so does the quantized model, with a warning."""
    checkpoint(tmp_path / "in", None, lambda n, k: (torch.ones(n, k), {"weight": torch.ones(n, k)}))
    extra = {f"{LAYER}.bias": torch.ones(96), "model.layers.0.mlp.down_proj.bias": torch.zeros(64)}
    change_tensors(tmp_path / "in" / "model.safetensors", lambda tensors: tensors.update(extra))
    with pytest.warns(
        UserWarning, match=r"1 tensors of the files next to weights, \S+up_proj\.bias for example, are not in Llama"
    ):
        lowbit.quantize_checkpoint(tmp_path / "in", tmp_path / "out", lowbit.LowBitConfig())


def test_factors_of_activation_functions_in_awq(tmp_path):
    checkpoint(tmp_path / "in", AWQ, simple(awq))
    file = tmp_path / "in" / "model.safetensors"
    change_tensors(file, lambda tensors: tensors.update({"model.layers.0.mlp.act_fn.scales": torch.ones(96).half()}))
    imported(tmp_path)
    change_tensors(file, lambda tensors: tensors["model.layers.0.mlp.act_fn.scales"].mul_(2))
    with pytest.raises(ValueError, match=r"act_fn\.scales in .* scales an activation function, which lowbit does not import"):
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "other")


@pytest.mark.filterwarnings("error")
def test_buffers_of_old_checkpoints(tmp_path):
    """Masks, scalars, frequencies and positions that current models compute themselves."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, max_position_embeddings=64)).eval()
    model.save_pretrained(tmp_path / "in")
    generator, settings = torch.Generator().manual_seed(0), GPTQ | {"desc_act": False}
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and "layers" in name:
            made = Quantized(*layer.weight.shape, 4, GROUP, "middle", generator)
            layer.weight.data.copy_(made.weight)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in gptq(made, 4, GROUP, 1).items()}
    tensors |= {
        f"gpt_neox.layers.0.attention.{leaf}": tensor
        for leaf, tensor in {
            "bias": torch.ones(1, 1, 64, 64).tril().bool(), "masked_bias": torch.tensor(-1e9),
            "rotary_emb.inv_freq": torch.rand(2),
        }.items()
    }  # fmt: skip
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert {tensor.kind for tensor in imported(tmp_path).tensors} == {"exact", "float"}
    found, expected = load(tmp_path / "out", dtype="auto")(TOKENS % 160).logits, model(TOKENS % 160).logits
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "tensor", [torch.tensor(2.0), torch.ones(2, 2).bool(), torch.zeros(0)], ids=["number", "mask", "empty"]
)
def test_tensors_of_other_shapes_and_dtypes_are_copied_bit_by_bit(tmp_path, tensor):
    checkpoint(tmp_path / "in", GPTQ, simple())
    change_tensors(tmp_path / "in" / "model.safetensors", lambda tensors: tensors.update({"model.layers.0.more": tensor}))
    with pytest.warns(UserWarning, match=r"1 tensors of .* are not in LlamaForCausalLM, model\.layers\.0\.more for example"):
        imported(tmp_path)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.more"], tensor)


def placeholder(layer, g_idx):
    return gptq(layer, 4, GROUP, 1) | {"g_idx": g_idx(layer.codes.shape[1])}


def zeros_of(k):
    return torch.zeros(k, dtype=torch.int32)


PLACEHOLDERS = {
    "gptq": (GPTQ | {"desc_act": False}, lambda layer: placeholder(layer, zeros_of)),
    "gptq, empty": (GPTQ, lambda layer: placeholder(layer, lambda k: torch.zeros(0, dtype=torch.int32))),
    "gptq, zero points": (
        GPTQ | {"sym": True},
        lambda layer: (made := gptq(layer, 4, GROUP, 1)) | {"qzeros": torch.zeros_like(made["qzeros"])},
    ),
    "awq": (AWQ, lambda layer: awq(layer) | {"g_idx": zeros_of(layer.codes.shape[1])}),
    "compressed-tensors": (ct(), lambda layer: compressed(layer, 4) | {"weight_g_idx": zeros_of(layer.codes.shape[1])}),
    "compressed-tensors, static": (
        ct(actorder="static"), lambda layer: compressed(layer, 4) | {"weight_g_idx": zeros_of(layer.codes.shape[1])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_placeholders_of_an_act_order_that_the_settings_deny(tmp_path, name):
    settings, pack = PLACEHOLDERS[name]
    check(tmp_path, checkpoint(tmp_path / "in", settings, simple(pack)), "exact")
    assert not [key for key in load_file(tmp_path / "out" / "model.safetensors") if key.endswith(("input_order", "g_idx"))]


@pytest.mark.parametrize(
    ("settings", "pack", "message"),
    [
        (GPTQ | {"desc_act": True}, PLACEHOLDERS["gptq"][1], "its inputs are in groups that do not have 32 inputs each"),
        (ct(actorder="group"), PLACEHOLDERS["compressed-tensors"][1], "its inputs are in groups that do not have 32"),
        (AWQ, lambda layer: awq(layer) | {"g_idx": act_order(layer)}, "has an act-order permutation; expected none"),
    ],
)
def test_impossible_act_orders_are_refused(tmp_path, settings, pack, message):
    checkpoint(tmp_path / "in", settings, simple(pack))
    with pytest.raises(ValueError, match=re.escape(message)):
        imported(tmp_path)


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


def fp8(n: int, k: int):
    codes = (torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 30).to(torch.float8_e4m3fn)
    return codes.float() * 0.001, {"weight": codes, "weight_scale": torch.tensor(0.001)}


@pytest.mark.filterwarnings("ignore:.*have codes that lowbit cannot represent")
@pytest.mark.parametrize(
    ("file", "content", "make", "format_"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}, simple(), "GPTQ"),
        ("quantize_config.json", {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP}, simple(awq), "AWQ"),
        ("quant_config.json", {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}, simple(awq), "AWQ"),
        ("quantization_config.json", {"bits": 4, "group_size": GROUP}, simple(), "AutoRound"),
        ("hf_quant_config.json", MODELOPT, fp8, "ModelOpt"),
    ],
)
def test_settings_in_another_file(tmp_path, file, content, make, format_):
    checkpoint(tmp_path / "in", {}, make)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    message = (
        "has quantized weights, .* but no settings: expected quantization_config in config.json, or one of quantize_config"
    )
    with pytest.raises(ValueError, match=message):
        imported(tmp_path)
    (tmp_path / "in" / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"is quantized already, by the method .* lowbit import converts such checkpoints"):
        lowbit.quantize_checkpoint(tmp_path / "in", tmp_path / "out", lowbit.LowBitConfig())
    assert imported(tmp_path).format == format_
    assert not (tmp_path / "out" / file).exists()  # the target has its own settings
    # With float weights, such a file may stay.
    lowbit.dequantize_checkpoint(tmp_path / "out", tmp_path / "float")
    (tmp_path / "float" / file).write_text(json.dumps(content))
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "again", lowbit.LowBitConfig())


def test_a_config_with_only_cache_settings_leaves_weights_float(tmp_path):
    checkpoint(tmp_path / "in", None, lambda n, k: (torch.ones(n, k), {"weight": torch.ones(n, k)}))
    content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "in" / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has float weights: use lowbit quantize"):
        imported(tmp_path)


def test_a_weight_file_with_autogptq_name(tmp_path):
    model = checkpoint(tmp_path / "in", GPTQ | {"model_file_base_name": "gptq_model-4bit-32g"}, simple())
    (tmp_path / "in" / "model.safetensors").rename(tmp_path / "in" / "gptq_model-4bit-32g.safetensors")
    check(tmp_path, model, "exact")


@pytest.mark.parametrize("target", ["re:.*mlp.*", "model.layers.0.mlp.up_proj", "LlamaMLP", "re:((a|o|m|d|e|l)*)*x"])
def test_7_and_8_bits_in_one_checkpoint(tmp_path, target):
    """If codes do not cross words, both widths have the same number of words: the words determine the width, not the
    settings."""
    weights = {"type": "int", "strategy": "group", "group_size": GROUP}
    settings = ct() | {
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": weights | {"num_bits": 8}},
            "b": {"targets": [target], "weights": weights | {"num_bits": 7}},
        }
    }
    made = {bits: maker(bits, "middle", lambda layer, bits=bits: compressed(layer, bits, whole=True)) for bits in (7, 8)}
    model = checkpoint(tmp_path / "in", settings, lambda n, k: made[7 if 96 in (n, k) else 8](n, k))
    check(tmp_path, model, "exact")
    bits = {entry.name: entry.bits for entry in lowbit.inspect_checkpoint(tmp_path / "out") if entry.kind == "packed"}
    assert {name: 7 if "mlp" in name else 8 for name in bits} == bits


def test_a_scale_of_a_whole_tensor_without_dimensions(tmp_path):
    def pack(layer):
        return compressed(layer, 4) | {"weight_scale": layer.scales.reshape(-1)[0]}

    def make(n: int, k: int):
        layer = Quantized(n, k, 4, k, "middle", torch.Generator().manual_seed(n))
        layer.scales[:] = layer.scales[0, 0]
        return layer.scales[0, 0].float() * (layer.codes - 8), pack(layer)

    check(tmp_path, checkpoint(tmp_path / "in", ct(strategy="tensor", group_size=None), make), "exact")


# Experts


def experts(path, pack_expert, settings):
    """A mixture whose experts come from `pack_expert(number, n, k)`: weights and tensors of a matrix."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 403, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
        )
    ).eval()
    model.save_pretrained(path / "in")
    tensors, holder = load_file(path / "in" / "model.safetensors"), model.model.layers[0].mlp.experts
    for name in [name for name in tensors if ".experts." in name]:
        layer = name.removesuffix(".weight")
        number, leaf = layer.split(".")[-2:]
        weight, packed = pack_expert(int(number), *tensors.pop(name).shape)
        tensors |= {f"{layer}.{part}": tensor for part, tensor in packed.items()}
        if leaf == "down_proj":
            holder.down_proj.data[int(number)] = weight
        else:
            holder.gate_up_proj.data[int(number), slice(0, 64) if leaf == "gate_proj" else slice(64, 128)] = weight
    save_file(tensors, path / "in" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "in" / "config.json").read_text())
    (path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return model


def random(number: int, n: int, k: int, bits: int = 4, group: int = GROUP, zeros: str = "middle"):
    return Quantized(n, k, bits, group, zeros, torch.Generator().manual_seed(number * 1000 + n + k))


def same_weights(path, model, exact: bool = True):
    """Compares the packed experts with the model's; returns them."""
    holder = load(path / "out", dtype="auto").model.layers[0].mlp.experts
    for leaf in ("gate_up_proj", "down_proj"):
        packed, expected = getattr(holder, leaf), getattr(model.model.layers[0].mlp.experts, leaf).detach()
        assert isinstance(packed, lowbit.nn.LinearExperts)
        for number, matrix in enumerate(packed.dequantize()):
            if exact is True or number != exact:
                assert torch.equal(matrix, expected[number]), (leaf, number)
            else:
                assert 0 < (matrix - expected[number]).norm() < 0.01 * expected[number].norm()
    return holder


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("odd", [(2,), (0, 1, 3)])
def test_all_experts_get_minimums_if_one_has_them(tmp_path, odd):
    def make(number: int, n: int, k: int):
        # Powers of two, so that minimums fit in float16.
        layer = random(number, n, k, zeros="middle" if number in odd else "free")
        layer.scales = 2.0 ** torch.randint(-9, -5, layer.scales.shape, generator=torch.Generator().manual_seed(n)).half()
        weight = layer.scales.float().repeat_interleave(GROUP, 1) * (layer.codes - layer.zeros.repeat_interleave(GROUP, 1))
        return weight, compressed(layer, 4)

    model = experts(tmp_path, make, ct())
    summary = imported(tmp_path)
    holder = same_weights(tmp_path, model)
    assert holder.down_proj.info.mapping == "affine" and holder.down_proj.info.bits == 4
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    shapes = {name for name in tensors if name.endswith("weight_shape")}
    assert summary.source_bytes == sum(tensor.nbytes for name, tensor in tensors.items() if name not in shapes) - sum(
        tensor.nbytes for name, tensor in tensors.items()
        if name.endswith("zero_point") and int(name.split(".")[-3]) in odd
    )  # fmt: skip


def test_gates_without_minimums_and_ups_with_them(tmp_path):
    """In all experts: the rows of gate and up form one matrix of the model."""
    count = iter(range(1000))

    def make(number: int, n: int, k: int):
        layer = random(number, n, k, zeros=("middle", "free")[next(count) % 2])
        return layer.weight, compressed(layer, 4)

    model = experts(tmp_path, make, ct())
    imported(tmp_path)
    holder = load(tmp_path / "out", dtype="auto").model.layers[0].mlp.experts
    for leaf in ("gate_up_proj", "down_proj"):
        expected = getattr(model.model.layers[0].mlp.experts, leaf).detach()
        torch.testing.assert_close(
            getattr(holder, leaf).dequantize(), expected, rtol=0, atol=4e-3 * float(expected.abs().max())
        )


ODD = {
    "8 bits": (lambda layer: (layer.weight, gptq(layer, 8, GROUP, 1)), {"bits": 8}, 8, "expert 2 is GPTQ, 8 bits"),
    "2 bits": (lambda layer: (layer.weight, gptq(layer, 2, GROUP, 1)), {"bits": 2}, 4, "expert 2 is GPTQ, 2 bits"),
    "groups": (
        lambda layer: (layer.weight, gptq(layer, 4, 16, 1)), {"group": 16}, 4, "expert 2 is GPTQ, 4 bits in groups of 16",
    ),
    "float": (lambda layer: (layer.weight, {"weight": layer.weight}), {}, 8, "expert 2 is F32"),
    "act-order": (
        lambda layer: (layer.weight, gptq(layer, 4, GROUP, 1) | {"g_idx": act_order(layer)}), {}, 8,
        "expert 2 is GPTQ, 4 bits with an act-order permutation",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_one_odd_expert(tmp_path, name):
    """All stay packed: exactly if the codes allow it, otherwise the odd one is requantized to 8 bits with a warning."""
    pack, options, bits, says = ODD[name]

    def make(number: int, n: int, k: int):
        if number != 2:
            layer = random(number, n, k)
            return layer.weight, gptq(layer, 4, GROUP, 1)
        layer = random(number, n, k, **options)
        packed = pack(layer)[1]  # act-order changes the weight
        return layer.weight, packed

    model = experts(tmp_path, make, GPTQ | {"desc_act": True, "dynamic": {}})
    with pytest.warns(
        UserWarning, match=rf"packed with {bits} bits, .*experts 0, 1, 3 are GPTQ, 4 bits.*, and {re.escape(says)}"
    ):
        summary = imported(tmp_path)
    exact = name not in ("float", "act-order")
    kinds = {tensor.kind for tensor in summary.tensors if "experts" in tensor.name}
    assert kinds == ({"exact"} if exact else {"requantized"})
    assert same_weights(tmp_path, model, True if exact else 2).down_proj.info.bits == bits
    indices = sum(k.nbytes for name, k in load_file(tmp_path / "in" / "model.safetensors").items() if name.endswith("g_idx"))
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "in" / "model.safetensors").values())
    assert summary.source_bytes == total - indices


def test_experts_that_all_differ_become_floats_with_a_warning(tmp_path):
    def make(number: int, n: int, k: int):
        layer = random(number, n, k)
        packed = gptq(layer, 4, GROUP, 1) | {"g_idx": act_order(layer)}
        return layer.weight, packed

    model = experts(tmp_path, make, GPTQ | {"desc_act": True})
    says = r"gate_up_proj become floats, 131 kB instead of .*experts 0, 1, 2, 3 are GPTQ, 4 bits with an act-order permutation"
    with pytest.warns(UserWarning, match=says):
        imported(tmp_path)
    found = load(tmp_path / "out", dtype="auto").model.layers[0].mlp.experts
    assert torch.equal(found.gate_up_proj, model.model.layers[0].mlp.experts.gate_up_proj)
