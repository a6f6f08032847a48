"""Measures the loss of lowbit on published language models, compared with llama.cpp on the same file, and by layer.

    make bench-reality          prints the tables, writes build/bench/reality.{json,md}
    make bench-reality DOC=1    the same, and writes the tables into docs/reality.md
    python3 bench/reality.py [--only gemma tiny_llama minilm] [--parts table weights ...] [--tokens N]

docs/reality.md describes the measures. Models and reference logits are kept in build/reality (2.5 GB).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lowbit
import reality_models as models
import reality_weights as weights
import torch
from lowbit.llm.perplexity import predictions
from lowbit.machine.facts import cpu_name
from lowbit.tools.divergence import judge, save_logits, stored
from reality_models import Pair
from reality_rounding import (
    KINDS,
    MATRICES,
    PARTS,
    Rounding,
    blocks,
    blocks_of,
    in_bfloat16,
    kind_of,
    noisy_embeddings,
    rotated,
    rounded_inputs,
    rows,
    rows_with_zero_point,
)
from torch import Tensor

BEGIN, END = "<!-- figures: written by bench/reality.py -->", "<!-- end of figures -->"
MODELS = ("gemma", "tiny_llama", "minilm")
WINDOW = 512
NOISE, SEEDS, LIKELIEST, NOISE_TOKENS = 1e-7, 3, 10, 128
CONTRACT = "blocks of min(group, 64)"


class Judge:
    """Compares models with one reference, the logits in a file."""

    def __init__(self, name: str, pair: Pair, directory: Path, calibration_tokens: int):
        self.calibration_tokens = calibration_tokens
        self.pair, self.window = pair, min(WINDOW, len(pair.tokens))
        self.stride = max(1, self.window // 2)
        self.path = directory / f"{name}-logits.safetensors"
        save_logits(pair.floats, pair.tokens, self.path, window=self.window, stride=self.stride)
        self.rows: list[dict[str, Any]] = []

    def model(self, name: str, model: torch.nn.Module, within: AbstractContextManager = nullcontext()) -> None:
        with within:
            self._add(name, predictions(model, self.pair.tokens, self.window, self.stride))

    def rounded(self, name: str, layers: dict[str, Rounding]) -> None:
        """Measures the float model with rounded inputs of these layers."""
        self.model(name, self.pair.floats, rounded_inputs(self.pair.floats, layers))

    def llama_cpp(self) -> None:
        try:
            self._add("llama.cpp, same file", models.llama_cpp(self.pair.gguf, self.pair.tokens, self.window, self.stride))
        except ImportError as error:
            say(f"llama.cpp: absent ({error}; make bench-peers installs it)")

    @torch.inference_mode()
    def _add(self, name: str, predicted: Iterator[tuple[Tensor, Tensor]]) -> None:
        found = judge(predicted, stored(self.path, self.pair.tokens, self.window, self.stride))
        row = {
            "name": name, "perplexity": found.model.perplexity,
            "percent": 100 * (found.model.perplexity / found.reference.perplexity - 1), "error": 100 * found.nats_error,
            "kld": found.kld, "kld_99": found.kld_99, "top1": found.top1,
        }  # fmt: skip
        self.rows.append(row)
        change = f"{row['percent']:+.2f} ± {row['error']:.2f} %"
        say(f"{name}: perplexity {row['perplexity']:.3f} ({change}), KLD {row['kld']:.5f}, top-1 {row['top1']:.3f}")


def with_16_bits(model: torch.nn.Module, end: str = "") -> torch.nn.Module:
    """The model with activations of 16 bits in the packed layers whose names have this end."""
    for name, module in model.named_modules():
        if isinstance(module, lowbit.nn.Linear) and name.endswith(end):
            module.to_activation_bits(16)
    return model


def judge_table(judge: Judge) -> None:
    pair, all_layers = judge.pair, list(judge.pair.groups)
    down = [name for name in all_layers if kind_of(name) == "down"]
    judge.model("float, float32", pair.floats)
    judge.model("float, bfloat16", copy.deepcopy(pair.floats).bfloat16())
    if pair.gguf is not None:
        judge.llama_cpp()
    for dtype in (torch.float32, torch.bfloat16):
        judge.model(f"lowbit, {str(dtype).removeprefix('torch.')}", pair.load(dtype))
    judge.model("lowbit, float32, activations of 16 bits", with_16_bits(pair.load(torch.float32)))
    judge.model("lowbit, float32, activations of 16 bits in the head", with_16_bits(pair.load(torch.float32), "lm_head"))
    judge.rounded(f"simulated: {CONTRACT}, as lowbit", {name: blocks_of(group) for name, group in pair.groups.items()})
    judge.rounded("a row, with zero point, as lowbit once had", dict.fromkeys(all_layers, rows_with_zero_point))
    judge.rounded("a row, symmetric", dict.fromkeys(all_layers, rows))
    for size in (256, 128, 64, 32):
        judge.rounded(f"blocks of {size}", dict.fromkeys(all_layers, blocks(size)))
    judge.rounded("a row, with zero point, only down", dict.fromkeys(down, rows_with_zero_point))
    others = [name for name in all_layers if name not in down]
    judge.rounded("a row, with zero point, all but down", dict.fromkeys(others, rows_with_zero_point))


def contract(pair: Pair, *, head: bool) -> dict[str, Rounding]:
    """lowbit's rounding of the inputs of each packed layer, and of the head if it is packed."""
    layers = pair.groups | ({"lm_head": pair.head_group} if head else {})
    return {name: blocks_of(group) for name, group in layers.items()}


