"""Prints a language model's perplexity on held-out text, and sample texts, at several widths.

    python examples/tiny_llama/perplexity.py

Prints one row per width (model size; perplexity per token and bits per byte of heldout.txt) and the model's greedy
continuations of PROMPTS. Documents are read in windows of the model's maximum length, each after a BOS, and each token of the
text counts once.
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import corpus
import lowbit
import torch
import transformers
from torch.nn.functional import cross_entropy

Tokenizer = transformers.PreTrainedTokenizerBase

MODEL = Path(__file__).with_name("model")
PROMPTS = ("Return the", "class Server\nThis class", "If the file")


@torch.inference_mode()
def losses(model: torch.nn.Module, tokenizer: Tokenizer, texts: list[str]) -> tuple[float, int]:
    """The summed loss of all tokens, in nats, and their number."""
    total, count = 0.0, 0
    for text in texts:
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        for window in tokens.split(model.config.max_position_embeddings - 1):
            row = torch.cat([torch.tensor([tokenizer.bos_token_id]), window])
            logits = model(row[None, :-1]).logits[0]
            total += cross_entropy(logits.float(), window, reduction="sum").item()
            count += len(window)
    return total, count


def quantized(model: torch.nn.Module, bits: int, group_size: int) -> torch.nn.Module:
    """A copy in which all weights except norms have `bits` bits; embedding and head stay shared."""
    linear, embedding = lowbit.LinearConfig(bits, group_size), lowbit.EmbeddingConfig(bits, group_size)
    return lowbit.quantize_(copy.deepcopy(model), {"*": linear, "model.embed_tokens": embedding})


def megabytes(model: torch.nn.Module) -> float:
    """Size of the state, counting shared parts once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    return sum(sizes.values()) / 1e6


def complete(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, tokens: int = 60) -> str:
    """The prompt and its greedy continuation of `tokens` tokens, or fewer if the model ends its text."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints a model's perplexity and text at several widths.")
    parser.add_argument("--model", type=Path, default=MODEL, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--bits", default="8,6,5,4,3,2", help="widths, 1 to 8; default: %(default)s")
    parser.add_argument("--group-size", type=int, default=32, help="weights per scale; default: %(default)s")
    options = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    models = {"float32": model, "bfloat16": copy.deepcopy(model).bfloat16()}
    for bits in map(int, options.bits.split(",")):
        models[f"{bits} bits"] = quantized(model, bits, options.group_size)

    texts = list(corpus.read_heldout().values())
    size = sum(map(len, texts))
    print("| weights | size, MB | perplexity | bits per byte |\n|---|---|---|---|")
    for name, one in models.items():
        total, count = losses(one, tokenizer, texts)
        figures = f"{megabytes(one):.2f} | {math.exp(total / count):.2f} | {total / math.log(2) / size:.3f}"
        print(f"| {name} | {figures} |", flush=True)
    for prompt in PROMPTS:
        for name, one in models.items():
            print(f"\n---- {name}\n{complete(one, tokenizer, prompt)}")


if __name__ == "__main__":
    main()
