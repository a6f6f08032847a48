"""Tests lowbit's decoder on tiny random versions of every causal language model of transformers.

`make models` writes docs/models.md from it. A model is right, refused, or not tried. If the decoder accepts a model but differs
from transformers' forward, the program ends with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import lowbit.llm
import torch
import transformers
from tiny_models import experts_in, float_share, make, quantize  # first, because it sets environment variables for transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MAX_LENGTH, TEXT, NEW = 64, 24, 8
# Tolerances for rounding, relative to the standard deviation of the logits. Float32 sums in another order change about 1e-6.
# Between 4-bit layers they also move activations to the next of 255 values.
CLOSE = {"float": 1e-3, "4 bits": 0.1}


@dataclass
class Outcome:
    """The result for one model in floats or at 4 bits."""

    state: str  # "right", "refused", "not tried", or "WRONG"
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    export: str = ""  # "yes", or the reason
    experts: str = ""  # at 4 bits: :func:`experts_in`
    refusal: str = ""  # of the decoder, if transformers' own attention is right
    how: str = ""  # capabilities of its caches then
    plan: str = ""  # why the decoder has none


def text(vocabulary: int) -> torch.Tensor:
    return torch.tensor([[(11 + 29 * i + i * i) % (vocabulary - 8) + 4 for i in range(TEXT)]])


def one_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().split("\n") if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


@torch.inference_mode()
def attempt(model: torch.nn.Module, kind: str, export: bool = True) -> Outcome:
    """Decodes with a model, and compares with the model's forward over the whole text."""
    try:
        tokens = text(model.config.get_text_config().vocab_size)
        own = model(input_ids=tokens, use_cache=False).logits.float()
    except Exception as error:
        try:
            lowbit.llm.Decoder(model, MAX_LENGTH)
        except ValueError as refusal:
            if "the model raises" not in str(refusal):
                return Outcome("refused", f"transformers' own forward raises {one_line(error)}", refusal=str(refusal))
        return Outcome("not tried", f"transformers' own forward raises {one_line(error)}")
    if not own.isfinite().all() or own.std() < 1e-6:
        return Outcome("not tried", "the logits of its random weights are not finite, or all the same")
    attention = model.config._attn_implementation
    try:
        decoder = lowbit.llm.Decoder(model, MAX_LENGTH)
    except ValueError as error:
        again = model(input_ids=tokens, use_cache=False).logits.float()
        if not torch.equal(again, own) or model.config._attn_implementation != attention:
            return Outcome("WRONG", "changed by a decoder that refused it")
        return fallback(model, kind, tokens, own, str(error))
    close, scale = CLOSE[kind], own.std()

    def off(logits: torch.Tensor, position: int) -> float:
        return float((logits[0].float() - own[0, position]).square().mean().sqrt() / scale)

    def start(at: int) -> torch.Tensor:
        return torch.tensor([at])

    figures = {"whole": off(decoder(tokens, start(0)), TEXT - 1)}
    figures["one by one"] = max(off(decoder(tokens[:, i : i + 1], start(i)), i) for i in range(TEXT))
    decoder(tokens[:, :7], start(0))
    decoder(tokens[:, 7:12], start(7))
    figures["pieces"] = off(decoder(tokens[:, 12:], start(12)), TEXT - 1)
    figures |= {f"proof, {name}": value for name, value in decoder.measured.items()}
    made = lowbit.llm.generate(decoder, tokens[0].tolist(), NEW, max_length=MAX_LENGTH).tokens
    outcome = Outcome("right", figures=figures, plan=decoder.plan_refusal or "")
    if export:
        try:
            outcome.export = exported(decoder, tokens, close * float(scale))
        except Exception as error:
            outcome.export = one_line(error)
    decoder.release()
    if not torch.equal(model(input_ids=tokens, use_cache=False).logits.float(), own):
        return Outcome("WRONG", "changed by a decoder that was released", figures)
    whole = torch.tensor([tokens[0].tolist() + made])
    then = model(input_ids=whole, use_cache=False).logits.float()[0, TEXT - 1 : -1]
    # Each token is the likeliest in the model's forward, or ties with it within rounding.
    figures["tokens"] = max(float((then[i].max() - then[i][token]) / scale) for i, token in enumerate(made))
    allowed = close
    for name, value in figures.items():
        if not name.startswith("proof") and not value <= allowed:
            allowed = max(close, jump(model, tokens, own))
        if not name.startswith("proof") and not value <= allowed:
            return Outcome("WRONG", f"{name}: {value:.3g} standard deviations from transformers' own forward", figures)
    return outcome


