"""Weights that transformers splits or joins during loading: q, k and v in one tensor of the files, gate and up, biases."""

import warnings

import lowbit.transformers  # noqa: F401 - lets transformers load packed checkpoints
import pytest
import torch
import transformers
from lowbit import LowBitConfig, quantize_checkpoint
from safetensors import safe_open

SMALL = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
KINDS = {
    "NomicBertModel": SMALL,  # attn.Wqkv
    "NomicBertForMaskedLM": SMALL,  # with a name prefix and a tied head
    "GteModel": SMALL,  # also up and gate, and renamed
    "JinaEmbeddingsV3Model": SMALL | {"max_position_embeddings": 32},
    "Dinov2Model": VISION | {"use_swiglu_ffn": True},  # with a bias that is also split
    "HrmTextModel": SMALL | {"num_key_value_heads": 2},  # four in one
}
Q, K = ("q_proj", "up_proj"), ("k_proj", "gate_proj")


def saved(kind: str, path) -> type:
    """Saves a random model in its architecture's checkpoint form."""
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**KINDS[kind]))
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))  # zero biases would hide a mix-up
    model.save_pretrained(path)
    return model_class


def state_of(model_class, path, **options) -> dict[str, torch.Tensor]:
    return model_class.from_pretrained(path, **options).state_dict()


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore:.*stay float, as .*a convolution, which conv_bits")  # the patches of images
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_files_and_memory_agree(kind, some, tmp_path):
    """Also if one of the matrices in a tensor has another width, and one stays float."""
    model_class = saved(kind, tmp_path / "float")
    overrides = {f"*.{name}": {"bits": 3} for name in Q} | {f"*.{name}": None for name in K}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the pattern")
        config = LowBitConfig(bits=5, group_size=16, overrides=overrides if some else None)
        summary = quantize_checkpoint(tmp_path / "float", tmp_path / "packed", config)
        expected = state_of(model_class, tmp_path / "float", quantization_config=config)
    found = model_class.from_pretrained(tmp_path / "packed")
    assert same(found.state_dict(), expected)
    with safe_open(tmp_path / "float" / "model.safetensors", "pt") as file:
        names = file.keys()
    state = model_class(model_class.config_class(**KINDS[kind])).state_dict()
    assert any(name not in state for name in names)  # otherwise nothing is split or joined
    assert not any("follow" in why for why in summary.unquantized.values())
    floats = [name for name in expected if name.endswith(tuple(f"{each}.weight" for each in K))]
    assert bool(floats) == some
    assert list(summary.unquantized.values()).count("left float by its configuration") == len(floats)
    found.save_pretrained(tmp_path / "again")
    assert same(state_of(model_class, tmp_path / "again"), expected)


@pytest.mark.parametrize("kind", ["NomicBertModel", "Dinov2Model"])
def test_a_tensor_of_another_shape_is_refused(kind, tmp_path):
    from safetensors.torch import load_file, save_file

    saved(kind, tmp_path / "float")
    file = tmp_path / "float" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(("Wqkv.weight", "weights_in.weight")))
    save_file(tensors | {name: tensors[name][:-6].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"gives \S+ the shape \[\d+, 32\]; expected \[\d+, 32\], as config.json says"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "packed", LowBitConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


def test_matrices_split_in_another_way_are_reported(tmp_path):
    """Bands of different sizes given in the configuration: the layers stay float, with that reason. The embedding table, stored
    in two parts, is packed as one."""
    config_class = getattr(transformers, "Molmo2TextConfig", None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no Molmo2")
    model_class = transformers.Molmo2TextModel
    model_class(config_class(**SMALL | {"num_key_value_heads": 1, "head_dim": 16})).save_pretrained(tmp_path / "float")
    why = "built by a conversion of transformers that lowbit does not support"
    with pytest.warns(UserWarning, match=rf"stay float, as layers\.0\.self_attn\.\w_proj does: {why}$"):
        summary = quantize_checkpoint(tmp_path / "float", tmp_path / "packed", LowBitConfig())
    assert summary.unquantized == {f"layers.{layer}.self_attn.att_proj.weight": why for layer in (0, 1)}
    table = model_class.from_pretrained(tmp_path / "float", quantization_config=LowBitConfig()).embed_tokens.packed_weight
    found, floats = (state_of(model_class, tmp_path / name) for name in ("packed", "float"))
    assert "layers.0.self_attn.q_proj.weight" in found and "layers.0.mlp.up_proj.packed_weight" in found
    assert torch.equal(found["embed_tokens.packed_weight"], table)
    assert torch.equal(found["layers.0.self_attn.q_proj.weight"], floats["layers.0.self_attn.q_proj.weight"])
