"""calibrate: models with experts in one tensor or as separate layers."""

import lowbit
import pytest
import torch
import transformers
from calibration_models import SHARED, buffers, errors, hidden, linears, llama, packed, tokens, with_inputs_of_all_sizes
from lowbit import LinearConfig
from lowbit.calibration import calibrate, learning, widths
from torch import nn

pytestmark = pytest.mark.more


def mixtral() -> nn.Module:
    """Experts in one tensor. Each token uses one; the last of four is never chosen, because its logit is the mean of the
    others'."""
    torch.manual_seed(2)
    config = transformers.MixtralConfig(
        **SHARED, num_key_value_heads=2, intermediate_size=32, num_local_experts=4, num_experts_per_tok=1,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = with_inputs_of_all_sizes(transformers.MixtralForCausalLM(config).eval())
    for layer in model.model.layers:
        gate = layer.mlp.gate.weight.data
        gate[3] = gate[:3].mean(0)
    return model


def test_experts_in_one_tensor_see_the_tokens_that_are_routed_to_them():
    model, ids = mixtral(), tokens(20)
    result = calibrate(model, ids, {"*": LinearConfig(3), "lm_head": None}, "gptq")
    names = {f"model.layers.{i}.mlp.experts.{leaf}" for i in range(3) for leaf in ("gate_up_proj", "down_proj")}
    assert {name for name in result.methods if ".experts." in name} == {f"{name}.{e}" for name in names for e in range(4)}
    methods = {e: {result.methods[f"{name}.{e}"] for name in names} for e in range(4)}
    assert methods[3] == {"nearest"} and "gptq" in methods[0] | methods[1] | methods[2]
    assert packed(model) == {name for name in result.methods if ".experts." not in name} and not result.unquantized
    again = mixtral()
    calibrate(again, ids, {"*": LinearConfig(3), "lm_head": None}, "gptq")
    assert buffers(model).keys() == buffers(again).keys()
    assert all(torch.equal(value, buffers(again)[name]) for name, value in buffers(model).items())


@pytest.mark.parametrize("method", ["importance", "gptq", "tuned", "distilled"])
def test_calibrated_experts_are_better(method):
    found = errors(mixtral(), {"*": None, "*.experts.*": LinearConfig(2)}, ("nearest", method))
    assert found[1] < 0.9 * found[0], found


@pytest.mark.parametrize(
    "method, config",
    [
        ("tuned", LinearConfig(2)), ("tuned", LinearConfig(2, 32, "affine")),
        ("distilled", LinearConfig(2)), ("distilled", LinearConfig(2, levels="fit")),
    ],
)  # fmt: skip
def test_scales_of_experts_are_learned(method, config):
    """Each expert's scale is learned separately; an expert that no token reached keeps its bits."""
    plain, model, patterns = mixtral(), mixtral(), {"*": None, "*.experts.*": config}
    wanted = hidden(plain, tokens(seed=1))
    before, after = (calibrate(each, tokens(12), patterns, how) for each, how in ((plain, "auto"), (model, method)))
    errors_ = [float((hidden(each, tokens(seed=1)) - wanted).square().sum()) for each in (plain, model)]
    assert errors_[1] < errors_[0], errors_
    assert after.methods.keys() == before.methods.keys() and method in after.methods.values()
    for name, experts in plain.named_modules():
        if isinstance(experts, lowbit.nn.LinearExperts):
            learned = model.get_submodule(name).packed_weight
            for number, packed in enumerate(experts.packed_weight):
                same = torch.equal(packed, learned[number])
                assert same or number < 3
                if method == "distilled" or ".layers.0." in name:  # otherwise their inputs differed
                    assert torch.equal(lowbit.unpack(packed).codes, lowbit.unpack(learned[number]).codes)
                    assert after.methods[f"{name}.{number}"] == method or same and method == "tuned"


def test_learned_experts_compute_what_packed_ones_do():
    """Except for the int8 rounding of activations, which learning ignores."""
    torch.manual_seed(5)
    weights = torch.randn(4, 48, 64)
    packed = torch.stack([lowbit.quantize_tensor(w, LinearConfig(3), bias=torch.randn(48)) for w in weights])
    layer, x = lowbit.nn.LinearExperts(packed), torch.randn(30, 2, 64)
    shared = learning.learning_of(packed, table=False)
    learned = learning.learning_in_place_of(layer, shared)
    index = torch.randint(0, 3, (30, 2, 1))  # the last expert is not chosen
    found, expected = learned(x, index), layer(x, index)
    assert found.shape == expected.shape == (30, 2, 1, 48)
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()
    exact = torch.einsum("teni,tei->ten", torch.stack([layer.dequantize()[i] for i in index[..., 0]]), x)
    biases = torch.stack([lowbit.unpack(one).bias for one in packed])[index[..., 0]]
    torch.testing.assert_close(found[:, :, 0], exact + biases, rtol=1e-4, atol=1e-4)
    found.square().sum().backward()
    grads = [expert.scale.grad for expert in shared.experts]
    assert grads[3] is None and all(bool(grad.any()) for grad in grads[:3])
    assert torch.equal(shared.pack(), packed)


def test_experts_with_biases_in_another_order():
    """GPT-OSS: [experts, in, out], and a bias."""
    config = transformers.GptOssConfig(
        **SHARED, num_key_value_heads=2, head_dim=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, initializer_range=0.2, layer_types=["full_attention"] * 3,
    )  # fmt: skip
    model = with_inputs_of_all_sizes(transformers.GptOssForCausalLM(config).eval())
    for layer in model.model.layers:
        layer.mlp.experts.down_proj_bias.data.normal_()
    found = errors(model, {"*": None, "*.experts.*": LinearConfig(2)}, ("nearest", "gptq", "tuned"))
    assert found[1] < 0.9 * found[0] and found[2] < found[1], found


class Experts(nn.Module):
    """A mixture of experts as linear layers; the last one never gets a token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(5))

    def forward(self, x):
        rows = x.reshape(-1, 64)
        best = self.router(rows).argmax(1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            if (best == index).any():
                out[best == index] = expert(rows[best == index])
        return out.view_as(x)


def mixture() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = Experts()
    return model


def test_experts_that_are_linear_layers():
    model = mixture()
    names = linears(model)
    result = calibrate(model, tokens(40), {"*": LinearConfig(3), "*router": None})
    assert packed(model) == {name for name in names if not name.endswith("router")} == set(result.methods)
    unused = {name for name, method in result.methods.items() if method == "nearest"}
    assert {f"model.layers.{i}.mlp.experts.4.{part}" for i in range(3) for part in (0, 2)} <= unused
    assert sum(".experts." in name and method == "gptq" for name, method in result.methods.items()) >= 6
    found = errors(mixture(), {"*": LinearConfig(3), "*router": None}, ("nearest", "auto"))
    assert found[1] < found[0], found


@pytest.mark.parametrize("make", [llama, mixtral])
def test_padding_does_not_affect_widths(make):
    """Padding tokens must not affect the width of a layer: only they have inputs in some directions."""
    model, config = make(), lowbit.LowBitConfig()
    text = tokens(2)
    padded = [
        {
            "input_ids": torch.cat([batch, torch.zeros(2, 16, dtype=torch.int64)], 1),
            "attention_mask": torch.cat([torch.ones(2, 48), torch.zeros(2, 16)], 1),
        }
        for batch in text
    ]
    layers = {name: each for name, each in config.select(model).items() if isinstance(each, LinearConfig)}
    with torch.no_grad():
        plain, found = (
            widths._importance(model, data, data, layers) for data in ([{"input_ids": batch} for batch in text], padded)
        )
    assert plain.keys() == found.keys() and len(plain) >= 15
    for name, values in plain.items():
        assert torch.allclose(found[name], values, rtol=1e-3, atol=1e-5), name
