"""Files of `lowbit export --to gguf`, loaded and computed by llama.cpp: `make test-llama-cpp`."""

import ctypes

import lowbit
import numpy as np
import pytest
import torch
from checkpoints import edit_json, make_model
from command_line import FLOAT
from gguf_files import write_model
from llama_cpp_peer import LlamaCpp, find_library
from lowbit import llm
from lowbit.exports.gguf import export_gguf
from lowbit.llm.loading import load_model, load_tokenizer
from test_export_gguf_families import tokenizer_of, vocabulary
from test_importing_gguf import random_model
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

FAMILIES = ["llama", "tied", "wide", "llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"]
PROMPT = [1, 300, 17, 402, 290, 311, 350, 277, 263, 341]  # longer than the windows, of three tokens
COUNT = 16
# llama.cpp's name of a file type -> a type of tensors in it. TQ1_0 and TQ2_0 are missing, because the model is so poor with
# three values that rounding of activations moves logits by 0.4 of their deviation (llama.cpp's by 0.3).
QUANTIZED = {
    "Q4_0": "Q4_0", "Q5_1": "Q5_1", "Q8_0": "Q8_0", "Q2_K": "Q2_K", "Q3_K_M": "Q3_K", "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K",
    "Q6_K": "Q6_K", "IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_XS",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama_cpp():
    return find_library()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), vocabulary())


def family(kind: str):
    if kind not in ("mistral", "llama3", "phi3"):
        return random_model(kind)
    model = random_model("phi3" if kind == "phi3" else "llama")
    config = model.config
    if kind == "phi3":
        config.sliding_window = None  # llama.cpp does not support windows here
    elif kind == "llama3":
        config.rope_parameters = {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }  # fmt: skip
    else:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(config, name) for name in names}
        sizes |= {"num_key_value_heads": 2, "rope_parameters": config.rope_parameters}
        mistral = MistralForCausalLM(MistralConfig(**sizes, sliding_window=None))
        mistral.load_state_dict(model.state_dict())
        return mistral.eval()
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_families(llama_cpp, tokenizer, tmp_path, kind):
    family(kind).save_pretrained(tmp_path / "float")
    tokenizer.save_pretrained(tmp_path / "float")
    # Floats: rotary embeddings, order of rows, windows, norms and settings are right. ggml reads Gemma's GELU from a float16
    # table.
    export_gguf(tmp_path / "float", tmp_path / "float.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    tokens, expected = list(PROMPT), []
    with torch.no_grad():
        for _ in range(COUNT):
            expected.append(model(torch.tensor([tokens])).logits[0, -1].numpy())
            tokens.append(int(expected[-1].argmax()))
    with LlamaCpp(llama_cpp, tmp_path / "float.gguf") as theirs:
        bound = 4e-3 if "gemma" in kind else 1e-5
        assert np.abs(theirs.logits(PROMPT) - expected[0]).max() < bound * expected[0].std()
    with LlamaCpp(llama_cpp, tmp_path / "float.gguf") as theirs:
        assert theirs.greedy(PROMPT, COUNT) == tokens[len(PROMPT) :]
    # Packed: the two round activations to 8 bits in different blocks.
    config = lowbit.LowBitConfig(scale="absmax")
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", config)
    edit_json(tmp_path / "packed" / "config.json", dtype="float32")
    written = export_gguf(tmp_path / "packed", tmp_path / "packed.gguf")
    assert {each.type for each in written} >= {"Q4_0", "F32"}
    with LlamaCpp(llama_cpp, tmp_path / "packed.gguf") as theirs:
        found = theirs.logits(PROMPT)
    expected = logits_of(load_model(tmp_path / "packed"), PROMPT)
    assert np.abs(found - expected).max() < 0.2 * expected.std()


def logits_of(model, tokens: list[int]) -> np.ndarray:
    step = llm.Decoder(model, 64)
    return step(torch.tensor([tokens]), torch.zeros(1, dtype=torch.int64))[0].detach().numpy()


TEXTS = ["the band and the", "  two spaces", "Thé <think>in the end", "", " ", "a\nb", "\u4e16\u754c 12"]


def test_sentencepiece(llama_cpp, tokenizer, tmp_path):
    random_model("llama").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "m")
    with LlamaCpp(llama_cpp, tmp_path / "m.gguf") as theirs:
        assert [theirs.tokenize(text) for text in TEXTS] == [ours(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "qwen35", "lfm2", "dbrx", "tekken", "deepseek-v3", "glm4", "smollm"])
