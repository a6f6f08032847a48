"""Quantization-aware training: prepared layers compared with packed ones, gradients, tied weights, errors."""

import copy
import re

import checkpoints
import lowbit
import pytest
import reference
import torch
from lowbit import EmbeddingConfig, LinearConfig
from reference import close_to_packed
from torch.nn import functional
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM

GROUPS = (16, 32, 48, None)
MAPPINGS = ("symmetric", "affine")


def train_a_little(model: torch.nn.Module, *inputs: torch.Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-3)  # a smaller eps is 0 in float16
    for _ in range(steps):
        optimizer.zero_grad()
        model(*inputs).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("bits", reference.WIDTHS)
def test_linear_before_and_after_converting(bits, mapping):
    for group in GROUPS:
        for bias in (False, True):
            config = LinearConfig(bits, group, mapping, "absmax" if bias else "mse")
            model = torch.nn.Sequential(torch.nn.Linear(100, 37, bias=bias))
            expected = lowbit.quantize_(copy.deepcopy(model), config)
            lowbit.qat.prepare_(model, config)
            untrained = lowbit.qat.convert_(copy.deepcopy(model))
            assert torch.equal(untrained[0].packed_weight, expected[0].packed_weight)

            x = reference.random_rows(9, 100, seed=bits)
            train_a_little(model, x)
            packed = lowbit.qat.convert_(copy.deepcopy(model))
            assert not torch.equal(packed[0].packed_weight, expected[0].packed_weight)
            with torch.no_grad():
                assert torch.equal(model[0].fake_quantized(), packed[0].dequantize())
                close_to_packed(model(x), packed[0], x)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("bits", reference.WIDTHS)
def test_embedding_before_and_after_converting(bits, mapping):
    for group in GROUPS:
        config = EmbeddingConfig(bits, group, mapping)
        model = torch.nn.Sequential(torch.nn.Embedding(37, 100, padding_idx=3))
        lowbit.qat.prepare_(model, config)
        indices = torch.tensor([[0, 36, 3], [3, 5, 5]])
        train_a_little(model, indices)
        packed = lowbit.qat.convert_(copy.deepcopy(model))
        assert torch.equal(model(indices), packed(indices))
        assert packed[0].padding_idx == 3
        for shape in ((0,), (2, 0)):
            nothing = model(torch.zeros(shape, dtype=torch.int64))
            nothing.sum().backward()
            assert nothing.shape == (*shape, 100)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_rotated_inputs_before_and_after_converting(mapping):
    config = {"0": EmbeddingConfig(4, 32, mapping, rotate=True), "1": LinearConfig(4, 32, mapping, rotate=True)}
    model = torch.nn.Sequential(torch.nn.Embedding(37, 96), torch.nn.Linear(96, 21))
    expected = lowbit.quantize_(copy.deepcopy(model), config)
    lowbit.qat.prepare_(model, config)
    untrained = lowbit.qat.convert_(copy.deepcopy(model))
    assert all(torch.equal(a.packed_weight, b.packed_weight) for a, b in zip(untrained, expected, strict=True))
    indices = torch.tensor([0, 36, 3, 5, 5])
    train_a_little(model, indices)
    packed = lowbit.qat.convert_(copy.deepcopy(model))
    assert all(layer.info.rotated_inputs == 32 for layer in packed)
    rows = packed[0](indices)
    assert torch.equal(model[0](indices), rows)
    with torch.no_grad():
        plain = lowbit.pack(*lowbit.unpack(packed[1].packed_weight)[:4], bits=4, group_size=32, mapping=mapping)
        close_to_packed(model[1](rows), lowbit.nn.Linear(plain), reference.rotated_inputs(rows, 32))


