"""Rotated inputs: results, quantizers, calibration, checkpoints and commands."""

import copy

import calibration_models
import lowbit
import pytest
import torch
from calibration_files import packed_of, source, text  # noqa: F401
from calibration_models import tokens
from command_line import document, error, invoke
from lowbit import EmbeddingConfig, LinearConfig, LowBitConfig
from lowbit.calibration import calibrate
from lowbit.packed.rotation import block_of, rotate, rotate_back, rotate_weight
from reference import assert_same_bits, random_packed, random_rows, rotated_inputs
from transformers import AutoModelForCausalLM

BLOCKS = (16, 32, 64, 128)  # block sizes of the format


def heavy_tailed(weight: torch.Tensor) -> torch.Tensor:
    """A weight of the same size with outliers."""
    generator = torch.Generator().manual_seed(0)
    heavy = weight * torch.randn(weight.shape, generator=generator).exp()
    return heavy * (weight.norm() / heavy.norm())


def test_blocks():
    assert [block_of(k) for k in (1, 8, 24, 16, 48, 96, 192, 640, 4864)] == [0, 0, 0, 16, 16, 32, 64, 64, 64]


@pytest.mark.parametrize("block", BLOCKS)
def test_in_torch_and_in_the_kernels(block):
    x, weight = random_rows(7, 3 * block), random_rows(5, 3 * block, seed=1)
    assert_same_bits(rotate(x, block), rotated_inputs(x, block))
    assert_same_bits(rotate_back(weight, block), rotated_inputs(weight, block, back=True))
    torch.testing.assert_close(rotate(x, block) @ rotate_weight(weight, block).T, x @ weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate_back(rotate_weight(weight, block), block), weight, rtol=1e-5, atol=1e-5)
    packed = random_packed(21, 3 * block, 4, 32, "affine", bias=True, rotated_inputs=block)
    codes, scales, mins, bias = lowbit.unpack(packed)[:4]
    plain = lowbit.pack(codes, scales, mins, bias, bits=4, group_size=32, mapping="affine")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = x.to(dtype)
        assert_same_bits(lowbit.linear(rows, packed, 21), lowbit.linear(rotate(rows, block), plain, 21).to(dtype))
    stacked = torch.stack([packed, packed])
    experts = torch.tensor([[1, 0]] * 7)
    assert_same_bits(lowbit.linear_experts(x, stacked, experts, 21)[:, 1], lowbit.linear(x, packed, 21))
    assert_same_bits(lowbit.linears(x, [packed, plain], [21, 21])[0], lowbit.linear(x, packed, 21))


def test_a_layer_and_its_gradients():
    torch.manual_seed(0)
    linear = torch.nn.Linear(192, 40)
    layer = lowbit.nn.Linear.from_float(linear, LinearConfig(bits=8, rotate=True))
    assert (layer.info.rotated_inputs, layer.info.version) == (64, 3)
    assert "inputs rotated in blocks of 64" in repr(layer)
    torch.testing.assert_close(layer.dequantize(), linear.weight.detach(), rtol=0, atol=1.5e-3)
    x = random_rows(3, 192).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize().sum(0).expand(3, -1))
    again = lowbit.nn.Linear(lowbit.pack(**lowbit.unpack(layer.packed_weight)._asdict()))
    assert torch.equal(again.packed_weight, layer.packed_weight)
    other = lowbit.nn.Linear.from_float(torch.nn.Linear(192, 40), LinearConfig(bits=8))
    other.load_state_dict(layer.state_dict())
    assert other.info.rotated_inputs == 64 and torch.equal(other(x), layer(x))


def losses_of(linear: torch.nn.Linear, x: torch.Tensor, bits: int, **options) -> list[float]:
    """Mean squared errors of a layer's outputs without and with rotated inputs."""
    with torch.no_grad():
        expected, losses = linear(x), []
        for rotates in (False, True):
            layer = lowbit.nn.Linear.from_float(linear, LinearConfig(bits, rotate=rotates, **options))
            losses.append(float((layer(x) - expected).square().mean()))
    return losses


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"mapping": "affine"}, {"mapping": "levels"}], ids=str)
def test_outliers_of_weights_cost_less(bits, options):
    torch.manual_seed(0)
    linear = torch.nn.Linear(384, 64)
    linear.weight.data = heavy_tailed(linear.weight.data)
    without, rotated = losses_of(linear, random_rows(256, 384), bits, **options)
    assert rotated < 0.95 * without


