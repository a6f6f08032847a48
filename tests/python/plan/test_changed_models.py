"""Decoders with a plan after their model has changed: texts that follow have the logits of the changed model."""

import copy
import gc

import lowbit
import pytest
import torch
from lowbit.llm import Decoder
from test_decoder_plans import TEXT, logits, model_of
from test_llm import make


def _replace_module(model):
    model.model.layers[1].mlp.up_proj = copy.deepcopy(model.model.layers[0].mlp.up_proj)


def _replace_parameter(model):
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2)


def _replace_data(model):
    model.model.norm.weight.data = model.model.norm.weight.data * 2


def _change_in_place(model):
    with torch.no_grad():
        model.model.norm.weight.mul_(2)


def _load_state(model):
    model.load_state_dict({"model.norm.weight": model.model.norm.weight.detach() * 2}, strict=False)


def _add_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)


def _add_pre_hook(model):
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def _set_forward(model):
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: own(x) * 2


def _add_adapters(model):
    peft = pytest.importorskip("peft")
    lowbit.peft  # noqa: B018  registers packed layers
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.eval()


def _set_epsilon(model):
    model.model.norm.variance_epsilon = 0.5


def _set_scaling(model):
    model.model.layers[0].self_attn.scaling *= 2


CHANGES = [
    _replace_module, _replace_parameter, _replace_data, _change_in_place, _load_state, _add_hook, _add_pre_hook, _set_forward,
    _add_adapters, _set_epsilon, _set_scaling,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_a_text_after_a_change_of_the_model(change):
    model = make("llama")
    decoder = Decoder(model, 64)
    before = logits(decoder)
    assert decoder.plan_refusal is None
    change(model)
    plain = Decoder(copy.deepcopy(model) if change is not _set_forward else _changed(change), 64, plan=False)
    expected = logits(plain)
    assert not torch.equal(expected, before)
    assert torch.equal(logits(decoder), expected)


def _changed(change) -> torch.nn.Module:
    model = make("llama")
    change(model)
    return model


@pytest.mark.parametrize("change", [_change_in_place, _load_state], ids=["in place", "state"])
def test_constants_that_depend_on_weights(change):
    """Those of Gemma are 1 + weight, which a plan computes once."""
    model = model_of("gemma3_text", quantized=False)
    decoder = Decoder(model, 64)
    before = logits(decoder)
    change(model)
    expected = logits(Decoder(copy.deepcopy(model), 64, plan=False))
    assert not torch.allclose(expected, before, atol=1e-3)
    torch.testing.assert_close(logits(decoder), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family, attribute", [("gemma2", "final_logit_softcapping"), ("granite", "logits_scaling")])
def test_numbers_of_the_config(family, attribute):
    model = model_of(family, quantized=False)
    decoder = Decoder(model, 64)
    before = logits(decoder)
    other = model_of(family, quantized=False)
    for each in (model, other):
        setattr(each.config, attribute, 0.5)
    expected = logits(Decoder(other, 64, plan=False))
    assert not torch.allclose(expected, before, atol=1e-3)
    assert torch.equal(logits(decoder), expected)


@pytest.mark.parametrize("family", ["llama", "gpt_neo"], ids=["by the interface", "of its own"])
@pytest.mark.parametrize("plan", [True, False], ids=["plan", "no plan"])
def test_a_layer_with_other_attention(family, plan):
    """It would attend to the call's own tokens only. A decoder that is made afterwards uses it."""
    model, other = model_of(family, quantized=False), model_of(family, quantized=False)
    decoder = Decoder(model, 64, plan=plan)
    layers = getattr(model, model.base_model_prefix)
    name = "layers" if hasattr(layers, "layers") else "h"
    getattr(layers, name)[0] = getattr(getattr(other, other.base_model_prefix), name)[0]
    with pytest.raises(RuntimeError, match="attention does not use the decoder's caches; call release"):
        logits(decoder)
    assert logits(Decoder(decoder.release(), 64)).isfinite().all()


def test_a_layer_of_a_model_that_belongs_to_a_decoder():
    model, other = make("llama"), make("llama")
    Decoder(other, 64)
    model.model.layers[0] = copy.deepcopy(other.model.layers[0])
    with pytest.raises(ValueError, match=r"the module 'model\.layers\.0\.self_attn' was taken from a model that belonged to"):
        Decoder(model, 64)


def test_weights_that_were_replaced_stay_in_memory():
    """A text that a change interrupts is finished with the old weights."""
    model = make("llama", quantized=False)
    decoder = Decoder(model, 64)
    with torch.inference_mode():
        expected = logits(decoder)[-1]
        decoder(torch.tensor([TEXT[:-1]]), torch.tensor([0]))
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, float("nan"))
        gc.collect()
        assert torch.equal(decoder(torch.tensor([TEXT[-1:]]), torch.tensor([len(TEXT) - 1]))[0], expected)
        assert decoder(torch.tensor([TEXT]), torch.tensor([0])).isnan().all()


def test_a_hook_prevents_the_plan_and_is_called():
    model, seen = make("llama"), []
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    decoder = Decoder(model, 64)
    assert "hook" in decoder.plan_refusal
    seen.clear()
    logits(decoder)
    assert seen == [len(TEXT) - 1, 1]


def test_a_copy_has_its_own_caches_and_weights():
    decoder = Decoder(make("llama"), 64)
    expected = logits(decoder)
    twin = copy.deepcopy(decoder)
    assert twin.plan_refusal is None and twin._plan is not None and twin._plan is not decoder._plan
    with torch.inference_mode():
        decoder(torch.tensor([TEXT[:10]]), torch.tensor([0]))
        twin(torch.tensor([TEXT[10:15]]), torch.tensor([0]))
        assert torch.equal(
            decoder(torch.tensor([TEXT[10:]]), torch.tensor([10])),
            Decoder(make("llama"), 64)(torch.tensor([TEXT]), torch.tensor([0])),
        )
    _change_in_place(decoder.model)
    assert torch.equal(logits(twin), expected) and not torch.equal(logits(decoder), expected)