def only(layers: dict[str, Rounding], kind: str) -> dict[str, Rounding]:
    return {name: rounding for name, rounding in layers.items() if kind_of(name) == kind}


def judge_layers(judge: Judge) -> None:
    """Measures the contract for each kind of layer alone, largest share first, and for all other kinds."""
    layers = contract(judge.pair, head=True)
    judge.rounded("all layers and the head", layers)
    first = len(judge.rows)
    for kind in KINDS:
        judge.rounded(f"only {kind}", only(layers, kind))
    alone = judge.rows[first:]
    for row in alone:
        row["share"] = row["kld"] / sum(row["kld"] for row in alone)
    judge.rows[first:] = sorted(alone, key=lambda row: -row["kld"])
    for kind in KINDS:
        judge.rounded(f"all but {kind}", {name: rounding for name, rounding in layers.items() if kind_of(name) != kind})


def judge_rotations(judge: Judge) -> None:
    """Measures the rounding of rotated inputs of down."""
    down = [name for name in judge.pair.groups if kind_of(name) == "down"]
    for name, rounding in (("64", blocks(64)), ("32", blocks(32))):
        judge.rounded(f"only down, blocks of {name}", dict.fromkeys(down, rounding))
        for size, title in ((64, "64"), (None, "all")):
            turned = dict.fromkeys(down, rotated(rounding, size))
            judge.rounded(f"only down, blocks of {name}, {title} inputs rotated", turned)


def judge_weights(judge: Judge) -> None:
    """Measures calibrated weights of few bits, and llama.cpp's."""
    tokens = judge.calibration_tokens
    own = (weights.calibrated(judge.pair, tokens, rotate) for rotate in (False, True))
    for candidate in chain(weights.of_llama_cpp(judge.pair, tokens), *own):
        judge.model(candidate.name, candidate.model)
        judge.rows[-1] |= {"bytes": candidate.bytes, "bits": candidate.bits, "seconds": candidate.seconds}


def judge_bfloat16(judge: Judge) -> None:
    """Measures the float and the packed model in float32 with parts rounded to bfloat16."""
    floats = judge.pair.floats
    judge.model("float model: bfloat16, as it runs", copy.deepcopy(floats).bfloat16())
    judge.model("simulated: all of these parts in bfloat16", floats, in_bfloat16(floats, {*PARTS, *MATRICES}))
    for part, title in (PARTS | MATRICES).items():
        judge.model(f"only {title}", floats, in_bfloat16(floats, {part}))
    packed = judge.pair.load(torch.float32)
    judge.model("lowbit: float32", packed)
    judge.model("bfloat16, as it runs", judge.pair.load(torch.bfloat16))
    judge.model("simulated: all of these parts in bfloat16", packed, in_bfloat16(packed, set(PARTS)))
    for part, title in PARTS.items():
        judge.model(f"only {title}", packed, in_bfloat16(packed, {part}))


