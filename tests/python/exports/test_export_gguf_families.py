"""`lowbit export --to gguf` of the Gemma and Phi 3 families, and of SentencePiece tokenizers."""

import contextlib
import filecmp
import json
import os
import re
import warnings

import gguf
import lowbit
import pytest
import torch
from checkpoints import TOKENS, edit_json, load
from gguf_files import write_model
from lowbit.exports.gguf import export_gguf
from lowbit.exports.gguf_settings import architecture_metadata, completed
from test_importing_gguf import metadata_of, random_model
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

LETTERS = "\u2581abcdefghijklmnopqrstuvwxyz"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def vocabulary() -> list[tuple[str, float, int]]:
    """403 SentencePiece tokens with scores and types."""
    found = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<think>", 0.0, USER)]
    found += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    words = ["he", "th", "the", "\u2581the", "in", "er", "\u2581in", "an", "and", "\u2581and"]
    words += [a + b for a in "\u2581aeiouy" for b in "bcdfghjklmnpqrst" if a + b not in words]
    joined = words[: 403 - len(found) - len(LETTERS)]
    assert len(found) + len(joined) + len(LETTERS) == 403
    return found + [(text, -float(rank), NORMAL) for rank, text in enumerate([*joined, *LETTERS])]


def same_files(first, second) -> set[str]:
    names = sorted(os.listdir(first))
    assert names == sorted(os.listdir(second)) and "model.safetensors" in names and "tokenizer.json" in names
    return {name for name in names if not filecmp.cmp(first / name, second / name, shallow=False)}


