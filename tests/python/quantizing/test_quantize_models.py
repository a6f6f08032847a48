"""quantize_: torch modules that use their linear layers in special ways, and refused models."""

import copy
import warnings

import lowbit
import pytest
import torch
from lowbit import EmbeddingConfig, LinearConfig
from reference import random_rows
from test_quantize import Model, quantized, refused
from torch import nn
from torch.nn.utils import prune


def test_multihead_attention_is_left_alone():
    attention = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    model = nn.ModuleDict({"attention": attention, "linear": nn.Linear(32, 32)})
    x = random_rows(2, 5, 32)
    expected = attention(x, x, x)[0]
    lowbit.quantize_(model, LinearConfig(4))
    assert set(quantized(model)) == {"linear"}
    assert torch.equal(attention(x, x, x)[0], expected)


def test_subclasses_are_left_alone():
    class Special(nn.Linear):
        pass

    class Table(nn.Embedding):
        pass

    model = nn.Sequential(Special(32, 32), nn.Linear(32, 32), Table(9, 32))
    lowbit.quantize_(model, {"*": LinearConfig(4), "1": LinearConfig(2)})
    assert quantized(model) == {"1": 2} and type(model[0]) is Special


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("kind", ["linear", "table", "conv"])
def test_a_parametrized_layer_is_packed_as_computed(norm, kind):
    layer, config = {
        "linear": (nn.Linear(32, 48), LinearConfig(4)),
        "table": (nn.Embedding(48, 32), EmbeddingConfig(4)),
        "conv": (nn.Conv1d(32, 48, 1), lowbit.ConvConfig(4)),
    }[kind]
    model = nn.Sequential(getattr(nn.utils.parametrizations, norm)(layer), nn.LayerNorm(1)).eval()
    model.register_module("same", model[0])  # under a second name
    expected = lowbit.quantize_tensor(layer.weight.flatten(1), config, bias=getattr(layer, "bias", None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of tensors that stay float
        lowbit.quantize_(model, config)
    assert torch.equal(model[0].packed_weight, expected) and torch.equal(model.same.packed_weight, expected)
    assert not [name for name, _ in model.named_parameters() if "parametrizations" in name]
    with pytest.raises(ValueError, match="0 has a parametrization, which lowbit.qat cannot train; give it the config None"):
        lowbit.qat.prepare_(nn.Sequential(layer), config)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, weight):
        return self.inner(weight)


def test_layers_of_a_parametrization_are_part_of_its_weight():
    layer = nn.Linear(32, 48)
    nn.utils.parametrize.register_parametrization(layer, "weight", Mixed())
    model = nn.Sequential(layer).eval()
    expected = lowbit.quantize_tensor(layer.weight, LinearConfig(4), bias=layer.bias)
    lowbit.quantize_(model, LinearConfig(4))
    assert torch.equal(model[0].packed_weight, expected)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_transformer_encoder(gradients, masked):
    # In evaluation torch's encoder passes the weights of its linear layers to a fused operator.
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x = random_rows(2, 5, 32)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    with torch.set_grad_enabled(gradients):
        expected = model(x, src_key_padding_mask=mask)
        lowbit.quantize_(model, LinearConfig(8))
        found = model(x, src_key_padding_mask=mask)
        alone = model.layers[1](model.layers[0](x, src_key_padding_mask=mask), src_key_padding_mask=mask)
    assert len(quantized(model)) == 4
    assert torch.equal(found, alone)
    real = torch.ones(2, 5, dtype=torch.bool) if mask is None else ~mask
    assert torch.cosine_similarity(found[real].flatten(), expected[real].flatten(), dim=0) > 0.999


def test_an_encoder_that_keeps_its_linear_layers_keeps_its_fused_path():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 1), "head": nn.Linear(32, 8)}).eval()
    lowbit.quantize_(model, {"head": LinearConfig()})
    assert model["encoder"].use_nested_tensor and model["encoder"].layers[0].activation_relu_or_gelu == 1


def test_decoder():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 1).eval()
    lowbit.quantize_(model, LinearConfig(4))
    assert model(random_rows(2, 3, 32), random_rows(2, 4, 32)).shape == (2, 3, 32)


def test_a_model_that_is_one_layer_itself():
    message = "model is itself a torch.nn.Linear; use lowbit.nn.Linear.from_float"
    refused(nn.Linear(32, 4), TypeError, message, LinearConfig())
    refused(nn.Embedding(9, 32), TypeError, "use lowbit.nn.Embedding.from_float", EmbeddingConfig())


