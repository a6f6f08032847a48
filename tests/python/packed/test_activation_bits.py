"""Activations of 16 bits, in two int8 planes: results of operators, quantizers, training, checkpoints and commands."""

import json
import shutil

import calibration_models
import lowbit
import pytest
import torch
from calibration_files import packed_of, source, text  # noqa: F401
from calibration_models import tokens
from command_line import document, error, invoke
from lowbit import ConvConfig, EmbeddingConfig, LinearConfig, LowBitConfig
from lowbit.calibration import calibrate
from lowbit.calibration.learning import learning_of
from lowbit.tools import model_speed
from reference import DTYPES, WEIGHTS, assert_same_bits, linear, random_packed, random_rows
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("bits, mapping", WEIGHTS)
def test_each_width(bits, mapping):
    packed = random_packed(37, 96, bits, 48, mapping, bias=True, rotated_inputs=32 if bits == 4 else 0, activation_bits=16)
    assert (lowbit.info(packed).activation_bits, lowbit.info(packed).version) == (16, 4)
    for dtype in DTYPES:
        x = random_rows(5, 96).to(dtype)
        expected = linear(x, packed)
        assert_same_bits(lowbit.linear(x, packed, 37), expected)
        assert_same_bits(lowbit.linear(x[2], packed, 37), expected[2])  # for any number of rows
    one = lowbit.with_activation_bits(packed, 8)
    assert torch.equal(one[64:], packed[64:]) and lowbit.info(one).activation_bits == 8
    assert torch.equal(lowbit.with_activation_bits(one, 16), packed)
    assert torch.equal(lowbit.pack(**lowbit.unpack(packed)._asdict()), packed)


