"""BLOOM, MPT and Falcon in lowbit's decoder: alibi, added to queries and keys, and Falcon's rotary embeddings."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import lowbit
from lowbit import llm
from lowbit.hf import own_attention
from lowbit.llm.loading import load_model

sys.path.append(str(Path(__file__).parents[2] / "models"))
import causal_lm

SIZES = {
    "vocab_size": 97, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FALCON = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 512, "bias": True}
# 6 heads are not a power of two, so alibi uses the slopes of 4 heads and some of 8.
MODELS = {
    "bloom": lambda: transformers.BloomConfig(hidden_size=96, n_layer=2, n_head=6, **SIZES),
    "mpt": lambda: transformers.MptConfig(
        d_model=96, n_layers=2, n_heads=6, max_seq_len=512, attn_config={"clip_qkv": 1.5, "softmax_scale": 0.4}, **SIZES
    ),
    "falcon": lambda: transformers.FalconConfig(alibi=True, multi_query=False, **FALCON, **SIZES),
    "falcon, one head of keys": lambda: transformers.FalconConfig(alibi=True, **FALCON, **SIZES),
    "falcon, groups": lambda: transformers.FalconConfig(
        alibi=True, new_decoder_architecture=True, num_kv_heads=2, **FALCON, **SIZES
    ),
    "falcon, groups and rotations": lambda: transformers.FalconConfig(
        new_decoder_architecture=True, num_kv_heads=2, **FALCON, **SIZES
    ),
    "falcon, rotations": lambda: transformers.FalconConfig(**FALCON, **SIZES),
}  # fmt: skip
ALIBI = [name for name in MODELS if "rotations" not in name]
TEXT = [(11 + 29 * i + i * i) % 89 + 4 for i in range(300)]  # beyond 256 positions, so that both numbers of a position matter


def make(name: str, bits: int | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    if bits is not None:
        lowbit.quantize_(model, lowbit.LinearConfig(bits, 32), lambda module, _: isinstance(module, torch.nn.Linear))
    return model


@torch.inference_mode()
def in_pieces(step, sizes: list[int]) -> torch.Tensor:
    """Logits after the last token of each piece of TEXT, [s, vocabulary]."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    calls = [(torch.tensor([TEXT[end - size : end]]), torch.tensor([end - size])) for end, size in zip(ends, sizes)]
    return torch.cat([step(*call) for call in calls])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    model = make(name)
    with torch.inference_mode():
        own = model(torch.tensor([TEXT])).logits[0]
        # The context of a token matters, also at a distance.
        other = model(torch.tensor([TEXT[:40] + TEXT[41:42] + TEXT[41:]])).logits[0]
    assert (other[60] - own[60]).std() > 0.01 * own[60].std()
    decoder = llm.Decoder(model, 304)
    assert max(decoder.measured.values()) < 1e-4
    sizes = [250, 1, 1, 5, 43]  # across position 256
    behind = torch.tensor(sizes).cumsum(0) - 1
    for pieces, at in (([300], [299]), (sizes, behind)):
        difference = (in_pieces(decoder, pieces) - own[at]).square().mean(-1).sqrt()
        assert (difference < 1e-4 * own.std()).all(), difference / own.std()
    decoder.release()
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([TEXT])).logits[0], own)
    assert not any(isinstance(module, own_attention.Alibi) for module in model.modules())


