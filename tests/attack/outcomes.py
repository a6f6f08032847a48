"""Runs a case in a separate process and classifies the outcome."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import hashlib
import importlib.metadata
import os
import re
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SAME, OTHER, REFUSED = "same result", "other result", "refused"
TRACEBACK, SIGNAL, HANG, MEMORY = "traceback", "signal", "hang", "memory"
OUTCOMES = (REFUSED, SAME, OTHER, TRACEBACK, SIGNAL, HANG, MEMORY)
BAD = (TRACEBACK, SIGNAL, HANG, MEMORY)
SECONDS = 180.0  # of a case, on a busy machine
BYTES = 2 << 30  # that a case may allocate beyond this process's memory
TRACES = ("Traceback (most recent call last)", "Exception ignored in", "Fatal Python error", "panicked at")


@dataclass
class Found:
    """The outcome of a case, and a description of what is wrong."""

    outcome: str
    detail: str = ""


@dataclass
class Ended:
    """How a process ended."""

    status: int | None  # as in subprocess; None: it hung
    peak: int  # bytes beyond this process's memory
    out: str
    err: str
    too_much: bool = False  # killed because of its memory


@functools.cache
def _program() -> Callable[[], None]:
    """The command line's entry point. Its parser is made once, before forking; otherwise it takes a third of a case's time."""
    import typer.main

    typer.main.get_command = functools.cache(typer.main.get_command)
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="lowbit")
    return entry.load()


def command(*arguments: object) -> Callable[[], None]:
    """A command of lowbit, for :func:`forked`."""
    program = _program()

    def run() -> None:
        sys.argv = ["lowbit", *map(str, arguments)]
        program()

    return run


def memory_of(process: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ProcessLookupError, IndexError):
        return 0


def forked(
    action: Callable[[], None], place: Path, seconds: float = SECONDS, most: int = BYTES, kill_after: float | None = None
) -> Ended:
    """Runs an action in a fork of this process, which has imported everything.

    Args:
        place: a directory for its stdout and stderr.
        seconds: time limit; a longer run counts as a hang and is killed.
        most: bytes that it may allocate.
        kill_after: seconds after which it is killed.
    """
    before = memory_of(os.getpid())
    gc.freeze()  # so that garbage collection in the fork does not copy all of this process's memory
    sys.stdout.flush()
    sys.stderr.flush()
    files = [place / "stdout", place / "stderr"]
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            code = _exit_code(action)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:  # for example a full pipe
            with contextlib.suppress(BaseException):
                traceback.print_exc()
        finally:
            os._exit(code)
    status, too_much, began = None, False, time.monotonic()
    handle = os.pidfd_open(child)
    try:
        while not select.select([handle], [], [], 0.05)[0]:
            elapsed = time.monotonic() - began
            if kill_after is not None:
                if elapsed + 0.05 < kill_after:
                    continue
                select.select([handle], [], [], max(0, kill_after - elapsed))
                break
            too_much = memory_of(child) - before > most
            if too_much or elapsed > seconds:
                if not too_much:
                    os.kill(child, signal.SIGUSR1)  # prints its stack
                    select.select([handle], [], [], 1)
                break
        else:
            status = 0
    finally:
        os.close(handle)
        killed = status is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and its children
        _, waited, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(waited)
    hung = killed and kill_after is None and not too_much
    out, err = (file.read_bytes().decode(errors="replace") if file.exists() else "" for file in files)
    return Ended(None if hung else code, usage.ru_maxrss * 1024 - before, out, err, too_much)


def _exit_code(action: Callable[[], None]) -> int:
    try:
        action()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def judged(ended: Ended, result: Callable[[], object], expected: object, most: int = BYTES) -> Found:
    """The outcome of a command.

    Args:
        result: its result if the exit code is 0.
        expected: the result of the same command for undamaged files.
    """
    if ended.too_much or ended.peak > most:
        return Found(MEMORY, f"{ended.peak >> 20} MiB")
    if ended.status is None:
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', ended.err)
        return Found(HANG, " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in frames[:3]))
    if ended.status < 0:
        return Found(SIGNAL, f"{signal.Signals(-ended.status).name}; {last_line(ended.err)}")
    # Rust prints a panic itself, before Python can catch it.
    caught = ended.status == 1 and "PanicException: " in last_line(ended.err)
    if any(trace in ended.err for trace in (TRACES[:-1] if caught else TRACES)):
        return Found(TRACEBACK, last_line(ended.err))
    if ended.status == 0:
        return Found(SAME if result() == expected else OTHER)
    errors = [line for line in ended.err.splitlines() if line.startswith("lowbit: error: ")]
    if ended.status != 1 or len(errors) != 1 or not errors[0].isprintable():
        return Found(TRACEBACK, f"exit code {ended.status} without one sentence: {last_line(ended.err)}")
    return Found(REFUSED, errors[0])


def tree(directory: Path) -> dict[str, str]:
    """Digests of all files below a directory, without the time of change of a source that an import records."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "lowbit_import.json":
                data = re.sub(rb'"mtime_ns": \d+', b"", data)
            found[str(path.relative_to(directory))] = hashlib.sha256(data).hexdigest()
    return found


def empty(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
