"""Compares ways to prepare keys for a cache of 4 bits, in a language model of transformers with norms of queries and keys.

    python bench/key_channels.py MODEL [--tokens 640] [--every 3]

For each way it prints the mean KL divergence, in nats, between attention weights with exact keys and with rounded ones, in
every third layer of the model. `weights`: scales from the weights of the norms. `text`: scales, or means, from a calibration
text. `pairs`: the same scale for the two channels that rotary positions mix. `powers of two`: those of hf/key_scales.py.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from cache_rounding import hadamard, levels
from lowbit.hf.key_scales import exponents
from reality_weights import calibration_text
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def pairs(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).square().mean(-2).sqrt().repeat(*[1] * (x.dim() - 1), 2)


def scales(key: Tensor, query: Tensor) -> Tensor:
    """The scales [heads, width] with the smallest error of scores. Keys are divided by them, queries multiplied."""
    key, query = (each.clamp_min(each.median() / 16) for each in (key, query))
    return (key / query).sqrt()[:, None]


def weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Logarithms of the attention weights of every eighth position."""
    scores = scale * query[:, 7::8] @ key.repeat_interleave(len(query) // len(key), 0).mT
    count = scores.shape[-1]
    return scores.masked_fill(torch.ones(count, count).triu(1).bool()[7::8], -torch.inf).log_softmax(-1)


@torch.inference_mode()
def queries_and_keys(model: torch.nn.Module, ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    found = {}

    def attention(module, q, k, v, mask, **more):
        found[module.layer_idx] = q[0], k[0]
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **more)

    ALL_ATTENTION_FUNCTIONS["noting"] = attention
    ALL_MASK_ATTENTION_FUNCTIONS["noting"] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    model.set_attn_implementation("noting")
    model.base_model(ids[None])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--every", type=int, default=3)
    options = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    ids = torch.tensor(tokenizer(calibration_text(), verbose=False)["input_ids"])
    text, other = ids[: options.tokens], torch.cat([ids[:1], ids[-options.tokens + 1 :]])
    tested, seen = queries_and_keys(model, text), queries_and_keys(model, other)
    rotation = hadamard(next(iter(tested.values()))[1].shape[-1])
    attention = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "k_norm")]
    norms = {
        each.layer_idx: [norm(torch.ones(len(rotation))).detach()[None].abs() for norm in (each.k_norm, each.q_norm)]
        for each in attention
    }

    def rounded(key: Tensor, scale: Tensor | float = 1.0, mean: Tensor | float = 0.0) -> Tensor:
        return levels((key - mean) / scale @ rotation) @ rotation * scale + mean

    def of_text(layer: int, center: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Root mean squares of keys and queries, and the mean of keys without the first position."""
        query, key = seen[layer]
        mean = key[:, 1:].mean(1, keepdim=True)
        size = (key[:, 1:] - mean if center else key).square().mean(1).sqrt()
        return size, query.unflatten(0, (len(key), -1)).square().mean((1, 2)).sqrt(), mean

    ways: dict[str, Callable[[int, Tensor], Tensor]] = {
        "as they are": lambda layer, key: rounded(key),
        "less the mean, text": lambda layer, key: rounded(key, 1.0, of_text(layer, True)[2]),
        "scales, text": lambda layer, key: rounded(key, scales(*of_text(layer, False)[:2])),
        "scales, less the mean, text": lambda layer, key: rounded(
            key, scales(*of_text(layer, True)[:2]), of_text(layer, True)[2]
        ),
        "scales, weights": lambda layer, key: rounded(key, scales(*norms[layer])),
        "scales, weights, pairs": lambda layer, key: rounded(key, scales(*map(pairs, norms[layer]))),
        "scales, weights, pairs, powers of two": lambda layer, key: rounded(
            key, exponents(*(each[0] for each in reversed(norms[layer]))).exp2()
        ),
    }
    for name, way in ways.items():
        total, layers = 0.0, sorted(tested)[:: options.every]
        for layer in layers:
            query, key = tested[layer]
            scale = getattr(model.get_decoder().layers[layer].self_attn, "scaling", len(rotation) ** -0.5)
            exact, found = (weights(query, each, scale) for each in (key, way(layer, key)))
            total += (exact.exp() * (exact - found)).nan_to_num(0.0).sum(-1).mean().item() / len(layers)
        print(f"{name:40}{total:.4f}", flush=True)


if __name__ == "__main__":
    main()
