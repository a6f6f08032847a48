"""calibrate: the layers placed into a model, how they are computed, and refusals."""

import copy
import re

import lowbit
import pytest
import torch
import transformers
from calibration_models import bert, buffers, hidden, llama, tokens
from lowbit import EmbeddingConfig, LinearConfig
from lowbit.calibration import blocks, calibrate, choice
from torch import nn

pytestmark = pytest.mark.more


class State:
    """An argument whose state is unknown."""


def test_inputs_come_from_the_quantized_blocks_before(monkeypatch):
    """The moments of the last block come from its inputs in the model whose earlier blocks are already quantized."""
    model, data = llama(tied=False), tokens(4)
    seen = []

    class Spy(choice.Solver):
        def __init__(self, moments, **options):
            super().__init__(moments, **options)
            if not moments.held:
                seen.append(moments)

    monkeypatch.setattr(choice, "Solver", Spy)
    reference = copy.deepcopy(model)
    result = calibrate(model, data, {"*": LinearConfig(2), "lm_head": None}, "gptq")
    assert set(result.methods.values()) == {"gptq"}
    index = 8  # four per block: the inputs of q, k and v; of o; of gate and up; of down
    totals = []
    for each in (model, reference):
        inputs = []
        hook = each.model.layers[2].self_attn.q_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        hidden(each, data)
        hook.remove()
        totals.append(torch.cat([x.reshape(-1, 64) for x in inputs]))
    ours, theirs = totals
    torch.testing.assert_close(seen[index].square, ours.T @ ours, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(seen[index].drift, (theirs - ours).T @ ours, rtol=1e-3, atol=1e-1)
    assert (theirs - ours).abs().mean() > 0.01


def test_a_float_block_runs_once(monkeypatch):
    """If memory permits, with the bits of one run per set of layers."""
    model, data, found = llama(tied=False), tokens(4), []
    forward = type(model.model.layers[0]).forward
    for most in (blocks._KEPT_BYTES, 0):
        changed, runs = copy.deepcopy(model), []

        def count(self, *args, runs=runs, **kwargs):
            runs.append(type(self.self_attn.q_proj) is nn.Linear and type(self.mlp.down_proj) is nn.Linear)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(blocks, "_KEPT_BYTES", most)
        monkeypatch.setattr(type(model.model.layers[0]), "forward", count)
        calibrate(changed, data, LinearConfig(3), "gptq")
        found.append((buffers(changed), sum(runs)))
    (kept, few), (again, many) = found
    assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)
    assert few < many / 2


@pytest.mark.parametrize("tied", [True, False])
def test_arguments_are_recorded_without_running_the_blocks(monkeypatch, tied):
    """If they do not depend on what the blocks compute, with the same bits."""
    model, data, found = llama(tied=tied), tokens(4) + tokens(4, seed=1), []
    forward = type(model.model.layers[0]).forward
    for skips in (True, False):
        changed, runs = copy.deepcopy(model), []

        def count(self, *args, runs=runs, **kwargs):
            runs.append(1)
            return forward(self, *args, **kwargs)

        def state(self, args, kwargs):
            return args, {**kwargs, "state": State()}

        if not skips:  # an argument that may change from block to block
            for block in changed.model.layers:
                block.register_forward_pre_hook(state, with_kwargs=True, prepend=True)
        monkeypatch.setattr(type(model.model.layers[0]), "forward", count)
        calibrate(changed, data, {"*": LinearConfig(3), "model.embed_tokens": EmbeddingConfig(3)}, "gptq")
        found.append((buffers(changed), sum(runs)))
    (skipped, few), (again, many) = found
    assert skipped.keys() == again.keys() and all(torch.equal(skipped[name], again[name]) for name in skipped)
    # All blocks but the last: for the quantized model's arguments, and from the second batch on for the float model's, unless
    # a head needs the outputs.
    assert many - few == 2 * len(data) + (0 if tied else 2 * (len(data) - 1))


def test_tied_head_and_embedding_stay_one():
    model = llama()
    result = calibrate(model, tokens(), {"*": LinearConfig(4), "model.embed_tokens": EmbeddingConfig(4)})
    assert type(model.model.embed_tokens) is lowbit.nn.Embedding
    assert model.lm_head.packed_weight is model.model.embed_tokens.packed_weight
    assert result.methods["lm_head"] == "gptq"


def test_low_bit_config_and_overrides():
    model = llama(tied=False)
    config = lowbit.LowBitConfig(bits=3, embedding_bits=8, overrides={"*down_proj": {"bits": 5}, "lm_head": None})
    calibrate(model, tokens(), config)
    kinds = lowbit.nn.Linear | lowbit.nn.Embedding
    bits = {name: module.info.bits for name, module in model.named_modules() if isinstance(module, kinds)}
    assert bits.pop("model.embed_tokens") == 8 and "lm_head" not in bits
    assert {name.rpartition(".")[2]: width for name, width in bits.items()} == {
        "q_proj": 3,
        "k_proj": 3,
        "v_proj": 3,
        "o_proj": 3,
        "gate_proj": 3,
        "up_proj": 3,
        "down_proj": 5,
    }


