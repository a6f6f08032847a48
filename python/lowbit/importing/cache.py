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

from ..files.gguf_cache import cache_of, is_current
from .gguf_source import open_gguf
from .write import READ, begin_step, write_checkpoint

__all__ = ["cache_of", "import_to_cache", "is_current", "loading_from_cache"]

_LOG = logging.getLogger(__name__)


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
