"""What a decoder changes in its model: release() gives the model back, and a refused model is as before."""

import copy
import json
import math

import pytest
import torch

pytestmark = pytest.mark.first

transformers = pytest.importorskip("transformers")

from lowbit.llm import Decoder
from test_llm import CLASSES, PROMPT, SIZES, make, run


def state(model) -> dict:
    """Parts of a model that a decoder could change."""
    modules = {name: (id(module), sorted(vars(module))) for name, module in model.named_modules()}
    configs = {id(module.config): json.dumps(vars(module.config), default=repr, sort_keys=True)
               for module in model.modules() if hasattr(module, "config")}  # fmt: skip
    return {"modules": modules, "configs": configs}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CLASSES)
def test_release_gives_the_model_back(kind, attention):
    model, far = make(kind), torch.arange(100)[None] % 97
    model.set_attn_implementation(attention)
    with torch.inference_mode():
        before, logits = state(model), model(far).logits
        decoder = Decoder(model, 64)
        assert state(model) != before
        whole = run(decoder, PROMPT)
        with pytest.raises(ValueError, match=r"this model belongs to a lowbit.llm.Decoder; .* release\(\) first"):
            model(far)
        assert decoder.release() is model and decoder.released
        assert state(model) == before
        assert torch.equal(model(far).logits, logits)  # also beyond the decoder's max_length
    assert not list(decoder.buffers(recurse=False))
    with pytest.raises(RuntimeError, match="this decoder was released"):
        run(decoder, PROMPT)
    assert decoder.release() is model
    assert torch.equal(run(Decoder(model, 64), PROMPT), whole)


def test_two_models_on_one_configuration():
    """A decoder changed the shared configuration, and the other model was refused."""
    config = transformers.LlamaConfig(**SIZES)
    models = [transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        before, logits = [state(model) for model in models], [model(tokens).logits for model in models]
        assert models[0].config is models[1].config
        decoders = [Decoder(models[0], 64)]
        assert torch.equal(models[1](tokens).logits, logits[1])
        decoders.append(Decoder(models[1], 64))
        for decoder, expected in zip(decoders, logits, strict=True):
            torch.testing.assert_close(
                decoder(tokens, torch.zeros(1, dtype=torch.int64)), expected[:, -1], rtol=1e-5, atol=1e-4
            )
        for n, (decoder, model) in enumerate(zip(decoders, models, strict=True)):
            decoder.release()
            assert state(model) == before[n] and torch.equal(model(tokens).logits, logits[n])
        assert models[0].config is models[1].config is config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_refused_model_is_as_before(dtype):
    """Refusals after the decoder has already changed the model."""
    model = make("llama", quantized=False).to(dtype)
    kv = model.model.layers[1].self_attn
    with torch.inference_mode():
        before, logits = state(model), model(torch.tensor([PROMPT])).logits
        for name, value, message in (
            ("layer_idx", 0, "LlamaForCausalLM .*: 1 of its 2 layers use the decoder's caches; use transf"),
            ("layer_idx", 7, "LlamaForCausalLM .*: 1 of its 2 layers use the decoder's caches"),
            ("is_causal", True, None),
        ):
            right, kv.__dict__[name] = kv.__dict__[name], value
            if message is None:
                Decoder(model, 64).release()
            else:
                with pytest.raises(ValueError, match=message):
                    Decoder(model, 64)
            kv.__dict__[name] = right
            assert state(model) == before and torch.equal(model(torch.tensor([PROMPT])).logits, logits)
        model.lm_head.weight[3, 3] = math.nan
        with pytest.raises(ValueError, match="LlamaForCausalLM .model_type llama.: its logits are NaN"):
            Decoder(model, 64)
        assert state(model) == before


def test_another_attention_set_after_the_decoder():
    model = make("llama")
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits
        decoder = Decoder(model, 16)
        model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="was given another attention implementation; call release"):
            run(decoder, PROMPT)
        # The remaining rotary tables are right, and end at max_length.
        torch.testing.assert_close(model(torch.tensor([PROMPT])).logits, logits, rtol=0, atol=0.1)
        with pytest.raises(ValueError, match="this model belongs to a lowbit.llm.Decoder"):
            model(torch.ones(1, 17, dtype=torch.int64))
        decoder.release()
        assert torch.equal(model(torch.tensor([PROMPT])).logits, logits)


def test_a_new_decoder_takes_the_model_from_the_last_one():
    model = make("llama")
    with torch.inference_mode():
        before, logits = state(model), model(torch.tensor([PROMPT])).logits
        first = Decoder(model, 32)
        second = Decoder(model, 64)
        assert first.released and not second.released
        with pytest.raises(RuntimeError, match="released, or its model taken by a later one"):
            run(first, PROMPT)
        first.release()  # has nothing to restore
        expected = run(second, PROMPT)
        del second  # no warning
        third = Decoder(model, 64)
        assert torch.equal(run(third, PROMPT), expected)
        copied = copy.deepcopy(third)
        third.release()
        assert torch.equal(run(copied, PROMPT), expected)
        copied.release()
        assert state(model) == before
        for released in (model, copied.model):
            assert torch.equal(released(torch.tensor([PROMPT])).logits, logits)
