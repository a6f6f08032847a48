"""``lowbit eval``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

import lowbit

from .models import load, read_text, set_threads
from .options import (
    Cache,
    EmbeddingBits,
    GroupSize,
    Json,
    Mapping,
    Model,
    Threads,
    make_config,
    parse_widths,
    refuse_without_bits,
)
from .output import Output, size, table


def evaluate(
    model: Model,
    text: Annotated[Path, typer.Option("--text", help="File of text, UTF-8.", show_default=False)],
    bits: Annotated[
        str | None,
        typer.Option(
            "--bits", metavar="N,N,...", help="Also quantise a float checkpoint to these widths.", show_default=False
        ),
    ] = None,
    group_size: GroupSize = "32",
    mapping: Mapping = "symmetric",
    embedding_bits: EmbeddingBits = None,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens that the model sees at once.")] = 512,
    stride: Annotated[int, typer.Option("--stride", min=1, help="New tokens per window.")] = 256,
    cache: Cache = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a text, for the checkpoint as it is and at other widths."""
    from lowbit.llm.loading import is_packed, load_tokenizer
    from lowbit.llm.perplexity import perplexity

    output = Output(as_json)
    refuse_without_bits(bits, group_size, mapping, embedding_bits)
    widths = [] if bits is None else parse_widths(bits)
    configs = [None, *(make_config(width, group_size, mapping, embedding_bits) for width in widths)]
    set_threads(threads)
    content = read_text(text)
    if is_packed(model) and widths:
        raise ValueError(f"{model} is packed already; --bits needs a float checkpoint")
    tokenizer = load_tokenizer(model)
    tokens = tokenizer(content, verbose=False)[
        "input_ids"
    ]  # verbose: a warning that they are more than the model takes
    results = []
    shown = table("weights", "size", "perplexity", "bits per byte", "seconds")
    for config in configs:
        loaded = load(output, model, config)
        name = _name_weights(loaded) if config is None else f"{config.bits} bits"
        begin = time.perf_counter()
        with output.progress(f"{text}, {name}", "tokens") as advance:
            measured = perplexity(loaded, tokens, window=window, stride=stride, cache=cache, progress=advance)
        row = {
            "weights": name,
            "bits": None if config is None else config.bits,
            "weight_bytes": sum(tensor.nbytes for tensor in _tensors(loaded)),
            "perplexity": measured.perplexity,
            "bits_per_byte": measured.bits_per_byte(len(content.encode())),
            "seconds": time.perf_counter() - begin,
        }
        results.append(row)
        figures = f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.4f}", f"{row['seconds']:.1f}"
        shown.add_row(name, size(row["weight_bytes"]), *figures)
        del loaded  # before the next one is loaded
    document = {
        "model": str(model),
        "text": str(text),
        "text_bytes": len(content.encode()),
        "predicted_tokens": len(tokens) - 1,
        "window": window,
        "stride": stride,
        "cache": cache,
        "threads": torch.get_num_threads(),
        "results": results,
    }
    output.result(document, shown)


def _name_weights(model: torch.nn.Module) -> str:
    """What a model's weights are, in a few words: "bfloat16", "packed, 4 and 8 bits"."""
    bits = sorted(
        {module.info.bits for module in model.modules() if isinstance(module, lowbit.nn.Packed)}
    )
    return f"packed, {' and '.join(map(str, bits))} bits" if bits else str(model.dtype).removeprefix("torch.")


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """The state of a model, shared tensors once."""
    return list({tensor.data_ptr(): tensor for tensor in model.state_dict().values() if tensor.numel()}.values())
