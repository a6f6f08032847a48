"""Planted defects that must be detected; tests/python runs this part, `make attack` does not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from outcomes import HANG, MEMORY, OTHER, REFUSED, SAME, SIGNAL, TRACEBACK, Found, forked, judged

_MOST = 64 << 20


def _fail(text: str, code: int) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)


def _die_in_a_child() -> None:
    """Its children must not outlive it."""
    if os.fork() == 0:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSEGV)


# Action of a process, and the outcome that must be reported.
CASES = [
    (lambda: print("expected"), SAME),
    (lambda: print("another"), OTHER),
    (lambda: _fail("lowbit: error: it is wrong", 1), REFUSED),
    (lambda: _fail("lowbit: error: it is wrong\nlowbit: error: twice", 1), TRACEBACK),
    (lambda: _fail("lowbit: error: it is wrong", 2), TRACEBACK),
    (lambda: _fail("something else", 1), TRACEBACK),
    (lambda: 1 // 0, TRACEBACK),
    (lambda: _fail("Traceback (most recent call last):\nOSError: in a thread", 0), TRACEBACK),
    (_die_in_a_child, SIGNAL),
    (lambda: os.abort(), SIGNAL),
    (lambda: time.sleep(600), HANG),
    (lambda: bytearray(b"x") * (4 * _MOST), MEMORY),  # ends before its memory can be sampled
    (lambda: time.sleep(600) if bytearray(b"x") * 0 else _grow(), MEMORY),
    # Rust's own report of a panic, with and without a sentence of the command that has caught it.
    (
        lambda: _fail("thread 'a' panicked at b.rs:1:2:\nc\nlowbit: error: the file does not load: PanicException: c", 1),
        REFUSED,
    ),
    (lambda: _fail("thread 'a' panicked at b.rs:1:2:\nlowbit: error: it is wrong", 1), TRACEBACK),
    (None, TRACEBACK),  # the attack itself fails
]


def _grow() -> None:
    kept = bytearray(b"x") * (2 * _MOST)
    time.sleep(600)
    print(len(kept))


@contextlib.contextmanager
def start(room: Path, quick: bool) -> Iterator:
    def case(number: int, draw: random.Random, place: Path) -> Found:
        action = CASES[number][0]
        if action is None:
            raise RuntimeError("planted")
        ended = forked(action, place, seconds=1, most=_MOST)
        return judged(ended, lambda: ended.out, "expected\n", _MOST)

    yield case
