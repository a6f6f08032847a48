"""Measures what quantized language models write, compared with the float model: answers, and tasks that a program checks.

    make bench-answers             prints the tables
    make bench-answers DOC=1       the same, and writes them into docs/measurements/answers.md
    python3 bench/answers.py [--only smollm2 gemma] [--rows TEXT ...] [--kept] [--problems 100] [--document PAGE]

docs/measurements/answers.md describes the columns. A row is kept in a file below build/answers as soon as it is measured, so
that a run goes on after a stop; rows that other settings measured are measured again. HumanEval runs the code of the models.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lowbit
import reality_models as models
import reality_weights as weights
import torch
from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens
from lowbit.machine.facts import cpu_name
from lowbit.tools.divergence import compare, save_logits
from lowbit.tools.greedy_answers import (
    LENGTHS,
    Score,
    equal_share,
    first_differences,
    greedy_answers,
    prompt_tokens,
    read_prompts,
    solve,
)
from lowbit.tools.report.peers import peers
from lowbit.tools.tasks import TASKS, make_problems
from pages import write_between
from torch import Tensor

BEGIN, END = "<!-- tables: make bench-answers DOC=1 -->\n", "<!-- end of tables of answers -->\n"
PROMPTS = Path(__file__).with_name("prompts.txt")
MODELS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "smollm2": (f"SmolLM2-135M-Instruct (`{models.SMOLLM2}`, a file of Q4_1)", models.smollm2_floats),
    "gemma": (f"Gemma 3 270M (`{models.GEMMA}=={models.VERSION}`, a file of Q4_K_M)", models.gemma_floats),
}
FLOATS = "float32"
NEW = LENGTHS[-1]
WINDOW = 512


@dataclass
class Source:
    """A float model, what it is asked, and what it answers."""

    directory: Path  # of the float checkpoint
    results: Path  # a directory for measured rows
    settings: argparse.Namespace
    answers: list[list[int]] = field(default_factory=list)  # the float model's
    unsolved: set[str] = field(default_factory=set)  # tasks of which the float model solves no problem; others are not asked

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    @cached_property
    def floats(self) -> torch.nn.Module:
        return load_model(self.directory).float().eval()

    @cached_property
    def prompts(self) -> list[list[int]]:
        lines = read_prompts(PROMPTS)[: self.settings.prompts]
        return [prompt_tokens(self.tokenizer, [{"role": "user", "content": line}]) for line in lines]

    @cached_property
    def text(self) -> list[int]:
        return models.python_source(self.tokenizer, self.settings.tokens)[1]

    @cached_property
    def problems(self) -> dict[str, Any]:
        found = {name: make_problems(name, self.settings.problems)[name] for name in TASKS if name != "humaneval"}
        return found | (make_problems("humaneval", self.settings.functions) if self.settings.functions else {})

    @cached_property
    def mean_squares(self) -> dict[str, Tensor]:
        return weights.mean_squares(self, self.settings.calibration_tokens)

    @cached_property
    def logits(self) -> Path:
        path = self.results / "logits.safetensors"
        save_logits(self.floats, self.text, path, window=WINDOW, stride=WINDOW // 2)
        return path


Made = tuple[torch.nn.Module, float]  # a model, and its bits per weight


def as_float(source: Source) -> Made:
    return source.floats, 32.0


def to_nearest(source: Source, bits: int, activation_bits: int = 8) -> Made:
    config = lowbit.LowBitConfig(bits=bits, activation_bits=activation_bits)
    model = load_model(source.directory, config)
    return model, weights.packed_size(model)[1]


def calibrated(source: Source, bits: int, target: float | None = None) -> Made:
    config = lowbit.LowBitConfig(bits=bits, rotate=True)
    model = weights.calibrate(source, source.settings.calibration_tokens, config, target)
    return model, weights.packed_size(model)[1]


def of_llama_cpp(source: Source, kind: str) -> Made:
    peer = peers([], importance=True)[kind]
    model, _, bits = weights.dequantized(source, peer, source.mean_squares)
    return model, bits


@dataclass(frozen=True)
class Row:
    name: str
    make: Callable[[Source], Made]
    cache: str | None = None
    peer: str | None = None  # a type of llama.cpp


ROWS = (
    Row(FLOATS, as_float),
    Row("lowbit, 8 bits", partial(to_nearest, bits=8)),
    Row("lowbit, 8 bits, activations of 16 bits", partial(to_nearest, bits=8, activation_bits=16)),
    Row("lowbit, 4 bits, rounded to nearest", partial(to_nearest, bits=4)),
    *(Row(f"lowbit, {bits} bits, calibrated", partial(calibrated, bits=bits)) for bits in (4, 3, 2)),
    *(
        Row(f"lowbit, mixed widths, {each} bits, calibrated", partial(calibrated, bits=4, target=each))
        for each in (4.5, 3.5, 2.5)
    ),
    *(
        Row(f"llama.cpp's {kind}", partial(of_llama_cpp, kind=f"GGUF {kind}"), peer=f"GGUF {kind}")
        for kind in ("Q8_0", "Q4_0", *(f"{kind}, importance" for kind in ("Q4_K", "Q3_K", "IQ3_S", "Q2_K", "IQ2_S")))
    ),
    *(Row(f"float32, KV cache {kind}", as_float, kind) for kind in ("int8", "int8,int4", "int4")),
)


def measure(source: Source, row: Row) -> dict[str, Any]:
    begin = time.perf_counter()
    model, bits = row.make(source)
    made = time.perf_counter()
    stop = stop_tokens(model, source.tokenizer)
    found: dict[str, Any] = {"bits": bits}
    if row.name == FLOATS:
        found["answers"] = greedy_answers(model, source.prompts, NEW, stop=stop)
    else:
        answers = greedy_answers(model, source.prompts, NEW, stop=stop, reference=source.answers, cache=row.cache)
        found["places"] = first_differences(answers, source.answers)
        divergence = compare(model, source.text, source.logits, window=WINDOW, stride=WINDOW // 2, cache=row.cache)
        found["kld"] = divergence.kld
    scores = {
        name: solve(model, source.tokenizer, problems, stop=stop, cache=row.cache)
        for name, problems in source.problems.items()
        if name not in source.unsolved
    }
    found["scores"] = {name: [score.solved, score.problems] for name, score in scores.items()}
    return found | {"seconds_to_quantize": made - begin, "seconds": time.perf_counter() - made}


def file_of(source: Source, row: Row) -> Path:
    return source.results / f"{re.sub(r'[^a-z0-9.]+', '_', row.name.lower())}.json"


def known(source: Source, row: Row, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The figures in a row's file, if they are of the same settings."""
    path = file_of(source, row)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found if found.get("settings") == settings else None


