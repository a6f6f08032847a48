"""lowbit.fuse_: fused models of several families compared with unfused ones, padding, gradients, and unfused parts."""

import copy
from inspect import signature

import lowbit
import pytest
import torch
from lowbit.hf import masked

transformers = pytest.importorskip("transformers")


def config_of(kind):
    small = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    if kind in ("qwen3", "gemma3_text"):
        small |= dict(num_key_value_heads=2, head_dim=16)
    if kind == "gemma3_text":
        small |= dict(sliding_window=4, use_bidirectional_attention=True, layer_types=["sliding_attention", "full_attention"])
    if kind == "modernbert":
        small |= dict(local_attention=8, pad_token_id=0, global_attn_every_n_layers=2)
    return transformers.AutoConfig.for_model(kind, **small)


def model_of(kind):
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config_of(kind)).eval()


TEXTS = torch.randint(3, 100, (3, 12), generator=torch.Generator().manual_seed(1))
SHOWN = torch.ones(3, 12, dtype=torch.int64)
SHOWN[0, 7:] = 0
SHOWN[2, :5] = 0


def run(model, texts=TEXTS, shown=SHOWN):
    with torch.no_grad():
        return model(input_ids=texts, attention_mask=shown).last_hidden_state


# Encoders with absolute positions; a window in both directions; a causal model with RMSNorm and grouped heads; Gemma's norms,
# windows and gated MLP.
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "qwen3", "gemma3_text"])
def test_a_fused_model_computes_the_same(kind, monkeypatch):
    model = model_of(kind)
    expected = run(model)
    summary = lowbit.fuse_(model)
    assert summary.attention == 1
    assert summary.norms == {"bert": 5, "roberta": 5, "modernbert": 5, "qwen3": 9, "gemma3_text": 13}[kind]
    assert summary.activations == 2
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or sdpa(*a, **k))
    out = run(model)
    assert not calls  # no layer fell back to sdpa
    torch.testing.assert_close(out[SHOWN == 1], expected[SHOWN == 1], rtol=1e-4, atol=1e-4)
    everything = torch.ones_like(SHOWN)
    whole = run(model, TEXTS, everything)
    assert not calls
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    torch.testing.assert_close(whole, run(plain, TEXTS, everything), rtol=1e-4, atol=1e-4)


def test_a_text_has_the_same_bits_alone_and_in_a_batch():
    model = model_of("bert")
    lowbit.quantize_(model, {"*": lowbit.LinearConfig(8, 32)})
    lowbit.fuse_(model)
    batch = run(model)
    assert run(model, TEXTS[:1, :7], SHOWN[:1, :7])[0].equal(batch[0, :7])
    longer = torch.cat([TEXTS, TEXTS], dim=1), torch.cat([SHOWN, torch.zeros_like(SHOWN)], dim=1)
    assert run(model, *longer)[0, :7].equal(batch[0, :7])


def test_gradients_and_training_go_the_models_own_way():
    model = model_of("qwen3")
    lowbit.fuse_(model)
    out = model(input_ids=TEXTS, attention_mask=SHOWN).last_hidden_state
    out.square().sum().backward()
    torch.testing.assert_close(out.detach()[SHOWN == 1], run(model)[SHOWN == 1], rtol=1e-4, atol=1e-4)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_unrecognized_modules_are_not_replaced():
    config = config_of("bert")
    config.hidden_act = "mish"
    model = transformers.AutoModel.from_config(config).eval()
    summary = lowbit.fuse_(model)
    assert summary.activations == 0
    assert summary.kept["encoder.layer.0.intermediate.intermediate_act_fn"] == "lowbit has no MishActivation"
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(
        "t5", d_model=32, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2, d_kv=16, vocab_size=50)).eval()  # fmt: skip
    expected = model(input_ids=TEXTS % 50, decoder_input_ids=TEXTS % 50).last_hidden_state
    lowbit.fuse_(model)  # position biases
    with torch.no_grad():
        out = model(input_ids=TEXTS % 50, decoder_input_ids=TEXTS % 50).last_hidden_state
    torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-4)


def test_attentions_that_were_asked_for():
    """Eager attention returns attentions, so it is not fused; sdpa has none, fused or not, and transformers warns."""
    config = config_of("bert")
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).eval()
    expected = model(input_ids=TEXTS, output_attentions=True).attentions
    summary = lowbit.fuse_(model)
    assert summary.attention == 0 and "which returns attentions" in summary.kept["BertModel"]
    assert summary.activations == 2
    with torch.no_grad():
        found = model(input_ids=TEXTS, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_autocast(kind):
    """Under autocast a fused model keeps the model's dtypes, which torch's layers change."""
    model = model_of(kind)
    lowbit.quantize_(model, {"*": lowbit.LinearConfig(8, 32)})
    with torch.autocast("cpu"):
        expected = run(model)
        lowbit.fuse_(model)
        found = run(model)
    assert found.dtype == expected.dtype
    shown = SHOWN == 1
    torch.testing.assert_close(found[shown].float(), expected[shown].float(), rtol=0.1, atol=0.1)


def test_masks_of_other_kinds_and_caches_are_sdpas():
    model = model_of("qwen3")
    expected, mask = run(model), torch.zeros(3, 1, 12, 12)
    mask[:, :, :, 3] = float("-inf")
    mask[:, :, 3, 3] = 0
    with torch.no_grad():
        other = model(input_ids=TEXTS, attention_mask=mask).last_hidden_state
        lowbit.fuse_(model)
        torch.testing.assert_close(model(input_ids=TEXTS, attention_mask=mask).last_hidden_state, other, rtol=1e-4, atol=1e-4)
        first = model(input_ids=TEXTS[1:2, :8], use_cache=True)
        cache = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before transformers 5.24
        second = model(input_ids=TEXTS[1:2, 8:], **{cache: getattr(first, cache)})
    torch.testing.assert_close(second.last_hidden_state, expected[1:2, 8:], rtol=1e-4, atol=1e-4)


def test_packed_texts_do_not_see_each_other():
    model = model_of("qwen3")
    places = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(3, -1)
    with torch.no_grad():
        expected = model(input_ids=TEXTS, position_ids=places).last_hidden_state
        lowbit.fuse_(model)
        out = model(input_ids=TEXTS, position_ids=places).last_hidden_state
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_only_masks_of_growing_ranges_become_bounds():
    visible = torch.ones(1, 6, dtype=torch.bool)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    assert masked._bounds_of(causal, visible)[0, :, 2].tolist() == [1, 2, 3, 4, 5, 6]
    hole, shrinking, nothing = causal.clone(), causal.clone(), causal.clone()
    hole[0, 0, 4, 2] = False
    shrinking[0, 0, 5, 4:] = False
    nothing[0, 0, 0, 0] = False
    for mask in (hole, shrinking, nothing):
        assert masked._bounds_of(mask, visible) is None
    visible[0, 2] = False  # a hole of padding splits the visible tokens into ranges
    hole[0, 0, 5, 2] = False
    assert masked._bounds_of(hole, visible)[0, :, 0].tolist() == [1, 1, 0, 1, 1, 1]


def test_a_fused_model_saves_and_copies_as_before(tmp_path):
    model = model_of("gemma3_text")
    names = set(model.state_dict())
    lowbit.fuse_(model)
    assert set(model.state_dict()) == names
    assert run(copy.deepcopy(model)).equal(run(model))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(run(loaded)[SHOWN == 1], run(model)[SHOWN == 1], rtol=1e-4, atol=1e-4)
    assert lowbit.fuse_(model).attention == 1  # again: nothing is wrapped twice
    assert run(model).shape == (3, 12, 64)