@pytest.mark.parametrize(
    ("kind", "type_name"), [("llama", "Q4_0"), ("gemma", "Q8_0"), ("gemma2", "Q4_1"), ("gemma3", "Q5_0"), ("phi3", "Q4_0")]
)
def test_there_and_back_are_the_same_bytes(tmp_path, kind, type_name):
    model = random_model(kind)
    write_model(tmp_path / "m.gguf", model, type_name, sentencepiece=vocabulary(), **metadata_of(model))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* become floats")
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "one")
    windows = pytest.warns(UserWarning, match="ignores phi3's sliding window of 3 tokens")
    with windows if kind == "phi3" else contextlib.nullcontext():
        report = export_gguf(tmp_path / "one", tmp_path / "again.gguf")
    assert {each.kind for each in report} == {"exact", "float"}
    lowbit.import_checkpoint(tmp_path / "again.gguf", tmp_path / "two")
    assert same_files(tmp_path / "one", tmp_path / "two") == {"lowbit_import.json"}  # contains the file's name
    fields = gguf.GGUFReader(tmp_path / "again.gguf").fields
    scores = fields["tokenizer.ggml.scores"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    assert types == [each[2] for each in vocabulary()]
    tokens = [each[0] for each in vocabulary()]
    joined = [tokens.index(text) for text in ("he", "th", "the", "\u2581the", "in", "er")]
    assert sorted(joined, key=lambda token: -scores[token]) == joined
    # Norms of the Gemma family are stored with 1 added.
    norm = next(each for each in gguf.GGUFReader(tmp_path / "again.gguf").tensors if each.name == "output_norm.weight")
    wanted = model.model.norm.weight.detach() + (1 if "gemma" in kind else 0)
    torch.testing.assert_close(torch.from_numpy(norm.data.copy()), wanted, rtol=0, atol=1e-6)


def test_the_rotation_of_long_texts(tmp_path):
    model = random_model("phi3")
    model.save_pretrained(tmp_path / "in")
    factors = {"short_factor": [1.0 + i / 16 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    rope = factors | {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "attention_factor": 1.25,
    }  # fmt: skip
    edit_json(tmp_path / "in" / "config.json", rope_parameters=rope, original_max_position_embeddings=64, sliding_window=None)
    tokenizer_of(tmp_path, vocabulary()).save_pretrained(tmp_path / "in")
    export_gguf(tmp_path / "in", tmp_path / "m.gguf")
    lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == rope | {"partial_rotary_factor": 1.0} and config["sliding_window"] is None
    assert torch.equal(load(tmp_path / "out")(TOKENS).logits, load(tmp_path / "in")(TOKENS).logits)


def tokenizer_of(directory, tokens):
    """A transformers tokenizer, loaded from a file."""
    model = random_model("llama")
    write_model(directory / "t.gguf", model, sentencepiece=tokens)
    lowbit.import_checkpoint(directory / "t.gguf", directory / "t")
    return AutoTokenizer.from_pretrained(directory / "t")


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A Mistral checkpoint with a tokenizer like Llama 2's, whose normalizer adds the first space."""
    directory = tmp_path_factory.mktemp("mistral")
    config = random_model("llama").config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(**{name: config[name] for name in names}, num_key_value_heads=2, sliding_window=None)
    )
    model.save_pretrained(directory / "m")
    tokenizer_of(directory, vocabulary()).save_pretrained(directory / "m")
    normalizers = [
        {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]  # fmt: skip
    edit_json(
        directory / "m" / "tokenizer.json", pre_tokenizer=None, normalizer={"type": "Sequence", "normalizers": normalizers}
    )
    return directory / "m"


def test_mistral_is_exported_as_llama(mistral, tmp_path):
    export_gguf(mistral, tmp_path / "m.gguf")
    lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    found, expected = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(mistral)
    text = "  the band and Thé <think>in"  # each part is preceded by a space
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert torch.equal(load(tmp_path / "out")(TOKENS).logits, load(mistral)(TOKENS).logits)
    edit_json(mistral / "config.json", sliding_window=16)
    with pytest.raises(ValueError, match="has sliding_window 16 in config.json; GGUF's llama has none"):
        export_gguf(mistral, tmp_path / "w.gguf")
    edit_json(mistral / "config.json", sliding_window=None)


@pytest.mark.parametrize("prefix", [True, False])
def test_the_first_space(mistral, tmp_path, prefix):
    tokenizer = json.loads((mistral / "tokenizer.json").read_text())
    (tmp_path / "m").mkdir()
    for name in os.listdir(mistral):
        (tmp_path / "m" / name).write_bytes((mistral / name).read_bytes())
    if not prefix:
        edit_json(tmp_path / "m" / "tokenizer.json", normalizer=tokenizer["normalizer"]["normalizers"][1])
    export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is prefix
    lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("the")["input_ids"]
    assert [each[0] for each in map(vocabulary().__getitem__, ids)] == ["<s>", "\u2581the" if prefix else "the"]


def without_byte(content: dict) -> None:
    vocab = content["model"]["vocab"]
    vocab["x<0x41>"] = vocab.pop("<0x41>")


def without_a_pair(content: dict) -> None:
    content["model"]["merges"].remove(["t", "h"])


def apart(content: dict) -> None:
    merges = content["model"]["merges"]
    merges.remove(["\u2581t", "he"]) if ["\u2581t", "he"] in merges else None
    merges.append(["\u2581t", "he"])


def cut(content: dict) -> None:
    content["pre_tokenizer"] = {"type": "Whitespace"}


def unigram(content: dict) -> None:
    content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]], "byte_fallback": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_byte, "has no token <0x41>; expected one for each byte"),
        (without_a_pair, "does not merge 't' and 'h', which make a token; llama.cpp would merge them"),
        (apart, "at another rank than other pairs that give the same token; GGUF has one score for a token"),
        (cut, "prepares texts by Prepend, Replace, Whitespace; GGUF's SentencePiece replaces spaces"),
        (unigram, "is Unigram; lowbit writes BPE to GGUF"),
    ],
)
def test_tokenizers_that_are_refused(mistral, tmp_path, change, message):
    content = json.loads((mistral / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "m").mkdir()
    for name in os.listdir(mistral):
        (tmp_path / "m" / name).write_bytes((mistral / name).read_bytes())
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(message)):
        export_gguf(tmp_path / "m", tmp_path / "m.gguf")


