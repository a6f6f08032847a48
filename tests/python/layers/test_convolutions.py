"""Convolutions that equal a matrix product are packed like linear layers; others stay float."""

import copy
import re
import warnings

import lowbit
import lowbit.transformers
import pytest
import torch
from models import BACKENDS
from torch import nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")

# Patches with a remainder, a single patch, points with and without stride and padding, neighbors in time.
CASES = {
    "patches": (nn.Conv2d, (3, 40, 14, 14), {}, (2, 3, 56, 45)),
    "wide patches": (nn.Conv2d, (16, 24, (2, 3), (2, 3)), {"bias": False}, (1, 16, 9, 9)),
    "one patch": (nn.Conv3d, (3, 40, (2, 14, 14), (2, 14, 14)), {}, (5, 3, 2, 14, 14)),
    "points": (nn.Conv2d, (32, 48, 1), {}, (2, 32, 7, 9)),
    "some points": (nn.Conv2d, (32, 48, 1, 2), {"padding": 1}, (2, 32, 7, 8)),
    "points in time": (nn.Conv1d, (24, 16, 1), {"padding": "same", "dilation": 3}, (1, 24, 5)),
    "three in time": (nn.Conv1d, (20, 48, 3), {"padding": 1}, (1, 20, 30)),
    "every second": (nn.Conv1d, (64, 48, 3, 2), {"padding": 1}, (2, 64, 31)),
    "pairs": (nn.Conv1d, (64, 48, 2, 2), {"padding": "valid"}, (2, 64, 31)),
}


def case(name):
    torch.manual_seed(0)
    kind, arguments, options, shape = CASES[name]
    return kind(*arguments, **options), torch.randn(shape)


def unfolded(x, conv):
    """[batch, positions, inputs], by torch's unfold() and loops."""
    dims = len(conv.kernel_size)
    padding = (0,) * dims if isinstance(conv.padding, str) else conv.padding
    x = functional.pad(x, [ends for one in reversed(padding) for ends in (one, one)])
    if dims < 3:
        shape = [1] * (2 - dims)
        x = x.view(*x.shape[:2], *shape, *x.shape[2:])
        return functional.unfold(x, (*shape, *conv.kernel_size), stride=(*shape, *conv.stride)).transpose(1, 2)
    assert tuple(x.shape[2:]) == conv.kernel_size
    return x.flatten(1)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_is_a_linear_layer_of_its_rows(name, dtype):
    conv, x = case(name)
    conv, x = conv.to(dtype), x.to(dtype)
    config = lowbit.ConvConfig(bits=5, group_size=16, mapping="affine")
    packed = lowbit.nn.Conv.from_float(conv, config)
    with torch.no_grad():
        expected = conv(x)
        rows = lowbit.operators.ops.linear(
            unfolded(x, conv), lowbit.quantize_tensor(conv.weight.flatten(1), config, conv.bias), len(conv.weight)
        )
        assert packed(x).equal(rows.transpose(1, 2).reshape(expected.shape))
        exact = lowbit.nn.Conv.from_float(conv, lowbit.ConvConfig())  # 8 bits
        assert float((exact(x) - expected).float().norm() / expected.float().norm()) < 0.02
        assert packed(x[0]).equal(packed(x)[0])
        if dtype is torch.float32 and x.dim() == 4:
            assert packed(x.to(memory_format=torch.channels_last)).equal(packed(x))
    assert packed.weight.shape == conv.weight.shape and packed.weight.dtype == dtype
    for attribute in ("in_channels", "out_channels", "kernel_size", "stride", "groups", "padding_mode"):
        assert getattr(packed, attribute) == getattr(conv, attribute), attribute
    dequantized = packed.dequantize()
    close = float((dequantized - conv.weight.float()).norm() / conv.weight.float().norm())
    assert dequantized.shape == conv.weight.shape and 0 < close < 0.1
    if conv.bias is not None:
        assert packed.bias.equal(conv.bias)


def test_gradients_are_those_of_the_dequantized_convolution():
    conv, x = case("every second")
    packed = lowbit.nn.Conv.from_float(conv, lowbit.ConvConfig())
    conv.weight.data = packed.dequantize()
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    packed(mine).square().sum().backward()
    y = conv(other)
    y.backward(2 * packed(x))
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


