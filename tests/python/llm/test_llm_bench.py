"""lowbit.llm: named shapes, random models, the benchmark."""

import json
import math
import sys
from pathlib import Path

import lowbit
import pytest
import torch

transformers = pytest.importorskip("transformers")

from lowbit import _C
from lowbit.cli.options import SHAPES
from lowbit.exports.plan_export import write_plan
from lowbit.files.config_json import read_config
from lowbit.llm import Decoder, random_model, shape_config, shapes
from lowbit.llm.loading import load_model
from lowbit.llm.plan_files import PLAN
from lowbit.tools import model_speed, speed_turns
from test_llm import CLASSES, PROMPT, SIZES, make

sys.path.append(str(Path(__file__).parents[3] / "bench"))
import llm as bench_llm

PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
}


@pytest.mark.parametrize("name", shapes.NAMES)
def test_shapes_have_the_known_numbers_of_parameters(name):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape_config(name))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_the_program_knows_the_shapes_without_torch():
    assert SHAPES == shapes.NAMES


def test_invalid_shapes():
    with pytest.raises(ValueError, match="there is no shape 'gpt-5'; expected one of llama-3.2-1b, "):
        shape_config("gpt-5")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bits, mapping", [(1, "symmetric"), (1, "affine"), (2, "symmetric"), (4, "affine"), (8, "symmetric")])
def test_random_models(bits, mapping, tied):
    config = CLASSES["qwen3"](**SIZES | {"tie_word_embeddings": tied})
    linear = lowbit.LinearConfig(bits, 32, mapping)
    model = random_model(config, linear, lowbit.EmbeddingConfig(4, 16))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    layers = [module for module in model.modules() if isinstance(module, lowbit.nn.Linear)]
    assert len(layers) == 2 * 7 + 1
    up = [layer.mlp.up_proj for layer in model.model.layers]
    assert (up[0].info.bits, up[0].info.group_size, up[0].info.mapping) == (bits, 32, mapping)
    assert up[0].packed_weight.data_ptr() != up[1].packed_weight.data_ptr()
    assert not torch.equal(up[0].packed_weight, up[1].packed_weight)
    table = model.model.embed_tokens
    assert (model.lm_head.packed_weight.data_ptr() == table.packed_weight.data_ptr()) == tied
    assert (table.info.bits, model.lm_head.info.bits) == (4, 4 if tied else bits)
    for layer in layers:
        lowbit.verify(layer.packed_weight)
        weight = layer.dequantize()
        assert 0.7 < weight.std().item() * math.sqrt(layer.in_features) < 1.4
        assert abs(weight.mean().item()) < 0.25 * weight.std().item()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits
    assert 0.3 < logits.std().item() < 3
    rotary, expected = model.model.rotary_emb, type(model.model.rotary_emb)(config)
    assert torch.equal(rotary.inv_freq, expected.inv_freq)

    again = random_model(config, linear, lowbit.EmbeddingConfig(4, 16))
    other = random_model(config, linear, lowbit.EmbeddingConfig(4, 16), seed=1)
    assert torch.equal(again.lm_head.packed_weight, model.lm_head.packed_weight)
    assert not torch.equal(other.lm_head.packed_weight, model.lm_head.packed_weight)


