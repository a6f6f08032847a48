"""Defines contenders, the matrices that they multiply with, and the process that runs one library's contenders."""

from __future__ import annotations

import importlib
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np

DIFFERENT_ROWS = 256  # a matrix repeats this many rows, because quantizing is slow and times do not depend on values
CHECKED_ROWS = 8  # of activations, in addition to one alone

# Largest accepted relative error (2-norm) of a width on normally distributed weights: about twice that of rounding to nearest
# in groups. At 1 bit, a code is only a sign.
ERROR_LIMITS = {32: 1e-5, 16: 0.01, 8: 0.025, 7: 0.04, 6: 0.06, 5: 0.1, 4: 0.2, 3: 0.35, 2: 0.7, 1: 0.9}


@dataclass(frozen=True)
class Spec:
    """What is known about a contender before it has run."""

    name: str
    library: str  # "lowbit", "torch", ...
    bits: int  # per weight, without scales
    group_size: int | None  # weights per scale; None: one scale per row, or no scales
    activations: str  # type of its input, and how it quantizes it
    note: str = ""
    error_limit: float | None = None  # if a library's quantizer needs another limit than ERROR_LIMITS


@dataclass(frozen=True)
class Problem:
    """``x @ weight.T``; the same numbers in every process."""

    n: int
    k: int
    rows: np.ndarray = field(repr=False)  # float32 [min(n, DIFFERENT_ROWS), k]: the weight matrix repeats them
    x: np.ndarray = field(repr=False)  # float32 [most rows of any call, k]

    @classmethod
    def make(cls, n: int, k: int, most_rows: int) -> Problem:
        random = np.random.default_rng(k)
        rows = random.standard_normal((min(n, DIFFERENT_ROWS), k), dtype=np.float32) * np.float32(0.02)
        return cls(n, k, rows, random.standard_normal((max(most_rows, CHECKED_ROWS), k), dtype=np.float32))

    def repeat(self, rows: np.ndarray) -> np.ndarray:
        """Repeats [len(self.rows), ...], computed from the different rows, to [n, ...]."""
        return np.ascontiguousarray(np.resize(rows, (self.n, *rows.shape[1:])))

    def relative_error(self, m: int, output: np.ndarray) -> float:
        """Relative error of a contender's [m, n] for the first m rows of x."""
        expected = self.x[:m].astype(np.float64) @ self.rows.T.astype(np.float64)
        expected = np.resize(expected.T, (self.n, m)).T
        if output.shape != expected.shape:
            raise ValueError(f"the output has shape {list(output.shape)}; expected {list(expected.shape)}")
        return float(np.linalg.norm(output - expected) / np.linalg.norm(expected))


class Runner:
    """A contender with its weights: `copies` equal matrices, each in separate memory, and one more.

    Subclasses set ``bytes`` (of one packed matrix: all that a call reads of it) and make both calls.
    """

    bytes: int

    def one(self, m: int, threads: int) -> np.ndarray:
        """Multiplies the first m rows of x with the first matrix: float [m, n]."""
        raise NotImplementedError

    def all(self, m: int, threads: int) -> np.ndarray:
        """Multiplies the first m rows of x with each of the other `copies` matrices; the last result."""
        raise NotImplementedError


# Makes a runner: problem, copies(bytes of a matrix) -> number, numbers of threads.
Make = Callable[[Problem, Callable[[int], int], list[int]], Runner]


@dataclass(frozen=True)
class Contender:
    spec: Spec
    make: Make


@dataclass(frozen=True)
class Absent:
    name: str
    reason: str


class Library:
    """The contenders of one module; lives in a process of its own."""

    def __init__(self, module: str, threads: list[int]):
        self.threads = threads
        self.contenders: dict[str, Contender] = {}
        self.absent: list[Absent] = []
        self.versions: dict[str, str] = {}
        self.runners: dict[str, Runner] = {}
        found, self.absent, self.versions = importlib.import_module(module).contenders()
        self.contenders = {contender.spec.name: contender for contender in found}

    def describe(self) -> dict:
        return {
            "specs": [asdict(contender.spec) for contender in self.contenders.values()],
            "absent": [asdict(absent) for absent in self.absent],
            "versions": self.versions,
        }

    def prepare(self, name: str, n: int, k: int, most_rows: int, bytes_per_pass: int) -> dict:
        """Packs the weights and checks the results; returns rough seconds per row on one thread."""
        problem = Problem.make(n, k, most_rows)
        copies = 0

        def copies_for(size: int) -> int:
            nonlocal copies
            copies = max(1, math.ceil(bytes_per_pass / size))
            return copies

        runner = self.contenders[name].make(problem, copies_for, self.threads)
        errors, seconds = [], []
        for threads in self.threads:
            for m, call in ((1, runner.all), (1, runner.one), (CHECKED_ROWS, runner.one)):
                begin = time.perf_counter()
                output = call(m, threads)
                seconds_of_last = time.perf_counter() - begin
                errors.append(problem.relative_error(m, output.astype(np.float64)))
            seconds.append(seconds_of_last * threads)
        self.runners[name] = runner
        return {
            "bytes": runner.bytes,
            "copies": copies,
            "relative_error": float(np.max(errors)),
            "seconds_per_row": min(seconds) / CHECKED_ROWS,
        }

    def time(self, name: str, m: int, threads: int, from_memory: bool, least_seconds: float) -> float:
        """Seconds per call, or of one pass over the copies if weights come from memory.

        Untimed calls for ``least_seconds`` first wake the threads and the CPU, which is slower after a pause.
        """
        runner = self.runners[name]
        begin = time.perf_counter()
        runner.one(1, threads)
        while time.perf_counter() - begin < least_seconds:
            runner.one(1, threads)
        calls, begin = 0, time.perf_counter()
        if from_memory:
            runner.all(m, threads)
            return time.perf_counter() - begin
        while True:
            runner.one(m, threads)
            calls += 1
            seconds = time.perf_counter() - begin
            if seconds >= least_seconds:
                return seconds / calls

    def release(self) -> None:
        self.runners.clear()


def serve(connection, module: str, threads: list[int]) -> None:
    """The process: answers (method, arguments) with (True, result) or (False, reason)."""
    try:
        library = Library(module, threads)
        connection.send((True, library.describe()))
        while True:
            method, arguments = connection.recv()
            try:
                connection.send((True, getattr(library, method)(*arguments)))
            except Exception as error:
                traceback.print_exc()
                connection.send((False, f"{type(error).__name__}: {error}"))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        traceback.print_exc()
        connection.send((False, f"{type(error).__name__}: {error}"))