def test_outliers_of_inputs_cost_less():
    torch.manual_seed(0)
    x = random_rows(256, 384)
    x[:, ::96] *= 30
    without, rotated = losses_of(torch.nn.Linear(384, 64), x, 8)
    assert rotated < 0.7 * without


def test_wrong_arguments():
    with pytest.raises(TypeError, match="rotate is 1; expected True or False"):
        LinearConfig(rotate=1)
    with pytest.raises(TypeError, match="rotate is 'yes'; expected True or False"):
        LowBitConfig(rotate="yes")
    codes, scales = torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 3)
    for block in (-16, 8, 24, 64, 256):
        with pytest.raises(ValueError, match=f"rotated in blocks of {block}; expected 0 for none, or a power of two from 16"):
            lowbit.pack(codes, scales, bits=4, group_size=32, rotated_inputs=block)


def test_layers_without_a_block_stay_as_they_are():
    layer = lowbit.nn.Linear.from_float(torch.nn.Linear(24, 8), LinearConfig(rotate=True, group_size=16))
    plain = lowbit.nn.Linear.from_float(torch.nn.Linear(24, 8), LinearConfig(group_size=16))
    assert (layer.info.rotated_inputs, layer.info.version) == (0, plain.info.version)


def test_slices_and_joined_matrices():
    packed = random_packed(32, 128, 4, 32, "symmetric", rotated_inputs=64)
    halves = [lowbit.slice_columns(packed, 0, 64), lowbit.slice_columns(packed, 64, 128)]
    assert torch.equal(lowbit.concat(halves, dim=1), packed)
    x = random_rows(3, 128)
    summed = lowbit.linear(x[:, :64], halves[0], 32) + lowbit.linear(x[:, 64:], halves[1], 32)
    torch.testing.assert_close(summed, lowbit.linear(x, packed, 32), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="inputs 0 to 32 cut a rotated block of 64"):
        lowbit.slice_columns(packed, 0, 32)
    with pytest.raises(ValueError, match="matrix 1 has inputs in rotated blocks of 0; expected 64"):
        lowbit.concat([packed, random_packed(32, 128, 4, 32, "symmetric")])


# ---- models


def test_a_config_of_transformers():
    config = LowBitConfig(bits=3, rotate=True, overrides={"*down*": {"rotate": False}})
    assert config.to_dict()["rotate"] is True and "rotate" not in LowBitConfig().to_dict()
    model = llama(tied=False)
    lowbit.quantize_(model, config.select(model))
    blocks = {name.rpartition(".")[2]: layer.info.rotated_inputs for name, layer in packed_layers(model)}
    assert blocks["q_proj"] == blocks["o_proj"] == blocks["up_proj"] == 64 and blocks["down_proj"] == 0
    described = LowBitConfig(**model.config.quantization_config.to_dict())
    again = llama(tied=False)
    assert {name: (c.bits, c.rotate) for name, c in described.select(again).items()} == {
        name: (layer.info.bits, layer.info.rotated_inputs > 0) for name, layer in packed_layers(model)
    }


def llama(tied: bool = True):
    torch.manual_seed(0)
    return calibration_models.llama(tied)


def packed_layers(model):
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, lowbit.nn.Packed)]


def test_saved_and_loaded(tmp_path):
    model = llama(tied=False)
    lowbit.quantize_(model, {"*": LinearConfig(3, rotate=True), "*embed*": EmbeddingConfig(4, rotate=True)})
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [layer.info for _, layer in packed_layers(loaded)] == [layer.info for _, layer in packed_layers(model)]
    batch = tokens(1)[0]
    with torch.no_grad():
        assert torch.equal(loaded(batch).logits, model(batch).logits)