@pytest.mark.parametrize("rows, k, n", [(1, 300, 40), (3, 64, 1), (200, 33, 5000), (1, 16, 40000), (600, 16, 70)])
def test_each_size(rows, k, n):
    packed = random_packed(n, k, 8, None if k == 300 else 16, "affine", activation_bits=16)
    x = random_rows(rows, k)
    some = torch.arange(0, rows, max(1, rows // 4))
    y = lowbit.linear(x, packed, n)
    assert_same_bits(y[some], linear(x[some], packed))
    assert_same_bits(lowbit.linear(x.T.contiguous().T, packed, n), y)


def test_the_second_plane_reduces_the_error():
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 64)
    x = random_rows(50, 512)
    errors = []
    layer.requires_grad_(False)
    for activation_bits in (8, 16):
        packed = lowbit.nn.Linear.from_float(layer, LinearConfig(8, activation_bits=activation_bits))
        exact = torch.nn.functional.linear(x.double(), packed.dequantize().double(), layer.bias.double())
        errors.append(float((packed(x) - exact).norm() / exact.norm()))
    assert errors[0] > 1e-3 and errors[1] < errors[0] / 100
    assert "activation_bits=16" in repr(packed)


def test_a_layer_is_changed_in_place():
    layer = lowbit.nn.Linear.from_float(torch.nn.Linear(64, 40), LinearConfig(8, activation_bits=16))
    experts = lowbit.nn.LinearExperts(torch.stack([layer.packed_weight] * 3))
    x, before = random_rows(2, 64), layer.packed_weight
    y = layer(x)
    assert layer.to_activation_bits(8) is layer and layer.info.activation_bits == 8 and not torch.equal(layer(x), y)
    assert torch.equal(layer.to_activation_bits(16).packed_weight, before) and torch.equal(layer(x), y)
    assert experts.info.activation_bits == 16 and experts.to_activation_bits(8).info.activation_bits == 8
    assert experts.packed_weight.shape == (3, len(before))


def test_values_that_are_not_finite():
    packed = random_packed(20, 96, 4, 32, "affine", activation_bits=16)
    x = random_rows(6, 96)
    x[0, 3], x[1, 40], x[2], x[3, :32], x[4, :32] = torch.inf, torch.nan, 0.0, 1e-40, 1e36
    y = lowbit.linear(x, packed, 20)
    assert y[[0, 1, 4]].isnan().all() and y[[2, 3, 5]].isfinite().all()
    assert_same_bits(y, linear(x, packed))


def test_experts_and_lists_of_matrices():
    packed = [random_packed(21, 96, 4, 32, "affine", bias=True, seed=seed, activation_bits=16) for seed in range(3)]
    x, experts = random_rows(7, 96), torch.tensor([[1, 0]] * 6 + [[2, 2]])
    y = lowbit.linear_experts(x, torch.stack(packed), experts, 21)
    for row, chosen in enumerate(experts.tolist()):
        for place, expert in enumerate(chosen):
            assert_same_bits(y[row, place], lowbit.linear(x[row], packed[expert], 21))
    plain = lowbit.with_activation_bits(packed[0], 8)
    both = lowbit.linears(x, [packed[0], plain], [21, 21])
    assert_same_bits(both[0], lowbit.linear(x, packed[0], 21))
    assert_same_bits(both[1], lowbit.linear(x, plain, 21))
    with pytest.raises(ValueError, match="expert 1 has activations of 8 bits; expected 16, as expert 0"):
        lowbit.linear_experts(x, torch.stack([packed[0], plain]), torch.tensor([[0, 1]] * 7), 21)


def test_a_table_gives_its_bits_to_the_head():
    packed = random_packed(50, 64, 8, 32, "symmetric", activation_bits=16)
    plain, indices = lowbit.with_activation_bits(packed, 8), torch.arange(50)
    assert torch.equal(lowbit.embedding(indices, packed, 64), lowbit.embedding(indices, plain, 64))


def test_slices_and_joined_matrices():
    packed = random_packed(32, 128, 4, 32, "symmetric", activation_bits=16)
    halves = [lowbit.slice_columns(packed, 0, 64), lowbit.slice_columns(packed, 64, 128)]
    assert torch.equal(lowbit.concat(halves, dim=1), packed)
    rows = [lowbit.slice_rows(packed, 0, 10), lowbit.slice_rows(packed, 10, 32)]
    assert torch.equal(lowbit.concat(rows), packed) and torch.equal(lowbit.repack(packed, "panel16"), packed)
    x = random_rows(3, 128)
    assert_same_bits(torch.cat([lowbit.linear(x, rows[0], 10), lowbit.linear(x, rows[1], 22)], 1), lowbit.linear(x, packed, 32))
    with pytest.raises(ValueError, match="matrix 1 has activations of 8 bits; expected 16, as matrix 0"):
        lowbit.concat([packed, lowbit.with_activation_bits(packed, 8)])


@pytest.mark.parametrize("value", [True, "16", 16.0, None])
def test_wrong_types(value):
    packed = random_packed(4, 32, 4, 32, "symmetric")
    for call in (
        lambda: LinearConfig(activation_bits=value),
        lambda: LowBitConfig(activation_bits=value),
        lambda: lowbit.with_activation_bits(packed, value),
        lambda: lowbit.pack(**lowbit.unpack(packed)._asdict() | {"activation_bits": value}),
        lambda: lowbit.qat.fake_quantize_activations(torch.ones(2, 32), 32, value),
        lambda: lowbit.tune_threads([(16, 32)], activation_bits=value),
    ):
        with pytest.raises(TypeError, match=f"activation_bits is {value!r}; expected 8 or 16"):
            call()


@pytest.mark.parametrize("value", [0, 4, 12, 32, -16])
def test_wrong_values(value, tmp_path):
    packed = random_packed(4, 32, 4, 32, "symmetric")
    for call in (
        *(lambda kind=kind: kind(activation_bits=value) for kind in (LinearConfig, EmbeddingConfig, ConvConfig, LowBitConfig)),
        lambda: LowBitConfig(overrides={"lm_head": {"activation_bits": value}}),
        lambda: LowBitConfig.from_dict({"quant_method": "lowbit", "activation_bits": value}),
        lambda: lowbit.with_activation_bits(packed, value),
        lambda: lowbit.nn.Linear(packed).to_activation_bits(value),
        lambda: lowbit.pack(**lowbit.unpack(packed)._asdict() | {"activation_bits": value}),
        lambda: lowbit.qat.fake_quantize_activations(torch.ones(2, 32), 32, value),
        lambda: lowbit.convert_checkpoint(tmp_path, tmp_path / "new", value),
        lambda: lowbit.tune_threads([(16, 32)], activation_bits=value),
        lambda: model_speed.run("qwen3-0.6b", activation_bits=value),
    ):
        with pytest.raises(ValueError, match=f"activation_bits is {value}; expected 8 or 16"):
            call()
    with pytest.raises(ValueError, match="not a packed weight"):
        lowbit.with_activation_bits(torch.zeros(100, dtype=torch.uint8), 16)


# ---- training


@pytest.mark.parametrize(
    "config", [{"bits": 4}, {"bits": 8, "rotate": True}, {"bits": 3, "mapping": "affine", "group_size": 80}]
)
def test_training_computes_what_the_packed_layer_will(config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(160, 40))
    lowbit.qat.prepare_(model, LinearConfig(activation_bits=16, **config))
    x = random_rows(30, 160).requires_grad_()
    trained = model(x)
    trained.sum().backward()
    assert torch.allclose(x.grad, model[0].fake_quantized().detach().sum(0).expand(30, -1), atol=1e-5) or "rotate" in config
    state = model.state_dict()
    lowbit.qat.convert_(model)
    assert model[0].info.activation_bits == 16
    packed = model(x)
    difference = (trained - packed).detach()
    assert float(difference.norm() / packed.detach().norm()) < 1e-6
    other = lowbit.qat.prepare_(torch.nn.Sequential(torch.nn.Linear(160, 40)), LinearConfig(**config))
    with pytest.raises(RuntimeError, match="activation_bits=16; the model was prepared for"):
        other.load_state_dict(state)


def test_fake_quantized_activations_are_the_planes():
    x = random_rows(9, 200)
    x[0, :64], x[1, 3], x[2, :64] = 0.0, torch.inf, 1e-40
    values = lowbit.qat.fake_quantize_activations(x, 64, 16)
    from reference import dequantized_rows, rest_of_rows

    expected = (dequantized_rows(x, 64).double() + dequantized_rows(rest_of_rows(x, 64), 64).double()).float()
    assert torch.equal(values.isnan(), expected.isnan()) and values[1, :64].isnan().all()
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0, equal_nan=True)
    rest = (values - x)[3:]
    assert float(rest.abs().max()) < float(x[3:].abs().max()) / 127 / 127


