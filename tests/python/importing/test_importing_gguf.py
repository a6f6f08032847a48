"""`lowbit import` of GGUF files, compared with the package gguf and with the original float models."""

import json
import os
import unicodedata
from pathlib import Path

import gguf
import lowbit
import numpy as np
import pytest
import torch
import transformers
from checkpoints import TOKENS, load
from command_line import document, documented_keys, error, invoke, keys_in
from gguf_files import file_bytes, permute, random_blocks, write_model
from importing_files import METADATA, tensors
from lowbit.checkpoint.codes import dequantize
from lowbit.files.gguf_reader import TYPES, read_gguf
from lowbit.hf.gguf_tokenizer import save_tokenizer
from lowbit.importing.gguf_blocks import FP4
from lowbit.importing.gguf_source import open_gguf, read_blocks
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
EXACT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "IQ4_NL", "MXFP4", "NVFP4"]
# Types whose scales are rounded, with the distance of their nearest two levels.
NEAR = {
    "Q2_K": 1, "Q3_K": 1, "Q4_K": 1, "Q5_K": 1, "Q6_K": 1, "IQ4_XS": 12, "IQ1_S": 2, "IQ1_M": 2, "IQ2_XXS": 16, "IQ2_XS": 16,
    "IQ2_S": 16, "IQ3_XXS": 8, "IQ3_S": 2,
}  # fmt: skip
HEADS, KV_HEADS, WIDTH = 4, 2, 256
LLAMA = {
    "general.architecture": "llama", "llama.context_length": 128, "llama.embedding_length": WIDTH,
    "llama.block_count": 1, "llama.feed_forward_length": 512, "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
MATRICES = {
    "token_embd": (40, WIDTH), "output": (40, WIDTH), "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (128, WIDTH),
    "blk.0.attn_v": (128, WIDTH), "blk.0.attn_output": (WIDTH, WIDTH), "blk.0.ffn_gate": (512, WIDTH),
    "blk.0.ffn_up": (512, WIDTH), "blk.0.ffn_down": (WIDTH, 512),
}  # fmt: skip
NAMES = {
    "token_embd": "model.embed_tokens", "output": "lm_head", "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj", "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj", "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj", "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}  # fmt: skip


def of_blocks(name: str, seed: int = 0) -> tuple[dict[str, np.ndarray], list]:
    """A model with random blocks of a type in all matrices, and its tensors for file_bytes."""
    generator, kind = np.random.default_rng(seed), TYPES[NUMBERS[name]]
    blocks = {matrix: random_blocks(name, *shape, kind.block, kind.bytes, generator) for matrix, shape in MATRICES.items()}
    tensors = [(f"{matrix}.weight", MATRICES[matrix][::-1], NUMBERS[name], data.tobytes()) for matrix, data in blocks.items()]
    ones = np.ones(WIDTH, "<f4").tobytes()
    tensors += [(f"{norm}.weight", (WIDTH,), 0, ones) for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")]
    return blocks, tensors


def reference(name: str, blocks: np.ndarray, k: int) -> np.ndarray:
    """The weights by the package gguf, or by this function for types that it lacks."""
    if name not in ("Q1_0", "Q2_0"):
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    size = TYPES[NUMBERS[name]].bytes
    weights = []
    for block in blocks.reshape(-1, size):
        scale = block[:2].view("<f2")[0].astype(np.float32)
        codes = np.unpackbits(block[2:], bitorder="little")
        if name == "Q1_0":
            weights.append(scale * (2 * codes.astype(np.float32) - 1))
        else:
            weights.append(scale * (codes[::2] + 2 * codes[1::2].astype(np.float32) - 1))
    return np.concatenate(weights).reshape(len(blocks), k)


def in_models_order(matrix: str, weight: np.ndarray) -> np.ndarray:
    """Undoes the converter's permutation of rows, found by the converter's own function."""
    heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(matrix)
    if heads is None:
        return weight
    found = np.empty_like(weight)
    found[permute(np.arange(len(weight)), heads)] = weight
    return found


def packed_weights(directory, k: dict[str, int]) -> dict[str, torch.Tensor]:
    tensors = load_file(directory / "model.safetensors")
    return {
        name.removesuffix(".packed_weight"): lowbit.embedding(
            torch.arange(lowbit.verify(packed).out_features), packed, lowbit.info(packed).in_features
        )
        for name, packed in tensors.items()
        if name.endswith("packed_weight")
    }


def test_less_than_a_head(tmp_path, monkeypatch):
    """At most twice the requested rows are read, because in a hostile file a head may be as large as the matrix."""
    counted = []

    def counting(stored, begin, end):
        counted.append(end - begin)
        return read_blocks(stored, begin, end)

    monkeypatch.setattr("lowbit.importing.gguf_source.read_blocks", counting)
    _, tensors = of_blocks("Q4_1")
    (tmp_path / "m.gguf").write_bytes(file_bytes(LLAMA, tensors))
    read = next(each.read for each in open_gguf(tmp_path / "m.gguf").tensors if "q_proj" in each.name)
    whole = read(0, WIDTH)
    assert whole.mins is not None
    for begin, end in ((0, 1), (0, 16), (24, 40), (31, 33), (40, 72), (1, 64), (250, 256)):  # heads have 64 rows
        counted.clear()
        for found, expected in zip(read(begin, end), whole, strict=True):
            assert torch.equal(found, expected[begin:end]), (begin, end)
        assert sum(counted) == 2 * (end - begin)


@pytest.mark.parametrize("name", [*EXACT, *NEAR])
def test_blocks_of_every_type(tmp_path, name):
    blocks, tensors = of_blocks(name)
    (tmp_path / "m.gguf").write_bytes(file_bytes(LLAMA, tensors))
    summary = lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    found = packed_weights(tmp_path / "out", {})
    assert found.keys() == set(NAMES.values())
    kinds = {tensor.kind for tensor in summary.tensors if tensor.source == name}
    assert kinds == ({"exact"} if name in EXACT else {"rounded"})
    steps = {tensor.name.removesuffix(".packed_weight"): tensor.steps for tensor in summary.tensors}
    for matrix, layer in NAMES.items():
        expected = in_models_order(matrix, reference(name, blocks[matrix], MATRICES[matrix][1]))
        moved = np.abs(found[layer].numpy() - expected)
        if name in EXACT:
            assert not moved.any(), layer
        else:
            # Random sub-scales are the worst case. The step of a group follows from the blocks' codes.
            packed = lowbit.unpack(load_file(tmp_path / "out" / "model.safetensors")[f"{layer}.packed_weight"])
            step = packed.scales.abs().repeat_interleave(packed.group_size, 1).numpy()
            step *= NEAR[name]
            step = np.where(step > 0, step, step.max(1, keepdims=True))
            assert (moved <= (steps[layer] * 1.01 + 1e-6) * step + 1e-6).all(), (layer, (moved / step).max())
            assert np.sqrt((moved**2).mean()) < 1e-3 * np.sqrt((expected**2).mean())


def random_model(kind: str):
    sizes = {
        "vocab_size": 403, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    wide = {"head_dim": 32}
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        "tied": lambda: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)),
        "wide": lambda: LlamaForCausalLM(LlamaConfig(**sizes, **wide)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, **wide)),
        "gemma": lambda: GemmaForCausalLM(GemmaConfig(**sizes, **wide)),
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**sizes, **wide, query_pre_attn_scalar=32, sliding_window=3)),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(**sizes | {"num_hidden_layers": 7}, **wide, query_pre_attn_scalar=32, sliding_window=3)
        ),
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**sizes, sliding_window=3)),
    }
    torch.manual_seed(0)
    model = models[kind]().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
        else:
            parameter.data.mul_(4)  # so that errors in heads or windows show
    return model


