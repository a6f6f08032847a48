"""Compares tokens of the C++ tokenizer with those of the library ``tokenizers``, on random lines of many scripts.

    python tests/python/support/compare_tokens.py LINES [tokenizer.json ...]

The lines are divided among the tokenizers: the given files, and each kind of transformers' tokenizers, trained on such lines.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "exports"))
import transformers
from lowbit import _C
from lowbit.exports.token_file import TextSettings, hard_texts, token_bytes
from lowbit.exports.token_patterns import Unsupported
from test_token_file import CORPUS, WORDS, precompiled
from tokenizers import Tokenizer, trainers
from transformers.tokenization_utils_tokenizers import TokenizersBackend

BATCH = 2000


def kinds() -> Iterator[tuple[str, Tokenizer]]:
    """The tokenizers of transformers that differ in more than their vocabularies."""
    charsmap = base64.b64decode(json.loads(precompiled("nmt_nfkc").__getstate__())["precompiled_charsmap"])
    known = set()
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/tokenization_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        except (ImportError, NameError) as error:
            print(f"{file.stem}: not imported: {str(error).splitlines()[0]}")
            continue
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if not issubclass(kind, TokenizersBackend) or kind.__module__ != module.__name__:
                continue
            has_charsmap = "_spm_precompiled_charsmap" in inspect.signature(kind).parameters
            try:
                made = kind(**({"_spm_precompiled_charsmap": charsmap} if has_charsmap else {}))
                backend = Tokenizer.from_str(made._tokenizer.to_str())
            except Exception as error:  # of classes that need files
                print(f"{name}: not made: {str(error).splitlines()[0]}")
                continue
            content = json.loads(backend.to_str())
            key = json.dumps([content[part] for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor")])
            if key in known:
                continue
            known.add(key)
            yield name, trained(backend, content["model"])


def trained(backend: Tokenizer, model: dict[str, Any]) -> Tokenizer:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    numbers = {number: text for text, number in vocabulary.items()}
    special = [numbers.get(number, f"<filler {number}>") for number in range(max(numbers, default=-1) + 1)]
    if model.get("byte_fallback"):
        special += [text for byte in range(256) if (text := f"<0x{byte:02X}>") not in vocabulary]
    few: dict[str, Any] = {"special_tokens": special, "show_progress": False, "vocab_size": 8000 + len(special)}
    if model["type"] == "Unigram":
        unknown = model["vocab"][model["unk_id"]][0] if model["unk_id"] is not None else None
        trainer = trainers.UnigramTrainer(unk_token=unknown, **few)
    elif model["type"] == "WordPiece":
        trainer = trainers.WordPieceTrainer(continuing_subword_prefix=model["continuing_subword_prefix"], **few)
    else:
        prefix, suffix = model["continuing_subword_prefix"] or "", model["end_of_word_suffix"] or ""
        trainer = trainers.BpeTrainer(continuing_subword_prefix=prefix, end_of_word_suffix=suffix, limit_alphabet=600, **few)
    backend.train_from_iterator([*CORPUS, *hard_texts(2000, 11, WORDS)], trainer)
    if model["type"] != "Unigram":
        return backend
    content, last = json.loads(backend.to_str()), dict[str, int]()
    for number, entry in enumerate(content["model"]["vocab"]):  # learned tokens may be among the special ones
        if entry[0] in last:
            content["model"]["vocab"][last[entry[0]]][0] = f"<filler {number}>"
        last[entry[0]] = number
    return Tokenizer.from_str(json.dumps(content))


def compare(name: str, backend: Tokenizer, lines: int, seed: int) -> int:
    """Returns the number of lines that differ."""
    backend.no_truncation()
    backend.no_padding()
    made = _C.Tokenizer(token_bytes(backend, TextSettings()))
    names = [token.content for token in backend.get_added_tokens_decoder().values()]
    vocabulary = sorted(backend.get_vocab().values())
    few = [[token] for token in vocabulary[:: len(vocabulary) // 4096 + 1]]
    pieces = [*names[:256], *backend.decode_batch(few, skip_special_tokens=False)]
    wrong = 0
    for at in range(0, lines, BATCH):
        texts = hard_texts(min(BATCH, lines - at), seed * 1_000_003 + at, pieces)
        for text, encoding in zip(texts, backend.encode_batch(texts), strict=True):
            ids = encoding.ids
            if made.encode(text, True) != ids or made.decode(ids, True) != backend.decode(ids):
                wrong += 1
                if wrong <= 3:
                    print(f"{name}: {text!a} differs")
    print(f"{name}: {lines} lines, {wrong} differ", flush=True)
    return wrong


def main() -> None:
    lines, files = int(sys.argv[1]), sys.argv[2:]
    backends = [*((Path(file).stem, Tokenizer.from_file(file)) for file in files), *kinds()]
    wrong, compared = 0, 0
    for seed, (name, backend) in enumerate(backends):
        try:
            wrong += compare(name, backend, lines // len(backends), seed)
            compared += 1
        except Unsupported as error:
            print(f"{name}: refused: {error}", flush=True)
    print(f"{compared} of {len(backends)} tokenizers, {lines // len(backends) * compared} lines, {wrong} differ")
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
