"""Adds a note to a packed checkpoint's model card (README.md) that says how to load the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

CARD = "README.md"

_NOTE = """<!-- lowbit: begin -->
> The weights of this checkpoint are packed by lowbit, which is needed to load it: run `pip install '.[llm]'` in a clone of
> lowbit's repository. lowbit is not on PyPI yet. transformers and the programs that use it then load the checkpoint without an
> import of lowbit. Without lowbit transformers stops and reports mismatched sizes. Do not pass `ignore_mismatched_sizes=True`
> there: the model would run with random weights.
<!-- lowbit: end -->
"""
_FOUND = re.compile(r"<!-- lowbit: begin -->.*?<!-- lowbit: end -->\r?\n(?:\r?\n)?", re.S)
_FRONT_MATTER = re.compile(r"---\r?\n.*?\n---\r?\n", re.S)  # YAML, which hubs read only at the beginning


def write_note(directory: Path) -> None:
    """Adds the note to the model card of a checkpoint, creating the card if needed."""
    text = _FOUND.sub("", _read(directory))
    matter = _FRONT_MATTER.match(text)
    at = matter.end() if matter else 0
    _write(directory, text[:at] + _NOTE + ("\n" if text[at:] else "") + text[at:])


def without_note(directory: Path) -> str:
    """The text of a checkpoint's model card without the note; empty if there is no other text."""
    return _FOUND.sub("", _read(directory))


def remove_note(directory: Path) -> None:
    """Removes the note, and the card if nothing else is left."""
    found = _read(directory)
    text = _FOUND.sub("", found)
    if text:
        _write(directory, text)
    elif found:
        (directory / CARD).unlink()


# The card belongs to the model's author: keep bytes that are not UTF-8, and its line endings.
def _read(directory: Path) -> str:
    path = directory / CARD
    return path.read_bytes().decode(errors="surrogateescape") if path.is_file() else ""


def _write(directory: Path, text: str) -> None:
    (directory / CARD).write_bytes(text.encode(errors="surrogateescape"))