# ---- models


def llama(tied: bool = True):
    torch.manual_seed(0)
    return calibration_models.llama(tied)


def packed_layers(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, lowbit.nn.Packed)}


def test_a_config_of_transformers(tmp_path):
    config = LowBitConfig(bits=8, activation_bits=16, overrides={"*down*": {"activation_bits": 8}})
    assert config.to_dict()["activation_bits"] == 16 and "activation_bits" not in LowBitConfig().to_dict()
    model = llama(tied=False)
    lowbit.quantize_(model, config.select(model))
    widths = {name.rpartition(".")[2]: layer.info.activation_bits for name, layer in packed_layers(model).items()}
    assert widths["q_proj"] == widths["lm_head"] == 16 and widths["down_proj"] == 8
    described = LowBitConfig(**model.config.quantization_config.to_dict())
    assert {name: c.activation_bits for name, c in described.select(llama(tied=False)).items()} == {
        name: layer.info.activation_bits for name, layer in packed_layers(model).items()
    }
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = tokens(1)[0]
    with torch.no_grad():
        assert torch.equal(loaded(batch).logits, model(batch).logits)


def test_a_tied_head_has_the_activations_of_its_table():
    model = llama()
    linear, table = LinearConfig(8, activation_bits=16), EmbeddingConfig(8, activation_bits=16)
    lowbit.quantize_(model, {"*": linear, "*proj": LinearConfig(8), "*embed*": table})
    layers = packed_layers(model)
    assert layers["lm_head"].info.activation_bits == layers["model.embed_tokens"].info.activation_bits == 16


def test_the_float_model_and_texts_are_closer():
    model, batch = llama(tied=False), tokens(seed=1)[0]
    with torch.no_grad():
        wanted = model(batch).logits
        errors = []
        for activation_bits in (8, 16):
            packed = llama(tied=False)
            lowbit.quantize_(packed, LowBitConfig(8, 32, activation_bits=activation_bits).select(packed))
            floats = llama(tied=False)
            for name, layer in packed_layers(packed).items():
                floats.get_submodule(name).weight.data = layer.dequantize()
            errors.append(float((packed(batch).logits - floats(batch).logits).norm() / wanted.norm()))
    assert errors[1] < errors[0] / 50


def test_calibrated_layers():
    model = llama()
    config = LowBitConfig(bits=3, activation_bits=16, overrides={"*k_proj": {"activation_bits": 8}})
    calibrate(model, tokens(2), config, "importance")
    widths = {name: layer.info.activation_bits for name, layer in packed_layers(model).items()}
    assert widths == {name: 8 if name.endswith("k_proj") else 16 for name in widths}


@pytest.mark.parametrize("mapping", ["symmetric", "affine", "levels"])
def test_learned_scales_keep_the_activations(mapping):
    packed = random_packed(20, 64, 3, 32, mapping, bias=True, activation_bits=16)
    assert lowbit.info(learning_of(packed, False).pack()).activation_bits == 16


