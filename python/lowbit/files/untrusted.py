"""Reads untrusted files, also through other libraries; every error is one line that names the file."""

from __future__ import annotations

import gc
import json
import os
import stat
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MOST_DEPTH = 100  # Python parses several hundred levels, but code that walks the result may recurse less deeply
MOST_JSON = 64 << 20  # bytes; the index of 140,000 tensors has 15 million, a config several thousand
_READERS = ("transformers", "huggingface_hub", "tokenizers", "safetensors", "jinja2")  # packages that interpret files


def read_json(path: str | os.PathLike[str], shallow: bool = False) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        shallow: whether the caller reads only the outer levels, so that deeper ones need no check, which takes time.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than 64 MiB, not UTF-8, not JSON, nested too deeply, not an object, or has a duplicate key.
    """
    path = Path(path)
    check_regular(path)
    with open(path, "rb") as file:
        data = file.read(MOST_JSON + 1)
    if len(data) > MOST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; expected at most {MOST_JSON}")
    try:
        with _without_collections():
            content = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected an object")
    if shallow:
        return content
    level: list[Any] = [content]
    for _ in range(_MOST_DEPTH):
        level = [inner for container in level for inner in (container.values() if isinstance(container, dict) else container)
                 if isinstance(inner, dict | list)]  # fmt: skip
        if not level:
            return content
    raise ValueError(f"{path} is nested too deeply; expected up to {_MOST_DEPTH} levels")


@contextmanager
def _without_collections() -> Iterator[None]:
    """A context without garbage collection, which takes most of the time of parsing a tokenizer, and finds nothing in it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_regular(path: Path) -> None:
    """Raises ValueError for a directory, a pipe or a device: opening one may block, and reading it may never end."""
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
    """Escapes characters that are not printable, because a name in a file may contain terminal control sequences."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def one_line(error: BaseException | str, most: int = 1000) -> str:
    """The message of an exception as one printable line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = printable(text)
    return text if len(text) <= most else f"{text[:most]} [...]"


def raised_by_reader(error: BaseException) -> bool:
    """Whether a library that reads files raised this because of a file's content, rather than through a bug of lowbit.

    The innermost frame of lowbit or of these libraries decides; frames of torch and Python are ignored.
    """
    # pyo3_runtime: a Rust panic of tokenizers or safetensors, which is not an Exception.
    if type(error).__module__.partition(".")[0] in ("pyo3_runtime", *_READERS):
        return True
    if type(error) is Exception:  # raised by tokenizers, which has no Python frames
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
    """A context around other libraries that read a file: turns their exceptions into a ValueError "`what`: message".

    Exceptions of lowbit pass unchanged, so that a bug does not look like a damaged file.
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
