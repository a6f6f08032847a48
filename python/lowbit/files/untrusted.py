"""Files that others wrote, and what other libraries make of them: a result, or one sentence that names the file."""

from __future__ import annotations

import json
import os
import stat
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MOST_DEPTH = 100  # Python parses some hundreds, and whoever walks through the result may not get as deep
MOST_JSON = 64 << 20  # bytes: the index of 140,000 tensors has 15 million, a config some thousands
_READERS = ("transformers", "huggingface_hub", "tokenizers", "safetensors", "jinja2")  # who interpret what files say


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A file of one JSON object.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than 64 MiB, not UTF-8, not JSON, nested too deeply, has a name twice, or is no object.
    """
    path = Path(path)
    check_regular(path)
    with open(path, "rb") as file:
        data = file.read(MOST_JSON + 1)
    if len(data) > MOST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; expected at most {MOST_JSON}")
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected an object")
    level: list[Any] = [content]
    for _ in range(_MOST_DEPTH):
        level = [inner for container in level for inner in (container.values() if isinstance(container, dict) else container)
                 if isinstance(inner, dict | list)]  # fmt: skip
        if not level:
            return content
    raise ValueError(f"{path} is nested too deeply; expected up to {_MOST_DEPTH} levels")


def check_regular(path: Path) -> None:
    """Raises ValueError for a directory, and for a pipe or a device: opening it may wait, and reading it never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise ValueError(f"{path} is {kind}; expected a file")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {twice!r} twice")
    return content


def printable(text: str) -> str:
    """What a terminal can show of a text, the rest as escapes: a name in a file may hold commands to a terminal."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def one_line(error: BaseException | str, most: int = 1000) -> str:
    """What an exception says, in one line that a terminal can show."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = printable(text)
    return text if len(text) <= most else f"{text[:most]} [...]"


def raised_by_reader(error: BaseException) -> bool:
    """Whether a library that reads files for us raised this, over what the file says; not our own code by mistake.

    Of their code and ours, whoever called last did: torch and Python itself do as they are told.
    """
    if type(error).__module__ == "pyo3_runtime":  # a panic in Rust: of tokenizers or safetensors, and no Exception
        return True
    if type(error) is Exception:  # tokenizers raises no other, without a frame of its own
        return True
    if not isinstance(error, Exception):  # Ctrl-C
        return False
    last = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "lowbit" or package in _READERS:
            last = package
    return last in _READERS


@contextmanager
def interpreting(what: str) -> Iterator[None]:
    """Around what other libraries make of a file: whatever they raise becomes a ValueError, "`what`: its text".

    What our own code raises passes as it is: a mistake of ours must not look like a damaged file.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except BaseException as error:
        if not raised_by_reader(error):
            raise
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        raise ValueError(f"{what}: {kind}{one_line(error)}") from error
