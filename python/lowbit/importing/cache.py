"""Caches the import of a GGUF file next to it, for commands that take the file directly."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..files.gguf_reader import parts_of
from ..files.untrusted import read_json
from .gguf_source import open_gguf
from .summary import REPORT, VERSION, file_states
from .write import READ, begin_step, write_checkpoint

_LOG = logging.getLogger(__name__)
_SUFFIX = ".lowbit"


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


@contextmanager
def _locked(path: Path, how: int, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """A context that holds the lock of a file or directory; ``how`` is fcntl.LOCK_SH or LOCK_EX.

    Does nothing if the file system has no locks. ``waiting`` is called if another process holds the lock.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.info("waiting for another process that holds %s", path)
            if waiting is not None:
                waiting()
            fcntl.flock(descriptor, how)
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(descriptor)


@contextmanager
def loading_from_cache(
    path: str | os.PathLike[str],
    progress: Callable[[int, int, str], None] | None = None,
    waiting: Callable[[], None] | None = None,
    opening: Callable[[int, int, str], None] | None = None,
) -> Iterator[Path]:
    """A context with the cache of a GGUF file, imported if missing or out of date. No process replaces it meanwhile.

    If several processes need the import, one does it and the others wait.

    Args:
        progress, opening: as for :func:`lowbit.import_checkpoint`.
        waiting: called before this process waits for another.

    Raises:
        OSError, ValueError: as :func:`is_current` and :func:`lowbit.import_checkpoint`.
    """
    cache = cache_of(path)
    with ExitStack() as stack:
        with _locked(Path(path), fcntl.LOCK_EX, waiting):
            if not is_current(path):
                begin = time.perf_counter()
                begin_step(opening, READ)
                source = open_gguf(path)  # may raise, before the old cache is removed
                if cache.exists():
                    with _locked(cache, fcntl.LOCK_EX, waiting):
                        shutil.rmtree(cache)
                write_checkpoint(source, cache.absolute(), progress=progress, opening=opening, begin=begin)
            stack.enter_context(_locked(cache, fcntl.LOCK_SH))
        yield cache


def import_to_cache(path: str | os.PathLike[str], progress: Callable[[int, int, str], None] | None = None) -> Path:
    """Imports a GGUF file to its cache if needed; returns the cache."""
    with loading_from_cache(path, progress) as cache:
        return cache