def test_same_bytes_again_and_progress():
    base, runs, steps = llama(), [], []
    for _ in range(2):
        model = copy.deepcopy(base)
        calibrate(model, tokens(), LinearConfig(2), progress=lambda done, total: steps.append((done, total)))
        runs.append(buffers(model))
    assert runs[0].keys() == runs[1].keys() and all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert steps[: len(steps) // 2] == [(i, 22) for i in range(23)]


def test_only_the_quantized_layers_of_the_model_change():
    model = llama().train()
    model.config.use_cache = True
    calibrate(model, tokens(), LinearConfig(4))
    assert model.training and model.config.use_cache is True
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_auto_takes_gptq_where_there_are_enough_tokens():
    result = calibrate(llama(), tokens(1, 40) + tokens(1, 40, seed=2), LinearConfig(4))  # 160 tokens
    assert set(result.methods.values()) == {"gptq"}
    model = llama()
    model.model.layers[1].mlp.gate_proj = nn.Linear(64, 200)
    model.model.layers[1].mlp.up_proj = nn.Linear(64, 200)
    model.model.layers[1].mlp.down_proj = nn.Linear(200, 64)
    result = calibrate(model, tokens(1, 40) + tokens(1, 40, seed=2), LinearConfig(4))
    assert {name for name, method in result.methods.items() if method == "importance"} == {"model.layers.1.mlp.down_proj"}


def test_of_a_long_text_parts_are_used_that_lie_evenly_in_it():
    from lowbit.calibration.data import batches

    class Words:
        def __call__(self, text, **options):
            return {"input_ids": [int(word) for word in text.split()][: options.get("max_length")]}

    text = " ".join(str(i % 120) for i in range(64 * 100))
    found, there = batches(llama(), [text], Words(), 64, 640)
    rows = torch.cat([batch["input_ids"] for batch in found])
    assert there == 6400 and rows.shape == (10, 64)
    assert rows[:, 0].tolist() == [64 * 10 * i % 120 for i in range(10)]
    found, there = batches(bert(), [f"{i} {i} {i} {i}" for i in range(100)], Words(), 64, 200)
    assert there == 400 and torch.cat([batch["input_ids"] for batch in found])[:, 0].tolist() == list(range(0, 100, 2))
    whole, there = batches(llama(), [text], Words(), 64, 10_000)
    assert sum(batch["input_ids"].numel() for batch in whole) == there == 6400


@pytest.mark.parametrize("tied", [True, False])
def test_a_calibrated_model_is_saved_whole(tied, tmp_path):
    model = llama(tied)
    config = {"*": lowbit.LinearConfig(bits=4), "*embed*": lowbit.EmbeddingConfig(bits=4)}
    lowbit.calibrate(model, tokens(), config)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(hidden(loaded, tokens(seed=1)), hidden(model, tokens(seed=1)))


# ---- refusals


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((tokens(), LinearConfig(4), "awq"), ValueError, "method is 'awq'; expected one of 'auto', 'gptq', 'import"),
        ((tokens(1, 20), LinearConfig(4)), ValueError, "has 40 tokens; expected at least 128"),
        (([], LinearConfig(4)), ValueError, "calibration text is empty"),
        ((["some text"], LinearConfig(4)), TypeError, "there is no tokenizer"),
        (([torch.ones(2, 100)], LinearConfig(4)), TypeError, "input_ids that are torch.float32 [2, 100]; expected"),
        ((torch.ones(2, 9).long(), LinearConfig(4)), TypeError, "input_ids that are torch.int64 [9]; expected texts"),
        (([7], LinearConfig(4)), TypeError, "data has a int; expected texts, int64 tensors"),
        (
            ([{"input_ids": torch.ones(2, 100).long(), "attention_mask": torch.ones(2, 9)}], LinearConfig(4)),
            ValueError,
            "attention_mask has shape [2, 9]; expected [2, 100]",
        ),
        (([torch.full((2, 100), 120)], LinearConfig(4)), ValueError, "token ids from 120 to 120; expected 0 to 119"),
        ((tokens(), EmbeddingConfig(4)), ValueError, "selects no torch.nn.Linear"),
        ((tokens(), "4 bits"), TypeError, "config is a str"),
        ((tokens(), {"*": 4}), TypeError, "config has the entry"),
        ((tokens(), {"*": LinearConfig(4), "*embed*": EmbeddingConfig(8)}), ValueError, "share one weight"),
    ],
)
def test_refused(arguments, error, message):
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=re.escape(message)):
        calibrate(model, *arguments)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_nan_weights_and_activations_are_refused():
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight has 1 NaN"):
        calibrate(model, tokens(), LinearConfig(4))
    for method in ("gptq", "importance"):
        model = llama(tied=False)
        model.model.layers[1].input_layernorm.weight.data[3] = torch.inf
        with pytest.raises(ValueError, match=r"the inputs of model.layers.1.self_attn.\w+ have NaN"):
            calibrate(model, tokens(), LinearConfig(4), method)
