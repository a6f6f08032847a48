"""Writes bytes, checksums and quality of every method and width on examples/tiny_llama: tests/results.csv.

    python bench/method_results.py > tests/results.csv

tests/python/bench/test_results.py compares the file with the current results, so that a change of behavior shows in the diff.
"""

from __future__ import annotations

import copy
import csv
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import lowbit
import torch
import transformers
from lowbit import EmbeddingConfig, LinearConfig
from lowbit.tools.divergence import compare, save_logits

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_llama"
TOKENS = 256  # of the text to compare on, and of the calibration text
HEADINGS = ("method", "bits", "group_size", "mapping", "bytes", "checksum", "kld", "top1", "perplexity")

# Method, bits, group size, mapping. Scales by mse and absmax come from the weights alone.
CASES = (
    *(("mse", bits, 32, "symmetric") for bits in range(1, 9)),
    ("mse", 2, 32, "affine"),
    ("mse", 4, None, "symmetric"),
    ("absmax", 4, 32, "symmetric"),
    *(("levels", bits, 32, "levels") for bits in (2, 4)),
    *(("importance", bits, 32, "symmetric") for bits in (2, 3)),
    *(("gptq", bits, 32, "symmetric") for bits in (2, 3)),
    ("gptq", 2, 32, "affine"),
    ("mse-rotated", 3, 32, "symmetric"),
    ("gptq-rotated", 3, 32, "symmetric"),
)
FROM_WEIGHTS = ("mse", "absmax", "mse-rotated")  # computed by the package's C++ alone: the same bytes on every machine


def texts(tokenizer) -> tuple[list[int], str]:
    """The ids to compare on, and the calibration text, which comes after them."""
    text = (EXAMPLE / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(text[: 8 * TOKENS])["input_ids"][:TOKENS]
    return ids, text[8 * TOKENS :]


def quantized(model, tokenizer, text: str, method: str, bits: int, group_size: int | None, mapping: str):
    levels = "fit" if method == "levels" else None
    scale = "absmax" if method == "absmax" else "mse"
    method, _, rotated = method.partition("-")
    linear = LinearConfig(bits, group_size, mapping, scale=scale, levels=levels, rotate=rotated == "rotated")
    config = {"*": linear, "model.embed_tokens": EmbeddingConfig(8, 32), "lm_head": LinearConfig(8, 32)}
    model = copy.deepcopy(model)
    if method in (*FROM_WEIGHTS, "levels"):
        return lowbit.quantize_(model, config)
    lowbit.calibrate(model, [text], config, method=method, tokenizer=tokenizer, max_tokens=TOKENS)
    return model


def packed(model) -> tuple[int, str]:
    """The total bytes of all packed weights, and a checksum over them in the order of their names."""
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, (lowbit.nn.Linear, lowbit.nn.Embedding)):
            weights.setdefault(module.packed_weight.data_ptr(), module.packed_weight)
    total, checksum = 0, 0
    for weight in weights.values():
        data = weight.numpy().tobytes()
        total, checksum = total + len(data), zlib.crc32(data, checksum)
    return total, f"{checksum:08x}"


def rows() -> Iterator[dict[str, str]]:
    """Yields a row for each case, as a dict by heading."""
    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE / "model")
    ids, text = texts(tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        reference = Path(directory) / "reference.safetensors"
        save_logits(model, ids, reference)
        yield from compared(model, tokenizer, ids, text, reference)


def compared(model, tokenizer, ids: list[int], text: str, reference: Path) -> Iterator[dict[str, str]]:
    for method, bits, group_size, mapping in CASES:
        smaller = quantized(model, tokenizer, text, method, bits, group_size, mapping)
        found = compare(smaller, ids, reference)
        figures = (f"{value:.4g}" for value in (found.kld, found.top1, found.model.perplexity))
        case = (method, str(bits), str(group_size or "row"), mapping)
        yield dict(zip(HEADINGS, (*case, *map(str, packed(smaller)), *figures), strict=True))


if __name__ == "__main__":
    writer = csv.DictWriter(sys.stdout, HEADINGS, lineterminator="\n")
    writer.writeheader()
    for row in rows():
        writer.writerow(row)
