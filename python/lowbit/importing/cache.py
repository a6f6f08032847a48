"""The packed checkpoint beside a GGUF file, for commands that are given the file itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.gguf import parts_of
from ..files.untrusted import read_json
from .gguf import open_gguf
from .report import REPORT, VERSION, file_states
from .write import write_checkpoint

_SUFFIX = ".lowbit"


def cache_of(path: str | os.PathLike) -> Path:
    """Where the import of a GGUF file is kept: "model.gguf.lowbit" beside "model.gguf"."""
    path = Path(path)
    return path.with_name(path.name + _SUFFIX)


def is_current(path: str | os.PathLike) -> bool:
    """Whether the cache was made of these very files, as their sizes and times say, by an import of this version.

    Raises:
        OSError, ValueError: there is something else in its place, or a part of the file is missing.
    """
    cache = cache_of(path)
    if not cache.exists():
        return False
    if not (cache / REPORT).exists():
        raise ValueError(f"{cache} is in the place of the import of {path}, but is none; move it away")
    said: dict[str, Any] = read_json(cache / REPORT)
    return said.get("version") == VERSION and said.get("files") == file_states(parts_of(Path(path)))


def import_to_cache(path: str | os.PathLike, progress: Callable[[int, int, str], None] | None = None) -> Path:
    """Imports a GGUF file to its cache, in the place of one that is not current.

    Raises:
        OSError, ValueError: as :func:`is_current` and :func:`lowbit.import_checkpoint`.
    """
    cache = cache_of(path)
    if is_current(path):
        return cache
    source = open_gguf(path)  # refused before the old one is gone
    if cache.exists():
        shutil.rmtree(cache)
    write_checkpoint(source, cache.absolute(), max_shard_bytes=5_000_000_000, progress=progress)
    return cache
