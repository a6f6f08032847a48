"""Tokenizers of GGUF files: special tokens stay whole and have the file's ids, and words are split as in llama.cpp."""

from types import SimpleNamespace

import numpy as np
import pytest
from lowbit.hf import gguf_tokenizer
from lowbit.hf.gguf_tokenizer import save_tokenizer
from lowbit.importing.gguf_metadata import generation_config
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
# Control tokens (3) and user-defined tokens (4), one of blanks, one of letters that stand for bytes.
SPECIAL = {BOS: 3, EOS: 3, "<｜User｜>": 4, "<|plain|>": 3, "  ": 4, "Ġx": 3, "é<": 3, "<｜tool｜>": 3}


def metadata(pre: str, **more) -> dict:
    tokens = [*LETTERS, "ab", *SPECIAL]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + list(SPECIAL.values()), "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": tokens.index(BOS), "tokenizer.ggml.eos_token_id": tokens.index(EOS),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }  # fmt: skip


def loaded(tmp_path, values: dict, architecture: str = "llama"):
    save_tokenizer(tmp_path / "x.gguf", values, architecture, len(values["tokenizer.ggml.tokens"]), tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "pre", ["deepseek-r1-qwen", "deepseek-llm", "deepseek-coder", "deepseek-v3", "falcon", "llama-bpe", "gpt-2"]
)
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.filterwarnings("error::UserWarning")
def test_special_tokens_are_whole_and_have_the_numbers_of_the_file(tmp_path, pre, add_bos):
    values = metadata(pre, add_bos_token=add_bos)
    tokens = values["tokenizer.ggml.tokens"]
    tokenizer = loaded(tmp_path, values, "qwen2" if "qwen" in pre else "llama")
    a, b, ab = map(tokens.index, ("a", "b", "ab"))
    for text in SPECIAL:
        assert tokenizer.convert_tokens_to_ids(text) == tokens.index(text)
        assert tokenizer(f"a{text}b", add_special_tokens=False)["input_ids"] == [a, tokens.index(text), b]
    assert tokenizer("ab")["input_ids"] == [tokens.index(BOS)] * add_bos + [ab]
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)
    assert set(tokenizer.all_special_ids) == {tokens.index(BOS), tokens.index(EOS)}
    special = {text for text, kind in SPECIAL.items() if kind == 3}
    assert {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} == special
    assert tokenizer.decode(tokenizer("aé b", add_special_tokens=False)["input_ids"]) == "aé b"


@pytest.mark.parametrize("types", [None, [1] * (257 + len(SPECIAL))])
def test_tokens_that_the_file_names_are_control_tokens_of_any_type(tmp_path, types):
    values = metadata("deepseek-llm", add_bos_token=True) | {"tokenizer.ggml.token_type": types}
    tokens = values["tokenizer.ggml.tokens"]
    if types is None:
        del values["tokenizer.ggml.token_type"]
    tokenizer = loaded(tmp_path, values)
    first, last, b = map(tokens.index, (BOS, EOS, "b"))
    assert tokenizer(f"{EOS}b")["input_ids"] == [first, last, b]
    assert {first, last} == set(tokenizer.all_special_ids)


@pytest.mark.parametrize("kind, ends", [(3, [0, 1]), (4, [0, 1]), (1, [0])])
def test_only_control_and_user_defined_tokens_end_a_turn(kind, ends):
    values = {"tokenizer.ggml.tokens": ["</s>", "<|im_end|>"], "tokenizer.ggml.token_type": np.array([3, kind], np.int32)}
    config = {"vocab_size": 2, "bos_token_id": None, "pad_token_id": None, "eos_token_id": 0}
    found = generation_config(SimpleNamespace(all=values, path="x.gguf"), config)
    assert found == {"eos_token_id": ends}


def test_an_empty_control_token_matches_nothing(tmp_path):
    values = metadata("llama-bpe")
    values["tokenizer.ggml.tokens"].append("")
    values["tokenizer.ggml.token_type"].append(3)
    assert loaded(tmp_path, values)("ab")["input_ids"] == [values["tokenizer.ggml.tokens"].index("ab")]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"token_type": [1.5] * 265}, "has the type 1.5 of a token; expected 0 to 6"),
        ({"token_type": ["x"] * 265}, "has the type 'x' of a token; expected 0 to 6"),
        ({"token_type": [77] * 265}, "has the type 77 of a token; expected 0 to 6"),
        ({"model": "llama"}, "has the score None of a token; expected a finite number for each"),
        ({"model": "llama", "scores": [float("nan")] * 265}, "has the score nan of a token"),
        ({"model": "llama", "scores": ["x"] * 265}, "has the score 'x' of a token"),
    ],
)
def test_types_and_scores_of_tokens_are_checked(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        loaded(tmp_path, metadata("llama-bpe", **changes))


def test_a_special_token_with_another_number_is_refused(tmp_path, monkeypatch):
    build = gguf_tokenizer._with_whole_tokens
    for without in (BOS, "<｜tool｜>"):
        monkeypatch.setattr(
            gguf_tokenizer, "_with_whole_tokens",
            lambda backend, tokens, types, without=without: build(
                backend, tokens, [1 if token == without else kind for token, kind in zip(tokens, types, strict=True)]
            ),
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"has the special token .* as 2\d\d; its tokenizer, as transformers .* gives"):
            loaded(tmp_path, metadata("llama-bpe"))


# How llama.cpp's expressions of each rule split a text.
CUT = {
    "falcon": [("I've 12345 (x)!\n", ["I", "'", "ve", "Ġ", "123", "45", "Ġ", "(", "x", ")!", "Ċ"])],
    "deepseek-coder": [("ab 12\nc, d", ["ab", "Ġ", "1", "2", "Ċ", "c", ",", "Ġd"])],
    "deepseek-llm": [("Ab 12\nc, d𝐀  ", ["Ab", "Ġ", "12", "Ċ", "c", ",", "Ġd", "ðĿĲĢ", "ĠĠ"])],
}


@pytest.mark.parametrize("pre", CUT)
def test_words_are_split_as_the_rule_says(tmp_path, pre):
    values = metadata(pre)
    values["tokenizer.ggml.token_type"] = [kind if kind == 3 else 1 for kind in values["tokenizer.ggml.token_type"]]
    cut = loaded(tmp_path, values).backend_tokenizer.pre_tokenizer
    for text, expected in CUT[pre]:
        assert [piece for piece, _ in cut.pre_tokenize_str(text)] == expected