def test_rows_of_every_kind():
    # Nonfinite, constant, one-sided, zero and subnormal rows; and many rows, to test activation rounding at ties.
    model = lowbit.qat.prepare_(torch.nn.Sequential(torch.nn.Linear(64, 16)), LinearConfig(4, 32))
    x = reference.random_rows(4000, 64)
    x[0], x[1], x[2], x[3, 5], x[4, 6] = 0, 3, x[2].abs() + 1, torch.nan, -torch.inf
    x[5] *= 1e-42
    x[6:2000] = (x[6:2000] * 64).round() / 64
    packed = lowbit.qat.convert_(copy.deepcopy(model))
    found, expected = model(x).detach(), packed(x)
    assert torch.equal(found.isnan(), expected.isnan()) and found[3:5].isnan().all() and not found[5:].isnan().any()
    rows = torch.isfinite(x).all(1)
    close_to_packed(found[rows], packed[0], x[rows])


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_dtypes(dtype):
    model = torch.nn.Sequential(torch.nn.Embedding(40, 64), torch.nn.Linear(64, 48)).to(dtype)
    configs = {"0": EmbeddingConfig(3, 32), "1": LinearConfig(2, 16, "affine")}
    lowbit.qat.prepare_(model, configs)
    train_a_little(model, torch.arange(40))
    packed = lowbit.qat.convert_(copy.deepcopy(model))
    found, expected = model(torch.arange(40)).detach(), packed(torch.arange(40))
    assert found.dtype == expected.dtype == dtype
    # One more rounding, to the dtype.
    torch.testing.assert_close(found.float(), expected.float(), rtol=torch.finfo(dtype).eps * 2, atol=1e-5)
    rows = packed[0](torch.arange(40))
    with torch.autocast("cpu", torch.bfloat16):  # rounds the input, and nothing inside
        autocast, of_packed = model[1](rows), packed[1](rows)
    assert autocast.dtype == of_packed.dtype == torch.bfloat16
    assert torch.equal(autocast, model[1](rows.bfloat16())) and torch.equal(of_packed, packed[1](rows.bfloat16()))


