"""``lowbit eval``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

import lowbit

from . import options
from .models import load, read_text, set_threads
from .output import Output, size, table

if TYPE_CHECKING:
    from ..llm.perplexity import Perplexity


@dataclass(frozen=True)
class _Widths(options.Quantizing):
    bits: Annotated[
        str | None,
        typer.Option("--bits", metavar="N,N,...", help="Also quantize a float checkpoint to these widths.", show_default=False),
    ] = None  # type: ignore[assignment]


def evaluate(
    output: Output,
    model: options.Model,
    *,
    text: Annotated[Path, typer.Option("--text", help="File of text, UTF-8.", show_default=False)],
    quantizing: _Widths,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens that the model sees at once.")] = 512,
    stride: Annotated[int, typer.Option("--stride", min=1, help="New tokens per window.")] = 256,
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
    """Perplexity of a text, and the divergence from a reference, for the checkpoint as it is and at other widths."""
    from ..llm.loading import is_packed, load_tokenizer
    from ..llm.perplexity import perplexity
    from ..tools.divergence import compare
    from ..tools.model_speed import stored_bytes

    if save_logits is not None:
        options.refuse_unused("with --save-logits", "bits", "cache", "reference")
    widths = [] if quantizing.bits is None else options.parse_widths(quantizing.bits)
    if not widths:
        options.refuse_unused("without --bits", *options.HOW)
    configs = [None, *map(quantizing.config_at, widths)]
    set_threads(threads)
    content = read_text(text)
    if is_packed(model) and widths:
        raise ValueError(f"{model} is packed already; --bits needs a float checkpoint")
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
        "threads": torch.get_num_threads(),
        "results": results,
    }
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