MODELS = ["llama", "tied", "wide", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"]


def metadata_of(model) -> dict:
    others = {}
    if getattr(model.config, "sliding_window", None) and model.config.model_type != "qwen2":
        others["attention__sliding_window"] = model.config.sliding_window
    if model.config.model_type == "gemma2":
        others |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return others


@pytest.mark.parametrize("kind", MODELS)
def test_a_float_file_gives_the_model_it_was_made_of(tmp_path, kind):
    model = random_model(kind)
    write_model(tmp_path / "m.gguf", model, **metadata_of(model))
    with pytest.warns(UserWarning, match="has no tokenizer"):
        summary = lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    assert {tensor.kind for tensor in summary.tensors} == {"float"}
    found, expected = load(tmp_path / "out", dtype="auto")(TOKENS).logits, model(TOKENS).logits
    # Gemma's norms are stored with 1 added, which rounds.
    torch.testing.assert_close(found, expected, rtol=1e-3 if "gemma" in kind else 0, atol=1e-4 if "gemma" in kind else 0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_quantized_file_gives_the_logits_of_its_dequantized_weights(tmp_path, kind):
    model = random_model(kind)
    write_model(tmp_path / "m.gguf", model, "Q8_0", **metadata_of(model))
    with pytest.warns(UserWarning, match="has no tokenizer"):
        summary = lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    assert {tensor.kind for tensor in summary.tensors} == {"exact", "float"}
    # Also for Gemma, which scales looked-up rows.
    assert "model.embed_tokens.packed_weight" in load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in packed_weights(tmp_path / "out", {}).items():
        original = model.get_submodule(name).weight
        q8 = gguf.GGMLQuantizationType.Q8_0
        assert torch.equal(weight, torch.from_numpy(gguf.dequantize(gguf.quantize(original.detach().numpy(), q8), q8)))
        original.data.copy_(weight)
    found, expected = load(tmp_path / "out", dtype="auto")(TOKENS).logits, model(TOKENS).logits
    # Only the activations are rounded, to 8 bits.
    assert (found - expected).norm() / expected.norm() < 0.03
    if kind == "qwen2":
        packed = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.q_proj.packed_weight"]
        assert torch.equal(lowbit.unpack(packed).bias, model.model.layers[0].self_attn.q_proj.bias)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequencies_of_llama3(tmp_path, factor):
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(
        vocab_size=40, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=131072, rope_parameters=rope,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    factors = plain / model.model.rotary_emb.inv_freq  # as in the converter
    assert factors.min() == 1 and factors.max() == factor
    write_model(tmp_path / "m.gguf", model)
    add_tensor(tmp_path / "m.gguf", tmp_path / "with.gguf", "rope_freqs.weight", factors.numpy())
    with pytest.warns(UserWarning, match="has no tokenizer"):
        lowbit.import_checkpoint(tmp_path / "with.gguf", tmp_path / "out")
    assert load(tmp_path / "out").config.rope_parameters == rope
    add_tensor(tmp_path / "m.gguf", tmp_path / "other.gguf", "rope_freqs.weight", factors.numpy() ** 2)
    with pytest.raises(ValueError, match="not those of Llama 3"):
        lowbit.import_checkpoint(tmp_path / "other.gguf", tmp_path / "other")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 0.0}, {"rope_type": "default"}),
        ({"type": "yarn", "factor": 0.0}, {"rope_type": "yarn", "factor": 1.0}),
    ],
)
def test_stretched_positions_as_ggml_reads_them(tmp_path, keys, expected):
    """Without a type, the factor is linear; with "none" it is ignored; 0 means no factor."""
    metadata = METADATA | {f"llama.rope.scaling.{name}": item for name, item in keys.items()}
    (tmp_path / "m.gguf").write_bytes(file_bytes(metadata, tensors()))
    found = open_gguf(tmp_path / "m.gguf").config["rope_parameters"]
    assert {name: found[name] for name in expected} == expected and ("factor" in found) == ("factor" in expected)


