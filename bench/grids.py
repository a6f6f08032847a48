"""Compares few-bit weights of lowbit and of llama.cpp on a float model, and on the same model with its channels permuted.

    python3 bench/grids.py build/reality/smollm2/float [--rows TEXT ...] [--tokens 512] [--calibration-tokens 2048]

A float model that was dequantized from a file has weights on the file's grid, which favors a quantizer with the same grid. A
permutation of the channels keeps the function and puts weights of many of the file's blocks into each block. Prints the KL
divergence to the float model in nats, on the text of `make bench-reality`. Rows of llama.cpp need `make bench-peers`.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lowbit
import reality_weights as weights
import torch
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.tools.report.peers import peers
from reality_models import python_source


@dataclass(frozen=True)
class Source:
    floats: torch.nn.Module
    tokenizer: Any


Made = tuple[torch.nn.Module, float]  # a model, and its bits per weight


def calibrated(source: Source, tokens: int, target: float | None = None, **settings: Any) -> Made:
    model = weights.calibrate(source, tokens, lowbit.LowBitConfig(bits=4, **settings), target)
    return model, weights.packed_size(model)[1]


def of_llama_cpp(source: Source, tokens: int, kind: str) -> Made:
    model, _, bits = weights.dequantized(source, peers([], importance=True)[kind], weights.mean_squares(source, tokens))
    return model, bits


ROWS: dict[str, Callable[[Source, int], Made]] = {
    "lowbit, groups of 32": partial(calibrated, rotate=True),
    "lowbit, groups of 64": partial(calibrated, rotate=True, group_size=64),
    "lowbit, groups of 64, a minimum": partial(calibrated, rotate=True, group_size=64, mapping="affine"),
    "lowbit, groups of 64, a table": partial(calibrated, rotate=True, group_size=64, mapping="levels", levels="fit"),
    "lowbit, groups of 32, a table": partial(calibrated, rotate=True, mapping="levels", levels="fit"),
    "lowbit, groups of 64, a minimum, not rotated": partial(calibrated, group_size=64, mapping="affine"),
    "lowbit, mixed widths, 4.5 bits": partial(calibrated, rotate=True, target=4.5),
    "llama.cpp's Q4_K, importance": partial(of_llama_cpp, kind="GGUF Q4_K, importance"),
}


@torch.no_grad()
def permute(model: Any, seed: int = 1) -> None:
    """Permutes channels of a model like Llama in place: of hidden states, of feed-forward layers, and of values in a head."""
    config, generator = model.config, torch.Generator().manual_seed(seed)

    def order(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=generator)

    def select(layer: torch.nn.Module, dim: int, index: torch.Tensor) -> None:
        layer.weight.data = layer.weight.data.index_select(dim, index)
        if dim == 0 and getattr(layer, "bias", None) is not None:
            layer.bias.data = layer.bias.data[index]

    hidden, heads = order(config.hidden_size), config.num_key_value_heads
    for table in dict.fromkeys((model.get_input_embeddings(), model.get_output_embeddings())):
        if table is model.get_input_embeddings() or table.weight is not model.get_input_embeddings().weight:
            select(table, 1, hidden)
    select(model.model.norm, 0, hidden)
    for block in model.model.layers:
        attention, feed = block.self_attn, block.mlp
        for norm in (child for name, child in block.named_children() if name.endswith("norm")):
            select(norm, 0, hidden)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj, feed.gate_proj, feed.up_proj):
            select(layer, 1, hidden)
        for layer in (attention.o_proj, feed.down_proj):
            select(layer, 0, hidden)
        inner = order(feed.down_proj.in_features)
        for layer, dim in ((feed.gate_proj, 0), (feed.up_proj, 0), (feed.down_proj, 1)):
            select(layer, dim, inner)
        size = attention.v_proj.out_features // heads
        values = [order(size) for _ in range(heads)]
        queries = attention.o_proj.in_features // size // heads  # heads that share keys and values
        select(attention.v_proj, 0, torch.cat([size * at + each for at, each in enumerate(values)]))
        select(attention.o_proj, 1, torch.cat([size * at + values[at // queries] for at in range(heads * queries)]))


@torch.inference_mode()
def divergence(model: torch.nn.Module, text: torch.Tensor, expected: torch.Tensor) -> float:
    found = model(text).logits[0].log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def measure(source: Source, tokens: int, calibration_tokens: int, rows: list[str]) -> Iterator[tuple[str, float, float, float]]:
    """Yields for each row its name, bits per weight, KL divergence and CPU seconds."""
    text = torch.tensor([python_source(source.tokenizer, tokens)[1]])
    with torch.inference_mode():
        expected = source.floats(text).logits[0].log_softmax(-1)
    for name in rows:
        begin = time.process_time()
        model, bits = ROWS[name](source, calibration_tokens)
        seconds = time.process_time() - begin
        yield name, bits, divergence(model, text, expected), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a float checkpoint")
    parser.add_argument("--rows", nargs="+", default=[""], help="rows whose names contain one of these texts; default: all")
    parser.add_argument("--tokens", type=int, default=512, help="of the text for the KLD; default: %(default)s")
    parser.add_argument("--calibration-tokens", type=int, default=2048, help="default: %(default)s")
    options = parser.parse_args()
    rows = [name for name in ROWS if any(text in name for text in options.rows)]
    floats = load_model(options.model).float().eval()
    permuted = copy.deepcopy(floats)
    permute(permuted)
    print("| Channels | Weights | Bits per weight | KLD, nats | CPU s |\n|---|---|---|---|---|")
    for channels, model in (("permuted", permuted), ("as they are", floats)):
        source = Source(model, load_tokenizer(options.model))
        for name, bits, kld, seconds in measure(source, options.tokens, options.calibration_tokens, rows):
            print(f"| {channels} | {name} | {bits:.2f} | {kld:.4f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
