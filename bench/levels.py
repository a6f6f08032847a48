"""Compares tables of levels with symmetric weights: weight error and perplexity of the example language model.

    python3 bench/levels.py [--bits 4 3 2] [--tokens 13000] [--group-sizes 32 16]

Prints a row per width, group size and table. Every matrix is quantized without calibration, including the table that embedding
and head share.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from pathlib import Path

import lowbit
import torch
from lowbit import EmbeddingConfig, LinearConfig
from lowbit.levels import TABLES

TINY_LLAMA = Path(__file__).resolve().parents[1] / "examples/tiny_llama"
WINDOW = 512


def relative_error(model: torch.nn.Module, floats: torch.nn.Module) -> float:
    """Relative error (2-norm) of the weights of all linear layers except the head."""
    error = total = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, lowbit.nn.Linear) and name != "lm_head":
            weight = floats.get_submodule(name).weight.detach().float()
            error += float((layer.dequantize() - weight).square().sum())
            total += float(weight.square().sum())
    return math.sqrt(error / total)


def bits_per_weight(model: torch.nn.Module) -> float:
    infos = {layer.packed_weight.data_ptr(): layer.info for layer in model.modules() if hasattr(layer, "info")}
    weights = sum(info.out_features * info.in_features for info in infos.values())
    return 8 * sum(info.total_bytes for info in infos.values()) / weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--group-sizes", nargs="+", type=int, default=[32, 16])
    parser.add_argument("--tokens", type=int, help="tokens of heldout.txt to measure on; default: all")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
    from lowbit.llm.perplexity import perplexity

    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_LLAMA / "model")
    floats = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA / "model", dtype=torch.float32).eval()
    ids = tokenizer((TINY_LLAMA / "heldout.txt").read_text("ascii"), verbose=False)["input_ids"][: options.tokens]
    whole = perplexity(floats, ids, window=WINDOW).perplexity
    print(f"{len(ids)} tokens of heldout.txt, float perplexity {whole:.3f}\n")
    print("| bits | group | weights | bits per weight | relative error | perplexity over float |\n" + 6 * "|---" + "|")
    for bits in options.bits:
        for group in options.group_sizes:
            for levels in (None, "fit", *(TABLES if bits == 4 else ())):
                if levels == "nvfp4":  # the table of mxfp4
                    continue
                model = copy.deepcopy(floats)
                arguments = {"bits": bits, "group_size": group, "levels": levels}
                lowbit.quantize_(model, {"*": LinearConfig(**arguments), "*embed*": EmbeddingConfig(**arguments)})
                quality = perplexity(model, ids, window=WINDOW).perplexity / whole
                print(
                    f"| {bits} | {group} | {levels or 'symmetric'} | {bits_per_weight(model):.2f} | "
                    f"{relative_error(model, floats):.4f} | {quality:.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