def test_random_models_in_floats():
    config = CLASSES["qwen3"](**SIZES | {"tie_word_embeddings": True})
    model = random_model(config, None, None, torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        assert 0.3 < model(torch.tensor([PROMPT])).logits.float().std().item() < 3
    head_only = random_model(config, None, lowbit.EmbeddingConfig(4, 16))
    assert isinstance(head_only.lm_head, lowbit.nn.Linear)
    assert isinstance(head_only.model.layers[0].mlp.up_proj, torch.nn.Linear)


@pytest.mark.parametrize("tied", [True, False])
def test_random_models_are_saved_and_loaded(tmp_path, tied):
    """Saved as packed models; without the quantization config, the files would load as other random weights."""
    config = CLASSES["qwen3"](**SIZES | {"tie_word_embeddings": tied})
    model = random_model(config, lowbit.LinearConfig(4, 32), lowbit.EmbeddingConfig(4, 32))
    assert not hasattr(config, "quantization_config")  # the caller's config is unchanged
    model.save_pretrained(tmp_path / "m")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    with torch.inference_mode():
        assert torch.equal(again(torch.tensor([PROMPT])).logits, model(torch.tensor([PROMPT])).logits)


def test_bytes_per_token():
    model = random_model(CLASSES["qwen3"](**SIZES), lowbit.LinearConfig(4, 32), lowbit.EmbeddingConfig(4, 32))
    layers = [module for module in model.modules() if isinstance(module, lowbit.nn.Linear)]
    table = model.model.embed_tokens.packed_weight.numel()
    assert model_speed.bytes_per_token(model) == sum(layer.packed_weight.numel() for layer in layers) + table // 97


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_plan_has_the_same_bytes_per_token(kind, tmp_path):
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    config = CLASSES["qwen3"](**SIZES) if kind == "dense" else transformers.Qwen3MoeConfig(**SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "float")
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", lowbit.LowBitConfig(bits=4, embedding_bits=4))
    model = load_model(tmp_path / "packed")
    decoder = Decoder(model, 32)
    write_plan(decoder, tmp_path / "packed" / PLAN, [0])
    plan = _C.PlanModel(str(tmp_path / "packed" / PLAN), 1)
    touched, linear = speed_turns.weights_of(tmp_path / "packed", plan, read_config(tmp_path / "packed"))
    assert touched == model_speed.bytes_per_token(model)
    assert linear == repr(next(layer for layer in model.modules() if isinstance(layer, lowbit.nn.Linear)))
    assert ("linear_experts" in {operator for operator, _, _ in plan.weights}) == (kind == "experts")


def test_the_benchmark():
    before = torch.get_num_threads()
    result = model_speed.run(CLASSES["llama"](**SIZES), prompt=20, new=6, threads=2, modes=["plan", "eager"], rounds=2)
    assert torch.get_num_threads() == before
    assert json.loads(json.dumps(result)) == result
    assert (result["shape"], result["threads"], result["prompt"], result["new"]) == ("llama", 2, 20, 6)
    assert result["packed_bytes_per_token"] > 0 and result["read_bandwidth"] > 1e8
    assert result["peak_memory_bytes"] > 1 << 30  # the buffer for the bandwidth measurement
    for figures in result["modes"].values():
        assert figures["prefill_tokens_per_second"] == pytest.approx(20 / figures["seconds_to_first_token"])
        assert set(figures["parts"]) == {"linear", "attention", "rest"} and min(figures["parts"].values()) > 0


def test_the_benchmark_takes_a_model():
    result = model_speed.run(make("qwen3"), prompt=5, new=2, modes=["eager"], rounds=1)
    assert result["shape"] == "qwen3" and "bits=4, group_size=16" in result["linear"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"modes": ["fast"]}, "mode is 'fast'; expected one of plan, eager, compile, aot"),
        ({"prompt": 0}, "prompt is 0; expected 1 or more"),
        ({"threads": 0}, "threads is 0; expected 1 or more"),
    ],
)
def test_the_benchmark_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        model_speed.run("qwen3-0.6b", **arguments)


def test_the_section_of_the_document():
    mode = {
        "library": "lowbit", "mode": "aot", "threads": 2,
        "decode_tokens_per_second": 43.21, "share_of_bandwidth": 0.876,
        "prefill_tokens_per_second": 321.0, "seconds_to_first_token": 1.6, "samples": [],
        "parts": {"linear": 0.02, "attention": 0.001, "rest": 0.0005},
    }  # fmt: skip
    library = {"version": "1", "note": "4 bits", "bytes_per_token": 7e8}
    shape = {
        "shape": "llama-3.2-1b", "libraries": {"lowbit": library}, "absent": {"llama.cpp Q4_0": "not there"},
        "modes": [mode], "read_bandwidth": {"2": 33e9},
    }  # fmt: skip
    results = {
        "command": "c", "date": "d", "machine": {"cpu": "p", "cpus": 2, "isa": "i", "system": "s"},
        "settings": {"prompt": 512, "new": 32, "rounds": 3, "threads": [2]}, "shapes": [shape],
    }  # fmt: skip
    section = bench_llm.tables(results)
    assert "| lowbit, aot | 43.2 | 88 % | 321 | 1.60 |" in section and "absent: not there" in section
    # A profile is one sample of one turn without a bandwidth measurement, so it may contradict the medians.
    assert "profiler" not in section and "20.00" not in section
    once = bench_llm.insert("# Title\n\n## Before\n", section)
    assert once.startswith("# Title\n\n## Before\n\n") and once.count(section) == 1
    around = once + "\n## Checkpoints\n"
    assert bench_llm.insert(around, section.replace("43.2", "50.0")) == around.replace("43.2", "50.0")