def test_mixed_widths_keep_the_activations():
    from lowbit.calibration.widths import config_of, pinned_by

    config = LowBitConfig(activation_bits=16, overrides={"*down*": {"activation_bits": 8}, "*up*": {"bits": 8}})
    assert config_of(config, [], []).activation_bits == 16
    selected = config.select(llama())
    assert pinned_by(config, selected) == {name for name in selected if "up_proj" in name}


# ---- commands


def test_commands(source, tmp_path):
    packed, converted, back = (tmp_path / name for name in ("packed", "converted", "back"))
    document(invoke("quantize", source, packed, "--bits", 8, "--activation-bits", 16, "--json"))
    weights = packed_of(packed)
    assert weights and all(lowbit.info(weight).activation_bits == 16 for weight in weights.values())
    rows = document(invoke("inspect", packed, "--json"))["tensors"]
    assert {row["activation_bits"] for row in rows} == {16, None}
    override = ["--override", "*down_proj=4,32,symmetric,16"]
    document(invoke("quantize", source, tmp_path / "override", *override, "--json"))
    chosen = {name for name, weight in packed_of(tmp_path / "override").items() if lowbit.info(weight).activation_bits == 16}
    assert chosen and all("down_proj" in name for name in chosen)

    shown = document(invoke("convert", packed, converted, "--activation-bits", 8, "--json"))
    assert shown["layers_of_16"] == 0 and shown["packed_layers"] == len(weights)
    assert all(lowbit.verify(weight).activation_bits == 8 for weight in packed_of(converted).values())
    invoke("convert", converted, back, "--activation-bits", 16)
    for name, weight in packed_of(back).items():
        assert torch.equal(weight, weights[name])
    configs = [json.loads((path / "config.json").read_text()) for path in (packed, converted, back)]
    assert configs[0] == configs[2] and "activation_bits" not in configs[1]["quantization_config"]
    batch = torch.arange(24).view(1, -1) % 90
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(path)(batch).logits for path in (packed, back, converted)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])

    some = tmp_path / "some"
    document(invoke("convert", converted, some, "--activation-bits", 16, "--only", "*down_proj", "--json"))
    chosen = {name for name, weight in packed_of(some).items() if lowbit.info(weight).activation_bits == 16}
    assert chosen == {name for name in weights if "down_proj" in name}
    model = AutoModelForCausalLM.from_pretrained(some)
    selected = model.config.quantization_config.select(llama())
    assert {name for name, config in selected.items() if config.activation_bits == 16} == {
        name.removesuffix(".packed_weight") for name in chosen
    }


def test_commands_that_quantize_while_loading(source, text, tmp_path):
    """They take the option, and compute the same as a packed checkpoint with 16 bits."""
    found = []
    for bits in (8, 16):
        document(invoke("quantize", source, tmp_path / f"{bits}", "--activation-bits", bits, "--json"))
    for model, options in ((source, ("--bits", 4, "--activation-bits", 16)), (tmp_path / "16", ()), (tmp_path / "8", ())):
        result = invoke("eval", model, "--text", text, "--window", 32, "--stride", 16, *options, "--json")
        found.append(document(result)["results"][-1])
    assert [row["weights"] for row in found] == [
        "4 bits, 16-bit activations", "packed, 4 bits, 16-bit activations", "packed, 4 bits"
    ]  # fmt: skip
    assert found[0]["perplexity"] == found[1]["perplexity"] != found[2]["perplexity"]


def test_commands_refuse(source, tmp_path):
    packed = tmp_path / "packed"
    document(invoke("quantize", source, packed, "--json"))
    for command in ("convert", "quantize", "import"):
        refused = invoke(command, packed, tmp_path / "new", "--activation-bits", 12)
        assert refused.exit_code == 2 and "'12' is not one of '8', '16'" in refused.stderr
    assert "is float; expected a checkpoint with packed weights" in error(
        invoke("convert", source, tmp_path / "new", "--activation-bits", 16)
    )
    assert "matches lm_haed; lowbit inspect lists their names" in error(
        invoke("convert", packed, tmp_path / "new", "--activation-bits", 16, "--only", "lm_haed")
    )
    refused = invoke("quantize", source, tmp_path / "new", "--override", "*=4,32,symmetric,12")
    assert refused.exit_code == 2 and "PATTERN=BITS[,GROUP[,MAPPING[,8 or 16]]]" in refused.stderr
    damaged = tmp_path / "damaged"
    shutil.copytree(packed, damaged)
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[data.index(b"\x89LOWBIT\n") + 11] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    assert "altered header" in error(invoke("convert", damaged, tmp_path / "new", "--activation-bits", 16))
    assert not (tmp_path / "new").exists()
