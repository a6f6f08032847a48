"""Attacks lowbit through its commands and its server, and counts the outcomes: `make attack`.

Each part has numbered cases. A case depends only on the seed, the part's name and its number, so `--only PART --seed SEED
--case NUMBER` repeats it. Bad outcomes are a traceback (or an error that is not one sentence), a signal, a hang, too much
memory, and a different result although a checksum protects the data. The directory of --keep keeps the files of bad cases, and
the exit code is then 1.
"""

from __future__ import annotations

import os

# Set before torch and tokenizers are imported, because cases run in forks, which have only the forking thread.
os.environ |= {
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "LOWBIT_COMPILE_CACHE": "",
    "TRANSFORMERS_VERBOSITY": "error", "LOWBIT_PREFIX_CACHE": "",
}  # fmt: skip

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import connections
import disks
import files
import planted
import request_bodies
from outcomes import BAD, OTHER, OUTCOMES, TRACEBACK, Found, empty
from sources import ROOT

Attack = Callable[[int, random.Random, Path], Found]


@dataclass
class Part:
    """One kind of attack.

    Attributes:
        start: prepares a directory; returns a function of a case's number, its random generator, and an empty directory.
        cases, quick: default numbers of cases, without and with --quick.
        same: whether a different result is a bad outcome.
    """

    start: Callable[[Path, bool], contextlib.AbstractContextManager[Attack]]
    cases: int
    quick: int
    same: bool = False


PARTS = {
    "gguf": Part(files.gguf, 2000, 8),
    "safetensors": Part(files.safetensors, 2000, 6),
    "directories": Part(files.directories, 2000, 4),
    "packed": Part(files.packed, 2000, 4, same=True),
    "config": Part(files.config, 2000, 6),
    "tokenizer": Part(files.tokenizer, 2000, 6),
    "ctranslate2": Part(files.ctranslate2, 2000, 6),
    "recordings": Part(files.recordings, 2000, 16),
    "images": Part(files.images, 2000, 12),
    "multipart": Part(request_bodies.multipart, 2000, 12),
    "requests": Part(request_bodies.requests, 2000, 16),
    "grammars": Part(request_bodies.grammars, 600, 12),
    "http": Part(connections.raw_http, 2000, 60, same=True),
    "disconnects": Part(connections.disconnects, 600, 12, same=True),
    "slow": Part(connections.slow_clients, 8, 1, same=True),
    "kill-import": Part(disks.kill_import, 150, 3, same=True),
    "kill-calibration": Part(disks.kill_calibration, 60, 1, same=True),
    "kill-server": Part(disks.kill_server, 60, 1, same=True),
    "two-servers": Part(disks.two_servers, 150, 4, same=True),
    "full-disk": Part(disks.full_disk, 150, 8, same=True),
    "read-only": Part(disks.read_only, 12, 3, same=True),
}
PLANTED = {"planted": Part(planted.start, len(planted.CASES), len(planted.CASES), same=True)}


@dataclass
class Row:
    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""


def attack(name: str, part: Part, numbers: range, options: argparse.Namespace) -> Row:
    """Runs one part."""
    row = Row()
    with tempfile.TemporaryDirectory(prefix=f"attack-{name}-") as base, contextlib.ExitStack() as stack:
        room = Path(base)
        try:
            case = stack.enter_context(part.start(empty(room / "room"), options.quick))
        except disks.Unavailable as error:
            row.skipped = str(error)
            return row
        began = time.monotonic()
        for number in numbers:
            if time.monotonic() - began > 60 * options.minutes:
                break
            place = empty(room / "case")
            try:
                found = case(number, random.Random(f"{options.seed} {name} {number}"), place)
            except Exception as error:  # the attack itself has a defect, or a server does not start
                found = Found(TRACEBACK, f"{error!r}")
            row.counts[found.outcome] += 1
            if found.outcome in BAD or part.same and found.outcome == OTHER:
                kept = options.keep / f"{name}-{options.seed}-{number}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(place, kept, symlinks=True)
                row.bad.append(f"--only {name} --seed {options.seed} --case {number}: {found.outcome}: {found.detail} ({kept})")
                print(row.bad[-1], flush=True)
            elif options.verbose:
                print(f"{name} {number}: {found.outcome} {found.detail}", flush=True)
        row.seconds = time.monotonic() - began
    return row


def table(rows: dict[str, Row]) -> Iterator[str]:
    yield "| Part | Cases | " + " | ".join(map(str.capitalize, OUTCOMES)) + " | Seconds |"
    yield "|---|" + "---:|" * (len(OUTCOMES) + 2)
    for name, row in rows.items():
        counts = [str(row.counts[outcome]) for outcome in OUTCOMES]
        yield f"| {name} | {row.counts.total()} | {' | '.join(counts)} | {row.seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = PARTS | PLANTED
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(PARTS), help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--cases", type=int, help="of each part, instead of its own number")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10, help="of each part, whose further cases are left out (10)")
    parser.add_argument("--quick", action="store_true", help="a few cases of each part")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "attack", help="for files of bad cases (build/attack)")
    parser.add_argument("--table", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if unknown := sorted(set(options.only) - set(everything)):
        parser.error(f"there is no part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end too
    rows: dict[str, Row] = {}
    for name in options.only:
        part = everything[name]
        count = options.cases or (part.quick if options.quick else part.cases)
        numbers = range(count) if options.case is None else range(options.case, options.case + 1)
        rows[name] = attack(name, part, numbers, options)
        print(list(table({name: rows[name]}))[-1], rows[name].skipped, flush=True)
    print("", *table(rows), sep="\n")
    if options.table:
        options.table.write_text("\n".join(table(rows)) + "\n")
    for name, row in rows.items():
        if row.skipped:
            print(f"{name} did not run: {row.skipped}")
    bad = [line for row in rows.values() for line in row.bad]
    print("", *bad, sep="\n")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