@pytest.mark.parametrize("name", ["bloom", "mpt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_in_16_bits_are_nearer_to_float32_than_transformers_own(name, dtype):
    exact = make(name)
    with torch.no_grad():
        for parameter in exact.parameters():  # the same weights in both
            parameter.copy_(parameter.to(dtype))
    model = make(name)
    model.load_state_dict(exact.state_dict())
    model.to(dtype)
    with torch.inference_mode():
        expected = exact(torch.tensor([TEXT])).logits[0, -1]
        own = model(torch.tensor([TEXT])).logits[0, -1].float()
    decoder = llm.Decoder(model, 304)
    assert decoder.k_cache_0.dtype == dtype
    found = in_pieces(decoder, [len(TEXT)])[0].float()
    assert (found - expected).norm() < 1.1 * (own - expected).norm()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("begin", [0, 4000, 65536 - 64])
def test_far_positions(kind, begin):
    """Errors relative to float64 are as small as at the start of a text."""
    heads, width, count, scale = 4, 16, 64, 0.25
    generator = torch.Generator().manual_seed(begin)
    query, key, value = (torch.randn(1, heads, count, width, generator=generator) for _ in range(3))
    dtype = getattr(torch, kind)
    key, value = (each.to(dtype).float() for each in (key, value))
    slopes = torch.tensor([0.9170040432, 0.5, 2**-4.5, 2**-8])
    alibi = own_attention._of_slopes(slopes, begin + count, scale)
    more_query, more_key = alibi(torch.arange(begin, begin + count))
    assert torch.equal(more_key, more_key.to(dtype).float())
    caches = [torch.zeros(1, heads, count, size, dtype=dtype) for size in (width + 16, width)]
    found = lowbit.operators.ops.attention(
        torch.cat([more_query, query], -1), torch.cat([more_key, key], -1), value, *caches, torch.tensor([0]), scale=scale
    )
    distance = torch.arange(count)[None] - torch.arange(count)[:, None]
    scores = query.double() @ key.double().transpose(-1, -2) * scale + slopes.double()[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, -torch.inf)
    expected = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ALIBI)
def test_caches_of_int8_are_refused(name):
    model = make(name)
    for kind in ("int8", "int8,int4"):
        with pytest.raises(ValueError, match=rf"carry positions \(alibi\), which a cache of {kind} would round; expected"):
            llm.Decoder(model, 64, kind)
    for kind in ("bfloat16", "float16", "float32"):
        decoder = llm.Decoder(model, 64, kind)
        assert decoder.measured.get("cache", 0) < 0.1 and decoder.k_cache_0.dtype == getattr(torch, kind)


def test_lengths_that_are_refused():
    with pytest.raises(ValueError, match="max_length is 528; expected at most the model's 512 positions"):
        llm.Decoder(make("mpt"), 528)
    with pytest.raises(ValueError, match="max_length is 65552; expected at most 65536 positions of its alibi"):
        llm.Decoder(make("bloom"), 65552)


def test_falcon_that_adds_its_bias_twice_is_refused():
    model = transformers.AutoModelForCausalLM.from_config(MODELS["falcon"](), attn_implementation="eager").eval()
    with pytest.raises(ValueError, match="its logits differ from those of its own attention"):
        llm.Decoder(model, 64)


def test_blooms_other_way_to_multiply_is_refused():
    model = make("bloom")
    for layer in model.transformer.h:
        layer.self_attention.slow_but_exact = True
    with pytest.raises(ValueError, match="its attention is the model's own code"):
        llm.Decoder(model, 64)


@pytest.mark.parametrize("name", MODELS)
def test_texts_of_other_lengths_in_a_call(name):
    decoder = llm.Decoder(make(name, 4), 304)
    prompts = [TEXT[:270], TEXT[1:4], TEXT[40:57], TEXT[7:8]]
    expected = [llm.generate(decoder, prompt, 8, max_length=304).tokens for prompt in prompts]
    assert [each.tokens for each in llm.generate_batch(decoder, prompts, 8)] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)


def test_falcons_linear_layers_are_packed_in_memory_and_from_file_to_file(tmp_path):
    make("falcon").save_pretrained(tmp_path / "float")
    config = lowbit.LowBitConfig(bits=4, group_size=32, embedding_bits=4)
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", config)
    loaded, here = load_model(tmp_path / "packed"), make("falcon")
    lowbit.quantize_(here, config.select(here))
    for model in (loaded, here):
        kinds = {type(module).__name__ for module in model.modules()}
        assert "FalconLinear" not in kinds and isinstance(model.transformer.h[1].mlp.dense_4h_to_h, lowbit.nn.Linear)
    with torch.inference_mode():
        assert torch.equal(*(model(torch.tensor([TEXT])).logits for model in (loaded, here)))


@pytest.mark.more
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "falcon, groups and rotations"])
def test_a_program(name):
    decoder = llm.Decoder(make(name, 4), 64)
    with torch.inference_mode():
        scale = decoder(torch.tensor([TEXT[:24]]), torch.tensor([0])).std()
    assert causal_lm.exported(decoder, torch.tensor([TEXT[:24]]), 0.01 * float(scale)) == "yes"
    # Compiled code gets tensors by their names in the decoder, so it must have no others.
    with torch.no_grad():
        program = torch.export.export(decoder, (torch.tensor([TEXT[:3]]), torch.tensor([0])))
    assert not program.graph_signature.lifted_tensor_constants


def test_a_pt2_describes_the_shape_of_each_cache(monkeypatch, tmp_path):
    """Keys are wider than values. Tests of other models compile the program for such caches."""
    from lowbit.exports import decoder_program as exports

    written, called = {}, []
    monkeypatch.setattr(exports, "export_pt2", lambda module, inputs, path, **more: written.update(more, inputs=inputs))
    decoder = llm.Decoder(make("bloom"), 64)
    llm.export_decoder(decoder, tmp_path / "m.pt2", chunk=8)
    shapes = [cache.shape for pair in decoder.caches() for cache in pair]
    assert [cache.shape for cache in written["inputs"][2]] == shapes and len(set(shapes)) == 2

    class Package:
        loader = SimpleNamespace(get_metadata=lambda: written["metadata"])

        def __call__(self, tokens, start, caches):
            called.extend(cache.shape for cache in caches)
            return torch.zeros(1, 97)

    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: Package())
    (tmp_path / "m.pt2").touch()
    llm.load_decoder(tmp_path / "m.pt2")(torch.tensor([[5]]), torch.tensor([0]))
    assert called == shapes
    written["metadata"]["lowbit.llm.caches"] += ",float32"
    with pytest.raises(ValueError, match="it has a cache 'float32'; expected a dtype and a shape, as float32:1x4x64x16"):
        llm.load_decoder(tmp_path / "m.pt2")
