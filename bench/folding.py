"""Measures AWQ's scaling, folded into the model: does it reduce the rounding error of weights of large inputs?

    python3 bench/folding.py [--models tiny_llama minilm] [--bits 4 3 2] [--methods nearest importance auto]

Each input j of a linear layer is divided by s_j = (mean |x_j|)^a, its column of the weight multiplied by it (Lin et
al.: "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys 2024). The division is free if it
can be folded into the previous weights: for q, k, v and gate, up, into a norm that nothing else reads; for the projection after
attention, into the rows of v; for down, into the rows of up. BERT adds its norms' outputs to others, and has a GELU before the
last layer, so only the rows of v can be used. The exponent a is the one of 21 with the smallest error over all outputs that
share the input, on a quarter of the batches that the importance has not seen; 0 leaves a layer unchanged.

The scaled float model computes the same (checked), and is then quantized as in bench/quality.py.
Prints a row for each model, width and method: quality without and with folding, and the number of scaled places.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass

import lowbit
import quality
import torch
from lowbit import EmbeddingConfig, LinearConfig
from lowbit.calibration.capture import inputs_of
from lowbit.calibration.data import batches
from lowbit.calibration.importance import search
from torch import Tensor

EXPONENTS = [step / 20 for step in range(21)]


@dataclass
class Place:
    """Linear layers that share one input, which the previous weights can scale."""

    layers: list[torch.nn.Linear]
    fold: Callable[[Tensor], None]  # divides the input by [k]
    tied: Callable[[Tensor], Tensor]  # [k] -> [k]: the nearest foldable factors


def divided(*parameters: torch.nn.Parameter | None) -> Callable[[Tensor], None]:
    """Divides the rows of matrices, and vectors, by [k]."""

    def fold(by: Tensor) -> None:
        for parameter in parameters:
            if parameter is not None:
                parameter.data /= by if parameter.dim() == 1 else by[:, None]

    return fold


def places_of_llama(model: torch.nn.Module) -> list[Place]:
    config, found = model.config, []
    repeated = config.num_attention_heads // config.num_key_value_heads

    def as_heads_of_values(factors: Tensor) -> Tensor:
        """Gives heads that read the same values the same factors."""
        heads = factors.view(config.num_key_value_heads, repeated, -1).log().mean(1, keepdim=True).exp()
        return heads.expand(-1, repeated, -1).flatten()

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        values = divided(attention.v_proj.weight, attention.v_proj.bias)

        def fold_heads(by: Tensor, values: Callable = values, size: int = attention.head_dim) -> None:
            values(by.view(config.num_key_value_heads, repeated, size)[:, 0].flatten())

        found += [
            Place([attention.q_proj, attention.k_proj, attention.v_proj], divided(layer.input_layernorm.weight), lambda s: s),
            Place([attention.o_proj], fold_heads, as_heads_of_values),
            Place([mlp.gate_proj, mlp.up_proj], divided(layer.post_attention_layernorm.weight), lambda s: s),
            Place([mlp.down_proj], divided(mlp.up_proj.weight, mlp.up_proj.bias), lambda s: s),
        ]
    return found


def places_of_bert(model: torch.nn.Module) -> list[Place]:
    return [
        Place(
            [layer.attention.output.dense],
            divided(layer.attention.self.value.weight, layer.attention.self.value.bias),
            lambda s: s,
        )
        for layer in model.encoder.layer
    ]


def scaled(model: torch.nn.Module, places: list[Place], inputs: list, config: LinearConfig, method: str) -> int:
    """Folds factors into a float model, in place; returns the number of places whose factors are not all 1."""
    seen: dict[str, list[Tensor]] = {}

    def take(name: str, x: Tensor) -> None:
        seen.setdefault(name, []).append(x.reshape(-1, x.shape[-1]).float())

    with torch.no_grad(), inputs_of({str(i): place.layers[0] for i, place in enumerate(places)}, take):
        for batch in inputs:
            model(**batch)
    changed = 0
    for i, place in enumerate(places):
        rows = torch.cat([x for at, x in enumerate(seen[str(i)]) if at % 4 != 3])
        judged = torch.cat([x for at, x in enumerate(seen[str(i)]) if at % 4 == 3])
        size, square, moments = rows.abs().mean(0).clamp(min=1e-8), rows.square().mean(0), judged.T @ judged
        best = (float("inf"), 0.0, torch.ones_like(size))
        for exponent in EXPONENTS:
            factors = place.tied(size**exponent)
            factors = factors / (factors.max() * factors.min()).sqrt()
            importance = None if method == "nearest" else square / factors.square()
            error = 0.0
            for layer in place.layers:
                weight = layer.weight.detach().float()
                if method == "nearest":
                    rounded = lowbit.nn.Linear(lowbit.quantize_tensor(weight * factors, config)).dequantize()
                else:
                    rounded = search(weight * factors, importance + 1e-4 * importance.mean(), config).dequantize()
                missed = rounded / factors - weight
                error += float(((missed @ moments) * missed).sum())
            best = min(best, (error, exponent, factors), key=lambda each: each[0])
        if best[1]:
            changed += 1
            place.fold(best[2])
            for layer in place.layers:
                layer.weight.data *= best[2]
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny_llama", "minilm"], choices=["tiny_llama", "minilm"])
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--group-size", type=int, default=32)
    methods = ["nearest", "importance", "auto"]
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods)
    parser.add_argument("--tokens", type=int, default=13000, help="of heldout.txt; default: %(default)s")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in options.models:
        size = 50_000 if name == "tiny_llama" else 30_000
        floats, measured, patterns, texts, tokenizer = getattr(quality, name)(size, options.tokens)
        inner = (lambda encoder: encoder[0].auto_model) if name == "minilm" else (lambda whole: whole)
        inputs, _ = batches(inner(floats), texts, tokenizer, quality.WINDOW, 1 << 20)
        print("| model | bits | method | as it is | folded | places |\n" + 6 * "|---" + "|", flush=True)
        for bits in options.bits:
            config = LinearConfig(bits, options.group_size)
            table = EmbeddingConfig(bits, options.group_size)
            chosen = {"*": config} | {pattern: kind and table for pattern, kind in patterns.items()}
            for method in options.methods:
                plain, folded = copy.deepcopy(floats), copy.deepcopy(floats)
                own = inner(folded)
                places = places_of_bert(own) if name == "minilm" else places_of_llama(own)
                changed = scaled(own, places, inputs, config, method)
                with torch.no_grad():
                    before, after = (whole(**inputs[0])[0] for whole in (inner(floats), own))
                assert (after - before).abs().max() <= 1e-3 * before.abs().max(), "folding changed the model"
                found = []
                for model in (plain, folded):
                    quality.quantize(inner(model), method, chosen, texts, tokenizer)
                    found.append(measured(model))
                print(
                    f"| {name} | {bits} | {method} | {found[0]:.4f} | {found[1]:.4f} | {changed} of {len(places)} |", flush=True
                )


if __name__ == "__main__":
    main()
