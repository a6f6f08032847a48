"""Plans of fused encoders: their results are the model's own, and other calls and changed models run the model's own code."""

import copy
import pickle
import threading
from inspect import signature

import lowbit
import pytest
import torch
from lowbit.hf import encoder_plan
from lowbit.hf.encoder_plan import EncoderPlan

transformers = pytest.importorskip("transformers")

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
KINDS = {
    "bert": {},
    "roberta": dict(pad_token_id=1),  # positions count the tokens that are not padding
    "electra": dict(embedding_size=32),
    "modernbert": dict(local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    "qwen3": dict(num_key_value_heads=2, head_dim=16),
    "gemma3_text": dict(
        num_key_value_heads=2, head_dim=16, sliding_window=4, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
IDS = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, 7:] = MASK[2, :5] = MASK[3, 3:6] = 0
IDS[MASK == 0] = 1


def config_of(kind, **more):
    config = transformers.AutoConfig.for_model(kind, **SMALL | KINDS[kind] | more)
    if kind == "modernbert":
        config.layer_types = ["full_attention", "sliding_attention"]
    return config


def fused(kind="bert", make=transformers.AutoModel.from_config, bits=8, **more):
    torch.manual_seed(0)
    model = make(config_of(kind, **more)).eval()
    if bits:
        lowbit.quantize_(model, {"*": lowbit.LinearConfig(bits, 32)})
    lowbit.fuse_(model)
    return model


def own(model, **arguments):
    """The result of the model's own code."""
    with torch.inference_mode():
        return type(model).forward(model, **arguments)


def run(model, **arguments):
    with torch.inference_mode():
        return model(**arguments)


def same(found, expected, mask=MASK):
    """Whether hidden states of tokens have the same bits, and those of padding are 0."""
    shown = mask != 0
    return torch.equal(found[0][shown], expected[0][shown]) and not found[0][~shown].any()


@pytest.fixture
def calls(monkeypatch):
    """The number of calls that plans have computed."""
    done = []
    compute = EncoderPlan.run

    def counted(*arguments, **named):
        result = compute(*arguments, **named)
        done.append(1)
        return result

    monkeypatch.setattr(EncoderPlan, "run", counted)
    return done


@pytest.mark.parametrize("bits", [8, 4, None])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_models(kind, bits, calls):
    model = fused(kind, bits=bits)
    found = run(model, input_ids=IDS, attention_mask=MASK, **({"use_cache": False} if kind in ("qwen3", "gemma3_text") else {}))
    plan = model.forward.plan
    assert calls, model.forward.refusal
    assert type(found) is type(own(model, input_ids=IDS))
    # Float layers and sines of rotary positions have another rounding.
    if bits and kind in ("bert", "roberta", "electra"):
        expected = own(model, input_ids=IDS, attention_mask=MASK)
        assert same(found, expected)
        assert found.keys() == expected.keys()
    else:
        assert plan.difference < (1e-3 if bits else 1e-6)
        assert not found[0][MASK == 0].any()


def test_arguments(calls):
    model = fused()
    run(model, input_ids=IDS)
    types, positions = IDS % 2, (torch.arange(12) * 3)[None]
    for arguments in (
        {"input_ids": IDS[:1]},
        {"input_ids": IDS.int(), "attention_mask": MASK.bool()},
        {"input_ids": IDS, "attention_mask": MASK.float(), "token_type_ids": types, "return_dict": True},
        {"input_ids": IDS, "token_type_ids": types[:1], "position_ids": positions},
        {"input_ids": IDS.t(), "attention_mask": MASK.t(), "position_ids": (IDS + 5).t()},
        {"input_ids": IDS[:, ::2], "attention_mask": MASK[:, ::2]},
    ):
        calls.clear()
        found, expected = run(model, **arguments), own(model, **arguments)
        assert calls and same(found, expected, arguments.get("attention_mask", torch.ones_like(arguments["input_ids"])))
    with torch.inference_mode():
        assert same(model(IDS, MASK, types), own(model, input_ids=IDS, attention_mask=MASK, token_type_ids=types))


def test_pooler():
    model = fused()
    found, expected = run(model, input_ids=IDS, attention_mask=MASK), own(model, input_ids=IDS, attention_mask=MASK)
    shown = MASK[:, 0] != 0  # the first token of the others is padding
    # torch's tanh has another rounding.
    torch.testing.assert_close(found.pooler_output[shown], expected.pooler_output[shown], rtol=1e-6, atol=1e-7)
    assert found.pooler_output.shape == expected.pooler_output.shape


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_text_has_the_same_bits_in_any_batch(kind, calls, monkeypatch):
    """Texts longer than a block of keys, between others; batches that are computed in pieces."""
    model = fused(kind)
    ids = torch.randint(3, 100, (5, 300), generator=torch.Generator().manual_seed(2))
    lengths = [300, 7, 290, 270, 1]
    mask = (torch.arange(300) < torch.tensor(lengths)[:, None]).long()
    batch = run(model, input_ids=ids, attention_mask=mask)
    for most in (encoder_plan._MOST_ROWS, 310, 1):
        monkeypatch.setattr(encoder_plan, "_MOST_ROWS", most)
        assert same(run(model, input_ids=ids, attention_mask=mask), batch, mask)
    for text, length in enumerate(lengths):
        assert torch.equal(run(model, input_ids=ids[text : text + 1, :length])[0][0], batch[0][text, :length])
    assert len(calls) == 4 + len(lengths) + 1 + (kind == "bert")  # and the proof's


def test_a_classifier_runs_its_encoder_by_the_plan(calls):
    model = fused(make=transformers.AutoModelForSequenceClassification.from_config)
    found = run(model, input_ids=IDS, attention_mask=MASK).logits
    assert calls
    plan = model.bert.forward
    del model.bert.forward
    expected = run(model, input_ids=IDS, attention_mask=MASK).logits
    shown = MASK[:, 0] != 0
    torch.testing.assert_close(found[shown], expected[shown], rtol=1e-5, atol=1e-6)
    assert plan.refusal is None


def same_output(found, expected):
    return all(
        torch.equal(a, b) if torch.is_tensor(a) else same_output(a, b) for a, b in zip(found, expected, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [
    {"output_hidden_states": True}, {"return_dict": False}, {"attention_mask": torch.ones(4, 1, 12, 12, dtype=torch.bool)},
    {"input_ids": None, "inputs_embeds": torch.ones(4, 12, 64)}, {"attention_mask": MASK * torch.tensor([[1], [0], [1], [1]])},
    {"encoder_hidden_states": torch.ones(4, 3, 64)},
])  # fmt: skip
def test_other_calls_run_the_models_own_code(arguments, calls):
    model = fused()
    run(model, input_ids=IDS)
    calls.clear()
    found, expected = (each(model, **{"input_ids": IDS} | arguments) for each in (run, own))
    assert not calls
    assert type(found) is type(expected)
    assert same_output(*(each if isinstance(each, tuple) else each.to_tuple() for each in (found, expected)))


@pytest.mark.filterwarnings("ignore")  # of tracing
def test_gradients_training_and_caches_run_the_models_own_code(calls):
    model = fused()
    run(model, input_ids=IDS)
    calls.clear()
    assert model(input_ids=IDS)[0].requires_grad
    with torch.inference_mode():
        model.train()
        assert not torch.equal(model(input_ids=IDS)[0], model(input_ids=IDS)[0])  # dropout
        model.eval()
        with torch.autocast("cpu"):
            model(input_ids=IDS)
        torch.jit.trace(model, (IDS,), strict=False, check_trace=False)
        assert not calls
        model(input_ids=IDS)
    assert calls == [1]
    decoder = fused("qwen3")
    cache = "cache" if "cache" in signature(type(decoder).forward).parameters else "past_key_values"  # before transformers 5.24
    assert getattr(run(decoder, input_ids=IDS, use_cache=False), cache) is None
    calls.clear()
    assert getattr(run(decoder, input_ids=IDS), cache).get_seq_length() == 12
    assert not calls
    decoder.config.use_cache = False
    run(decoder, input_ids=IDS)
    assert calls


def test_wrong_input_has_the_models_errors():
    model = fused()
    run(model, input_ids=IDS)
    for wrong in ({"input_ids": IDS + 97}, {"input_ids": IDS - 50}, {"input_ids": IDS, "token_type_ids": IDS}):
        with pytest.raises(IndexError):
            run(model, **wrong)
    with pytest.raises((IndexError, RuntimeError)):
        run(model, input_ids=torch.ones(1, 513, dtype=torch.int64))
    with pytest.raises((ValueError, RuntimeError)):
        run(model, input_ids=IDS, attention_mask=MASK[:, 1:])


def test_hooks_see_each_call(calls):
    model = fused()
    run(model, input_ids=IDS)
    calls.clear()
    seen = []
    hook = model.encoder.layer[1].register_forward_hook(lambda *_: seen.append(1))
    run(model, input_ids=IDS)
    hook.remove()
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(2))
    run(model, input_ids=IDS)
    everywhere.remove()
    assert not calls and seen.count(1) == 1 and seen.count(2) > 10
    run(model, input_ids=IDS)
    assert calls


@pytest.mark.parametrize("change", ["values", "data", "parameter", "layer", "dtype"])
def test_a_changed_model_runs_as_it_is_now(change):
    model = fused()
    before = run(model, input_ids=IDS)
    layer = model.encoder.layer[0].output
    with torch.no_grad():
        if change == "values":
            layer.LayerNorm.bias += 1
        elif change == "data":
            layer.LayerNorm.bias.data = layer.LayerNorm.bias + 1
        elif change == "parameter":
            layer.LayerNorm.bias = torch.nn.Parameter(layer.LayerNorm.bias + 1)
        elif change == "layer":
            layer.dense = copy.deepcopy(model.encoder.layer[1].output.dense)
        else:
            model.to(torch.bfloat16)
    found = run(model, input_ids=IDS)
    assert same(found, own(model, input_ids=IDS), torch.ones_like(IDS))
    assert found[0].dtype != before[0].dtype or not torch.equal(found[0], before[0])
    if change in ("data", "dtype"):
        assert model.forward.plan is None and "has been changed" in model.forward.refusal
    lowbit.fuse_(model)
    assert same(run(model, input_ids=IDS), own(model, input_ids=IDS), torch.ones_like(IDS))
    assert model.forward.plan is not None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_a_plan_of_its_own(copied):
    model = fused()
    expected = run(model, input_ids=IDS)
    other = copied(model)
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.bias += 1
    assert torch.equal(run(other, input_ids=IDS)[0], expected[0])
    assert other.forward.model is other and other.forward.plan is not None
    assert not torch.equal(run(model, input_ids=IDS)[0], expected[0])


def test_threads_share_a_plan():
    model = fused()
    expected = own(model, input_ids=IDS, attention_mask=MASK)
    found = []
    threads = [
        threading.Thread(target=lambda: found.extend(run(model, input_ids=IDS, attention_mask=MASK) for _ in range(5)))
        for _ in range(4)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and all(same(each, expected) for each in found)


def test_a_model_without_a_plan_says_why(calls):
    model = fused("gemma3_text", use_bidirectional_attention=False)
    model.register_forward_hook(lambda *_: None)
    run(model, input_ids=IDS, use_cache=False)
    assert not calls and "has a hook" in model.forward.refusal
    large = fused(bits=None, intermediate_size=1 << 14)
    run(large, input_ids=IDS)
    assert not calls and "float" in large.forward.refusal