@torch.inference_mode()
def sensitivity(pair: Pair) -> list[dict[str, Any]]:
    """Measures how much tiny noise in the embeddings changes the log-probabilities of the likeliest tokens."""
    tokens = pair.tokens[:NOISE_TOKENS]

    def log_probabilities(model: torch.nn.Module) -> Tensor:
        with closing(predictions(model, tokens, len(tokens), len(tokens) // 2)) as windows:
            return torch.cat([logits for logits, _ in windows]).log_softmax(-1)

    expected = log_probabilities(pair.floats)
    ids = expected.topk(LIKELIEST, dim=-1).indices
    expected = expected.gather(1, ids)
    found = []

    def add(name: str, model: torch.nn.Module, layers: dict[str, Rounding] | None = None) -> None:
        with rounded_inputs(model, layers or {}):
            before = log_probabilities(model).gather(1, ids)
            moved = []
            for seed in range(SEEDS):
                with noisy_embeddings(model, NOISE, seed):
                    moved.append((log_probabilities(model).gather(1, ids) - before).abs())
        each = torch.cat(moved)
        row = {
            "name": name, "mean": each.mean().item(), "most_99": each.flatten().quantile(0.99).item(),
            "most": each.max().item(), "from_float": (before - expected).abs().mean().item(),
        }  # fmt: skip
        found.append(row)
        say(f"{name}: moved by {row['mean']:.2g} in the mean, {row['most']:.2g} at most; {row['from_float']:.2g} from float")

    add("float", pair.floats)
    add("lowbit, float32", pair.load(torch.float32))
    add("lowbit, float32, activations of 16 bits", with_16_bits(pair.load(torch.float32)))
    for bits in (8, 6):
        config = {name: lowbit.LinearConfig(bits, 32) for name in pair.groups if name != "lm_head"}  # tied: float
        add(f"lowbit, float32, {bits} bits in groups of 32", lowbit.quantize_(copy.deepcopy(pair.floats), config))
    layers = contract(pair, head=False)
    add(f"simulated: {CONTRACT}", pair.floats, layers)
    for kind in KINDS:
        if some := only(layers, kind):
            add(f"only {kind}", pair.floats, some)
    for size in (32, 16):
        add(f"blocks of {size}", pair.floats, dict.fromkeys(layers, blocks(size)))
    return found


def judge_minilm() -> dict[str, Any]:
    found = []
    for bits in (8, 4):
        cosines, tokens = models.minilm(bits)
        found.append({"bits": bits, "mean": cosines.mean().item(), "least": cosines.min().item()})
        say(f"{bits} bits: cosine {found[-1]['mean']:.5f}, at least {found[-1]['least']:.5f}")
    return {"sentences": len(cosines), "tokens": tokens, "rows": found}


# ---- the document


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(row) + " |" for row in rows), ""]


# Columns that only some parts have: heading, and format of a row's number.
MORE: dict[str, tuple[str, Callable[[float], str]]] = {
    "share": ("share of KLD", "{:.0%}".format),
    "bytes": ("MB", lambda size: f"{size / 1e6:.1f}"),
    "bits": ("bits per weight", "{:.2f}".format),
    "seconds": ("CPU s", "{:.0f}".format),
}


def divergence_table(first: str, rows: list[dict[str, Any]]) -> list[str]:
    more = [name for name in MORE if any(name in row for row in rows)]
    return table(
        [first, "perplexity", "over float's, %", "KLD, nats", "KLD, 99 %", "top-1", *(MORE[name][0] for name in more)],
        [
            [
                row["name"],
                f"{row['perplexity']:.3f}",
                f"{row['percent']:+.2f} ± {row['error']:.2f}",
                f"{row['kld']:.5f}",
                f"{row['kld_99']:.4f}",
                f"{row['top1']:.3f}",
                *(MORE[name][1](row[name]) if name in row else "" for name in more),
            ]  # fmt: skip
            for row in rows
        ],
    )