def test_nothing_selected():
    message = "selects no torch.nn.Linear or torch.nn.Embedding"
    refused(nn.Sequential(nn.LayerNorm(4), nn.ReLU()), ValueError, message, LinearConfig())
    refused(Model(tied=False), ValueError, message, LinearConfig(), lambda module, name: False)
    refused(Model(tied=False), ValueError, message, {"*": None})
    refused(Model(tied=False), ValueError, message, {})
    refused(nn.Sequential(nn.Linear(4, 4)), ValueError, message, EmbeddingConfig())


class Linear(nn.Linear):
    """Has the name of its base class."""


def test_subclasses_are_named():
    """A subclass of another library may use its weight in its own way; that of openai-whisper is known."""
    model = nn.Sequential(Linear(64, 64), nn.Embedding(32, 64))
    name = f"{__name__}.Linear"
    refused(model, ValueError, f"no convolution; {name}: a subclass may use its weight in its own way", LinearConfig())
    with pytest.warns(UserWarning, match=f"stay float, in {name}; lowbit packs torch.nn.Linear"):
        lowbit.quantize_(model, EmbeddingConfig())
    model = nn.Sequential(type("Linear", (nn.Linear,), {"__module__": "whisper.model"})(64, 64, bias=False))
    expected = lowbit.quantize_tensor(model[0].weight, LinearConfig())
    lowbit.quantize_(model, LinearConfig())
    assert torch.equal(model[0].packed_weight, expected)


def test_kinds_that_stay_float_are_named():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Conv1d(64, 64, 3), "c": nn.LSTM(8, 8), "d": nn.Linear(64, 64)})
    total = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1)
    left = 100 * (4 * 64 * 64 * 3 + 4 * 2 * 4 * 8 * 8) / total
    message = f"only {100 * 4 * 32 * 32 / total:.0f} % are packed: {left:.0f} % of the bytes of this ModuleDict's matrices "
    message += "stay float, as b does: a convolution, which a lowbit.ConvConfig packs; and in LSTM; lowbit packs"
    with pytest.warns(UserWarning, match=message):
        lowbit.quantize_(model, {"a": LinearConfig()})


def test_no_warning_of_what_the_user_left_out():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 320)), LinearConfig(), lambda m, name: name == "0")
        lowbit.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Embedding(320, 32)), {"*": LinearConfig(), "1": None})
        lowbit.quantize_(nn.Sequential(nn.Linear(512, 512), nn.Conv1d(8, 8, 1)), LinearConfig())  # too small for a warning


def test_half_of_a_tied_pair_is_warned_of():
    model = Model(tied=True)
    grows = "the model grows by 2.11 kB instead of shrinking by 4.29 kB"
    with pytest.warns(UserWarning, match=f"share one weight, of which only .* is packed: {grows}"):
        lowbit.quantize_(model, LinearConfig())


def test_max_norm():
    model = nn.ModuleDict({"linear": nn.Linear(32, 9), "table": nn.Embedding(9, 32, max_norm=1.0)})
    configs = {"*": LinearConfig(4), "table": EmbeddingConfig(4)}
    refused(model, ValueError, "table has max_norm=1.0; expected None", configs)
    with pytest.raises(ValueError, match="max_norm=1.0"):
        lowbit.nn.Embedding.from_float(model["table"], EmbeddingConfig())


@pytest.mark.parametrize(
    "value, dtype, message",
    [
        (torch.nan, torch.float32, "last.weight has 1 NaN or infinite values; expected finite values"),
        (-torch.inf, torch.float32, "last.weight has 1 NaN or infinite values"),
        (torch.inf, torch.float16, "last.weight has 1 NaN or infinite values"),
        (3e38, torch.float32, r"last.weight reaches from .* to 3e\+38; expected magnitudes up to 8.5"),
    ],
)
def test_bad_values_leave_the_model_unchanged(value, dtype, message):
    model = nn.ModuleDict({"first": nn.Linear(32, 9), "last": nn.Linear(32, 9)}).to(dtype)
    model["last"].weight.data[3, 4] = value
    refused(model, ValueError, message, LinearConfig(mapping="affine"))


@pytest.mark.parametrize("name", ["norm.weight", "norm.bias", "tables.limit"])
def test_nan_in_a_tensor_that_stays_float_is_refused(name):
    """As by lowbit quantize. Infinite limits and buffers that are not stored are kept."""
    model = nn.ModuleDict({"norm": nn.LayerNorm(32), "last": nn.Linear(32, 9), "tables": nn.Module()})
    model["tables"].register_buffer("limit", torch.tensor([0, torch.inf]))
    model["tables"].register_buffer("mask", torch.tensor([torch.nan]), persistent=False)
    tensor = model.state_dict()[name]
    tensor[0] = torch.nan
    refused(model, ValueError, f"{name} has NaN values; expected numbers", LinearConfig(4))
    with pytest.raises(ValueError, match=f"{name} has NaN values; expected numbers"):
        lowbit.qat.prepare_(model, LinearConfig(4))
    tensor[0] = -torch.inf
    assert set(quantized(lowbit.quantize_(model, LinearConfig(4)))) == {"last"}


