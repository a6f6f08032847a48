"""transformers' vision towers, packed and with lowbit.fuse_, compared with the originals."""

import copy

import lowbit
import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
# Two images of different sizes as concatenated patches.
GRID = torch.tensor([[1, 4, 6], [1, 8, 4]])
PATCHES = torch.randn(24 + 32, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(2))
KINDS = {
    "siglip_vision_model": {"image_size": 32, "patch_size": 8, **SIZES},
    "clip_vision_model": {"image_size": 32, "patch_size": 8, **SIZES},
    "vit": {"image_size": 32, "patch_size": 8, **SIZES},
    "qwen2_5_vl": {"window_size": 32, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
}


def tower(kind):
    torch.manual_seed(0)
    settings = KINDS[kind]
    if not kind.startswith("qwen"):
        return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **settings)).eval()
    vision = {
        "patch_size": 8, "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64,
        **settings,
    }  # fmt: skip
    text = {**SIZES, "num_key_value_heads": 2, "vocab_size": 32}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    return transformers.AutoModel.from_config(config).eval().visual


@torch.no_grad()
def run(model, one=None):
    """The hidden states of all images, or only of image `one`."""
    if "Qwen" not in type(model).__name__:
        return model(pixel_values=IMAGES if one is None else IMAGES[one : one + 1]).last_hidden_state
    patches = PATCHES if one is None else PATCHES.split([24, 32])[one]
    return model(patches, grid_thw=GRID if one is None else GRID[one : one + 1]).pooler_output


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_tower_computes_the_same(kind, monkeypatch):
    model = tower(kind)
    expected = run(model)
    summary = lowbit.fuse_(model)
    assert summary.attention == 1 and summary.activations >= 2
    assert summary.norms == len([module for module in model.modules() if "Norm" in type(module).__name__])
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or sdpa(*a, **k))
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-4)
    assert not calls  # no layer fell back to sdpa


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_a_packed_tower(kind):
    model = tower(kind)
    expected = run(model)
    errors = []
    for bits in (8, 4):
        packed = lowbit.quantize_(copy.deepcopy(model), lowbit.LowBitConfig(bits=bits, conv_bits=8).select(model))
        (patches,) = [layer for layer in packed.modules() if isinstance(layer, lowbit.nn.Conv)]
        assert patches.info.bits == 8
        assert not any(type(layer) in (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d) for layer in packed.modules())
        found = run(packed)
        errors.append(float((found - expected).norm() / expected.norm()))
        lowbit.fuse_(packed)
        torch.testing.assert_close(run(packed), found, rtol=1e-3, atol=1e-3)
    assert 0 < errors[0] < 0.03 and errors[0] < errors[1] < 0.2


# As for texts, an image's bits do not depend on the rest of the batch, because torch's parts process each image separately.
@pytest.mark.parametrize("kind", ["clip_vision_model", "vit"])
@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_an_image_has_the_same_bits_alone_and_in_a_batch(kind):
    model = tower(kind)
    lowbit.quantize_(model, lowbit.LowBitConfig(bits=8, conv_bits=8).select(model))
    lowbit.fuse_(model)
    together = run(model)
    for image in range(3):
        assert run(model, image)[0].equal(together[image])