def jump(model: torch.nn.Module, tokens: torch.Tensor, own: torch.Tensor) -> float:
    """How far rounding alone moves a model's logits, in standard deviations, for example by choosing another expert.

    The embeddings of the tokens change by parts of 1e-6, in 16 ways.
    """
    generator, furthest = torch.Generator().manual_seed(2), 0.0

    def disturb(_module: torch.nn.Module, _inputs: Any, vectors: torch.Tensor) -> torch.Tensor:
        return vectors * (1 + 1e-6 * torch.randn(vectors.shape, generator=generator))

    hook = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        for _ in range(16):
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            furthest = max(furthest, float((logits - own).square().mean(-1).sqrt().max() / own.std()))
    finally:
        hook.remove()
    return furthest


def without_us(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a text, token by token, by transformers alone."""
    cache, logits = transformers.DynamicCache(config=model.config.get_text_config(decoder=True)), []
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before transformers 5.24
    for i in range(tokens.shape[1]):
        logits.append(model(input_ids=tokens[:, i : i + 1], use_cache=True, **{name: cache}).logits.float())
    return torch.cat(logits, dim=1)


def fallback(model: torch.nn.Module, kind: str, tokens: torch.Tensor, own: torch.Tensor, refusal: str) -> Outcome:
    """The same for a model that the decoder refuses, with its own attention, compared with its own generate()."""
    try:
        step = lowbit.llm.Fallback(model, MAX_LENGTH)
    except ValueError as error:
        return Outcome("refused", str(error), refusal=refusal)
    scale, start = own.std(), lambda at: torch.tensor([at])

    def off(logits: torch.Tensor, position: int) -> float:
        return float((logits[0].float() - own[0, position]).square().mean().sqrt() / scale)

    figures = {"whole": off(step(tokens, start(0)), TEXT - 1)}
    figures["one by one"] = max(off(step(tokens[:, i : i + 1], start(i)), i) for i in range(TEXT))
    step(tokens[:, :7], start(0))
    step(tokens[:, 7:12], start(7))
    figures["pieces"] = off(step(tokens[:, 12:], start(12)), TEXT - 1)
    step(tokens[:, :9], start(12))
    figures["cut back"] = off(step(tokens[:, 12:], start(12)), TEXT - 1)
    made = lowbit.llm.generate(step, tokens[0].tolist(), NEW, max_length=MAX_LENGTH).tokens
    then = model(input_ids=torch.tensor([tokens[0].tolist() + made]), use_cache=False).logits.float()[0, TEXT - 1 : -1]
    figures["tokens"] = max(float((then[i].max() - then[i][token]) / scale) for i, token in enumerate(made))
    figures |= {f"proof, {name}": value for name, value in step.measured.items()}
    for name, value in figures.items():
        if not name.startswith("proof") and not value <= CLOSE[kind]:
            cached = without_us(model, tokens)
            if (cached - own).square().mean(-1).sqrt().max() / scale > CLOSE[kind]:
                return Outcome(
                    "not tried", "transformers' own caches give other logits than its own forward over the whole text: "
                    f"{value:.2g} standard deviations", figures, refusal=refusal,
                )  # fmt: skip
            return Outcome("WRONG", f"fallback, {name}: {value:.3g} standard deviations", figures, refusal=refusal)
    return Outcome("right", figures=figures, refusal=refusal, how=step.how)


def exported(decoder: lowbit.llm.Decoder, tokens: torch.Tensor, close: float) -> str:
    """torch.export with any number of tokens, as for .pte and .pt2, without their compilers, which take half a minute each."""
    sizes = ({1: torch.export.Dim("s", min=1, max=32)}, None)
    with torch.no_grad():
        program = torch.export.export(decoder, (tokens[:, :3], torch.tensor([0])), dynamic_shapes=sizes).module()
        program(tokens[:, :9], torch.tensor([0]))
        logits = program(tokens[:, 9:], torch.tensor([9]))
    difference = (logits - decoder(tokens, torch.tensor([0]))).float().square().mean().sqrt()
    return "yes" if difference <= close else f"its logits are {difference:.3g} off"


def try_model(model_type: str, kinds: Iterable[str] = CLOSE, export: bool = True) -> dict[str, Outcome]:
    """The results for a model in floats and at 4 bits."""
    try:
        model = make(model_type)
    except Exception as error:
        return {kind: Outcome("not tried", f"no tiny configuration: {one_line(error)}") for kind in kinds}
    outcomes = {}
    for kind in kinds:
        this = copy.deepcopy(model)
        if kind != "float":
            try:
                if not quantize(this):
                    outcomes[kind] = Outcome("not tried", "it has no torch.nn.Linear to quantize")
                    continue
            except Exception as error:
                outcomes[kind] = Outcome("not tried", f"quantize_ raises {one_line(error)}")
                continue
        # Only at 4 bits, because the graph is the same in floats and tracing is the slowest part.
        outcomes[kind] = attempt(this, kind, export and kind != "float")
        if kind != "float":
            outcomes[kind].experts = experts_in(this)
    return outcomes


def _child(model_type: str, export: bool, path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        outcomes = try_model(model_type, export=export)
    said = {"versions": versions(), "class": class_name(model_type)}
    said |= {"outcomes": {kind: asdict(outcome) for kind, outcome in outcomes.items()}}
    with contextlib.suppress(Exception):  # no tiny configuration (the outcomes report it), or no default one
        said["float_share"] = float_share(model_type)
    path.with_suffix(".part").write_text(json.dumps(said))
    os.replace(path.with_suffix(".part"), path)


def class_name(model_type: str) -> str:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


def versions() -> list[str]:
    return [transformers.__version__, torch.__version__.split("+")[0]]


def run_all(names: list[str], cache: Path, jobs: int, seconds: float, export: bool) -> dict[str, dict]:
    """Runs each model in a fork of this process, with a time limit."""
    cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    make("llama")  # shared imports, once
    results, waiting, running = {}, [], {}
    for name in names:
        path = cache / f"{name}.json"
        said = json.loads(path.read_text()) if path.exists() else None
        if said and said["versions"] == versions():
            results[name] = said
        else:
            waiting.append(name)
    context = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            process = context.Process(target=_child, args=(name, export, cache / f"{name}.json"))
            process.start()
            running[name] = process, time.monotonic()
        time.sleep(0.05)
        for name, (process, began) in list(running.items()):
            if process.is_alive() and time.monotonic() - began < seconds:
                continue
            reason = f"more than {seconds:.0f} s" if process.is_alive() else f"it ended with {process.exitcode}"
            if process.is_alive():
                process.kill()
            process.join()
            del running[name]
            path = cache / f"{name}.json"
            if process.exitcode == 0 and path.exists():
                results[name] = json.loads(path.read_text())
            else:
                lost = {kind: asdict(Outcome("not tried", reason)) for kind in CLOSE}
                results[name] = {"versions": versions(), "class": class_name(name), "outcomes": lost}
                path.write_text(json.dumps(results[name]))
            states = [outcome["state"] for outcome in results[name]["outcomes"].values()]
            print(f"{name}: {', '.join(states)} ({time.monotonic() - began:.0f} s)", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a Markdown file")
    parser.add_argument("--cache", type=Path, default=Path("build/models"), help="results of an earlier run count")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=300, help="the most for one model")
    parser.add_argument("--no-export", action="store_true")
    parser.add_argument("names", nargs="*", help="model types; all of them by default")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = options.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    results = run_all(names, options.cache, options.jobs, options.seconds, not options.no_export)
    wrong = [name for name in names if "WRONG" in states(results[name])]
    for name in options.names or wrong:
        for kind, outcome in results[name]["outcomes"].items():
            print(name, kind, outcome["state"], outcome["reason"], outcome["export"], outcome["figures"])
    if wrong:
        return 1
    if options.write:
        options.write.write_text(document({name: results[name] for name in names}))
    return 0


def states(result: dict) -> list[str]:
    return [outcome["state"] for outcome in result["outcomes"].values()]


def document(results: dict[str, dict]) -> str:
    """The text of docs/models.md."""
    sorts = {"right": [], "refused": [], "not tried": []}
    for name, result in results.items():
        found = states(result)
        sorts["right" if "right" in found else "refused" if "refused" in found else "not tried"].append(name)
    own = [name for name in sorts["right"] if any(each.get("refusal") for each in results[name]["outcomes"].values())]
    rounding = dict.fromkeys(CLOSE, 0.0)
    proofs = dict.fromkeys(CLOSE, 0.0)
    for name in sorts["right"]:
        for kind, outcome in results[name]["outcomes"].items():
            for what, figure in outcome["figures"].items():
                if what.startswith("proof") and outcome.get("refusal"):
                    continue  # not from the decoder, and large if caches lack a feature
                most = proofs if what.startswith("proof") else rounding
                most[kind] = max(most[kind], figure)

    def cell(text: str) -> str:
        text = re.sub(r"^(lowbit's decoder is not for )?\w+ \(model_type \S+\)( writes no text token by token)?: ", "", text)
        return text.removesuffix("; use transformers' generate(), which takes quantized models too").replace("|", "\\|")

    found = versions()
    lines = [
        "# Which models lowbit decodes",
        "",
        "Written by `make models`: every causal language model of transformers, tiny and with random weights. "
        f"transformers {found[0]}, torch {found[1]}.",
        "",
        f"Of {len(results)} model types {len(sorts['right'])} are right, {len(sorts['refused'])} are refused, and "
        f"{len(sorts['not tried'])} were not tried. {len(own)} of the right ones run with transformers' own attention: "
        "`lowbit.llm.Decoder` refuses them for the reason in the table, and `lowbit generate` and `chat` use "
        "`lowbit.llm.Fallback` instead; `export` and `bench` refuse them.",
        "",
        f"**Right** means that the logits of a text of {TEXT} tokens (whole, token by token, and in three pieces) and {NEW} "
        "generated tokens equal those of transformers' own forward over the whole text, in floats and with linear layers of 4 "
        "bits. If a model has all its experts in one tensor, these are packed too, or the table says that they stay float. "
        f"Logits may differ by {CLOSE['float']:g} standard deviations in floats, and by {CLOSE['4 bits']:g} at 4 bits, where "
        f"differences in rounding have a larger effect; they differed by up to {rounding['float']:.1g} and "
        f"{rounding['4 bits']:.2g}. After `release()` the model gives the same bits as before. Exported means that "
        "`torch.export` exports the decoder at 4 bits, for any number of tokens, with the same logits. AOTInductor and "
        "ExecuTorch were not tried.",
        "",
        "**By transformers' own attention** means the same for `Fallback`, and that a truncated text gives the same results as "
        "a text that was never longer. It was also measured what the caches of each model support.",
        "",
        "Calls of the decoder run by a [plan](internals/plan.md) at 4 bits, unless the table says **no plan** and why: the "
        "model's Python code runs then, with the same results.",
        "",
        "**Refused** means that one or both decoders refused the model with this reason, and left every bit of it unchanged.",
        "",
        "The decoder's own check compares errors with the effect of the earlier text on the logits: up to "
        f"{proofs['float']:.1g} in floats and {proofs['4 bits']:.2g} at 4 bits for models that are right.",
        "",
        "**Float** is the share of parameters that stay float, at the usual sizes of the class, if all layers and tables that "
        "lowbit supports are quantized: norms, routers, positions, convolutions.",
        "",
        "| model type | class | result | float | details |",
        "|---|---|---|---:|---|",
    ]
    for name in sorted(results):
        outcomes = results[name]["outcomes"]
        state = next(state for state, members in sorts.items() if name in members)
        said = []
        if state == "right":
            for kind, outcome in outcomes.items():
                if outcome["state"] != "right":
                    said.append(f"{kind}: {outcome['state']}: {cell(outcome['reason'])}")
                elif outcome.get("refusal"):
                    if kind == "float" or outcomes["float"]["state"] != "right":
                        said.append(f"by transformers' own attention: {cell(outcome['refusal'])}")
                        said.append(outcome["how"].split(":")[0])
                elif kind != "float":
                    export = outcome["export"] or "not tried"
                    said.append("exported" if export == "yes" else f"not exported: {cell(export)}")
                    if outcome.get("plan"):
                        said.append(f"no plan: {cell(outcome['plan'])}")
                if outcome.get("experts"):
                    said.append(f"experts {outcome['experts']}")
        else:
            said.append(cell(next(outcome["reason"] for outcome in outcomes.values() if outcome["state"] == state)))
        share = results[name].get("float_share")
        float_cell = "" if share is None else f"{100 * share:.2g} %"
        lines.append(f"| {name} | {results[name]['class']} | {state} | {float_cell} | {'; '.join(said)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
