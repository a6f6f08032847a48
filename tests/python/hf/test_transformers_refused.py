"""lowbit in transformers refuses damaged, foreign or wrong checkpoints in one sentence."""

import json

import lowbit
import pytest
import torch
from checkpoints import EMBED, NORM, UP, change_tensors, edit_json, load, save_model
from lowbit import LowBitConfig, quantize_checkpoint
from test_transformers import CONFIG


@pytest.fixture
def packed(tmp_path):
    source = save_model(tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "packed", CONFIG, max_shard_bytes=40_000)
    return tmp_path / "packed"


def shard_of(directory, name: str):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][name]


def refuse(path, error, *parts, **options):
    with pytest.raises(error) as caught:
        load(path, **options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", [f"{UP}.packed_weight", f"{EMBED}.packed_weight"])
def test_altered_bytes(packed, name):
    shard = shard_of(packed, name)
    change_tensors(shard, lambda tensors: tensors[name].__setitem__(1000, tensors[name][1000] ^ 1))
    refuse(packed, ValueError, f"{name} in {shard}", "altered bytes", "quantize, again")
    change_tensors(shard, lambda tensors: tensors[name].__setitem__(20, 1))
    refuse(packed, ValueError, f"{name} in {shard}", "altered header")


def test_a_truncated_file(packed):
    shard = shard_of(packed, NORM)
    shard.write_bytes(shard.read_bytes()[:-1])
    refuse(packed, ValueError, str(shard), "not a whole safetensors file")


def test_a_truncated_float_file(tmp_path):
    source = save_model(tmp_path / "source")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refuse(source, ValueError, str(file), "not a whole safetensors file", quantization_config=CONFIG)


def test_missing_parts(packed):
    shard = shard_of(packed, NORM)
    change_tensors(shard, lambda tensors: tensors.pop(NORM))
    refuse(packed, ValueError, str(packed), "lacks 1 of the 21 tensors", NORM)
    shard.unlink()
    refuse(packed, OSError, shard.name)


def test_a_shard_that_the_index_lacks(packed):
    index = packed / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    lacking = weights[f"{UP}.packed_weight"]
    edit_json(index, weight_map={name: file for name, file in weights.items() if file != lacking})
    refuse(packed, ValueError, "lacks", "A shard, or its entry in the index, is missing")


def test_another_models_weights(packed):
    edit_json(packed / "config.json", intermediate_size=200)
    refuse(packed, ValueError, "has weights [64, 168]; expected [64, 200], as config.json says")
    edit_json(packed / "config.json", intermediate_size=168, attention_bias=True)
    refuse(packed, ValueError, "tensors of LlamaForCausalLM", "q_proj.bias")
    edit_json(packed / "config.json", attention_bias=False, num_hidden_layers=1)
    refuse(packed, ValueError, "model.layers.1", "has no such layer")


def test_a_later_version(packed):
    settings = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_json(packed / "config.json", quantization_config=settings | {"format_version": 3})
    refuse(packed, ValueError, "format_version 3; this lowbit reads versions 1 and 2", "Install the lowbit that wrote it")
    edit_json(packed / "config.json", quantization_config=settings | {"rotation": "hadamard"})
    refuse(packed, TypeError, "has no 'rotation'")


def test_a_config_with_false_claims(tmp_path, packed):
    source = tmp_path / "source"
    settings = json.loads((packed / "config.json").read_text())
    edit_json(source / "config.json", quantization_config=settings.pop("quantization_config"))
    refuse(source, ValueError, "has no tensor .packed_weight")
    (packed / "config.json").write_text(json.dumps(settings))
    refuse(packed, ValueError, "has packed weights", "no quantization_config", quantization_config=CONFIG)


def test_bad_float_weights(tmp_path):
    source = save_model(tmp_path / "source")
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors[f"{UP}.weight"].__setitem__((5, 5), float("nan")))
    refuse(source, ValueError, f"{UP}.weight has 1 NaN", quantization_config=CONFIG)
    change_tensors(file, lambda tensors: tensors.update({f"{UP}.weight": torch.ones(168, 64)}))
    change_tensors(file, lambda tensors: tensors["model.norm.weight"].__setitem__(3, float("nan")))
    refuse(source, ValueError, "model.norm.weight has NaN values; expected numbers", quantization_config=CONFIG)
    change_tensors(file, lambda tensors: tensors["model.norm.weight"].fill_(1))
    change_tensors(file, lambda tensors: tensors.update({f"{UP}.weight": torch.ones(168, 65)}))
    refuse(source, ValueError, f"{UP}.weight in {file} has shape [168, 65]; expected [168, 64]", quantization_config=CONFIG)
    change_tensors(file, lambda tensors: tensors.pop(f"{UP}.weight"))
    refuse(source, ValueError, f"lacks 1 of the 21 tensors of LlamaForCausalLM: {UP}", quantization_config=CONFIG)