@pytest.mark.parametrize("config", [
    LinearConfig(3, 32), LinearConfig(1, 32), LinearConfig(4, 32, "affine"), LinearConfig(4, None, rotate=True)
], ids=str)  # fmt: skip
def test_derivatives_of_torch_func(config):
    """grad has the bits of backward(), per-sample gradients sum to it, and forward mode gives the same value."""
    torch.manual_seed(0)
    model = lowbit.qat.prepare_(torch.nn.Sequential(torch.nn.Linear(96, 20)), config)
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    parameters["0.weight_scale"] *= 0.7  # so that some weights are out of range
    x = reference.random_rows(5, 96)

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    expected = dict(zip(leaves, torch.autograd.grad(loss(leaves, x), [*leaves.values()]), strict=True))
    found = torch.func.grad(loss)(parameters, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    samples = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    for name, value in samples.items():
        torch.testing.assert_close(value.sum(0), expected[name], rtol=1e-4, atol=1e-3)
    direction = {name: torch.randn_like(value) for name, value in parameters.items()}
    for at, tangent in ((0, direction), (1, torch.randn_like(x))):
        function = (lambda value: loss(value, x)) if at == 0 else (lambda value: loss(parameters, value))
        _, forward = torch.func.jvp(function, ((parameters, x)[at],), (tangent,))
        backward = torch.func.grad(loss, at)(parameters, x)
        pairs = [(backward[name], direction[name]) for name in direction] if at == 0 else [(backward, tangent)]
        torch.testing.assert_close(forward, sum((a * b).sum() for a, b in pairs), rtol=1e-4, atol=1e-2)


def test_derivatives_of_a_prepared_embedding():
    table = lowbit.qat.prepare_(torch.nn.Sequential(torch.nn.Embedding(40, 64)), EmbeddingConfig(3, 32, "affine"))
    parameters = {name: value.detach() for name, value in table.named_parameters()}
    indices = torch.tensor([3, 1, 3])

    def loss(parameters):
        return torch.func.functional_call(table, parameters, (indices,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    table(indices).square().sum().backward()
    assert all(torch.equal(found[name], value.grad) for name, value in table.named_parameters())


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_gradients_are_those_of_lsq(mapping):
    """Compared with autograd of the formula, with the rounding as an added constant."""
    bits, top = 3, 7
    config = LinearConfig(bits, 32, mapping)
    model = lowbit.qat.prepare_(torch.nn.Sequential(torch.nn.Linear(96, 20)), config)
    layer, x = model[0], reference.random_rows(6, 96).requires_grad_()
    with torch.no_grad():  # so that some weights are out of range
        layer.weight_scale.mul_(0.6)
        layer.weight_scale.copy_(layer.weight_scale.half())
        if layer.weight_min is not None:
            layer.weight_min.copy_((0.6 * layer.weight_min).half())
    upstream = reference.random_rows(6, 20, seed=1)
    model(x).backward(upstream)

    weight, scale = layer.weight.detach().clone().requires_grad_(), layer.weight_scale.detach().clone().requires_grad_()
    low = None if layer.weight_min is None else layer.weight_min.detach().clone().requires_grad_()
    steps = scale.repeat_interleave(32, 1)
    begin = steps * -4 if low is None else low.repeat_interleave(32, 1)
    code = ((weight - begin) / steps).clamp(0, top)
    assert ((code == 0) | (code == top)).any() and ((code > 0) & (code < top)).any()
    code = code + (code.round() - code).detach()
    stored = steps * (code - 4) if low is None else steps * code + begin
    (reference.dequantized_rows(x.detach(), 32) @ stored.T).backward(upstream)
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.weight_scale.grad, scale.grad, rtol=1e-4, atol=1e-3)
    if low is not None:
        torch.testing.assert_close(layer.weight_min.grad, low.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, upstream.sum(0))
    torch.testing.assert_close(x.grad, upstream @ layer.fake_quantized().detach())


def test_the_sign_of_one_bit_passes_all_gradients():
    model = lowbit.qat.prepare_(torch.nn.Sequential(torch.nn.Linear(32, 4)), LinearConfig(1, 32))
    x = reference.random_rows(5, 32)
    model(x).sum().backward()
    layer = model[0]
    expected = reference.dequantized_rows(x, 32).sum(0)
    torch.testing.assert_close(layer.weight.grad, expected.expand(4, 32))
    torch.testing.assert_close(layer.weight_scale.grad, (layer.weight.sign() * expected).sum(1, keepdim=True))


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_a_model_of_transformers(kind, tmp_path):
    model = checkpoints.make_model(kind, torch.float32)
    configs = {
        "*": LinearConfig(2, 32), "*down_proj": LinearConfig(3, 16, "affine"), "*.0.*o_proj": None,
        "lm_head": LinearConfig(4, 32), "*embed*": EmbeddingConfig(4, 32),
    }  # fmt: skip
    expected = lowbit.quantize_(copy.deepcopy(model), configs)
    lowbit.qat.prepare_(model, configs)
    checkpoints.assert_same_model(lowbit.qat.convert_(copy.deepcopy(model)), expected)
    assert type(model.model.layers[0].self_attn.o_proj) is torch.nn.Linear
    scales = sum(name.endswith("weight_scale") for name, _ in model.named_parameters())
    assert scales == (15 if kind == "untied" else 14)

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        model(checkpoints.TOKENS, labels=checkpoints.TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        before = model(checkpoints.TOKENS).logits
    state = copy.deepcopy(model.state_dict())
    model.save_pretrained(tmp_path / "training")  # like Trainer, during training
    lowbit.qat.convert_(model)
    with torch.no_grad():
        after = model(checkpoints.TOKENS).logits
    # A different rounding moves an activation by a step in later layers.
    assert (after - before).abs().max() <= 0.02 * after.abs().max()
    shared = model.lm_head.packed_weight.data_ptr() == model.model.embed_tokens.packed_weight.data_ptr()
    assert shared == (kind != "untied")
    model.save_pretrained(tmp_path / "packed")
    checkpoints.assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), model)

    # Training resumes from a checkpoint.
    again = lowbit.qat.prepare_(checkpoints.make_model(kind, torch.float32, seed=1), configs)
    again.load_state_dict(state)
    checkpoints.assert_same_model(lowbit.qat.convert_(again), model)


def test_the_same_layer_twice_and_hooks():
    layer = torch.nn.Linear(32, 32)
    model = torch.nn.Sequential(layer, layer)
    seen = []
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    weight = layer.weight
    lowbit.qat.prepare_(model, LinearConfig(4))
    assert model[0] is model[1] and model[0].weight is weight
    model(torch.zeros(1, 32))
    lowbit.qat.convert_(model)
    assert model[0] is model[1] and isinstance(model[0], lowbit.nn.Linear)
    model(torch.zeros(1, 32))
    handle.remove()
    model(torch.zeros(1, 32))
    assert len(seen) == 4


def test_torchs_encoder_layers_in_evaluation():
    """They pass the weights of their linear layers to one fused operator, without rounding."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1)
    lowbit.qat.prepare_(model, {"*": LinearConfig(bits=2)})
    model.eval()
    x = reference.random_rows(2, 5, 32)
    with torch.no_grad():
        found = model(x)
        model.enable_nested_tensor = False
        torch.testing.assert_close(found, lowbit.qat.convert_(model)(x), rtol=1e-4, atol=1e-4)


def test_two_layers_with_one_weight_and_two_biases():
    first, second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    second.weight = first.weight
    model = torch.nn.ModuleList([first, second])
    expected = lowbit.quantize_(copy.deepcopy(model), LinearConfig(2))
    lowbit.qat.prepare_(model, LinearConfig(2))
    assert len(list(model.parameters())) == 4  # a weight, its scale, two biases
    lowbit.qat.convert_(model)
    for found, one in zip(model, expected, strict=True):
        assert torch.equal(found.packed_weight, one.packed_weight)


def test_training_at_two_bits_gains():
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 16))
    unseen = torch.randn(2000, 64)

    def error(model: torch.nn.Module) -> float:
        with torch.no_grad():
            return functional.mse_loss(model(unseen), teacher(unseen)).item()

    before = error(lowbit.quantize_(copy.deepcopy(teacher), LinearConfig(2)))
    model = lowbit.qat.prepare_(copy.deepcopy(teacher), LinearConfig(2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(300):
        x = torch.randn(256, 64)
        optimizer.zero_grad()
        functional.mse_loss(model(x), teacher(x).detach()).backward()
        optimizer.step()
    assert error(lowbit.qat.convert_(model)) < 0.6 * before


# ---- errors


@pytest.mark.parametrize("strict, assign", [(True, False), (False, True)])
@pytest.mark.parametrize(
    "other, found",
    [
        (LinearConfig(2, 16), "bits=2, group_size=16, mapping='symmetric'"),
        (LinearConfig(4, 32), "bits=4, group_size=32, mapping='symmetric'"),
        (LinearConfig(4, None), "bits=4, group_size=None, mapping='symmetric'"),
        (LinearConfig(4, 16, "affine"), "bits=4, group_size=16, mapping='affine'"),
        (LinearConfig(4, 16, rotate=True), "bits=4, group_size=16, mapping='symmetric', rotate=True"),
    ],
    ids=str,
)
def test_a_state_dict_of_another_config(other, found, strict, assign):
    """2-bit scales have the same shape as 4-bit ones; they were loaded with a wrong meaning."""
    state = lowbit.qat.prepare_(two(), {"0": LinearConfig(4, 16), "1": other}).state_dict()
    model = lowbit.qat.prepare_(two(), LinearConfig(4, 16))
    expected = re.escape(
        f"1.weight_scale: the state dict has scales for {found}; the model was prepared for bits=4, group_size=16, "
        "mapping='symmetric'"
    )
    with pytest.raises(RuntimeError, match=expected):
        model.load_state_dict(state, strict=strict, assign=assign)
    del state["1.weight_format"]
    with pytest.raises(RuntimeError, match=r"1.weight_scale: .* an unknown config \(there is no weight_format\)"):
        model.load_state_dict(state, strict=strict, assign=assign)
    whole = lowbit.qat.prepare_(two(), LinearConfig(4, 16))
    model.load_state_dict(whole.state_dict(), strict=strict, assign=assign)
    assert torch.equal(model[1].weight_scale, whole[1].weight_scale)


@pytest.mark.parametrize("mapping, missing", [("symmetric", "weight_scale"), ("affine", "weight_scale and no weight_min")])
@pytest.mark.parametrize("assign", [False, True])
def test_float_weights_are_loaded_before_preparing(mapping, missing, assign):
    """With strict=False the scales of the old weights stayed."""
    model = lowbit.qat.prepare_(two(), LinearConfig(4, 16, mapping))
    before = copy.deepcopy(model.state_dict())
    expected = f"0.weight: the state dict has no {missing} for it, and the model is prepared for training; load float weights"
    for strict in (False, True):
        with pytest.raises(RuntimeError, match=expected):
            model.load_state_dict(two().state_dict(), strict=strict, assign=assign)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Scales alone may be loaded, for example those that an optimizer has learned.
    model.load_state_dict(
        {"0.weight_scale": before["0.weight_scale"], "0.weight_format": before["0.weight_format"]}, strict=False
    )


def two() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))


def test_wrong_order():
    config = LinearConfig(2)
    with pytest.raises(ValueError, match=r"the model has no layers that lowbit\.qat\.prepare_ has prepared$"):
        lowbit.qat.convert_(two())
    packed = lowbit.quantize_(two(), config)
    with pytest.raises(ValueError, match=r"has prepared; 2 are packed already$"):
        lowbit.qat.convert_(packed)
    with pytest.raises(ValueError, match=r"^0 is packed already; expected a float model to prepare$"):
        lowbit.qat.prepare_(packed, config)
    prepared = lowbit.qat.prepare_(two(), {"1": config})
    for again in (lowbit.qat.prepare_, lowbit.quantize_):
        with pytest.raises(ValueError, match=r"^1 is prepared for training; lowbit\.qat\.convert_ packs it$"):
            again(prepared, config)
    with pytest.raises(ValueError, match="prepared for training.* before it is exported"):
        torch.export.export(prepared, (torch.zeros(1, 32),))
    # Partly prepared: the other layer stays float, as in quantize_.
    lowbit.qat.convert_(prepared)
    assert type(prepared[0]) is torch.nn.Linear and isinstance(prepared[1], lowbit.nn.Linear)
    with pytest.raises(ValueError, match=r"has prepared; 1 are packed already$"):
        lowbit.qat.convert_(prepared)


def test_bad_arguments():
    config = LinearConfig(2)
    layer = torch.nn.Linear(32, 32)
    with pytest.raises(TypeError, match="model is itself a torch.nn.Linear"):
        lowbit.qat.prepare_(layer, config)
    with pytest.raises(TypeError, match="model is a int; expected a torch.nn.Module"):
        lowbit.qat.prepare_(3, config)
    with pytest.raises(TypeError, match="model is a int; expected a torch.nn.Module"):
        lowbit.qat.convert_(3)
    with pytest.raises(ValueError, match="config selects no"):
        lowbit.qat.prepare_(two(), {"0": None})
    with pytest.raises(ValueError, match="^0 has mapping 'levels'; expected 'symmetric' or 'affine' for training$"):
        lowbit.qat.prepare_(two(), {"0": LinearConfig(4, 32, "levels")})
    with pytest.raises(TypeError, match="float64"):
        lowbit.qat.prepare_(two().double(), config)
    model = lowbit.qat.prepare_(two(), config)
    with pytest.raises(TypeError, match="model is itself a prepared layer"):
        lowbit.qat.convert_(model[0])


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
def test_training_that_went_wrong(name):
    model = lowbit.qat.prepare_(two(), LinearConfig(2))
    getattr(model[1], name).data.view(-1)[3] = torch.nan
    with pytest.raises(ValueError, match=rf"^1\.{name} has .*NaN or infinite values; expected finite values$"):
        lowbit.qat.convert_(model)
    assert all(isinstance(layer, lowbit.qat.Linear) for layer in model)


def test_scales_as_the_packer_stores_them():
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(64, 5, generator=generator) * torch.exp2(torch.randint(-30, 30, (64, 5), generator=generator))
    scales[0], scales[1], scales[2, 1:] = 0, scales[1].clamp(-999, 999).half(), 1e-38
    codes = torch.ones(64, 80, dtype=torch.uint8)
    packed = lowbit.pack(codes, scales, bits=2, group_size=16)
    found, _ = lowbit.qat.stored(scales, None)
    assert torch.equal(found, lowbit.unpack(packed).scales)


def test_falcons_linear_layers_are_trained_too():
    """They have their own class, which differs from torch.nn.Linear only by a rounding."""
    config = FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=97)
    model = FalconForCausalLM(config)
    floats = model.transformer.h[0].self_attention.query_key_value
    packed = lowbit.nn.Linear.from_float(floats, LinearConfig(4, 16))
    assert torch.equal(packed.packed_weight, lowbit.quantize_tensor(floats.weight, LinearConfig(4, 16), floats.bias))
    lowbit.qat.prepare_(model, {"*": LinearConfig(4, 16)})
    tokens = torch.tensor([[1, 2, 3]])
    model(tokens).logits.sum().backward()
    trained = model.transformer.h[0].self_attention.query_key_value
    assert trained.weight.grad.any() and trained.weight_scale.grad.any()
    with torch.no_grad():
        before = model.eval()(tokens).logits
        torch.testing.assert_close(lowbit.qat.convert_(model)(tokens).logits, before, rtol=1e-5, atol=1e-5)


def test_parametrized_layers_keep_a_weight_each():
    """A parametrization's weight is a new tensor each time; ids of two freed tensors may be equal."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    lowbit.qat.prepare_(model, LinearConfig(4, 32))
    for layer in model:
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Tanh())
    expected = [layer.fake_quantized() for layer in model]
    lowbit.qat.convert_(model)
    assert all(torch.equal(layer.dequantize(), weight) for layer, weight in zip(model, expected, strict=True))