STAY = {
    "a depthwise convolution": nn.Conv1d(16, 32, 3, groups=16),
    "a convolution in 4 groups of channels": nn.Conv2d(64, 32, 1, groups=4),
    "a convolution of 3 with dilation": nn.Conv1d(16, 32, 3, dilation=2),
    "a convolution of 7, which uses each input at many positions": nn.Conv1d(16, 32, 7, padding=3),
    "a convolution of 3x3, which uses each input at many positions": nn.Conv2d(16, 32, 3, padding=1),
    "a convolution of 4x4, which uses each input at many positions ": nn.Conv2d(16, 32, 4, 4, padding=1),
    "a convolution of 3 with padding 'same', zeros": nn.Conv1d(16, 32, 3, padding="same"),
    "a convolution of 3 with padding (1,), circular": nn.Conv1d(16, 32, 3, padding=1, padding_mode="circular"),
    "a convolution of 8 inputs; expected at least 16": nn.Conv2d(8, 32, 1),
    "a transposed convolution": nn.ConvTranspose1d(16, 32, 2, 2),
    "a Special, which may use its weight in its own way": type("Special", (nn.Conv1d,), {})(16, 32, 1),
    "a convolution whose weight a hook computes before each call": nn.utils.weight_norm(nn.Conv1d(16, 32, 1)),
}


@pytest.mark.parametrize("why", STAY)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_float_layers_are_named_with_the_reason(why):
    model = nn.Sequential(nn.Linear(16, 16), copy.deepcopy(STAY[why]) if "hook" not in why else STAY[why])
    with pytest.warns(UserWarning) as caught:
        lowbit.quantize_(model, {"*": lowbit.LinearConfig(8), "1": lowbit.ConvConfig()})
    said = [str(one.message) for one in caught]
    assert any(f"as 1 does: {why.strip()}" in one for one in said), said
    assert isinstance(model[0], lowbit.nn.Linear) and not isinstance(model[1], lowbit.nn.Packed)
    if "Transpose" not in type(STAY[why]).__name__:
        with pytest.raises(ValueError) as refused:
            lowbit.nn.Conv.from_float(STAY[why], lowbit.ConvConfig())
        assert str(refused.value) == f"it is {why.strip()}, which lowbit does not pack"


def test_a_config_packs_the_layers_of_its_kind():
    def model():
        return nn.ModuleDict({"patch": nn.Conv2d(3, 32, 4, 4), "up": nn.Linear(32, 32)})

    with pytest.warns(UserWarning, match="as patch does: a convolution, which a lowbit.ConvConfig packs"):
        only = lowbit.quantize_(model(), lowbit.LinearConfig(4))
    assert type(only["patch"]) is nn.Conv2d
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.quantize_(model(), {"*": lowbit.LinearConfig(4), "patch": None})
        both = lowbit.quantize_(model(), {"*": lowbit.LinearConfig(4), "**": lowbit.ConvConfig()})
        assert [layer.info.bits for layer in both.values()] == [8, 4]
        one = lowbit.quantize_(model(), {"*": lowbit.ConvConfig(6), "up": None})
    assert one["patch"].info.bits == 6 and type(one["up"]) is nn.Linear
    for config in (lowbit.ConvConfig(), lowbit.LinearConfig()):
        with pytest.raises(TypeError, match="model is itself a torch.nn.Conv2d; use lowbit.nn.Conv.from_float"):
            lowbit.quantize_(nn.Conv2d(16, 16, 1), config)
    with pytest.raises(ValueError, match="patch is a convolution, which lowbit.qat cannot train"):
        lowbit.qat.prepare_(model(), {"*": lowbit.ConvConfig()})
    with pytest.raises(TypeError, match="expected a ConvConfig; found LinearConfig"):
        lowbit.nn.Conv.from_float(nn.Conv2d(16, 16, 1), lowbit.LinearConfig())


