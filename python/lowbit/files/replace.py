"""Atomic writes: readers see either the old file or directory or the complete new one, also after a power failure."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def sync(file: IO[Any]) -> None:
    """Flushes an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flushes a file to the disk; for a directory, the names of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefix(target: Path) -> str:
    # Includes the host name: on a shared file system a lock may be visible only on the machine that holds it.
    host = "".join(letter if letter.isalnum() else "-" for letter in socket.gethostname())
    name = target.name
    if len(os.fsencode(name)) > 128:  # file names are limited to 255 bytes
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}-{host}-"


def lock(directory: Path) -> int | None:
    """Locks a directory; returns a descriptor that holds the lock until it is closed, or None if another process holds it.

    Raises:
        OSError: no such directory, or the file system does not support locks.
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
    """Removes partial directories of `target` left behind by dead processes of this machine."""
    prefix = _prefix(target)
    for entry in os.scandir(target.parent):
        if not (entry.name.startswith(prefix) and entry.name.endswith(_PARTIAL)):
            continue
        try:
            held = lock(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else None
        except OSError:  # its owner cannot be determined
            continue
        if held is not None:
            try:
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(held)


class PartialDirectory:
    """A hidden, empty directory next to `target` that replaces it atomically.

    A context manager: on exit the directory is removed unless :meth:`finish` has renamed it. Directories that dead processes
    left for the same target are removed first.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, target: Path):
        self.target = target
        self._lock: int | None = None
        self._mode: int | None = None  # of the empty directory that is replaced
        self._keep = False
        sweep(target)
        while True:
            # tempfile.mkdtemp makes private directories, and reading the umask would change it for all threads.
            self.path = target.parent / f"{_prefix(target)}{secrets.token_hex(4)}{_PARTIAL}"
            try:
                self.path.mkdir()
            except OSError as error:
                raise OSError(error.errno, f"{target.parent} cannot be written: {error.strerror}") from error
            try:
                self._lock = lock(self.path)
            except FileNotFoundError:
                continue  # another process swept it before it was locked
            except OSError:
                break  # without locks, no process sweeps
            if self._lock is not None and self.path.exists():
                break
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> PartialDirectory:
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._keep:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def rehearse(self) -> None:
        """Tries the steps of :meth:`finish` with an empty directory, so that a failure is found before any work is done.

        Raises:
            OSError: the target cannot be replaced by a directory.
        """
        empty = self.path / "rehearsal"
        empty.mkdir()
        self._mode = stat.S_IMODE(self.target.stat().st_mode) if self.target.exists() else None
        try:
            os.rename(empty, self.target)
            if self._mode is None:
                self.target.rmdir()
            else:
                self.target.chmod(self._mode)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.target} cannot be replaced by a new directory: {error.strerror}; choose a new name in a "
                "directory that you can write to",
            ) from error

    def finish(self) -> None:
        """Renames the directory to the target, which must not exist or be an empty directory.

        Raises:
            OSError: the rename failed. The files are kept; the message says where.
        """
        # Sync all files, because libraries that write tokenizers, for example, do not sync theirs.
        for directory, _, names in os.walk(self.path, topdown=False):
            for name in names:
                sync_path(Path(directory, name))
            sync_path(Path(directory))
        try:
            if self._mode is not None:
                self.path.chmod(self._mode)
            os.rename(self.path, self.target)
        except OSError as error:
            self._keep = True
            kept = self.target.parent / f"{self.target.name}-{secrets.token_hex(4)}"
            try:
                os.rename(self.path, kept)  # so that no process sweeps it
            except OSError:
                kept = self.path
            raise OSError(
                error.errno, f"{self.target} could not be replaced: {error.strerror}. The complete result is in {kept}"
            ) from error
        self._keep = True
        sync_path(self.target.parent)


def check_utf8(path: Path) -> None:
    """Raises OSError for a path that is not UTF-8, because safetensors cannot read it."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise OSError(errno.EILSEQ, f"the path {os.fspath(path)!a} is not UTF-8, which safetensors needs") from error


def resolve_new_directory(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a new directory, with symbolic links followed.

    Raises:
        OSError: the path exists and is not an empty directory, is a mount point, has no parent, or is not UTF-8.
    """
    target = Path(os.path.realpath(path))
    check_utf8(target)
    link = "" if target == Path(os.path.abspath(path)) else f" ({path})"
    if target.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a symbolic link to itself")
    if target.exists():
        if not target.is_dir():
            raise FileExistsError(f"{target}{link} is a file; expected a directory that is empty or not there yet")
        if os.path.ismount(target):
            raise OSError(
                errno.EBUSY,
                f"{target}{link} is a mount point, which no new directory can replace; choose a directory in it, such as "
                f"{target / 'packed'}",
            )
        count = len(list(target.iterdir()))
        if count:
            raise FileExistsError(
                f"{target}{link} has {count} files; expected a directory that is empty or not there yet: choose another, "
                "or delete it"
            )
    if not target.parent.is_dir():
        raise NotADirectoryError(f"{target.parent} is not a directory; make it first")
    return target


def has_mark(path: Path, mark: bytes) -> bool:
    """Whether a file has these bytes anywhere; it must not be empty."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(mark) >= 0


def refuse_other_file(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Refuses to replace a file that lowbit has not written.

    Args:
        is_ours: whether lowbit wrote a file, in this or an earlier version.
        what: the kind of file, for example "a report".

    Raises:
        FileExistsError: the file is not empty, and of another program.
    """
    if path.is_file() and path.stat().st_size and not is_ours(path):
        raise FileExistsError(f"{path} exists and is not {what} of lowbit; choose another name, or delete it")


@contextmanager
def naming_full_disk(target: Path, takes: str = "", kept: str = "nothing of it was kept") -> Iterator[None]:
    """A context whose errors of a full disk name the target; the system names none.

    Args:
        takes: how much space the target needs.
        kept: what remains on the disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or error.strerror != os.strerror(error.errno):  # another text is an explanation already
            raise
        needs = takes and f", which takes {takes}"
        raise OSError(
            error.errno, f"{error.strerror} while {target} was written{needs}; {kept}. Make room, or choose another place"
        ) from error


@contextmanager
def replacing(path: str | os.PathLike[str], suffix: str) -> Iterator[Path]:
    """A context with a path to write to; that file replaces `path` atomically if the context exits without an error.

    If `path` is a symbolic link, its target is replaced. A replaced file keeps its permissions.

    Raises:
        ValueError: path does not end in `suffix`.
        OSError: the file cannot be written.
    """
    if Path(path).suffix != suffix:
        raise ValueError(f"path is {str(path)!r}; expected a name that ends in {suffix}")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise NotADirectoryError(f"{target.parent} is not a directory; make it first")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; expected the name of a file")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    with naming_full_disk(target), PartialDirectory(target) as directory:
        if mode is not None:
            directory.path.chmod(0o700)  # private until the new file has the old one's permissions
        written = directory.path / Path(path).name
        yield written
        if mode is not None:
            written.chmod(mode)
        sync_path(written)
        os.replace(written, target)
        sync_path(target.parent)