def add_tensor(source, target, name: str, values: np.ndarray) -> None:
    read = read_gguf(source)
    metadata = {key: item for key, item in read.metadata.items() if not key.startswith("GGUF")}
    tensors = []
    for stored in read.tensors.values():
        data = source.read_bytes()[stored.offset : stored.offset + stored.bytes]
        tensors.append((stored.name, stored.shape[::-1], NUMBERS[stored.type.name], data))
    tensors.append((name, (len(values),), 0, values.astype("<f4").tobytes()))
    target.write_bytes(file_bytes(metadata, tensors))


def test_the_tokenizer_is_imported(tmp_path):
    model = random_model("llama")
    tokens = ["<s>", "<|im_end|>", *[chr(code) for code in range(33, 127)], "th", "the", "\u0120"]
    write_model(tmp_path / "m.gguf", model, tokens=tokens + [f"unused{i}" for i in range(403 - len(tokens))])
    lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("the th")["input_ids"]
    assert [tokens[index] for index in ids] == ["<s>", "the", "\u0120", "th"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the th"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [1]
    # transformers 5.19 warns about a wrong tokenizer if config.json has no version.
    assert json.loads((tmp_path / "out" / "config.json").read_text())["transformers_version"] == transformers.__version__


def test_qwen_tokenizers_give_the_tokens_of_qwen_own_class(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "i n", "Ġ a", "1 2", "Ċ Ċ", "' l", "l l", "Ã ©", "Ì ģ"]
    tokens = ["<|endoftext|>", *letters, *("".join(merge.split(" ")) for merge in merges)]
    metadata = {
        "model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": merges, "token_type": [3] + [1] * (len(tokens) - 1),
        "eos_token_id": 0, "add_bos_token": False,
    }  # fmt: skip
    save_tokenizer(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, "qwen2", 999, tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    reference = Qwen2Tokenizer(
        {token: index for index, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]
    )
    texts = [
        "They'LL be in the 12123rd, all o'clock", "a\n\n  b\t c   ", "\r\n\r\n x", "<|endoftext|> a", "漢字カナ 3.14",
        "a\u00a0b\u3000c", "caf\u00e9 or cafe\u0301", "\u2126 \ufb01 \u1112\u1161\u11ab", "\U0001f468\u200d\U0001f469 \x00",
    ]  # fmt: skip
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_a_split_file_from_any_of_its_parts(tmp_path):
    model = random_model("tied")
    write_model(tmp_path / "m.gguf", model)
    write_model(tmp_path / "m", model, split=7)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) > 2
    with pytest.warns(UserWarning, match="has no tokenizer"):
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "whole")
        lowbit.import_checkpoint(parts[1], tmp_path / "out")
    found, expected = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "whole"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    parts[-1].rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=f"{parts[-1].name} is missing: the model has {len(parts)} parts"):
        lowbit.import_checkpoint(parts[0], tmp_path / "none")
    (tmp_path / "m.gguf").rename(parts[-1])
    with pytest.raises(ValueError, match="says that it is part 0 .from 0. of 1; expected part"):
        lowbit.import_checkpoint(parts[0], tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_the_head_gets_16_bit_activations(tmp_path, kind):
    """So does the table that it shares. With activation_bits given, all layers have that number."""
    model = random_model(kind)
    write_model(tmp_path / "m.gguf", model, "Q8_0", **metadata_of(model))
    entries = {}
    for wanted in (None, 8, 16):
        with pytest.warns(UserWarning, match="has no tokenizer"):
            entries[wanted] = lowbit.import_checkpoint(
                tmp_path / "m.gguf", tmp_path / str(wanted), activation_bits=wanted
            ).entries
        packed = {entry.name: entry.activation_bits for entry in entries[wanted] if entry.activation_bits is not None}
        head = "model.embed_tokens" if kind == "tied" else "lm_head"
        usual = wanted or 8
        assert packed == dict.fromkeys(packed, usual) | {f"{head}.packed_weight": wanted or 16}
        layers = load(tmp_path / str(wanted), dtype="auto")
        assert layers.lm_head.info.activation_bits == (wanted or 16)
        assert layers.model.layers[0].mlp.down_proj.info.activation_bits == usual


def test_the_command_and_inspect(tmp_path):
    _, tensors = of_blocks("Q4_K")
    (tmp_path / "m.gguf").write_bytes(file_bytes(LLAMA, tensors))
    said = document(invoke("import", tmp_path / "m.gguf", tmp_path / "out", "--json"))
    assert set(said) | keys_in(said["tensors"]) == documented_keys("import")
    assert (said["format"], said["packed_layers"]) == ("GGUF", 9)
    shown = document(invoke("inspect", tmp_path / "out", "--json"))
    key = lambda tensor: tensor["name"]  # noqa: E731
    assert sorted(shown["imported"], key=key) == sorted(said["tensors"], key=key)
    lines = invoke("inspect", tmp_path / "out").stdout
    assert "conversion" in lines and lines.count("rounded, within") == 9
    file = tmp_path / "out" / "lowbit_import.json"
    report = json.loads(file.read_text())
    for odd in ("1", True, None, 10**400, [1]):
        for key in ("steps", "error"):
            changed = [entry | {key: odd} for entry in report["tensors"]]
            file.write_text(json.dumps(report | {"tensors": changed}))
            said = error(invoke("inspect", tmp_path / "out"))
            assert f"{file} is not a report of an import: an entry has the distance" in said
    file.write_text(json.dumps(report))
    assert "expected a directory that is empty" in error(invoke("import", tmp_path / "m.gguf", tmp_path / "out"))


@pytest.mark.more
def test_memory(tmp_path, run_python):
    """Memory below 1.3 times the largest tensor plus the output; measured: a fifth of the tensor."""
    tensors = [tensor for tensor in of_blocks("Q8_0")[1] if tensor[0] != "output.weight"]
    (tmp_path / "small.gguf").write_bytes(file_bytes(LLAMA, tensors))
    rows, row = 300_000, tensors[0][3][: WIDTH // 32 * 34]
    assert tensors[0][0] == "token_embd.weight"
    tensors[0] = ("token_embd.weight", (WIDTH, rows), NUMBERS["Q8_0"], row * rows)
    (tmp_path / "large.gguf").write_bytes(file_bytes(LLAMA, tensors))
    script = """
import sys, warnings, torch, lowbit
torch.set_num_threads(1)
warnings.simplefilter("ignore")
def peak():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
lowbit.import_checkpoint(sys.argv[1] + "/small.gguf", sys.argv[1] + "/small")
open("/proc/self/clear_refs", "w").write("5")  # resets the peak to the current memory
before = peak()
lowbit.import_checkpoint(sys.argv[1] + "/large.gguf", sys.argv[1] + "/large")
print(before, peak())
"""
    process = run_python(script, tmp_path)
    assert process.returncode == 0, process.stderr
    before, after = map(int, process.stdout.split()[-2:])
    assert len(row) * rows > 80e6 and after - before < 40e6


@pytest.mark.filterwarnings("ignore:.* has no tokenizer")
def test_progress_and_an_interrupted_import(tmp_path):
    _, tensors = of_blocks("Q4_0")
    (tmp_path / "m.gguf").write_bytes(file_bytes(LLAMA, tensors))
    seen: list[tuple[int, int]] = []
    lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out", progress=lambda *said: seen.append(said[:2]))
    assert seen == sorted(seen) and len({total for _, total in seen}) == 1 and seen[-1][0] == seen[-1][1] > 0

    def stop(count: int, total: int, name: str) -> None:
        if count > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "none", progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "out"]


def test_levels_are_those_of_the_formats():
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [level / 2 for level in FP4] == e2m1 + [-value for value in e2m1]


def test_dequantize_is_what_the_operator_computes():
    torch.manual_seed(0)
    for bits in range(1, 9):
        packed = lowbit.quantize_tensor(torch.randn(5, 40), lowbit.LinearConfig(bits=bits, group_size=16))
        assert torch.equal(dequantize(lowbit.unpack(packed)), lowbit.embedding(torch.arange(5), packed, 40))


def test_generate_imports_a_file_once(tmp_path):
    model = random_model("tied")
    tokens = ["<s>", "<|im_end|>", *[chr(code) for code in range(33, 127)], "th", "the", "\u0120"]
    tokens += [f"unused{i}" for i in range(403 - len(tokens))]
    file, cache = tmp_path / "m.gguf", tmp_path / "m.gguf.lowbit"
    write_model(file, model, "Q8_0", tokens=tokens)
    command = ("generate", file, "--prompt", "the the", "--max-new-tokens", "3")
    first = invoke(*command)
    assert first.exit_code == 0 and f"{file} is imported to {cache}\n" in first.stderr
    written = os.stat(cache / "config.json").st_mtime_ns
    again = invoke(*command)
    assert again.stdout == first.stdout and f"{file} was imported before: {cache}\n" in again.stderr
    assert os.stat(cache / "config.json").st_mtime_ns == written
    same = invoke("generate", cache, "--prompt", "the the", "--max-new-tokens", "3")
    assert same.stdout == first.stdout
    # Another model in its place, and one that is refused, after which the old import stays.
    os.utime(file, ns=(1, 1))
    changed = invoke(*command)
    assert "the import of another file is replaced" in changed.stderr and changed.stdout == first.stdout
    assert os.stat(cache / "config.json").st_mtime_ns != written
    file.write_bytes(file.read_bytes()[:1000])
    assert "m.gguf" in error_after_notes(invoke(*command)) and cache.exists()
    (cache / "lowbit_import.json").unlink()
    assert "exists but is not an import of" in error_after_notes(invoke(*command))


def error_after_notes(result) -> str:
    assert result.exit_code == 1 and result.stdout == ""
    return result.stderr.splitlines()[-1]
