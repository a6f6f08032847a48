"""Measures the memory that a server needs for several texts of a model with sliding windows: Gemma 3 270M's shape.

    python bench/window_memory.py [--texts 8] [--length 8192] [--cache bfloat16]

Weights are random, and the vocabulary is small. It prints the resident memory that caches add after all of their bytes were
written, with windows and whole.
"""

import argparse

import torch
import transformers
from lowbit import llm

WINDOW = "sliding_attention"


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmRSS:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a text, a multiple of 16")
    parser.add_argument("--cache", default="bfloat16")
    options = parser.parse_args()
    config = transformers.Gemma3TextConfig(
        vocab_size=1024, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, head_dim=256,
        num_key_value_heads=1, sliding_window=512, layer_types=([WINDOW] * 5 + ["full_attention"]) * 3,
        max_position_embeddings=32768,
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    print(f"{options.texts} texts of {options.length} tokens, caches of {options.cache}")
    for windows in (False, True):
        decoder = llm.Decoder(model, options.length, options.cache, windows=windows, plan=False)
        before = resident()
        texts = [decoder.new_caches(options.length) for _ in range(options.texts)]
        for caches in texts:
            for tensor in (tensor for layer in caches.layers for tensor in layer):
                tensor.fill_(1)
        print(f"{'windows' if windows else 'whole'}: {(resident() - before) / 2**20:.0f} MiB")
        del texts, caches, tensor
        decoder.release()


if __name__ == "__main__":
    main()
