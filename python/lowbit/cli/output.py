"""Prints results, progress, warnings and errors of the commands."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import unicodedata
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import typer

from ..files.untrusted import one_line, printable, raised_by_reader
from ..machine.sizes import size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .. import CheckpointEntry

__all__ = [
    "Output",
    "console",
    "facts_table",
    "packed_figures",
    "print_piece",
    "quieten",
    "reporting",
    "set_stdout_errors",
    "size",
    "table",
]

_NO_MEMORY = "can't allocate memory"  # torch raises a plain RuntimeError
LINE_SECONDS = 60.0  # between lines of progress without a terminal
PIPE_WIDTH = 120  # columns if the output is not a terminal


def console(*, stderr: bool, width: int | None = None) -> Console:
    """A rich console; ``width`` in columns overrides the terminal's width, or PIPE_WIDTH without a terminal."""
    from rich.console import Console  # takes longer to import than all else here, and few commands need it

    stream = sys.stderr if stderr else sys.stdout
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = PIPE_WIDTH
    # Without markup and emoji, because names of tensors and files may look like either.
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def table(*columns: str, texts: Collection[int] = ()) -> Table:
    """A table of figures: a text column, and right-aligned columns; ``texts`` are numbers of further text columns."""
    from rich.table import Table

    result = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        text = index in texts
        result.add_column(column, justify="right" if index and not text else "left", no_wrap=not text)
    return result


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and texts, without a header."""
    result = table("", "", texts=[1])
    result.show_header = False
    for row in rows:
        result.add_row(*row)
    return result


def packed_figures(entries: Iterable[CheckpointEntry]) -> tuple[int, dict[str, Any]]:
    """The number of packed tensors, and their JSON figures: bytes, weights, bits per weight (None without weights)."""
    packed = [entry for entry in entries if entry.kind == "packed"]
    bytes_, weights = sum(entry.bytes for entry in packed), sum(math.prod(entry.shape) for entry in packed)
    density = 8 * bytes_ / weights if weights else None
    return len(packed), {"packed_bytes": bytes_, "packed_weights": weights, "bits_per_weight": density}


def _print_whole(out: Console, shown: Table) -> None:
    """Prints a table without truncating cells, even in a narrow terminal.

    If a row does not fit, its first cell is printed on a separate line. Lines in a file may have any length.
    """
    from rich.cells import cell_len

    columns = [[str(column.header), *map(str, column.cells)] for column in shown.columns]
    widths = [max(map(cell_len, cells)) for cells in columns]
    least = [
        width if column.no_wrap else max(cell_len(word) for cell in cells for word in cell.split() or [""])
        for column, cells, width in zip(shown.columns, columns, widths, strict=True)
    ]
    needed = sum(least) + 2 * (len(least) - 1)
    if needed <= out.width:
        out.print(shown)
        return
    if not out.is_terminal:
        console(stderr=False, width=needed).print(shown)
        return
    is_text = [column.justify == "left" for column in shown.columns]
    for name, *cells in list(zip(*columns, strict=True))[0 if shown.show_header else 1 :]:
        aligned = []
        for cell, width, text in zip(cells, widths[1:], is_text[1:], strict=True):
            space = " " * (width - cell_len(cell))
            aligned.append(cell + space if text else space + cell)
        for line in (name, f"  {'  '.join(aligned)}"):
            if line.strip():
                out.print(line.rstrip(), soft_wrap=True)


class Output:
    """One command's output: a result on stdout, the rest on stderr."""

    def __init__(self, as_json: bool):
        self.as_json = as_json

    @cached_property
    def out(self) -> Console:
        return console(stderr=False)

    @cached_property
    def err(self) -> Console:
        return console(stderr=True)

    def result(self, document: dict[str, Any], *shown: Any) -> None:
        """Prints the result: the JSON document, or the texts and tables for people."""
        if self.as_json:
            print(json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            for item in shown:
                if not isinstance(item, str):
                    _print_whole(self.out, item)
                else:
                    self.out.print(item, soft_wrap=not self.out.is_terminal)

    def note(self, text: str) -> None:
        """Prints a line for people to stderr."""
        if "err" in vars(self):  # it may show a progress bar
            self.err.print(text, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Prints a warning to stderr."""
        _print_warning(text)

    @contextmanager
    def progress(self, what: str, unit: str | None = None) -> Iterator[Callable[..., None]]:
        """A context that shows a progress bar; without a terminal, a line at the beginning and one per minute.

        Yields ``advance(done, total, detail="")``; until it is called only the time is shown. ``unit`` is "bytes" or a plural
        noun.
        """
        if not self.err.is_terminal:
            self.note(f"{what} ...")
            with _lines(self.note, what, unit) as advance:
                yield advance
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        counted = [DownloadColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)] if unit else []
        columns = [
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            *([BarColumn(), *counted, TimeRemainingColumn()] if unit else []),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
        ]
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(what, total=None, detail="")

            def advance(done: int, total: int, detail: str = "") -> None:
                bar.update(task, completed=done, total=total, detail=detail)

            yield advance


@contextmanager
def _lines(note: Callable[[str], None], what: str, unit: str | None) -> Iterator[Callable[..., None]]:
    """Prints progress as lines, one per LINE_SECONDS, also while nothing is reported."""
    ended, begin = threading.Event(), time.perf_counter()
    marks: deque[tuple[float, int]] = deque(maxlen=10)  # (time, done) at the last lines
    state: tuple[int, int, str] = (0, 0, "")

    def advance(done: int, total: int, detail: str = "") -> None:
        nonlocal state
        if not marks:
            marks.append((time.perf_counter(), done))
        state = done, total, detail

    def tell() -> None:
        while not ended.wait(LINE_SECONDS):
            now, (done, total, detail) = time.perf_counter(), state
            parts = [f"{what}: {_duration(now - begin)}"]
            if total:
                amount = f"{size(done)} of {size(total)}" if unit == "bytes" else f"{done} of {total} {unit}"
                parts.append(f"{amount}, {100 * done // total} %")
                then, before = marks[0]
                if done > before:
                    parts.append(f"about {_duration((now - then) * (total - done) / (done - before))} left")
                marks.append((now, done))
            note(", ".join(parts) + (f": {printable(detail)}" if detail else ""))

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        ended.set()
        teller.join()


def _duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h 5 min"."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Signals that end a program. SIGHUP: its terminal was closed, or the connection to it was lost.
_ENDINGS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _end(number: int, frame: Any) -> None:
    """Raises an exception, so that every `finally` removes partial files; later signals are ignored."""
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def set_stdout_errors(errors: str) -> None:
    """Sets how stdout handles characters that its encoding does not have."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a caller may have replaced it
        sys.stdout.reconfigure(errors=errors)


def print_piece(text: str) -> None:
    """Prints a piece of a model's text; on a terminal, without control characters."""
    if sys.stdout.isatty():
        text = "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
    print(text, end="", flush=True)


@contextmanager
def reporting(as_json: bool, debug: bool, model: str | os.PathLike[str] | None) -> Iterator[None]:
    """A context that turns errors that users can fix into one line and exit code 1; a bug keeps its traceback.

    Users can fix bad input (ValueError, OSError, ImportError), too little memory, and a model whose files make another
    library fail. Everything else is a bug.
    """
    before = {number: signal.getsignal(number) for number in _ENDINGS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup and a shell's background jobs ignore some signals
            signal.signal(number, _end)
    if sys.stderr is None:  # closed by a shell's 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        if sys.stdout is None:
            raise OSError("stdout is closed; expected an open stream for the result")
        set_stdout_errors("backslashreplace")  # file names may not be UTF-8
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # typer ends the process without a message
    except BaseException as error:
        if debug:
            raise
        if isinstance(error, ValueError | OSError | ImportError):
            message = describe(error)
        elif isinstance(error, MemoryError) or _NO_MEMORY in str(error):
            message = f"not enough memory: {describe(error)}"
        elif model is not None and raised_by_reader(error):
            message = f"the model in {model} does not run: {type(error).__name__}: {describe(error)}"
        else:
            raise
        if as_json and sys.stdout is not None:
            with suppress(OSError):  # the disk may be full, which may be the error itself
                print(json.dumps({"error": {"type": type(error).__name__, "message": message}}, ensure_ascii=False), flush=True)
        print(f"lowbit: error: {message}", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        for number, handler in before.items():  # no exceptions may be raised while Python shuts down
            if signal.getsignal(number) == _end:
                signal.signal(number, handler)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = one_line(error)
    if isinstance(error, ImportError):
        needed = ("torch", "transformers", "safetensors")
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if missing:
            text = f"{' and '.join(missing)} not installed; install it with: pip install 'lowbit[llm]'"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return one_line(text)


class _Without(logging.Filter):
    def __init__(self, *beginnings: str):
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginnings)


def quieten() -> None:
    """Hides messages that other libraries address to developers, and prints warnings as one line."""
    # torchao, a dependency of executorch that transformers imports, tries libraries for other machines and Pythons
    logging.getLogger("torchao").addFilter(_Without("Failed to load ", "Skipping import of cpp extensions"))
    # and registers enums in a way that torch considers outdated.
    logging.getLogger("torch.utils._pytree").addFilter(_Without("<enum "))
    # torch's profiler would log its start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # transformers would print advice for programmers.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # ExecuTorch would warn of mutated buffers, which are the KV caches.
    warnings.filterwarnings("ignore", "Mutation on a buffer in the model is detected")
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
) -> None:
    _print_warning(str(message))


def _print_warning(text: str) -> None:
    print(f"lowbit: warning: {one_line(text)}", file=sys.stderr)
