"""Tests kills, full disks, read-only disks, and two servers on one directory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from files import GENERATE, save_packed
from outcomes import OTHER, REFUSED, SAME, TRACEBACK, Found, command, empty, forked, judged, tree
from service import COMPLETIONS, Service, completion
from sources import gguf_files, run_here, save_llama

_NEW_USER, _NEW_MOUNTS, _READ_ONLY, _REMOUNT = 0x10000000, 0x00020000, 1, 32


class Unavailable(Exception):
    """This machine lacks what a part needs."""


def _entries(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name not in ("stdout", "stderr"))


def _killed(run: Callable[[Path], Callable[[], None]], expected: dict[str, str], seconds: float, again: int):
    """Cases that kill a command at random times and repeat it: the target is missing or complete, and complete at the end.

    Args:
        run: the command that writes `out` in a directory.
        seconds: its duration.
        again: number of kills before it may finish.
    """

    def case(number: int, draw: random.Random, place: Path) -> Found:
        for _ in range(draw.randrange(1, again + 1)):
            ended = forked(run(place), place, kill_after=draw.uniform(0, 1.1 * seconds))
            found = tree(place / "out")
            if found not in ({}, expected):
                return Found(OTHER, f"killed, it left {sorted(found)}")
            if ended.status not in (0, -9):
                return judged(ended, dict, None)
            if found:
                shutil.rmtree(place / "out")
        ended = forked(run(place), place)
        verdict = judged(ended, lambda: tree(place / "out"), expected)
        if verdict.outcome == REFUSED:  # a refusal is fine here
            return Found(OTHER, verdict.detail)
        left = _entries(place)
        return verdict if left == ["out"] else Found(OTHER, f"{left} is there; expected out alone")

    return case


def _whole(run: Callable[[Path], Callable[[], None]], room: Path) -> tuple[dict[str, str], float]:
    """The result of a command, and its duration."""
    run_here(run(empty(room / "whole")))
    began = time.monotonic()
    ended = forked(run(empty(room / "whole")), room / "whole")
    assert ended.status == 0, ended.err
    return tree(room / "whole" / "out"), time.monotonic() - began


@contextlib.contextmanager
def kill_import(room: Path, quick: bool) -> Iterator:
    save_llama(room / "llama")
    source = gguf_files(room, room / "llama")[-1]
    run = lambda place: command("import", source, place / "out")  # noqa: E731
    yield _killed(run, *_whole(run, room), 2)


@contextlib.contextmanager
def kill_calibration(room: Path, quick: bool) -> Iterator:
    """Killed runs resume from their journal, and write the same bytes as an undisturbed run."""
    save_llama(room / "llama")
    (room / "text").write_text("Returns the number of items in the list, or zero if the list is empty.\n" * 200)
    settings = ("--bits", 3, "--calibrate", room / "text", "--calibrate-tokens", 1024, "--window", 64)
    run = lambda place: command("quantize", room / "llama", place / "out", *settings)  # noqa: E731
    yield _killed(run, *_whole(run, room), 1 if quick else 3)


@contextlib.contextmanager
def kill_server(room: Path, quick: bool) -> Iterator:
    """A server with a prefix cache on disk is killed while it answers; the next server reads the cache."""
    save_packed(room / "model")
    bodies = [completion(f"The number {n} " * 40 + "is", 4) for n in range(4)]
    expected = _answers(room, bodies)

    def case(number: int, draw: random.Random, place: Path) -> Found:
        cache = ("--prefix-cache", place / "cache", "--prefix-cache-size", draw.choice(("100KB", "1MB", "1GB")))
        for _ in range(1 if quick else 2):
            with Service(place, room / "model", *cache) as service:
                asking = threading.Thread(target=_ask, args=(service, bodies, draw.sample(range(4), 4)))
                asking.start()
                time.sleep(draw.uniform(0, 0.6))
                service.kill()
                asking.join()
        with Service(place, room / "model", *cache) as service:
            for body, text in zip(bodies, expected, strict=True):
                if (found := service.post(COMPLETIONS, body)) != text:
                    return Found(OTHER, f"{found}; expected {text}")
            return service.check()

    yield case


def _answers(room: Path, bodies: list[bytes]) -> list:
    """The answers of a server without a cache on disk."""
    with Service(room, room / "model") as service:
        return [service.post(COMPLETIONS, body) for body in bodies]


def _ask(service: Service, bodies: list[bytes], order: list[int]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for number in order:
            service.post(COMPLETIONS, bodies[number])


@contextlib.contextmanager
def two_servers(room: Path, quick: bool) -> Iterator:
    """Two servers share one directory for prefixes, which has room for few of them."""
    save_packed(room / "model")
    bodies = [completion(f"A list of {n} names: " * 30 + "the", 4) for n in range(6)]
    expected = _answers(room, bodies)
    cache = ("--prefix-memory", 0, "--prefix-cache", room / "cache", "--prefix-cache-size", "300KB")
    empty(room / "a"), empty(room / "b")
    with Service(room / "a", room / "model", *cache) as one, Service(room / "b", room / "model", *cache) as other:

        def case(number: int, draw: random.Random, place: Path) -> Found:
            wrong: list[str] = []

            def ask(service: Service, order: list[int]) -> None:
                for which in order:
                    try:
                        found = service.post(COMPLETIONS, bodies[which])
                    except (OSError, ValueError) as error:
                        wrong.append(f"{error}")
                        return
                    if found != expected[which]:
                        wrong.append(f"{found}; expected {expected[which]}")

            asking = [
                threading.Thread(target=ask, args=(service, draw.choices(range(6), k=4)))
                for service in (one, other, one, other)
            ]
            if draw.random() < 0.2:
                for path in draw.sample(sorted((room / "cache").rglob("*")), 1) if (room / "cache").exists() else ():
                    if path.is_file():
                        path.unlink(missing_ok=True)  # another program cleans up
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
            checked = [service.check() for service in (one, other)]
            bad = next((found for found in checked if found.outcome != SAME), None)
            return bad or (Found(OTHER, wrong[0]) if wrong else Found(SAME))

        yield case


def _mount(target: Path, size: int, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(target), b"tmpfs", flags, f"size={size}".encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")


def _own_mounts() -> None:
    """Gives this single-threaded process its own mount namespace."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(content)


