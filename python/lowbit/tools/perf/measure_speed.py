"""Measures one part of a page in this process: ``python -m lowbit.tools.perf.measure_speed PART THREADS SECONDS FILE``.

PART is "kernels", or the name of a shape. All contenders of a part take turns, and figures are medians over the rounds.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lowbit

from ...files.plan_facts import are_allowed
from ...files.untrusted import one_line
from ...machine.child import gist
from ...machine.memory import ReadBandwidth, in_huge_pages
from ...machine.sizes import size
from . import energy
from .machine_facts import cache_bytes, free_memory
from .start_cost import LOWBIT, until_first_output

_MIB = 1 << 20
_LAYER = (4096, 4096)  # outputs and inputs of the layer
_GROUP = 32
_ROWS = 256  # rows of a GEMM: the number of prompt tokens that a decoder computes at a time
_COPIES = 128 * _MIB  # smallest total size of the layer's copies, in bytes
_ROUNDS = 5  # for kernels
_MODEL_ROUNDS = 3
_STARTS = 3  # how often the start of lowbit generate is measured
_START_SECONDS = 60.0  # how much time must be left for it; most of it is for the file of the weights
_PROMPT, _NEW = 128, 32
_BITS = 4  # of models
_PEER = "llama-bench"
_LOWBIT = "lowbit, eager"


@dataclass(frozen=True)
class _Run:
    """A run of a model: the program's version, and tokens per second."""

    version: str
    prefill: float
    decode: float


class NotReached(Exception):
    """Something cannot be measured; the message says why."""


class Clock:
    """Tracks the remaining time; ``again(n)`` tells whether another round of the mean duration of the n so far fits."""

    def __init__(self, seconds: float):
        self._begin = time.perf_counter()
        self._end = self._begin + seconds
        self._rounds = self._begin

    def start_rounds(self) -> None:
        self._rounds = time.perf_counter()

    def again(self, done: int) -> bool:
        now = time.perf_counter()
        return done == 0 or now + (now - self._rounds) / done <= self._end

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()


