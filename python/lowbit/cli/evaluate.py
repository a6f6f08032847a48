"""``lowbit eval``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lowbit

from . import options
from .models import load, read_text, set_threads
from .output import Output, size, table

if TYPE_CHECKING:
    import torch

    from .. import LowBitConfig
    from ..llm.perplexity import Perplexity


@dataclass(frozen=True)
class _Widths(options.Quantizing):
    bits: Annotated[
        str | None,
        typer.Option("--bits", metavar="N,N,...", help="Also quantize a float checkpoint to these widths.", show_default=False),
    ] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _Answers:
    """The options that judge a model by the texts that it writes."""

    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers", metavar="FILE", help="File of prompts, one per line; compares greedy answers with the reference's.",
            show_default=False,
        ),
    ] = None  # fmt: skip
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks", metavar="NAME,...", help="Some of arithmetic, json, calls, and humaneval, which runs the model's code.",
            show_default=False,
        ),
    ] = None  # fmt: skip
    new: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Largest number of tokens of an answer.")] = 256
    problems: Annotated[int, typer.Option("--problems", min=1, help="Number of problems of each task.")] = 100
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed that chooses the problems.")] = 0


def evaluate(
    output: Output,
    model: options.Model,
    *,
    text: Annotated[Path | None, typer.Option("--text", help="File of text, UTF-8.", show_default=False)] = None,
    judging: _Answers,
    quantizing: _Widths,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens that the model sees at once.")] = 512,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, help="New tokens per window.", show_default="half the window")
    ] = None,
    cache: options.Cache = None,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="Compare with this model's directory or file of logits.", show_default=False),
    ] = None,
    save_logits: Annotated[
        Path | None,
        typer.Option(
            "--save-logits", metavar="FILE", help="Write the model's logits here, for --reference.", show_default=False
        ),
    ] = None,
    threads: options.Threads = None,
) -> None:
    """Perplexity of a text and divergence from a reference, or answers and tasks, for the checkpoint and at other widths."""
    from ..llm.loading import is_packed, load_tokenizer
    from ..llm.perplexity import perplexity, stride_of
    from ..tools.divergence import compare
    from ..tools.model_speed import stored_bytes

    if save_logits is not None:
        options.refuse_unused("with --save-logits", "bits", "cache", "reference")
    answering = judging.answers is not None or judging.tasks is not None
    if answering == (text is not None):
        raise typer.BadParameter("expected a text, or --answers, --tasks or both", param_hint="--text")
    if answering:
        options.refuse_unused("without --text", "window", "stride", "save_logits")
    else:
        options.refuse_unused("without --answers or --tasks", "new", "problems", "seed")
    widths = [] if quantizing.bits is None else options.parse_widths(quantizing.bits)
    if not widths:
        options.refuse_unused("without --bits", *options.HOW)
    stride = stride_of(window, stride)
    configs = [None, *map(quantizing.config_at, widths)]
    set_threads(threads)
    if is_packed(model) and widths:
        raise ValueError(f"{model} is packed already; --bits needs a float checkpoint")
    if text is None:
        _evaluate_answers(output, model, judging, configs, cache, reference)
        return
    content = read_text(text)
    tokenizer = load_tokenizer(model)
    tokens = tokenizer(content, verbose=False)["input_ids"]  # verbose: warns of long texts
    against = None if reference is None else _load_reference(output, reference, model, content, tokens)
    results = []
    columns = [] if against is None else ["KLD", "KLD 99 %", "top-1"]
    shown = table("weights", "size", "perplexity", "bits per byte", *columns, "seconds")
    for number, config in enumerate(configs, 1):
        loaded = load(output, model, config)
        name = (_name_weights(loaded) if config is None else f"{config.bits} bits") + _name_activations(loaded)
        weight_bytes = stored_bytes(loaded)
        begin = time.perf_counter()
        compared = None
        of_several = f", {number} of {len(configs)}" if len(configs) > 1 else ""
        with output.progress(f"{text}, {name}{of_several}", "tokens") as advance:
            common: dict[str, Any] = {"window": window, "stride": stride, "progress": advance}
            if save_logits is not None:
                measured = _save(output, loaded, tokens, save_logits, common)
            elif against is not None:
                compared = compare(loaded, tokens, against, cache=cache, **common)
                measured = compared.model
            else:
                measured = perplexity(loaded, tokens, cache=cache, **common)
        row = {
            "weights": name,
            "bits": None if config is None else config.bits,
            "weight_bytes": weight_bytes,
            "perplexity": measured.perplexity,
            "bits_per_byte": measured.bits_per_byte(len(content.encode())),
            "kld": None if compared is None else compared.kld,
            "kld_99": None if compared is None else compared.kld_99,
            "top1": None if compared is None else compared.top1,
            "seconds": time.perf_counter() - begin,
        }
        results.append(row)
        figures = [f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.4f}"]
        if compared is not None:
            figures += [f"{compared.kld:.5f}", f"{compared.kld_99:.4f}", f"{compared.top1:.4f}"]
        shown.add_row(name, size(weight_bytes), *figures, f"{row['seconds']:.1f}")
        if number < len(configs):  # the last result is followed by the table
            output.note(f"{name}{of_several}: perplexity {row['perplexity']:.3f} in {row['seconds']:.1f} s")
        del loaded  # frees memory before the next model is loaded
    document = {
        "model": str(model),
        "text": str(text),
        "text_bytes": len(content.encode()),
        "predicted_tokens": len(tokens) - 1,
        "window": window,
        "stride": stride,
        "cache": cache,
        "reference": None if reference is None else str(reference),
        "reference_perplexity": None if compared is None else compared.reference.perplexity,
        "saved_logits": None if save_logits is None else str(save_logits),
        "threads": import_module("torch").get_num_threads(),
        "results": results,
    }
    output.result(document, shown)


def _evaluate_answers(
    output: Output,
    model: Path,
    judging: _Answers,
    configs: Sequence[LowBitConfig | None],
    cache: str | None,
    reference: Path | None,
) -> None:
    """Greedy answers compared with the reference's, or with the float checkpoint's; and scores of tasks."""
    from ..llm.loading import load_tokenizer, stop_tokens
    from ..tools.greedy_answers import LENGTHS, compare_answers, greedy_answers, prompt_tokens, read_prompts, solve
    from ..tools.model_speed import stored_bytes
    from ..tools.tasks import make_problems

    prompts = [] if judging.answers is None else read_prompts(judging.answers)
    problems = {} if judging.tasks is None else make_problems(judging.tasks, judging.problems, judging.seed)
    if prompts and reference is None and len(configs) == 1:
        raise ValueError("--answers compares with a reference; expected --reference, or --bits for a float checkpoint")
    if reference is not None and not (prompts and reference.is_dir()):
        raise ValueError(
            f"{reference} is not a directory; expected that of a model, for --answers"
            if prompts
            else "--reference has no effect on --tasks; expected --answers"
        )
    tokenizer = load_tokenizer(model)
    asked = [prompt_tokens(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    lengths = [length for length in LENGTHS if length <= judging.new] if prompts else []
    heads = [f"equal, {length}" for length in lengths] + (["first difference"] if prompts else []) + list(problems)
    shown, results = table("weights", "size", *heads, "seconds"), []

    def answer(loaded: torch.nn.Module, name: str, cache: str | None) -> list[list[int]]:
        with output.progress(f"answers of {name}", "answers") as advance:
            stop = stop_tokens(loaded, tokenizer)
            known = expected or None  # empty while the reference itself answers
            found: list[list[int]] = greedy_answers(
                loaded, asked, judging.new, stop=stop, reference=known, cache=cache, progress=advance
            )
        return found

    expected: list[list[int]] = []
    if prompts:
        source = model if reference is None else reference
        if load_tokenizer(source).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{source} has other tokens than {model}; a reference has the same tokenizer")
        expected = answer(load(output, source, None).float(), f"{source} in float32", None)
    for config in configs:
        loaded = load(output, model, config)
        name = (_name_weights(loaded) if config is None else f"{config.bits} bits") + _name_activations(loaded)
        weight_bytes, begin = stored_bytes(loaded), time.perf_counter()
        row: dict[str, Any] = {"weights": name, "bits": None if config is None else config.bits, "weight_bytes": weight_bytes}
        cells = [name, size(weight_bytes)]
        if prompts:
            same = compare_answers(answer(loaded, name, cache), expected, judging.new)
            row |= {"equal": {str(length): share for length, share in same.equal.items()}, "first_difference": same.first}
            cells += [f"{share:.0%}" for share in same.equal.values()]
            cells.append("" if same.first is None else f"{same.first:.1f}")
        scores = {}
        for task, of_task in problems.items():
            with output.progress(f"{task}, {name}", "problems") as advance:
                score = solve(loaded, tokenizer, of_task, stop=stop_tokens(loaded, tokenizer), cache=cache, progress=advance)
            scores[task] = {"solved": score.solved, "problems": score.problems, "share": score.share, "error": score.error}
            cells.append(f"{100 * score.share:.1f} ± {100 * score.error:.1f} %")
        row |= {"tasks": scores, "seconds": time.perf_counter() - begin}
        results.append(row)
        shown.add_row(*cells, f"{row['seconds']:.1f}")
        del loaded
    document = {
        "model": str(model), "answers": None if judging.answers is None else str(judging.answers), "prompts": len(prompts),
        "max_new_tokens": judging.new, "tasks": list(problems), "seed": judging.seed, "cache": cache,
        "reference": None if reference is None else str(reference), "threads": import_module("torch").get_num_threads(),
        "results": results,
    }  # fmt: skip
    output.result(document, shown)


def _load_reference(output: Output, reference: Path, model: Path, content: str, tokens: list[int]) -> torch.nn.Module | Path:
    """The reference model, in float32, or the path of a file of logits."""
    from ..llm.loading import load_tokenizer

    if not reference.is_dir():
        return reference
    if load_tokenizer(reference)(content, verbose=False)["input_ids"] != tokens:
        raise ValueError(f"the tokenizers in {reference} and {model} give different tokens; a reference has the same tokenizer")
    return load(output, reference, None).float()


def _save(output: Output, model: torch.nn.Module, tokens: list[int], path: Path, common: dict[str, Any]) -> Perplexity:
    from ..tools.divergence import logits_bytes, save_logits

    vocabulary = model.config.get_text_config().vocab_size
    bytes_ = logits_bytes(len(tokens), vocabulary)
    output.note(f"{path} will have {size(bytes_)}: {len(tokens) - 1} predicted tokens, a vocabulary of {vocabulary}")
    reference: Perplexity = save_logits(model.float(), tokens, path, **common)
    return reference


def _name_weights(model: torch.nn.Module) -> str:
    """Describes a model's weights in a few words: "bfloat16", "packed, 4 and 8 bits"."""
    bits = sorted({module.info.bits for module in model.modules() if isinstance(module, lowbit.nn.Packed)})
    return f"packed, {' and '.join(map(str, bits))} bits" if bits else str(model.dtype).removeprefix("torch.")


def _name_activations(model: torch.nn.Module) -> str:
    """The rest of the name of a model with activations of 16 bits: ", 16-bit activations"; empty if it has only 8."""
    bits = {module.info.activation_bits for module in model.modules() if isinstance(module, lowbit.nn.Packed)}
    return "" if 16 not in bits else ", 16-bit activations" if bits == {16} else ", 8- and 16-bit activations"
