"""Loads tokenizer.json by the library ``tokenizers``, after a check for contradictions, of which it keeps one side silently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .untrusted import interpreting, read_json

TOKENIZER = "tokenizer.json"
_SPARE = 1 << 16  # numbers without a token that a tokenizer may have, besides 16 for each token


def check_tokenizer(directory: Path) -> None:
    """Checks the numbers of the tokens in tokenizer.json, if there is one; what the library refuses is left to it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a JSON object, or as :func:`check_numbers`.
    """
    if (directory / TOKENIZER).exists():
        try:
            _check(read_json(directory / TOKENIZER, shallow=True))
        except ValueError as error:
            raise ValueError(f"the tokenizer in {directory} does not load: {error}") from error


def load_backend(directory: Path, checked: bool = False) -> Any:
    """The Tokenizer of the library ``tokenizers`` in a directory, without truncation and padding.

    Args:
        checked: whether :func:`check_tokenizer` has accepted this very file before, which its checksum in a plan shows.

    Raises:
        OSError, ValueError: the file is missing or damaged, or as :func:`check_numbers`.
    """
    from tokenizers import Tokenizer

    if not checked:
        check_tokenizer(directory)
    content = (directory / TOKENIZER).read_bytes()
    with interpreting(f"the tokenizer in {directory} does not load"):
        backend = Tokenizer.from_buffer(content)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check(content: dict[str, Any]) -> None:
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # scores, in the order of the numbers
        firsts = [entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary]
        vocabulary = {text: number for number, text in enumerate(firsts) if isinstance(text, str)}
    added = added if isinstance(added, list) and all(isinstance(each, dict) for each in added) else []
    check_numbers(vocabulary if isinstance(vocabulary, dict) else {}, added)


def check_numbers(vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]]) -> None:
    """Checks that each token has a number of its own, and that few numbers have no token.

    Args:
        vocabulary: the tokens of the model, and their numbers.
        added: the added tokens, each with its "content" and "id".

    Raises:
        ValueError: two tokens have one number, a token has two, or a number is far beyond the others.
    """
    numbers: dict[str, Any] = dict(vocabulary)
    for each in added:
        text, number = each.get("content"), each.get("id")
        if isinstance(text, str) and (before := numbers.setdefault(text, number)) != number:
            raise ValueError(f"the token {text!r} has the numbers {before} and {number}; expected one of them")
    if {*map(type, numbers.values())} != {int}:
        return  # there are none, or the library says what is wrong
    texts = {number: text for text, number in numbers.items()}
    if len(texts) < len(numbers):
        other, text = next((texts[number], text) for text, number in numbers.items() if texts[number] != text)
        raise ValueError(f"the tokens {text!r} and {other!r} both have the number {numbers[text]}; expected a number for each")
    most = 16 * len(texts) + _SPARE
    if (largest := max(texts)) >= most:
        raise ValueError(
            f"the token {texts[largest]!r} has the number {largest}, and there are {len(texts)} tokens; expected numbers "
            f"below {most}"
        )
