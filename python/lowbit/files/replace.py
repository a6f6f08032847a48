"""Writing in one step: a reader sees what was there before or all of the new, also after the power fails."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL = ".partial"


def sync(file) -> None:
    """Returns when what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """The same for a file by its name; for a directory: when the names of its files are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefix(target: Path) -> str:
    # With the name of the machine: a lock on a shared file system may be known to the machine alone that holds it.
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
    return f".{target.name}-{host}-"


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the lock of a directory until it is closed, or its process ends however; None: another has it.

    Raises:
        OSError: there is no such directory, or this file system has no locks.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sweep(target: Path) -> None:
    """Removes what processes of this machine that have ended, by a signal for example, left of writing `target`."""
    prefix = _prefix(target)
    for entry in os.scandir(target.parent):
        if not (entry.name.startswith(prefix) and entry.name.endswith(_PARTIAL)):
            continue
        try:
            held = _lock(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else None
        except OSError:  # not to be told whose it is
            continue
        if held is not None:
            try:
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(held)


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """An empty hidden directory beside `target`, which is gone afterwards unless it was renamed.

    Those that dead processes have left of the same target are removed first.

    Raises:
        OSError: it cannot be made.
    """
    sweep(target)
    lock = None
    while True:
        # Not tempfile.mkdtemp: that makes directories which others cannot read, and what a user's umask says cannot be
        # asked without changing it for all threads.
        path = target.parent / f"{_prefix(target)}{secrets.token_hex(4)}{_PARTIAL}"
        path.mkdir()
        try:
            lock = _lock(path)
        except FileNotFoundError:
            continue  # another process swept it before it was locked
        except OSError:
            break  # no locks here: then nobody sweeps either
        if lock is not None:
            if path.exists():
                break
            os.close(lock)
            lock = None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def replacing(path: str | os.PathLike, suffix: str) -> Iterator[Path]:
    """A path to write a file to; when all went well it becomes `path`, whatever was there, in one step.

    A `path` that is a symbolic link stays one: what it points to is replaced.

    Raises:
        ValueError: path does not end in `suffix`.
        OSError: the file cannot be written there.
    """
    if Path(path).suffix != suffix:
        raise ValueError(f"path is {str(path)!r}; expected a name that ends in {suffix}")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise NotADirectoryError(f"{target.parent} is not a directory; make it first")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; expected the name of a file")
    with partial_directory(target) as directory:
        written = directory / Path(path).name
        yield written
        sync_path(written)
        os.replace(written, target)
        sync_path(target.parent)
