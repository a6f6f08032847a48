"""GGUF files of mixtures of experts, like those of llama.cpp's converter: per layer one tensor each for all gates, ups and
downs."""

import re

import gguf
import lowbit
import lowbit.llm
import numpy as np
import pytest
import torch
import transformers
from checkpoints import load
from gguf_files import experts_as_in_files, file_bytes, random_blocks, write_model
from lowbit.files.gguf_reader import TYPES, read_gguf

TOKENS = torch.arange(12)[None] * 5
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=3),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, intermediate_size=32, moe_intermediate_size=96, shared_expert_intermediate_size=32, num_experts=3
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=32, intermediate_size=32, moe_intermediate_size=96, num_experts=3, norm_topk_prob=True
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, intermediate_size=96, num_local_experts=3, sliding_window=4, rope_parameters=YARN
    ),
}


def metadata_of(config) -> dict:
    found = {"expert_count": 3, "expert_used_count": 2}
    if config.model_type != "mixtral":
        found["expert_feed_forward_length"] = 96
    if config.model_type == "qwen2_moe":
        found["expert_shared_feed_forward_length"] = 32
    if config.model_type == "gpt_oss":
        found |= {
            "attention__sliding_window": 4, "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 16,
        }  # fmt: skip
    return found


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[request.param]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            else:
                parameter.normal_(0, 0.2)
    return model


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_a_float_file_gives_the_model_it_was_made_of(model, tmp_path):
    write_model(tmp_path / "m.gguf", model, **metadata_of(model.config))
    summary = lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    assert {tensor.kind for tensor in summary.tensors} == {"float"}
    found = load(tmp_path / "out", dtype="auto")
    state, expected = found.state_dict(), model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    assert torch.equal(found(TOKENS).logits, model(TOKENS).logits)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_a_quantized_file_gives_the_experts_its_blocks_stand_for(model, tmp_path):
    gpt_oss = model.config.model_type == "gpt_oss"
    kind = gguf.GGMLQuantizationType["MXFP4" if gpt_oss else "Q4_0"]
    write_model(tmp_path / "m.gguf", model, kind.name, **metadata_of(model.config))
    summary = lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    assert {tensor.kind for tensor in summary.tensors} == {"exact", "float"}
    found, halves = load(tmp_path / "out", dtype="auto"), {}
    for number in range(2):
        for leaf in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{number}.mlp.experts.{leaf}"
            own = found.get_submodule(name)
            assert isinstance(own, lowbit.nn.LinearExperts) and own.info.has_bias == gpt_oss
            halves = experts_as_in_files(name, own.dequantize().mT.numpy() if gpt_oss else own.dequantize().numpy(), gpt_oss)
            original = experts_as_in_files(name, model.state_dict()[name].numpy(), gpt_oss)
            for part, matrices in original.items():
                for expert, matrix in enumerate(matrices):
                    blocks = gguf.quantize(np.ascontiguousarray(matrix), kind)
                    assert np.array_equal(halves[part][expert], gguf.dequantize(blocks, kind)), (name, part, expert)
            if gpt_oss:
                biases = torch.stack([lowbit.unpack(packed).bias for packed in own.packed_weight])
                assert torch.equal(biases, model.state_dict()[f"{name}_bias"])
    # Everything else as in transformers, with the file's weights.
    for name, layer in found.named_modules():
        if isinstance(layer, lowbit.nn.Linear | lowbit.nn.Embedding):
            model.get_submodule(name).weight.data = layer.dequantize()
        elif isinstance(layer, lowbit.nn.LinearExperts):
            weight = layer.dequantize()
            model.get_parameter(name).data = weight.mT.contiguous() if gpt_oss else weight
    logits, expected = found(TOKENS).logits, model(TOKENS).logits
    assert 0 < (logits - expected).std() < 0.05 * expected.std()  # 8-bit activations
    decoder = lowbit.llm.Decoder(found, 32)
    with torch.inference_mode():
        last = decoder(TOKENS, torch.zeros(1, dtype=torch.int64))
    assert (last - logits[:, -1]).std() < 0.05 * expected.std()