@pytest.mark.more
@pytest.mark.parametrize("method", ["gptq", "importance", "tuned", "distilled"])
def test_calibrated_layers_rotate(method):
    model = llama()
    for name, layer in model.named_modules():
        if name.endswith("proj"):
            layer.weight.data = heavy_tailed(layer.weight.data)
    test = tokens(seed=1)
    wanted = calibration_models.hidden(model, test)
    losses = []
    for rotates in (False, True):
        changed = copy.deepcopy(model)
        config = LowBitConfig(bits=3, rotate=rotates, overrides={"*embed*": {"bits": 8}, "lm_head": {"bits": 8}})
        calibrate(changed, tokens(20), config, method)
        blocks = {layer.info.rotated_inputs for name, layer in packed_layers(changed) if "proj" in name}
        assert blocks == ({32, 64} if rotates else {0})
        losses.append(float((calibration_models.hidden(changed, test) - wanted).square().sum() / wanted.square().sum()))
    assert losses[1] < 0.9 * losses[0]


def test_layers_of_one_input_may_differ():
    test = tokens(seed=1)
    wanted = calibration_models.hidden(llama(), test)
    losses = []
    for overrides in ({}, {"*k_proj": {"rotate": False}}):
        changed = llama()
        calibrate(changed, tokens(20), LowBitConfig(bits=4, rotate=True, overrides=overrides), "gptq")
        losses.append(float((calibration_models.hidden(changed, test) - wanted).square().sum() / wanted.square().sum()))
    blocks = {name.rpartition(".")[2]: layer.info.rotated_inputs for name, layer in packed_layers(changed)}
    assert blocks["q_proj"] == 64 and blocks["k_proj"] == 0
    assert losses[1] < 1.3 * losses[0]  # weights and moments belong to the same kind of inputs


@pytest.mark.more
def test_mixed_widths_of_layers_that_rotate_or_not():
    model = llama(tied=False)
    config = LowBitConfig(rotate=True, overrides={"*k_proj": {"rotate": False}})
    calibrate(model, tokens(20), config, "importance", target_bits=5.5)
    infos = {name: layer.info for name, layer in packed_layers(model)}
    assert all((info.rotated_inputs > 0) != name.endswith("k_proj") for name, info in infos.items())
    assert len({(info.bits, info.group_size) for name, info in infos.items() if name.endswith("k_proj")} | {(4, 32)}) > 1


# ---- commands


@pytest.mark.more
def test_commands(source, text, tmp_path):
    packed = tmp_path / "packed"
    document(invoke("quantize", source, packed, "--bits", 3, "--rotate", "--json"))
    infos = [lowbit.info(weight) for name, weight in packed_of(packed).items() if "proj" in name]
    assert infos and all(info.rotated_inputs for info in infos)
    rows = document(invoke("inspect", packed, "--json"))["tensors"]
    assert {row["rotated_inputs"] for row in rows if row["kind"] == "packed" and "proj" in row["name"]} == {
        info.rotated_inputs for info in infos
    }
    assert "symmetric, rotated" in invoke("inspect", packed).output
    calibrated = tmp_path / "calibrated"
    command = ["quantize", source, calibrated, "--bits", 3, "--rotate", "--calibrate", text, "--calibrate-tokens", 2048]
    document(invoke(*command, "--window", 64, "--json"))
    document(invoke(*command[:2], tmp_path / "mixed", *command[3:], "--window", 64, "--target-bits", 4.5, "--json"))
    for target in (calibrated, tmp_path / "mixed"):
        weights = packed_of(target)
        assert all(lowbit.info(weight).rotated_inputs for name, weight in weights.items() if "proj" in name)
    floats = tmp_path / "floats"
    document(invoke("dequantize", packed, floats, "--json"))
    batch = torch.arange(24).view(1, -1) % 90
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(path)(batch).logits for path in (floats, packed)]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.05
    assert "has rotated inputs, which GGUF does not support" in error(
        invoke("export", packed, "--to", "gguf", "--output", tmp_path / "model.gguf")
    )
