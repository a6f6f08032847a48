"""What int8 activations cost: one scale per row, as the kernels have it, beside one per group of inputs, and floats.

    python bench/activations.py [--models tiny_llama minilm] [--bits 8 4] [--groups 128 64 32] [--tokens N]

prints a row per model and width, and writes nothing. The integer arithmetic is simulated in float: weights as packed
(symmetric, groups of 32, table and head too), activations rounded to 255 steps of each row, or of each group of a row.
The product of two integers and the scales are exact enough in float32, so only the rounding differs. Models and
measures are those of bench/quality.py: perplexity over float, and mean cosine with the float embeddings.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
from torch import Tensor
from torch.nn import functional

import quality
from lowbit import LinearConfig, nn, qat, quantize_


class Simulated(torch.nn.Module):
    """A packed layer, its weight dequantised; ``group``: inputs per scale of activations, 0: floats, None: a row."""

    def __init__(self, layer: nn.Linear, group: int | None):
        super().__init__()
        self.weight, self.group = layer.dequantize(), group
        self.bias = None if layer.bias is None else layer.bias + 0

    def rounded(self, x: Tensor) -> Tensor:
        if self.group == 0:
            return x
        if self.group is None:
            return qat.rounded_rows(x)
        k = x.shape[-1]
        groups = functional.pad(x, (0, -k % self.group)).unflatten(-1, (-1, self.group))
        return qat.rounded_rows(groups).flatten(-2)[..., :k]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.rounded(x), self.weight, self.bias)


def simulate(model: torch.nn.Module, group: int | None) -> torch.nn.Module:
    """A copy of a packed model."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, Simulated(layer, group))
    return model


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny_llama", "minilm"], choices=["tiny_llama", "minilm"])
    parser.add_argument("--bits", nargs="+", type=int, default=[8, 4])
    parser.add_argument("--groups", nargs="+", type=int, default=[128, 64, 32])
    parser.add_argument("--tokens", type=int, default=8000, help="of heldout.txt; default: %(default)s")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    kinds = {"float": 0, "row": None} | {f"groups of {group}": group for group in options.groups}
    for name in options.models:
        floats, measure, patterns, _, _ = getattr(quality, name)(0, options.tokens)
        print(f"| {name} | {' | '.join(kinds)} | as it runs |\n|---" + (len(kinds) + 1) * "|---" + "|")
        for bits in options.bits:
            config = {"*": LinearConfig(bits, 32)} | {key: kind and kind(bits, 32) for key, kind in patterns.items()}
            model = quantize_(copy.deepcopy(floats), config)
            found = [measure(simulate(model, group)) for group in kinds.values()] + [measure(model)]
            print(f"| {bits}-bit weights | {' | '.join(f'{value:.5f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
