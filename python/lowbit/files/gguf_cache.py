"""The directory next to a GGUF file that caches its import, and whether it is current."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .gguf_reader import parts_of
from .untrusted import read_json

REPORT = "lowbit_import.json"
VERSION = 4  # increases when the result of an import of the same file changes
_SUFFIX = ".lowbit"


def file_states(paths: Iterable[Path]) -> list[dict[str, str | int]]:
    """Names, sizes and times of files, to detect later changes."""
    return [{"name": path.name, "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns} for path in paths]


def cache_of(path: str | os.PathLike[str]) -> Path:
    """The cache directory of a GGUF file: "model.gguf.lowbit" next to "model.gguf"."""
    path = Path(path)
    return path.with_name(path.name + _SUFFIX)


def is_current(path: str | os.PathLike[str]) -> bool:
    """Whether the cache was written by this version of the importer, from files with the current sizes and times.

    Raises:
        OSError, ValueError: something else exists at its path, or a part of the file is missing.
    """
    cache = cache_of(path)
    if not cache.exists():
        return False
    if not (cache / REPORT).exists():
        raise ValueError(f"{cache} exists but is not an import of {path}; move it away")
    report = read_json(cache / REPORT)
    return report.get("version") == VERSION and report.get("files") == file_states(parts_of(Path(path)))