def test_wrong_inputs():
    packed = lowbit.nn.Conv.from_float(nn.Conv2d(3, 16, 4, 4), lowbit.ConvConfig())
    for shape in ((1, 4, 8, 8), (8, 8), (1, 1, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"x has shape .*; expected \[batch, 3, size, size\]"):
            packed(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"the input has the sizes \[3, 8\]; expected at least \[4, 4\]"):
        packed(torch.zeros(1, 3, 3, 8))
    window = packed._window
    with pytest.raises(ValueError, match="the weight has 40 inputs; expected a multiple of the kernel's 16"):
        lowbit.nn.Conv(lowbit.quantize_tensor(torch.randn(16, 40), lowbit.ConvConfig()), window)


def test_shared_convolutions_stay_shared():
    first, second = nn.Conv1d(16, 32, 3), nn.Conv1d(16, 32, 3, padding=1)
    second.weight, second.bias = first.weight, first.bias
    model = lowbit.quantize_(nn.ModuleList([first, second, first]), lowbit.ConvConfig())
    assert model[0].packed_weight is model[1].packed_weight and model[0].packed_weight is model[2].packed_weight
    assert [layer.padding for layer in model] == [(0,), (1,), (0,)]


class Stem(nn.Module):
    """Two convolutions of neighbors in time, patches of an image, and points."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(20, 32, 3, padding=1), nn.Conv1d(32, 32, 3, 2, padding=1)
        self.patch, self.point = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 1)

    def forward(self, sound, image):
        return self.second(functional.gelu(self.first(sound))), functional.relu(self.point(self.patch(image)))


@pytest.fixture(scope="module")
def stem():
    torch.manual_seed(0)
    return lowbit.quantize_(Stem().eval(), lowbit.ConvConfig())


INPUTS = torch.randn(1, 20, 30), torch.randn(2, 3, 16, 12)


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_state_dict_restores_the_bits(stem):
    torch.manual_seed(1)
    other = lowbit.quantize_(Stem().eval(), lowbit.ConvConfig(4))
    state = stem.state_dict()
    assert list(state) == [f"{name}.packed_weight" for name in ("first", "second", "patch", "point")]
    other.load_state_dict(state)
    with torch.no_grad():
        assert all(one.equal(two) for one, two in zip(other(*INPUTS), stem(*INPUTS), strict=True))


def test_a_state_dict_of_another_shape(tmp_path):
    """As many inputs per row do not make the same convolution."""
    config = lowbit.ConvConfig()
    pairs = lowbit.nn.Conv.from_float(nn.Conv1d(32, 16, 2, 2), config)
    before = pairs.packed_weight.clone()
    linear = lowbit.nn.Linear.from_float(nn.Linear(64, 16), lowbit.LinearConfig(8))
    points = lowbit.nn.Conv.from_float(nn.Conv1d(64, 16, 1), config)
    for other, shape in ((linear, [16, 64]), (points, [16, 64, 1])):
        torch.save(other.state_dict(), tmp_path / "state.pt")
        for state in (other.state_dict(), torch.load(tmp_path / "state.pt")):
            expected = f"packed_weight: the weight has shape {shape}; expected [16, 32, 2]"
            with pytest.raises(RuntimeError, match=re.escape(expected)):
                pairs.load_state_dict(state)
    with pytest.raises(RuntimeError, match=re.escape("shape [16, 32, 2]; expected [16, 64]")):
        linear.load_state_dict(pairs.state_dict())
    assert torch.equal(pairs.packed_weight, before)
    # As in torch, a state dict does not record the stride.
    pairs.load_state_dict(lowbit.nn.Conv.from_float(nn.Conv1d(32, 16, 2, 1), config).state_dict())
    assert not torch.equal(pairs.packed_weight, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(stem, backend):
    torch._dynamo.reset()
    with torch.no_grad():
        assert_close(torch.compile(stem, fullgraph=True, backend=backend)(*INPUTS), stem(*INPUTS))


SHAPES = ({2: torch.export.Dim("time", min=4, max=64)}, {0: torch.export.Dim("images", max=4)})


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:This API is experimental")
def test_exported(stem, executorch, tmp_path):
    program = torch.export.export(stem, INPUTS, dynamic_shapes=SHAPES).module()
    longer = torch.randn(1, 20, 41), torch.randn(3, 3, 16, 12)
    with torch.no_grad():
        assert_close(program(*longer), stem(*longer))
    lowbit.export_pte(stem, INPUTS, tmp_path / "stem.pte", dynamic_shapes=SHAPES)
    method = executorch.load_program(tmp_path / "stem.pte").load_method("forward")
    with torch.no_grad():
        assert_close(method.execute(longer), stem(*longer))


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:This API is experimental")
def test_as_machine_code(stem, tmp_path):
    lowbit.export_pt2(stem, INPUTS, tmp_path / "stem.pt2")
    with torch.no_grad():
        assert_close(torch._inductor.aoti_load_package(str(tmp_path / "stem.pt2"))(*INPUTS), stem(*INPUTS))


# ---- checkpoints of transformers

IMAGE = torch.randn(2, 3, 32, 32)


def make(kind):
    torch.manual_seed(0)
    if kind == "convnext":
        config = transformers.ConvNextConfig(hidden_sizes=[32, 48], depths=[1, 1], num_stages=2, image_size=32, patch_size=4)
    else:
        config = transformers.SiglipVisionConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
        )
    model = transformers.AutoModel.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


@torch.inference_mode()
def run(model):
    return model(pixel_values=IMAGE).last_hidden_state


CONFIG = lowbit.LowBitConfig(bits=4, conv_bits=8)
PACKED = {
    "siglip": ["embeddings.patch_embedding"],
    "convnext": ["embeddings.patch_embeddings", "encoder.stages.1.downsampling_layer.1"],
}
FLOAT = {"siglip": {}, "convnext": {"a depthwise convolution"}}


@pytest.mark.parametrize("kind", PACKED)
def test_every_way_gives_the_same_bits(kind, tmp_path):
    float_model = make(kind)
    float_model.save_pretrained(tmp_path / "float")
    in_memory = lowbit.quantize_(copy.deepcopy(float_model), CONFIG.select(float_model))
    convs = [name for name, layer in in_memory.named_modules() if isinstance(layer, lowbit.nn.Conv)]
    assert convs == PACKED[kind] and {in_memory.get_submodule(name).info.bits for name in convs} == {8}
    at_load = transformers.AutoModel.from_pretrained(tmp_path / "float", quantization_config=CONFIG).eval()
    summary = lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", CONFIG)
    reasons = {why for name, why in summary.unquantized.items() if "convolution" in why}
    assert reasons == set(FLOAT[kind])
    in_memory.save_pretrained(tmp_path / "memory")
    at_load.save_pretrained(tmp_path / "load")
    expected = run(in_memory)
    for saved in ("packed", "memory", "load"):
        loaded = transformers.AutoModel.from_pretrained(tmp_path / saved).eval()
        assert run(loaded).equal(expected), saved
        assert {name: type(layer) for name, layer in loaded.named_modules()} == {
            name: type(layer) for name, layer in in_memory.named_modules()
        }
    described = in_memory.config.quantization_config
    again = described.select(float_model)
    assert {name: config.bits for name, config in again.items()} == {
        name: layer.info.bits for name, layer in in_memory.named_modules() if isinstance(layer, lowbit.nn.Packed)
    }
    floats = copy.deepcopy(in_memory).dequantize()
    assert not any(isinstance(layer, lowbit.nn.Packed) for layer in floats.modules())
    for name in convs:
        assert type(floats.get_submodule(name)) is nn.Conv2d
        assert floats.get_submodule(name).weight.equal(in_memory.get_submodule(name).dequantize())
    difference = float((run(floats) - expected).norm() / expected.norm())
    assert 0 < difference < 0.05
    lowbit.dequantize_checkpoint(tmp_path / "packed", tmp_path / "again")
    assert run(transformers.AutoModel.from_pretrained(tmp_path / "again").eval()).equal(run(floats))


def test_without_conv_bits_they_stay_float_and_are_named(tmp_path):
    make("siglip").save_pretrained(tmp_path / "float")
    why = "a convolution, which conv_bits of the configuration (--conv-bits) would pack"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = lowbit.LowBitConfig(bits=4, overrides={"*": {"bits": 5}})
        summary = lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", config)
    assert summary.unquantized["embeddings.patch_embedding.weight"] == why
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "packed")
    assert type(loaded.embeddings.patch_embedding) is nn.Conv2d
    overridden = lowbit.LowBitConfig(bits=4, mapping="levels", conv_bits=8, overrides={"*patch*": {"mapping": "levels"}})
    chosen = overridden.select(make("siglip"))["embeddings.patch_embedding"]
    assert (chosen.bits, chosen.mapping) == (8, "symmetric")
    with pytest.raises(TypeError, match="conv_bits is '8'; expected an int or None"):
        lowbit.LowBitConfig(conv_bits="8")
