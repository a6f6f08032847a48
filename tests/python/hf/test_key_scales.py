"""Balanced channels of queries and keys: the same bits with float caches, less loss with caches of few bits."""

import copy
import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lowbit.hf import key_scales
from lowbit.llm import Decoder

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=97, pad_token_id=0, max_position_embeddings=64,
)  # fmt: skip
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, query_pre_attn_scalar=32, layer_types=["full_attention"] * 2),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**SIZES),
    "lfm2": lambda: transformers.Lfm2Config(**SIZES, layer_types=["full_attention"] * 2),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
}
NORMS = {"hunyuan": ("query_layernorm", "key_layernorm"), "lfm2": ("q_layernorm", "k_layernorm")}
TEXT = torch.tensor([[(7 * i * i + 3 * i + 5) % 90 + 4 for i in range(40)]])


def make(kind, dtype=torch.float32):
    """A model whose norms have weights like those of trained models: large ones for some keys, zeros and negative ones."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype).eval()
    if kind == "llama":
        return model
    for layer in model.model.layers:
        query, key = (getattr(layer.self_attn, name).weight.data for name in NORMS.get(kind, ("q_norm", "k_norm")))
        shift = 1.0 if kind == "gemma3" else 0.0
        query.copy_(torch.rand(32) + 0.5 - shift)
        key.copy_(torch.rand(32) + 0.5 - shift)
        key[[3, 19]] = 24 - shift  # a pair of the rotary positions
        query[[3, 19]] = 1 / 16 - shift
        query[[5, 21]] = -shift
        key[7] *= -1
    return model


@torch.inference_mode()
def logits(decoder):
    """Of a prompt, single tokens, and several texts."""
    found = [decoder(TEXT[:, :24], torch.tensor([0]))]
    found += [decoder(TEXT[:, at : at + 1], torch.tensor([at])) for at in range(24, 40)]
    texts = [(decoder.new_caches(48), TEXT[0, :9].tolist()), (decoder.new_caches(48), TEXT[0, 9:12].tolist())]
    return torch.cat([*found, torch.stack(decoder.run_texts(texts))])


def decoders(model, monkeypatch, *arguments, **more):
    """One with scales and one without."""
    scaled = Decoder(copy.deepcopy(model), 64, *arguments, **more)
    with monkeypatch.context() as patch:
        patch.setattr(key_scales, "attach", lambda model: [])
        return scaled, Decoder(copy.deepcopy(model), 64, *arguments, **more)


@pytest.mark.parametrize(
    "kind, dtype, plan",
    [
        *itertools.product(["qwen3", "gemma3"], [torch.float32, torch.bfloat16], [True, False]),
        ("gemma3", torch.float16, True), ("hunyuan", torch.float32, True), ("lfm2", torch.float32, True),
    ],
)  # fmt: skip
def test_float_caches_have_the_same_bits(kind, dtype, plan, monkeypatch):
    scaled, plain = decoders(make(kind, dtype), monkeypatch, plan=plan)
    for layer in scaled.model.model.layers:
        scales = layer.self_attn.lowbit_query_scales
        assert scales.dtype == dtype and (scales.float().frexp().mantissa == 0.5).all()
        assert (scales * layer.self_attn.lowbit_key_scales == 1).all() and scales.max() > scales.min()
    assert not hasattr(plain.model.model.layers[0].self_attn, "lowbit_query_scales")
    assert (scaled.plan is not None) == (plain.plan is not None) == plan
    assert logits(scaled).equal(logits(plain))
    assert not scaled.caches()[0][0].equal(plain.caches()[0][0])


@pytest.mark.parametrize("cache", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_caches_of_few_bits_lose_less(kind, cache, monkeypatch):
    model = make(kind)
    exact = logits(Decoder(copy.deepcopy(model), 64))
    lost = [(logits(each) - exact).norm() for each in decoders(model, monkeypatch, cache)]
    assert lost[0] < lost[1] / 2


def test_release_and_models_without_scales():
    model = make("qwen3")
    names = set(model.state_dict())
    decoder = Decoder(model, 64)
    assert set(model.state_dict()) == names
    assert {name for name, _ in model.named_buffers()} > {"model.layers.1.self_attn.lowbit_key_scales"}
    decoder.release()
    assert not [name for name, _ in model.named_buffers() if "lowbit" in name]
    for layer in model.model.layers:  # nothing to balance
        layer.self_attn.k_norm.weight.data.copy_(3 * layer.self_attn.q_norm.weight.data)
    for each in (model, make("llama")):
        assert not [name for name, _ in Decoder(each, 64).named_buffers() if "scales" in name]
    for value in (float("nan"), float("inf")):
        layer.self_attn.k_norm.weight.data[:16] = value
        assert key_scales.attach(model) == []
