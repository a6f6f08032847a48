"""Tokenizers of GGUF files: special tokens are whole and have the file's numbers, and words are cut as llama.cpp cuts them."""

import pytest
from lowbit.hf import gguf_tokenizer
from lowbit.hf.gguf_tokenizer import save_tokenizer
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
# Control tokens (3) and those of the user (4), one of them made of blanks, one of letters that stand for bytes.
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


# What llama.cpp's expressions of each rule make of a text.
CUT = {
    "falcon": [("I've 12345 (x)!\n", ["I", "'", "ve", "Ġ", "123", "45", "Ġ", "(", "x", ")!", "Ċ"])],
    "deepseek-coder": [("ab 12\nc, d", ["ab", "Ġ", "1", "2", "Ċ", "c", ",", "Ġd"])],
    "deepseek-llm": [("Ab 12\nc, d𝐀  ", ["Ab", "Ġ", "12", "Ċ", "c", ",", "Ġd", "ðĿĲĢ", "ĠĠ"])],
}


@pytest.mark.parametrize("pre", CUT)
def test_words_are_cut_as_the_rule_says(tmp_path, pre):
    values = metadata(pre)
    values["tokenizer.ggml.token_type"] = [kind if kind == 3 else 1 for kind in values["tokenizer.ggml.token_type"]]
    cut = loaded(tmp_path, values).backend_tokenizer.pre_tokenizer
    for text, expected in CUT[pre]:
        assert [piece for piece, _ in cut.pre_tokenize_str(text)] == expected