def test_an_unknown_architecture(packed):
    edit_json(packed / "config.json", model_type="llama77")
    refuse(packed, ValueError, "llama77")


def test_devices():
    quantizer = lowbit.transformers.LowBitQuantizer(CONFIG)
    for device_map in (None, "auto", {"": torch.device("cpu")}, {"": "cpu"}):  # as passed on by transformers
        quantizer.validate_environment(device_map=device_map)
        assert quantizer.update_device_map(device_map) in (None, {"": "cpu"})
    for device_map in ({"": torch.device("cuda:0")}, {"model": "cpu", "lm_head": "disk"}, {"": 0}):
        with pytest.raises(ValueError, match="expected 'cpu' or none"):
            quantizer.validate_environment(device_map=device_map)


def test_quantized_models_are_not_quantized_again(packed):
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = load(packed, quantization_config=LowBitConfig(bits=8))
    assert model.model.layers[0].mlp.up_proj.info.bits == 3


def test_config_errors():
    for options, error, message in (
        ({"bits": 9}, ValueError, "bits is 9; expected 1 to 8"),
        ({"bits": "4"}, TypeError, "bits is '4'; expected an int"),
        ({"embedding_bits": 0}, ValueError, "bits is 0; expected 1 to 8"),
        ({"embedding_bits": "4"}, TypeError, "embedding_bits is '4'; expected an int or None"),
        ({"embedding_bits": True}, TypeError, "embedding_bits is True; expected an int or None"),
        ({"levels": 4}, TypeError, "levels is a int; expected a str or 16 integers"),
        ({"group_size": 20}, ValueError, "group_size is 20; expected a positive multiple of 16"),
        ({"mapping": "linear"}, ValueError, "mapping is 'linear'"),
        ({"scale": "max"}, ValueError, "scale is 'max'"),
        ({"overrides": "lm_head=8"}, TypeError, "overrides is a str; expected a dict of name patterns, or a list"),
        ({"overrides": ["lm_head"]}, TypeError, "overrides has the entry lm_head; expected a name pattern"),
        ({"overrides": [("lm_head", 8)]}, TypeError, "overrides has the entry 'lm_head': 8; expected a name pattern"),
        ({"overrides": {"lm_head": 8}}, TypeError, "overrides has the entry 'lm_head': 8; expected a name pattern"),
        ({"overrides": {"lm_head": {"width": 8}}}, TypeError, "expected a name pattern and a dict of bits, group_size"),
        ({"overrides": {"lm_head": {"bits": 0}}}, ValueError, "bits is 0"),
        ({"overrides": {3: {"bits": 4}}}, TypeError, "overrides has the entry 3"),
        ({"width": 4}, TypeError, "LowBitConfig has no 'width'"),
        ({"quant_method": "gptq"}, ValueError, "quant_method is 'gptq'; expected 'lowbit'"),
    ):
        with pytest.raises(error) as caught:
            LowBitConfig(**options)
        assert message in str(caught.value)
