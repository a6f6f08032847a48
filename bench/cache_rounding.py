"""Compares ways to round keys and values to 4 bits in a float32 language model with transformers' attention.

    python bench/cache_rounding.py [--tokens 3000] [--large 8]

For each way it prints the perplexity ratio to no rounding (keys alone, values alone, both), and the relative squared error of
keys and values. `rotated`: multiplied by a Hadamard matrix, rounded, and rotated back. `levels` is the format of 4-bit caches,
with a scale for each position of a head; `steps` has 15 equidistant levels, `minimum` has 16 from the smallest value to the
largest; `groups` has scales for groups of 16 inputs. --large multiplies two inputs of each key, and divides those of the
queries: the model computes the same, and its keys have outliers like those of larger models.
"""

import argparse
import math
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny_llama"
LEVELS = torch.tensor([6.0, 18, 31, 44, 58, 75, 96, 127])
LEVELS = torch.cat([-LEVELS.flip(0), LEVELS])


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def levels(x: Tensor) -> Tensor:
    scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    chosen = LEVELS[torch.bucketize(x / scales, (LEVELS[1:] + LEVELS[:-1]) / 2)]
    return chosen * ((x * chosen).sum(-1, keepdim=True) / chosen.square().sum(-1, keepdim=True))


def steps(x: Tensor) -> Tensor:
    scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 7
    return (x / scales).round() * scales


def minimum(x: Tensor) -> Tensor:
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scales = ((most - least) / 15).clamp_min(1e-30)
    return ((x - least) / scales).round() * scales + least


def groups(x: Tensor) -> Tensor:
    return steps(x.unflatten(-1, (-1, 16))).flatten(-2)


def enlarge(model: torch.nn.Module, factor: float) -> None:
    width = model.config.head_dim
    for layer in model.model.layers:
        for linear, by in ((layer.self_attn.k_proj, factor), (layer.self_attn.q_proj, 1 / factor)):
            heads = linear.weight.data.view(-1, width, linear.in_features)
            heads[:, [0, width // 2]] *= by  # RoPE rotates these two as a pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--large", type=float)
    options = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.float32).eval()
    if options.large is not None:
        enlarge(model, options.large)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE / "model")
    ids = torch.tensor(tokenizer((EXAMPLE / "heldout.txt").read_text())["input_ids"])[: options.tokens]
    rotation = hadamard(model.config.head_dim)
    way, rotated, which = None, False, ""
    lost = {"k": [0.0, 0.0], "v": [0.0, 0.0]}

    def rounded(name: str, x: Tensor) -> Tensor:
        if way is None or name not in which:
            return x
        result = way(x @ rotation) @ rotation if rotated else way(x)
        lost[name][0] += (result - x).square().sum().item()
        lost[name][1] += x.square().sum().item()
        return result

    def attention(module, q, k, v, mask, **more):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, rounded("k", k), rounded("v", v), mask, **more)

    ALL_ATTENTION_FUNCTIONS["rounded"] = attention
    model.set_attn_implementation("rounded")

    @torch.inference_mode()
    def nats() -> float:
        parts = ids[: len(ids) // 1000 * 1000].view(-1, 1000)
        return sum(
            torch.nn.functional.cross_entropy(model(part[None]).logits[0, :-1], part[1:]).item() for part in parts
        ) / len(parts)

    exact = nats()
    print(f"perplexity without rounding {math.exp(exact):.3f}; ratio to it with keys, values, both; squared errors")
    for way in (levels, steps, minimum, groups):
        for rotated in (True, False):
            over = []
            for which in ("k", "v", "kv"):
                lost.update(k=[0.0, 0.0], v=[0.0, 0.0])
                over.append(f"{math.exp(nats() - exact):.4f}")
            squares = [f"{some / all_:.4f}" for some, all_ in lost.values()]
            print(f"{way.__name__:8} {'rotated' if rotated else 'as is':8}", *over, "", *squares, flush=True)


if __name__ == "__main__":
    main()
