"""quantize_checkpoint: refused sources and arguments, which leave no files."""

import json

import lowbit
import pytest
import torch
from checkpoints import CONFIG, EMBED, HEAD, NORM, UP, change_tensors, edit_json, load, refuse, save_model
from lowbit import LowBitConfig, inspect_checkpoint, quantize_checkpoint
from lowbit.checkpoint import outputs
from lowbit.checkpoint.converting import convert_checkpoint
from safetensors.torch import load_file


@pytest.fixture
def source(tmp_path):
    return save_model(tmp_path / "source")


@pytest.fixture
def sharded(tmp_path):
    return save_model(tmp_path / "source", sharded=True)


def test_sources_that_do_not_exist(tmp_path):
    refuse(tmp_path / "none", tmp_path / "packed", OSError, str(tmp_path / "none"), "is not a directory")


def test_no_weights(source, tmp_path):
    (source / "model.safetensors").rename(source / "weights.safetensors")
    refuse(source, tmp_path / "packed", OSError, "has neither model.safetensors nor", "found config.json")


@pytest.mark.parametrize("size", [0, 7, 300, -1])
def test_a_truncated_file(source, tmp_path, size):
    file = source / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    refuse(source, tmp_path / "packed", ValueError, str(file), "not a whole safetensors file", "copy it again")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        inspect_checkpoint(source)


def test_a_header_that_lies(source, tmp_path):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[64,168]", b"[64,169]"))
    refuse(source, tmp_path / "packed", ValueError, str(file), "not a whole safetensors file")


def test_a_missing_shard(sharded, tmp_path):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refuse(sharded, tmp_path / "packed", OSError, f"{shard} is missing", "tensors; copy it too")


def test_a_shard_that_the_index_lacks(sharded, tmp_path):
    index = sharded / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={name: file for name, file in weights.items() if "00002-of" not in file})
    refuse(sharded, tmp_path / "packed", ValueError, "lacks", "tensors of LlamaForCausalLM: ", "A shard, or its entry")


def test_an_index_that_disagrees_with_the_files(sharded, tmp_path):
    index = sharded / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weights | {NORM: weights[f"{EMBED}.weight"]})
    refuse(sharded, tmp_path / "packed", ValueError, f"{NORM} is in", "found it in")
    edit_json(index, weight_map=weights | {"no.such": weights[NORM]})
    refuse(sharded, tmp_path / "packed", ValueError, "no.such is in", "found it nowhere")
    edit_json(index, weight_map=weights | {NORM: "../elsewhere.safetensors"})
    refuse(sharded, tmp_path / "packed", ValueError, "../elsewhere.safetensors", "of the same directory")
    index.write_text("[1, 2]")
    refuse(sharded, tmp_path / "packed", ValueError, f"{index} holds a list; expected an object")
    index.write_text("{")
    refuse(sharded, tmp_path / "packed", ValueError, f"{index} is not JSON")
    index.write_text("{}")
    refuse(sharded, tmp_path / "packed", ValueError, f"{index} is not an index")


def test_a_tensor_in_two_shards(sharded, tmp_path):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    change_tensors(second, lambda tensors: tensors.update({name: tensor}))
    refuse(sharded, tmp_path / "packed", ValueError, f"{name} is in both", "expected each name once")


def test_a_missing_tensor(source, tmp_path):
    change_tensors(source / "model.safetensors", lambda tensors: tensors.pop(NORM))
    refuse(source, tmp_path / "packed", ValueError, f"lacks 1 of the 21 tensors of LlamaForCausalLM: {NORM}")


@pytest.mark.parametrize("name, shape", [(f"{UP}.weight", (168, 65)), (NORM, (63,)), (f"{EMBED}.weight", (403, 64, 1))])
def test_a_wrong_shape(source, tmp_path, name, shape):
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    refuse(source, tmp_path / "packed", ValueError, f"{name} in {file} has shape {list(shape)}; expected ", "config.json")


def test_a_wrong_dtype(source, tmp_path):
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors.update({f"{UP}.weight": tensors[f"{UP}.weight"].to(torch.int8)}))
    refuse(source, tmp_path / "packed", ValueError, f"{UP}.weight in {file} has dtype I8; expected F64, F32, BF16, F16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite(source, tmp_path, monkeypatch, value):
    monkeypatch.setattr(outputs, "_BAND_WEIGHTS", 64 * 64)
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors[f"{UP}.weight"].__setitem__((70, 3), value))
    message = f"{UP}.weight in {file}, rows 64 to 127: weight has 1 NaN or infinite values"
    refuse(source, tmp_path / "packed", ValueError, message)


