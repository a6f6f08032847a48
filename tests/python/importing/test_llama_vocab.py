"""Imported tokenizers against the vectors of llama.cpp: `make test-llama-vocab LLAMA_CPP=directory of llama.cpp`.

Its models directory has vocabularies without tensors, ggml-vocab-NAME.gguf. Beside each are texts, NAME.gguf.inp, and the
ids of their tokens, NAME.gguf.out.
"""

import os
import warnings
from pathlib import Path

import pytest
from gguf_files import file_bytes
from lowbit.files.gguf_reader import read_gguf
from lowbit.hf.gguf_tokenizer import save_tokenizer
from test_gguf_tokenizer import metadata
from transformers import AutoTokenizer

DIRECTORY = os.environ.get("LOWBIT_LLAMA_VOCAB")
BETWEEN = "\n__ggml_vocab_test__\n"


def vectors(vocabulary: Path) -> list[tuple[str, list[int]]]:
    """The texts and their tokens."""
    texts = vocabulary.with_name(vocabulary.name + ".inp").read_bytes().decode().split(BETWEEN)
    lines = vocabulary.with_name(vocabulary.name + ".out").read_text().splitlines()
    if len(texts) == len(lines) + 1:
        texts.pop()  # after the last separator there is no text
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=True)]


def differences(vocabulary: Path, target: Path) -> list[tuple[str, list[int], list[int]]]:
    """Texts whose tokens differ from those in the file."""
    values = read_gguf(vocabulary).metadata
    count = len(values["tokenizer.ggml.tokens"])
    save_tokenizer(vocabulary, values, values["general.architecture"], count, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = ((text, wanted, tokenizer(text, add_special_tokens=False)["input_ids"]) for text, wanted in vectors(vocabulary))
    return [each for each in found if each[1] != each[2]]


VOCABULARIES = sorted(
    path for path in Path(DIRECTORY or ".").glob("ggml-vocab-*.gguf") if path.with_name(path.name + ".out").exists()
)


@pytest.mark.skipif(DIRECTORY is None, reason="needs llama.cpp's models: make test-llama-vocab LLAMA_CPP=directory")
def test_there_are_vocabularies():
    assert VOCABULARIES, f"{DIRECTORY} has no ggml-vocab-*.gguf with .inp and .out"


@pytest.mark.parametrize(
    "vocabulary", VOCABULARIES if DIRECTORY else (), ids=lambda path: path.stem.removeprefix("ggml-vocab-")
)
def test_vectors_of_llama_cpp(tmp_path, vocabulary):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            wrong = differences(vocabulary, tmp_path)
        except ValueError as error:
            pytest.skip(f"lowbit refuses this tokenizer: {error}")
    said = [str(each.message) for each in caught if vocabulary.name in str(each.message)]
    if wrong and said:
        pytest.xfail(f"{len(wrong)} of {len(vectors(vocabulary))} texts differ, as a warning of the import says: {said[0]}")
    assert not wrong


TEXTS = ["ab", "", " a\n\nb ", "a<|plain|>b", "é漢🎈", "aab  ba"]


def test_the_comparison_itself(tmp_path):
    """Without llama.cpp's files: it accepts equal token ids, and finds a wrong one."""
    values = metadata("gpt-2") | {"general.architecture": "llama"}
    vocabulary = tmp_path / "ggml-vocab-x.gguf"
    vocabulary.write_bytes(file_bytes(values, []))
    letter = values["tokenizer.ggml.tokens"].index
    bytes_of = {chr(byte): letter(chr(byte)) for byte in range(33, 127)} | {" ": letter("Ġ"), "\n": letter("Ċ")}
    others = [letter(chr(code)) for code in (0xC3, 0xA9, 0xE6)] + [letter("¼"), letter("¢")]
    others += [letter("ð"), letter("Ł"), letter("İ"), letter("Ī")]
    wanted = [
        [letter("ab")], [], [bytes_of[character] for character in " a\n\nb "],
        [bytes_of["a"], letter("<|plain|>"), bytes_of["b"]], others,
        [bytes_of["a"], letter("ab"), letter("  "), bytes_of["b"], bytes_of["a"]],
    ]  # fmt: skip
    (tmp_path / "ggml-vocab-x.gguf.inp").write_bytes(BETWEEN.join([*TEXTS, ""]).encode())
    for wrong in (False, True):
        wanted[0][0] += wrong
        lines = "".join(" ".join(map(str, each)) + "\n" for each in wanted)
        (tmp_path / "ggml-vocab-x.gguf.out").write_text(lines)
        found = differences(vocabulary, tmp_path / str(wrong))
        assert found == ([("ab", [letter("ab") + 1], [letter("ab")])] if wrong else [])