def document(results: dict[str, Any]) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [f"Written by `{results['command']}` on {results['date']}. {machine['cpu']}, ISA {machine['isa']}; {versions}.", ""]
    titles = {
        "table": "Activations",
        "weights": "Weights",
        "layers": "Layers",
        "rotations": "Rotations",
        "bfloat16": "bfloat16",
    }
    firsts = {
        "table": "model, activations", "weights": "weights", "layers": f"rounded in {CONTRACT}", "rotations": "rounded",
        "bfloat16": "in bfloat16",
    }  # fmt: skip
    for name, found in results["models"].items():
        if name == "minilm":
            lines += ["## all-MiniLM-L6-v2", "", f"Cosine of packed and float embeddings, {found['sentences']} sentences.", ""]
            rows = [[f"{row['bits']} bits, groups of 32", f"{row['mean']:.5f}", f"{row['least']:.5f}"] for row in found["rows"]]
            lines += table(["weights", "mean cosine", "least cosine"], rows)
            continue
        lines += [f"## {found['title']}", "", f"{found['text']}.", ""]
        for part, title in titles.items():
            if part in found:
                lines += [f"### {title}", "", *divergence_table(firsts[part], found[part])]
        if "sensitivity" in found:
            lines += ["### Sensitivity", ""]
            numbers = ("mean", "most_99", "most", "from_float")
            rows = [[row["name"], *(f"{row[number]:.2g}" for number in numbers)] for row in found["sensitivity"]]
            lines += table(["model", "log-probabilities moved, mean", "99 %", "at most", "distance from float, mean"], rows)
    return "\n".join(lines).rstrip() + "\n"


def insert(text: str, section: str) -> str:
    """Returns a page with the text between its markers replaced."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} before {END}")
    return f"{head}{BEGIN}\n{section}{END}{tail}"


def write(results: dict[str, Any], output: Path) -> None:
    output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    judges = {
        "table": judge_table,
        "weights": judge_weights,
        "layers": judge_layers,
        "rotations": judge_rotations,
        "bfloat16": judge_bfloat16,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=MODELS, choices=MODELS, help="models; default: all")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["table", "layers", "bfloat16", "sensitivity"],
        choices=[*judges, "sensitivity"],
        help="tokens of each language model; default: %(default)s",
    )
    parser.add_argument("--tokens", type=int, default=512, help="of text; default: %(default)s")
    parser.add_argument("--calibration-tokens", type=int, default=8192, help="of the part weights; default: %(default)s")
    parser.add_argument("--directory", type=Path, default=Path("build/reality"), help="for models; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("build/bench/reality"), help="without .json and .md")
    parser.add_argument("--document", type=Path, help="a page with markers, which also gets the tables")
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error(f"--tokens is {options.tokens}; expected 2 or more")
    options.directory.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "command": " ".join(["python3", "bench/reality.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cpu": cpu_name(), "isa": ", ".join(lowbit.isa()["active"]), "system": platform.platform()},
        "versions": models.versions(),
        "models": {},
    }
    for name in options.only:
        say(f"## {name}")
        if name == "minilm":
            results["models"][name] = judge_minilm()
            continue
        pair = getattr(models, name)(options.directory.resolve(), options.tokens)
        found = results["models"][name] = {"title": pair.title, "text": pair.text}
        judging = Judge(name, pair, options.directory, options.calibration_tokens)
        for part, run in judges.items():
            if part in options.parts:
                say(f"# {part}")
                judging.rows = found[part] = []
                run(judging)
                write(results, options.output)
        if "sensitivity" in options.parts:
            say("# sensitivity")
            found["sensitivity"] = sensitivity(pair)
    write(results, options.output)
    section = document(results)
    options.output.with_suffix(".md").write_text(section, encoding="utf-8")
    if options.document is not None:
        options.document.write_text(insert(options.document.read_text("utf-8"), section), encoding="utf-8")
    print(section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