def test_float64_models_are_refused():
    model = nn.ModuleDict({"first": nn.Linear(32, 9), "last": nn.Linear(32, 9).double()})
    refused(model, TypeError, "last.weight has dtype torch.float64; expected torch.float32", LinearConfig())


def test_bad_biases_leave_the_model_unchanged():
    model = nn.ModuleDict({"first": nn.Linear(32, 9), "last": nn.Linear(32, 9)})
    model["last"].bias.data[3] = torch.nan
    refused(model, ValueError, "last.bias has 1 NaN or infinite values", LinearConfig())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_that_cannot_be_packed_leave_the_model_unchanged():
    first = nn.Linear(32, 9)
    refused(nn.Sequential(first, nn.Linear(32, 0)), ValueError, r"1.weight has shape \[0, 32\]", LinearConfig())
    configs = {"0": LinearConfig(), "1": LinearConfig(4, 2**31 + 16)}
    refused(nn.Sequential(first, nn.Linear(8, 8)), ValueError, "group size is 2147483664", configs)


def test_a_model_on_another_device():
    model = nn.Sequential(nn.Linear(32, 9), nn.Linear(32, 9, device="meta"))
    with pytest.raises(ValueError, match="1.weight is on meta; expected the CPU"):
        lowbit.quantize_(model, LinearConfig())
    assert not quantized(model)


@pytest.mark.parametrize(
    "config, message",
    [
        (4, "config is a int; expected a LinearConfig, an EmbeddingConfig, a ConvConfig or a dict"),
        (None, "config is a NoneType"),
        ({"*": 4}, r"config has the entry '\*': 4; expected a name pattern and a LinearConfig"),
        ({3: LinearConfig()}, "config has the entry 3"),
        ([("*", LinearConfig())], "config is a list"),
    ],
)
def test_wrong_configs(config, message):
    refused(Model(), TypeError, message, config)


def test_not_a_module():
    with pytest.raises(TypeError, match="model is a list; expected a torch.nn.Module"):
        lowbit.quantize_([nn.Linear(4, 4)], LinearConfig())


def test_quantizing_twice_does_nothing_more():
    model = lowbit.quantize_(nn.Sequential(nn.Linear(32, 9)), LinearConfig(4))
    layer = model[0]
    with pytest.warns(UserWarning, match="matches no layer"), pytest.raises(ValueError, match="selects no"):
        lowbit.quantize_(model, LinearConfig(2))
    assert model[0] is layer


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "pruned weight", "pruned bias"])
def test_weights_that_hooks_compute_are_refused(name):
    """The hook would set the weight on a packed layer, and its next value would differ from the packed one."""

    def pruned(layer):
        prune.l1_unstructured(layer, name.split()[1], 0.5)

    change, undo = {
        "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        "spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
        "pruned weight": (pruned, lambda layer: prune.remove(layer, "weight")),
        "pruned bias": (pruned, lambda layer: prune.remove(layer, "bias")),
    }[name]
    model = nn.Sequential(nn.Linear(32, 9), nn.Linear(9, 9)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns that there are newer ones
        change(model[1])
    x = random_rows(3, 32)
    expected = model(x)
    said = r"(1\.)?(weight|bias) is not a parameter: a hook computes it before each call"
    for call in (
        lambda: lowbit.quantize_(model, LinearConfig(8)),
        lambda: lowbit.qat.prepare_(model, LinearConfig(8)),
        lambda: lowbit.nn.Linear.from_float(model[1], LinearConfig(8)),
    ):
        with pytest.raises(ValueError, match=said):
            call()
        assert torch.equal(model(x), expected)
    assert quantized(lowbit.quantize_(copy.deepcopy(nn.Sequential(model[0])), LinearConfig(8)))
    undo(model[1])
    lowbit.quantize_(model, LinearConfig(8))
    torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)


def test_a_custom_forward_causes_a_warning():
    """Set on the layer instead of its class: it computes with the float weight, so the packed layer cannot keep it."""
    model = nn.Sequential(nn.Linear(32, 9))
    layer = model[0]
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)
    with pytest.warns(UserWarning, match="a Linear has a forward of its own, set on the layer; the packed layer in its"):
        lowbit.quantize_(model, LinearConfig(8))
    assert "forward" not in vars(model[0])