@pytest.mark.parametrize("name", [NORM, f"{HEAD}.weight"])
def test_nan_in_a_tensor_that_stays_float(source, tmp_path, name):
    change_tensors(source / "model.safetensors", lambda tensors: tensors[name].view(-1).__setitem__(5, float("nan")))
    config = LowBitConfig(overrides={HEAD: None})
    refuse(source, tmp_path / "packed", ValueError, f"{name} has NaN values; expected numbers", config=config)
    # Infinity is a value that some models store, as the limit of a range.
    change_tensors(source / "model.safetensors", lambda tensors: tensors[name].view(-1).__setitem__(5, float("inf")))
    quantize_checkpoint(source, tmp_path / "packed", config)
    with pytest.raises(ValueError, match="has NaN values"):
        change_tensors(tmp_path / "packed/model.safetensors", lambda tensors: tensors[name].fill_(float("nan")))
        convert_checkpoint(tmp_path / "packed", tmp_path / "converted", 16)
    assert not (tmp_path / "converted").exists()


def test_a_file_beside_an_index_of_others(sharded, tmp_path):
    """One of them is a leftover; transformers would load the single file."""
    single = sharded / "model.safetensors"
    save_model(tmp_path / "other", seed=1)
    (tmp_path / "other/model.safetensors").rename(single)
    first = min(file.name for file in sharded.glob("model-*"))
    message = (
        f"has model.safetensors, and model.safetensors.index.json of other files, {first} for example; expected one of them"
    )
    refuse(sharded, tmp_path / "packed", ValueError, str(sharded), message)
    with pytest.raises(ValueError, match="expected one of them"):
        load(sharded, quantization_config=CONFIG)
    # An index of the single file is allowed.
    names = load_file(single).keys()
    edit_json(sharded / "model.safetensors.index.json", weight_map=dict.fromkeys(names, single.name))
    quantize_checkpoint(sharded, tmp_path / "packed", CONFIG)
    # One of files that are gone is a leftover: transformers deletes old shards, but not their index.
    edit_json(sharded / "model.safetensors.index.json", weight_map=dict.fromkeys(names, "model-00009-of-00009.safetensors"))
    quantize_checkpoint(sharded, tmp_path / "again", CONFIG)


def test_an_unknown_architecture(source, tmp_path):
    edit_json(source / "config.json", model_type="llama77", architectures=["Llama77ForCausalLM"])
    refuse(source, tmp_path / "packed", ValueError, "'llama77'", "['Llama77ForCausalLM']", "newer transformers")


def test_a_broken_config(source, tmp_path):
    (source / "config.json").write_text('{"model_type": ')
    refuse(source, tmp_path / "packed", ValueError, str(source / "config.json"), "is not JSON")
    (source / "config.json").unlink()
    refuse(source, tmp_path / "packed", OSError, "has no config.json")


def test_checkpoints_that_are_already_quantized(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    refuse(tmp_path / "packed", tmp_path / "again", ValueError, "is quantized already, by the method 'lowbit'")
    edit_json(source / "config.json", quantization_config={"quant_method": "gptq"})
    refuse(source, tmp_path / "again", ValueError, "is quantized already, by the method 'gptq'")


def test_wrong_arguments(source, tmp_path):
    refuse(source, tmp_path / "packed", TypeError, "is a LinearConfig", "LowBitConfig", config=lowbit.LinearConfig())
    nothing = LowBitConfig(overrides={"*": None})
    refuse(source, tmp_path / "packed", ValueError, "config selects no layer of LlamaForCausalLM", config=nothing)
    too_long = LowBitConfig(group_size=2**31 + 16)
    refuse(source, tmp_path / "packed", ValueError, "group size is 2147483664", config=too_long)
    for value in (0, 1.5, True, None):
        with pytest.raises(ValueError, match="max_shard_bytes is"):
            quantize_checkpoint(source, tmp_path / "packed", CONFIG, max_shard_bytes=value)


def test_different_configs_for_one_weight(tmp_path):
    source = save_model(tmp_path / "source", "tied")
    config = LowBitConfig(overrides={HEAD: {"bits": 8}})
    refuse(source, tmp_path / "packed", ValueError, "share one weight but have different configs", config=config)
