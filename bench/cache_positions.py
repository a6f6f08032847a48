"""Prints the KL divergence of each type of KV cache to a float32 cache, by position in a text, for a packed model.

    python bench/cache_positions.py MODEL [--tokens 8192] [--caches int8 int8,int4 int4] [--unbalanced]

The text is Python source from the standard library. All decoders read it as a prompt, in pieces of 256 tokens. A row of the
table has the mean over the tokens at its positions. --unbalanced: without the scales of keys (hf/key_scales.py).
"""

import argparse
import copy
from pathlib import Path

import lowbit.transformers  # so that transformers loads packed checkpoints  # noqa: F401
import torch
import transformers
from lowbit.hf import key_scales
from lowbit.llm import Decoder
from lowbit.llm.loading import load_tokenizer
from reality_weights import calibration_text

_PIECE = 256
_ENDS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@torch.inference_mode()
def divergences(model: torch.nn.Module, tokens: list[int], caches: list[str]) -> dict[str, torch.Tensor]:
    """KL(float32 || cache) after each token, nats, float32 [tokens]."""
    decoders = {name: Decoder(copy.deepcopy(model), len(tokens), cache=name) for name in ("float32", *caches)}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in caches}
    for begin in range(0, len(tokens), _PIECE):
        piece = torch.tensor([tokens[begin : begin + _PIECE]])
        positions, start = begin + torch.arange(piece.shape[1]), torch.tensor([begin])

        def run(decoder: Decoder, piece=piece, positions=positions, start=start) -> torch.Tensor:
            return decoder.run(piece, positions, start, decoder.caches())[0].float().log_softmax(-1)

        expected = run(decoders["float32"])
        for name in caches:
            found[name].append((expected.exp() * (expected - run(decoders[name]))).sum(-1))
    return {name: torch.cat(pieces) for name, pieces in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--caches", nargs="+", default=["int8", "int8,int4", "int4"])
    parser.add_argument("--unbalanced", action="store_true")
    options = parser.parse_args()
    if options.unbalanced:
        key_scales.attach = lambda model: []
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(options.model)
    tokens = tokenizer(calibration_text(), verbose=False)["input_ids"][: options.tokens // _PIECE * _PIECE]
    found = divergences(model, tokens, options.caches)
    print("| Positions | " + " | ".join(f"`{name}`" for name in found) + " |")
    print("|---" * (1 + len(found)) + "|")
    begin = 0
    for end in _ENDS:
        if begin < len(tokens):
            means = (f"{values[begin:end].mean():.3f}" for values in found.values())
            print(f"| {begin} to {min(end, len(tokens))} | " + " | ".join(means) + " |")
        begin = end


if __name__ == "__main__":
    main()