def small(
    kind: str, drop: tuple[str, ...] = (), shapes: dict | None = None, kinds: dict | None = None, more: tuple[str, ...] = ()
) -> bytes:
    """A qwen3moe with one layer and two experts, with random blocks of a type in the expert tensors."""
    generator, width = np.random.default_rng(0), 256
    a = "qwen3moe"
    metadata = {
        "general.architecture": a, f"{a}.context_length": 64, f"{a}.embedding_length": width, f"{a}.block_count": 1,
        f"{a}.feed_forward_length": 64, f"{a}.expert_feed_forward_length": width, f"{a}.attention.head_count": 2,
        f"{a}.attention.head_count_kv": 1, f"{a}.attention.layer_norm_rms_epsilon": 1e-6, f"{a}.expert_count": 2,
        f"{a}.expert_used_count": 1,
    }  # fmt: skip
    floats = {
        "token_embd": (width, 8), "output": (width, 8), "output_norm": (width,), "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,), "blk.0.attn_q": (width, width), "blk.0.attn_k": (width, 128),
        "blk.0.attn_v": (width, 128), "blk.0.attn_output": (width, width), "blk.0.attn_q_norm": (128,),
        "blk.0.attn_k_norm": (128,), "blk.0.ffn_gate_inp": (width, 2),
    }  # fmt: skip
    tensors = [
        (f"{name}.weight", shape, 0, generator.normal(0, 1, shape[::-1]).astype("<f4").tobytes())
        for name, shape in floats.items()
    ]
    for part in ("gate", "up", "down", *more):
        name, shape = f"blk.0.ffn_{part}_exps.weight", (shapes or {}).get(part, (width, width, 2))
        number = next(number for number, each in TYPES.items() if each.name == (kinds or {}).get(part, kind))
        each = TYPES[number]
        rows = shape[1] * (shape[2] if len(shape) > 2 else 1)
        blocks = random_blocks(each.name, rows, shape[0], each.block, each.bytes, generator)
        if part not in drop:
            tensors.append((name, shape, number, blocks.tobytes()))
    return file_bytes(metadata, tensors)


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_experts_of_a_lattice_type(tmp_path):
    (tmp_path / "m.gguf").write_bytes(small("IQ3_S"))
    lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    found = load(tmp_path / "out", dtype="auto").model.layers[0].mlp.experts.down_proj
    stored = read_gguf(tmp_path / "m.gguf").tensors["blk.0.ffn_down_exps.weight"]
    data = (tmp_path / "m.gguf").read_bytes()[stored.offset : stored.offset + stored.bytes]
    blocks = np.frombuffer(data, np.uint8).reshape(2, 256, -1)
    expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.IQ3_S))
    assert (found.dequantize() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ("up",)}, "has no ffn_up_exps.weight for model.layers.0.mlp.experts"),
        ({"kinds": {"up": "Q8_0"}}, "blk.0.ffn_up_exps.weight is Q8_0 [2, 256, 256], and blk.0.ffn_gate_exps.weight Q4_0"),
        ({"shapes": {"down": (256, 256)}}, "blk.0.ffn_down_exps.weight is Q4_0 [256, 256]"),
        ({"shapes": dict.fromkeys(("gate", "up", "down"), (256, 256, 3))}, "has shape [3, 256, 256]; expected [2, 256, 256]"),
        ({"drop": ("gate", "up", "down")}, "lacks 2 of the"),
        (
            {"more": ("gate_up",), "shapes": {"gate_up": (256, 512, 2)}},
            "has blk.0.ffn_gate_exps.weight beside the other matrices",
        ),
    ],
)
def test_refusals(tmp_path, changes, message):
    (tmp_path / "m.gguf").write_bytes(small("Q4_0", **changes))
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