def test_settings_that_are_missing_are_those_of_transformers(tmp_path):
    """Some differ from one model to another."""
    defaults = {
        "mistral": {"num_key_value_heads": 8}, "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        "qwen3": {"head_dim": 128}, "gemma2": {"sliding_window": 4096, "query_pre_attn_scalar": 256},
        "gemma": {"head_dim": 256}, "llama": {"num_key_value_heads": 4, "head_dim": 16, "rope_theta": 10000.0},
        "gemma3_text": {"head_dim": 256},
    }  # fmt: skip
    for kind, expected in defaults.items():
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 99}
        config = {"model_type": kind, **sizes, "num_attention_heads": 4}
        found = completed(tmp_path, config)
        assert {key: found.get(key, found["rope_parameters"].get(key)) for key in expected} == expected
        assert completed(tmp_path, found) == found and found.items() >= config.items()
        if kind == "mistral":
            with pytest.raises(ValueError, match="has sliding_window 4096 in config.json; GGUF's llama has none"):
                architecture_metadata(tmp_path, found)
        elif kind != "gemma2":  # whose query_pre_attn_scalar is that of another size
            metadata = architecture_metadata(tmp_path, found)
            assert metadata[f"{metadata['general.architecture']}.attention.layer_norm_rms_epsilon"] == found["rms_norm_eps"]
    del config["hidden_size"]
    assert completed(tmp_path, config) == config  # refused by architecture_metadata
    with pytest.raises(ValueError, match="has hidden_size None in config.json; expected a number above 0"):
        architecture_metadata(tmp_path, config)
    with pytest.raises(ValueError, match="has a config.json that cannot be completed: transformers refuses its settings: "):
        completed(tmp_path, found | {"layer_types": ["other"] * 6, "rms_norm_eps": 1e-6})


@pytest.mark.parametrize("kind", ["gemma", "gemma2"])
def test_a_separate_head_is_refused(tmp_path, kind):
    """In ggml the first two Gemmas read one table; a packed head and a float table are two matrices."""
    random_model(kind).save_pretrained(tmp_path / "float")
    tokenizer_of(tmp_path, vocabulary()).save_pretrained(tmp_path / "float")
    config = lowbit.LowBitConfig(overrides={"*embed_tokens": None, "lm_head": {"bits": 4}})
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "apart", config)
    with pytest.raises(ValueError, match=f"has a separate head .*GGUF's {kind} .*--override lm_head=float"):
        export_gguf(tmp_path / "apart", tmp_path / "m.gguf")
    for name, overrides in {"packed": {}, "left": {"*embed_tokens": None}}.items():
        config = lowbit.LowBitConfig(scale="absmax", overrides=overrides)
        lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / name, config)
        types = {each.name: each.type for each in export_gguf(tmp_path / name, tmp_path / "m.gguf")}
        assert "output.weight" not in types
        assert types["token_embd.weight"] == ("Q4_0" if name == "packed" else "F32")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 5}, "has query_pre_attn_scalar 5 in config.json; GGUF's gemma2 has 32"),
        ("gemma2", {"attn_logit_softcapping": None}, "has attn_logit_softcapping None"),
        ("gemma", {"hidden_act": "gelu"}, "has hidden_act 'gelu' in config.json; GGUF's gemma has 'gelu_pytorch_tanh'"),
        ("gemma3", {"layer_types": ["full_attention"] * 7}, "has layer_types"),
        ("phi3", {"head_dim": 8}, "has head_dim 8 in config.json; GGUF's phi3 has 16"),
    ],
)
def test_settings_that_are_refused(tmp_path, kind, changes, message):
    random_model(kind).config.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        export_gguf(tmp_path, tmp_path / "m.gguf")