def measured(source: Source, row: Row, settings: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row: those in its file, or new ones."""
    found = known(source, row, settings)
    if found is None:
        found = measure(source, row) | {"settings": settings}
        path = file_of(source, row)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file = path.with_suffix(".partial")
        partial_file.write_text(json.dumps(found) + "\n", encoding="utf-8")
        partial_file.replace(path)
    return found


# ---- the page


def percent(share: float, count: int) -> str:
    """A share of a sample in percent, with its standard error."""
    return f"{100 * share:.0f} ± {100 * math.sqrt(share * (1 - share) / count):.0f}"


def cells(name: str, found: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    places = found.get("places")
    if places is None:  # the float model itself
        compared = [""] * (2 + len(LENGTHS))
    else:
        middle = statistics.median(NEW if place is None else place for place in places)
        shares = (percent(equal_share(places, length), len(places)) for length in LENGTHS)
        compared = [f"{found['kld']:.4f}", *shares, f"{middle:.0f}"]
    scores = [Score(*found["scores"][task]) if task in found["scores"] else None for task in tasks]
    solved = ["" if score is None else percent(score.share, score.problems) for score in scores]
    return [name, f"{found['bits']:.2f}", *compared, *solved]


HEADINGS = {"arithmetic": "Arithmetic", "json": "JSON", "calls": "Function calls", "humaneval": "HumanEval"}


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    tasks = list(next(iter(rows.values()))["scores"])
    heads = ["Weights", "Bits per weight", "KLD, nats", *(f"Equal, {length} tokens, %" for length in LENGTHS)]
    heads += ["Median of equal tokens", *(f"{HEADINGS[task]}, %" for task in tasks)]
    header, *lines = (f"| {' | '.join(line)} |" for line in (heads, *(cells(name, rows[name], tasks) for name in rows)))
    return [header, "|" + "---|" * len(heads), *lines]


def document(results: dict[str, dict[str, dict[str, Any]]], settings: argparse.Namespace) -> str:
    lines = [
        f"{datetime.date.today()}, {cpu_name()}, {lowbit.isa()['active'][-1]}, torch {torch.__version__}. Answers to "
        f"{settings.prompts} prompts, {settings.problems} problems of each task, {settings.functions} of HumanEval; KLD on "
        f"{settings.tokens} tokens, calibrated on {settings.calibration_tokens}."
    ]
    if results.keys() != MODELS.keys() or any(len(rows) < len(ROWS) for rows in results.values()):
        lines[0] += " Only these rows have been measured; `make bench-answers DOC=1` measures all."
    for name, rows in results.items():
        lines += ["", f"### {MODELS[name][0] if name in MODELS else name}", "", *table(rows)]
    return "\n".join(lines)


def sources(options: argparse.Namespace) -> Iterator[tuple[str, Source]]:
    for name in options.only:
        directory = MODELS[name][1](options.models) if name in MODELS else Path(name)
        yield name, Source(directory, options.directory / (name if name in MODELS else directory.name), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), help="models: names, or directories of float checkpoints")
    parser.add_argument("--rows", nargs="+", default=[""], help="rows whose names contain one of these texts; default: all")
    parser.add_argument("--kept", action="store_true", help="only rows that were measured before")
    parser.add_argument("--prompts", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--problems", type=int, default=100, help="of each task but HumanEval; default: %(default)s")
    parser.add_argument("--functions", type=int, default=40, help="problems of HumanEval; 0: none; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=512, help="of the text for the KLD; default: %(default)s")
    parser.add_argument("--calibration-tokens", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--models", type=Path, default=models.ROOT / "build" / "reality", help="default: %(default)s")
    parser.add_argument("--directory", type=Path, default=models.ROOT / "build" / "answers", help="default: %(default)s")
    parser.add_argument("--document", type=Path, help="write the tables into this page")
    options = parser.parse_args()
    names = ("prompts", "problems", "functions", "tokens", "calibration_tokens")
    settings = {name: getattr(options, name) for name in names}
    chosen = [row for row in ROWS if row.name == FLOATS or any(text in row.name for text in options.rows)]
    absent = {row.peer for row in chosen if row.peer is not None} - peers([], importance=True).keys()
    if absent and not options.kept:
        print(f"not installed (make bench-peers): {', '.join(sorted(absent))}", flush=True)
        chosen = [row for row in chosen if row.peer not in absent]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name, source in sources(options):
        rows = results[name] = {}
        for row in chosen:
            if options.kept and known(source, row, settings) is None:
                continue
            rows[row.name] = measured(source, row, settings)
            if row.name == FLOATS:
                source.answers = rows[FLOATS]["answers"]
                source.unsolved = {task for task, (solved, _) in rows[FLOATS]["scores"].items() if not solved}
            print(f"{name}: {' | '.join(cells(row.name, rows[row.name], list(rows[FLOATS]['scores'])))}", flush=True)
    text = document({name: rows for name, rows in results.items() if rows}, options)
    print(text)
    if options.document is not None:
        write_between(options.document, BEGIN, END, text)


if __name__ == "__main__":
    main()