def _bandwidth() -> ReadBandwidth:
    """A bandwidth test with a buffer larger than the caches, within a quarter of the free memory."""
    free = free_memory() or 1 << 30
    return ReadBandwidth(max(16 * _MIB, min(256 * _MIB, free // 4)))


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _packed(bits: int) -> torch.Tensor:
    n, k = _LAYER
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.rand(n, k // _GROUP, generator=generator).add_(0.5)
    return lowbit.pack(codes, scales, None, None, bits=bits, group_size=_GROUP)


class _Copies:
    """Many copies of a layer, so that a pass over all of them finds none in a cache."""

    def __init__(self, bytes_: int):
        self._buffer = in_huge_pages(torch.zeros(bytes_, dtype=torch.uint8))

    def of(self, packed: torch.Tensor) -> list[torch.Tensor]:
        step = -(-packed.numel() // 4096) * 4096
        copies = [self._buffer[at : at + packed.numel()] for at in range(0, self._buffer.numel() - packed.numel() + 1, step)]
        for copy in copies:
            copy.copy_(packed)
        return copies


def _turn(packed: torch.Tensor, copies: list[torch.Tensor], rows: dict[int, torch.Tensor], roof: float) -> dict[str, float]:
    """Figures of one bit width: a pass over all copies with one row, and a call with many rows."""
    n, k = _LAYER
    lowbit.linear(rows[1], copies[-1], n)  # wakes the threads
    gemv = _seconds(lambda: [lowbit.linear(rows[1], copy, n) for copy in copies]) / len(copies)
    gemm = _seconds(lambda: lowbit.linear(rows[_ROWS], packed, n))
    return {
        "gemv_bytes_per_second": packed.numel() / gemv,
        "gemv_share": packed.numel() / gemv / roof,
        "gemv_gops": 2e-9 * n * k / gemv,
        "gemm_gops": 2e-9 * n * k * _ROWS / gemm,
    }


def kernels(threads: int, seconds: float) -> dict[str, Any]:
    """The part ``kernels`` of the figures."""
    clock, bandwidth = Clock(seconds), _bandwidth()
    # Four times the cache, but at most a gigabyte, which exceeds any cache, and a quarter of the free memory.
    beyond = min(1024 * _MIB, max(_COPIES, 4 * (cache_bytes() or 0)), max(48 * _MIB, (free_memory() or 1 << 30) // 4))
    copies = _Copies(beyond)
    packed = {bits: _packed(bits) for bits in range(1, 9)}
    rows = {count: torch.randn(count, _LAYER[1], generator=torch.Generator().manual_seed(0)) for count in (1, _ROWS)}
    counts = sorted({1, threads})
    turns: dict[tuple[int, int], list[dict[str, float]]] = {(bits, count): [] for bits in packed for count in counts}
    roofs: dict[int, list[float]] = {count: [] for count in counts}
    done = 0
    clock.start_rounds()
    while done < _ROUNDS and clock.again(done):
        for bits, matrix in packed.items():
            filled = copies.of(matrix)
            for count in counts:
                torch.set_num_threads(count)
                roofs[count].append(bandwidth(count))
                turns[bits, count].append(_turn(matrix, filled, rows, roofs[count][-1]))
        done += 1
    return {
        "out_features": _LAYER[0],
        "in_features": _LAYER[1],
        "group_size": _GROUP,
        "rows": _ROWS,
        "rounds": done,
        "read_bandwidth": [
            {"threads": count, "bytes_per_second": statistics.median(measured)} for count, measured in roofs.items()
        ],
        "widths": [
            {"bits": bits, "threads": count, "isas": _isas(bits)} | _medians(measured)
            for (bits, count), measured in turns.items()
        ],
        "not_reached": [],
    }


def _isas(bits: int) -> list[str]:
    """The instruction sets of the linear kernels that run at a bit width."""
    rows = (row for row in lowbit.kernels() if row["family"] == "linear" and row["active"] and row["bits"] == bits)
    return sorted({row["isa"] for row in rows})


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def _need_memory(shape: str) -> None:
    """Raises NotReached if the free memory is too small to make the weights."""
    from ...llm import shape_config

    config = shape_config(shape)
    hidden, inner, table = config.hidden_size, config.intermediate_size, config.vocab_size * config.hidden_size
    heads = (config.num_attention_heads * 2 + config.num_key_value_heads * 2) * config.head_dim
    weights = config.num_hidden_layers * hidden * (heads + 3 * inner) + table * (1 if config.tie_word_embeddings else 2)
    # A scale of 4 bytes for 32 codes; codes of the largest matrix as bytes, twice, and Python with torch.
    needed = weights * (_BITS + 32 / _GROUP) / 8 + 3 * table + 700e6
    free = free_memory()
    if free is not None and free < needed:
        raise NotReached(f"it needs about {size(needed)} of memory, and {size(free)} are free")


def model(shape: str, threads: int, seconds: float) -> dict[str, Any]:
    """An entry of ``models`` of the figures: a whole model of random weights.

    Raises:
        NotReached: it does not fit into memory, or takes too long.
        ImportError: transformers is not installed.
    """
    from ...llm import Decoder, random_model
    from .. import model_speed

    clock = Clock(seconds)
    _need_memory(shape)
    torch.set_num_threads(threads)
    weights = random_model(shape, lowbit.LinearConfig(_BITS, _GROUP), lowbit.EmbeddingConfig(_BITS, _GROUP))
    not_reached: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as directory:
        peer = shutil.which(_PEER)
        if peer is None:
            not_reached.append({"what": "llama.cpp", "why": f"its program {_PEER} is not in PATH"})
        else:
            file = Path(directory) / "model.gguf"
            _write_gguf(weights, Path(directory) / "checkpoint", file)
        decoder = Decoder(weights, -(-(_PROMPT + _NEW + 1) // 16) * 16)  # as lowbit generate
        prompt = torch.randint(decoder.vocabulary, (1, _PROMPT), generator=torch.Generator().manual_seed(0))

        def run() -> _Run:
            first, later = model_speed.measure(decoder, prompt, _NEW)
            return _Run(lowbit.__version__, _PROMPT / first, 1 / statistics.median(later))

        runs: dict[str, Callable[[], _Run]] = {_LOWBIT: run}
        if peer is not None:
            runs["llama.cpp, Q4_0"] = lambda: _run_peer(peer, file, threads, clock.left)
        model_speed.measure(decoder, prompt[:, :16], 2)  # memory of the caches and the operators
        bandwidth, touched = _bandwidth(), model_speed.bytes_per_token(weights)
        roofs: list[float] = []
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        versions: dict[str, str] = {}
        done = 0
        clock.start_rounds()
        while done < _MODEL_ROUNDS and clock.again(done):
            for name in list(runs):
                roofs.append(bandwidth(threads))
                try:
                    ran = runs[name]()
                except (NotReached, OSError) as error:
                    not_reached.append({"what": f"{shape} in {name}", "why": gist(str(error))})
                    del runs[name], turns[name]
                    continue
                versions[name] = ran.version
                share = {"bandwidth_share": ran.decode * touched / roofs[-1]} if name == _LOWBIT else {}
                turns[name].append({"prefill_tokens_per_second": ran.prefill, "decode_tokens_per_second": ran.decode} | share)
            done += 1
        joules, counter = _joules_per_token(decoder, not_reached)
        start = None
        try:
            start = _start(weights, decoder.vocabulary, Path(directory) / "model", threads, clock)
        except (NotReached, OSError, RuntimeError, subprocess.SubprocessError) as error:
            not_reached.append({"what": f"start of lowbit generate with {shape}", "why": gist(str(error))})
    return {
        "shape": shape,
        "bits": _BITS,
        "group_size": _GROUP,
        "packed_bytes_per_token": touched,
        "threads": threads,
        "prompt": _PROMPT,
        "new": _NEW,
        "rounds": done,
        "read_bandwidth": statistics.median(roofs),
        "joules_per_token": joules,
        "energy_counter": counter,
        "start": start,
        "programs": [
            {"program": name, "version": versions[name], "bandwidth_share": None} | _medians(turns[name]) for name in turns
        ],
        "not_reached": not_reached,
    }


def _joules_per_token(
    decoder: Callable[..., torch.Tensor], not_reached: list[dict[str, str]]
) -> tuple[float | None, str | None]:
    """Joules of a token in decode, and the names of the counters."""
    from .. import model_speed

    found, reason = energy.sensors()
    try:
        if found:
            with energy.Meter(found) as meter:
                model_speed.measure(decoder, torch.zeros(1, 1, dtype=torch.int64), _NEW)
            return meter.joules / (_NEW + 1), ", ".join(sensor.name for sensor in found)
    except (OSError, ValueError) as error:
        reason = f"{found[0].name} cannot be read: {error}"
    not_reached.append({"what": "energy", "why": reason})
    return None, None


def _start(weights: torch.nn.Module, vocabulary: int, directory: Path, threads: int, clock: Clock) -> dict[str, float]:
    """The start of ``lowbit generate``: of a packed model with its plan, and a tokenizer of as many words."""
    if clock.left < _START_SECONDS:
        raise NotReached(f"{clock.left:.0f} s were left; it may need {_START_SECONDS:.0f}")
    if not are_allowed():
        raise NotReached("LOWBIT_PLAN is 0, which switches plans off; expected it unset, or 1")
    weights.save_pretrained(directory)
    _write_tokenizer(directory, vocabulary)
    command = [sys.executable, "-P", "-c", LOWBIT, "generate", str(directory), "--prompt", "1", "--threads", str(threads)]
    command += ["--max-new-tokens"]
    first = subprocess.run([*command, "1"], capture_output=True, text=True, errors="replace", timeout=max(1.0, clock.left))
    if first.returncode:
        raise NotReached(f"lowbit generate failed: {gist(first.stderr)}")
    if not (directory / "lowbit.plan").exists():
        raise NotReached("lowbit generate has written no plan beside the weights")
    return _medians([until_first_output([*command, str(_NEW)]) for _ in range(_STARTS)])


def _write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer whose words are the numbers below the size of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _write_gguf(weights: torch.nn.Module, checkpoint: Path, file: Path) -> None:
    """Writes the same weights for llama.cpp, as Q4_0; the intermediate packed checkpoint is removed."""
    from ...exports.gguf import export_gguf

    weights.save_pretrained(checkpoint)
    export_gguf(checkpoint, file, tokenizer=False)
    shutil.rmtree(checkpoint)


def _run_peer(program: str, file: Path, threads: int, seconds: float) -> _Run:
    """Measures a prompt and decoding with llama-bench.

    Raises:
        NotReached: it failed, or takes longer than ``seconds``.
        OSError: it cannot be started.
    """
    options = {"-m": file, "-p": _PROMPT, "-n": _NEW, "-t": threads, "-r": 1, "-ngl": 0, "-o": "json"}
    command = [program, *(str(part) for option in options.items() for part in option)]
    seconds = max(1.0, seconds)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NotReached(f"{_PEER} was not done after {seconds:.0f} s, all of the time that was left") from None
    if ran.returncode:
        raise NotReached(f"{_PEER} failed: {gist(ran.stderr)}")
    try:
        tests = {(test["n_prompt"], test["n_gen"]): test for test in json.loads(ran.stdout)}
        prompt, new = tests[_PROMPT, 0], tests[0, _NEW]
        version = f"build {prompt['build_number']} ({prompt['build_commit']})"
        return _Run(one_line(version, 60), float(prompt["avg_ts"]), float(new["avg_ts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise NotReached(f"{_PEER} printed other figures than its JSON of two tests: {gist(ran.stdout)}") from error


def main() -> None:
    """Writes the document of a part, or the reason why it could not be measured."""
    part, threads, seconds, file = sys.argv[1:]
    document: dict[str, Any]
    try:
        arguments = int(threads), float(seconds)
        document = kernels(*arguments) if part == "kernels" else model(part, *arguments)
    except (NotReached, ImportError) as error:
        document = {"reason": str(error)}
    except MemoryError:
        document = {"reason": "not enough memory"}
    Path(file).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