def test_ways_of_cutting_words(llama_cpp, tmp_path, pre):
    """Tokens that only some rules allow: digits, letters with marks, signs with letters, several spaces."""
    letters = list(bytes_to_unicode().values())
    merges = ("1 2", "12 3", "123 4", "t h", "th e", "! a", "! !", "Ġ Ġ", "ĠĠ Ġ", "Ġ a", "a 1", "e Ì", "eÌ ģ", "' s", "Ċ Ċ")
    tokens = ["<s>", "</s>", *letters, *(merge.replace(" ", "") for merge in merges)]
    torch.manual_seed(0)
    model = make_model(vocab_size=len(tokens), dtype=torch.float32)
    write_model(tmp_path / "m.gguf", model, tokens=tokens, pre=pre, merges=merges)
    lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the 1234a1 12345!a   a!!  the's e\u0301 \u4e2d\u65871 the\n\n  a1.\n it'S \t'the"
    with LlamaCpp(llama_cpp, tmp_path / "m.gguf") as theirs:
        assert theirs.tokenize(text) == ours.encode(text)


def test_the_shipped_model(llama_cpp, tmp_path):
    """Its matrices are bfloat16, to which ggml also rounds activations."""
    config = lowbit.LowBitConfig(embedding_bits=6, scale="absmax")
    lowbit.quantize_checkpoint(FLOAT, tmp_path / "packed", config)
    edit_json(tmp_path / "packed" / "config.json", dtype="float32")
    tokens = load_tokenizer(FLOAT)("Return the number of items")["input_ids"]
    models = {FLOAT: load_model(FLOAT).float(), tmp_path / "packed": load_model(tmp_path / "packed")}
    for source, model in models.items():
        with pytest.warns(UserWarning, match="the tokenizer in .* cuts words"):
            export_gguf(source, tmp_path / "m.gguf")
        with LlamaCpp(llama_cpp, tmp_path / "m.gguf") as theirs:
            found = theirs.logits(tokens)
        expected = logits_of(model, tokens)
        assert np.abs(found - expected).max() < (0.02 if source == FLOAT else 0.2) * expected.std()
        assert found.argmax() == expected.argmax()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_files_that_llama_cpp_quantized(llama_cpp, tmp_path, kind):
    """examples/tiny_llama, quantized by llama.cpp: llama.cpp's logits for the file, and ours for its import."""
    with pytest.warns(UserWarning, match="the tokenizer in .* cuts words"):
        export_gguf(FLOAT, tmp_path / "float.gguf")
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # replaces that of an earlier model
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    files = [str(tmp_path / name).encode() for name in ("float.gguf", "theirs.gguf")]
    assert llama_cpp.llama_model_quantize(*files, settings) == 0
    summary = lowbit.import_checkpoint(tmp_path / "theirs.gguf", tmp_path / "packed")
    kinds = {tensor.source: tensor.kind for tensor in summary.tensors}
    assert QUANTIZED[kind] in kinds and set(kinds.values()) <= {"exact", "rounded", "float"}, kinds
    tokens = load_tokenizer(FLOAT)("Return the number of items")["input_ids"]
    with LlamaCpp(llama_cpp, tmp_path / "theirs.gguf") as theirs:
        found = theirs.logits(tokens)
    expected = logits_of(load_model(tmp_path / "packed"), tokens)
    assert np.abs(found - expected).max() < 0.2 * expected.std()