def _need_mounts(room: Path) -> None:
    def attempt() -> None:
        _own_mounts()
        _mount(empty(room / "mounted"), 65536)

    if forked(attempt, room).status != 0:
        raise Unavailable("this machine allows no user to mount a disk (kernel.apparmor_restrict_unprivileged_userns?)")


class _Commands:
    """Commands that write to a disk with limits: each gives the same result there or is refused."""

    def __init__(self, room: Path):
        _need_mounts(room)
        save_packed(room / "packed")
        self.room, source = room, gguf_files(room / "float", room / "float")[-1]
        (room / "text").write_text("Returns the number of items in the list, or zero if the list is empty.\n" * 60)
        calibrated = ("--bits", 3, "--calibrate", room / "text", "--calibrate-tokens", 512, "--window", 64)
        self.runs: list[Callable[[Path], Callable[[], None]]] = [
            lambda disk: command("quantize", room / "float", disk / "out", "--scale", "absmax"),
            lambda disk: command("import", source, disk / "out"),
            lambda disk: command("export", room / "packed", "--to", "gguf", "--output", disk / "out" / "m.gguf"),
            lambda disk: command("quantize", room / "float", disk / "out", *calibrated),
            lambda disk: command("dequantize", room / "packed", disk / "out"),
            lambda disk: command("generate", room / "packed", *GENERATE, "--prefix-cache", disk / "out"),
        ]
        self.expected = []
        for run in self.runs:
            for _ in range(2):  # the first run imports
                where = empty(room / "whole")
                (where / "out").mkdir()
                run_here(run(where))
            self.expected.append(tree(where / "out"))
        where = empty(room / "whole")
        self._text = forked(self.runs[-1](where), where).out

    def attack(self, place: Path, which: int, size: int, read_only: bool) -> Found:
        disk = place / "disk"
        disk.mkdir()
        report = place / "found"

        def action() -> None:
            _own_mounts()
            _mount(disk, size)
            (disk / "out").mkdir()
            if read_only:
                _mount_read_only(disk)
            try:
                self.runs[which](disk)()
            finally:
                report.write_text(json.dumps(tree(disk)))

        ended = forked(action, place)
        left = {} if not report.exists() else json.loads(report.read_text())
        made = {name.removeprefix("out/"): digest for name, digest in left.items() if name.startswith("out/")}
        cached = which == len(self.runs) - 1  # without a writable cache the text stays the same
        found = judged(ended, lambda: ended.out if cached else made, self._text if cached else self.expected[which])
        # A calibration keeps its journal, to resume when there is space.
        rest = [name for name in left if not (name.startswith("out/") and found.outcome != REFUSED or ".calibration/" in name)]
        return Found(TRACEBACK, f"{found.detail}; left {rest}") if rest and not cached else found


def _mount_read_only(disk: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(disk), b"tmpfs", _READ_ONLY | _REMOUNT, None) != 0:
        raise OSError(ctypes.get_errno() or errno.EPERM, "remount")


@contextlib.contextmanager
def full_disk(room: Path, quick: bool) -> Iterator:
    commands = _Commands(room)

    def case(number: int, draw: random.Random, place: Path) -> Found:
        which = number % len(commands.runs)
        return commands.attack(place, which, int(4096 * 2 ** draw.uniform(1, 9)), False)

    yield case


@contextlib.contextmanager
def read_only(room: Path, quick: bool) -> Iterator:
    commands = _Commands(room)

    def case(number: int, draw: random.Random, place: Path) -> Found:
        return commands.attack(place, number % len(commands.runs), 1 << 20, True)

    yield case
