"""Measures the quality of quantization on two models: rounding to nearest, calibration, and mixed widths.

    python3 bench/quality.py [--models tiny_llama minilm] [--bits 4 3 2] [--methods nearest auto ...] [--target-bits 3.5]

Prints a row per model, width, group size and method. For examples/tiny_llama: the perplexity ratio on heldout.txt; every matrix
is quantized, including the table that embedding and head share. For all-MiniLM-L6-v2: the mean cosine of packed and float
embeddings of examples/minilm/sentences.txt. Both are calibrated on the documentation in Python's standard library, except the
text of heldout.txt (examples/tiny_llama/corpus.py).

    python3 bench/quality.py --write-text FILE [--models minilm]

Writes that text for `lowbit report --calibrate` and measures nothing; with only MiniLM, one sentence per line.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lowbit
import torch
from lowbit import EmbeddingConfig, LinearConfig
from lowbit.calibration import model as calibration

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES / "tiny_llama"), str(EXAMPLES / "minilm")]

WINDOW = 512

# Calibrated methods, with arguments of lowbit.calibration.gptq_solver.gptq.
CALIBRATED = {
    "importance": ("importance", {}),
    "auto": ("auto", {}),
    "tuned": ("tuned", {}),
    "distilled": ("distilled", {}),
    "gptq": ("gptq", {"correction": 0.0}),
    "gptaq-0.25": ("gptq", {"correction": 0.25}),
    "gptaq": ("gptq", {"correction": 1.0}),
    "gptaq-act-order": ("gptq", {"correction": 1.0, "by_importance": True}),
}


def quantize(model: torch.nn.Module, method: str, patterns: dict, texts: list[str], tokenizer) -> None:
    if method in CALIBRATED:
        name, options = CALIBRATED[method]
        calibration.run(
            model, texts, patterns, name, tokenizer=tokenizer, window=WINDOW, max_tokens=1 << 20, progress=None, options=options
        )
        return
    lowbit.quantize_(model, patterns)


def bits_per_weight(model: torch.nn.Module) -> float:
    buffers = {}
    for module in model.modules():
        if isinstance(module, lowbit.nn.Linear | lowbit.nn.Embedding):
            info = module.info
            buffers[module.packed_weight.data_ptr()] = (info.total_bytes, info.out_features * info.in_features)
    return 8 * sum(size for size, _ in buffers.values()) / sum(weights for _, weights in buffers.values())


def calibration_texts(size: int) -> list[str]:
    """Parts of every 7th training document, up to `size` characters."""
    import corpus

    texts, total = [], 0
    for text in list(corpus.documents(corpus.read_heldout()).values())[::7]:
        if total >= size:
            break
        texts.append(text[:6000])
        total += len(texts[-1])
    return texts


def calibration_sentences(size: int) -> list[str]:
    """Sentences for MiniLM, like those it is measured on: paragraphs of documentation are longer."""
    import corpus

    return [
        part.strip()
        for text in calibration_texts(size)
        for paragraph in corpus.split(text)
        for part in paragraph.replace("\n", " ").split(". ")
        if len(part.split()) >= 5
    ]


def tiny_llama(size: int, tokens: int | None) -> tuple[torch.nn.Module, Callable, dict, list[str], object]:
    import transformers
    from lowbit.llm.perplexity import perplexity

    path = EXAMPLES / "tiny_llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32).eval()
    ids = tokenizer((path / "heldout.txt").read_text("ascii"), verbose=False)["input_ids"][:tokens]
    whole = perplexity(model, ids, window=WINDOW).perplexity
    print(f"tiny_llama: {len(ids)} tokens of heldout.txt, float perplexity {whole:.3f}", flush=True)

    def quality(changed: torch.nn.Module) -> float:
        return perplexity(changed, ids, window=WINDOW).perplexity / whole

    table = {"model.embed_tokens": EmbeddingConfig, "lm_head": LinearConfig}
    return model, quality, table, calibration_texts(size), tokenizer


def minilm(size: int, tokens: int | None) -> tuple[torch.nn.Module, Callable, dict, list[str], object]:
    import demo

    encoder = demo.load_model()
    texts, topics = demo.read_sentences(demo.SENTENCES, None)
    corpus_ = demo.tokenize(encoder, texts, topics)
    expected = demo.embed(encoder, corpus_)
    print(f"minilm: {len(texts)} sentences", flush=True)

    def quality(changed: torch.nn.Module) -> float:
        return float((demo.embed(changed, corpus_) * expected).sum(1).mean())

    patterns = {"*pooler*": None, "*word_embeddings": EmbeddingConfig}
    return encoder, quality, patterns, calibration_sentences(size), encoder.tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny_llama", "minilm"], choices=["tiny_llama", "minilm"])
    parser.add_argument("--bits", nargs="*", type=int, default=[4, 3, 2])
    parser.add_argument("--group-sizes", nargs="+", type=int, default=[32])
    parser.add_argument("--mappings", nargs="+", default=["symmetric"], choices=["symmetric", "affine", "levels"])
    parser.add_argument("--methods", nargs="+", default=["nearest", "importance", "auto"], choices=["nearest", *CALIBRATED])
    parser.add_argument("--table-bits", type=int, default=0, help="more bits for embedding tables than for the rest")
    parser.add_argument(
        "--target-bits",
        nargs="*",
        type=float,
        default=[],
        help="also mixed precision per layer with these mean bits per weight; for importance, auto, tuned and distilled",
    )
    parser.add_argument("--rotate", choices=["layers", "all"], help="rotates the inputs of layers, or also of tables and heads")
    parser.add_argument("--characters", type=int, default=50_000, help="tokens of calibration text; default: %(default)s")
    parser.add_argument("--tokens", type=int, help="tokens of heldout.txt to measure on; default: all")
    parser.add_argument("--write-text", type=Path, metavar="FILE", help="write the calibration text and exit")
    options = parser.parse_args()
    if options.write_text is not None:
        sentences = options.models == ["minilm"]
        texts = calibration_sentences(options.characters) if sentences else calibration_texts(options.characters)
        options.write_text.write_text(("\n" if sentences else "\n\n").join(texts), encoding="utf-8")
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in options.models:
        floats, quality, patterns, texts, tokenizer = globals()[name](options.characters, options.tokens)
        inner = (lambda encoder: encoder[0].auto_model) if name == "minilm" else (lambda whole: whole)
        print("| model | bits | group | mapping | bits per weight | method | quality | s |\n" + 8 * "|---" + "|")
        for bits in options.bits:
            for group in options.group_sizes:
                for mapping in options.mappings:
                    config = {"*": LinearConfig(bits, group, mapping, rotate=options.rotate is not None)}
                    of_tables = options.rotate == "all"
                    more = (bits + options.table_bits, group, mapping)
                    config |= {pattern: kind and kind(*more, rotate=of_tables) for pattern, kind in patterns.items()}
                    for method in options.methods:
                        model = copy.deepcopy(floats)
                        begin = time.process_time()
                        quantize(inner(model), method, config, texts, tokenizer)
                        seconds = time.process_time() - begin
                        print(
                            f"| {name} | {bits} | {group} | {mapping} | {bits_per_weight(model):.2f} | {method} | "
                            f"{quality(model):.4f} | {seconds:.0f} |",
                            flush=True,
                        )
        whole = [method for method in options.methods if CALIBRATED.get(method) == (method, {})]
        for target in options.target_bits:
            overrides = [(pattern, None) for pattern, kind in patterns.items() if kind is None]
            if options.rotate == "layers":
                overrides += [(pattern, {"rotate": False}) for pattern, kind in patterns.items() if kind is not None]
            kept = lowbit.LowBitConfig(overrides=overrides, rotate=options.rotate is not None)
            begin = time.process_time()
            widths = lowbit.calibration.assign_widths(
                inner(floats), texts, kept, target, tokenizer=tokenizer, window=WINDOW, max_tokens=1 << 20
            )
            assigned = time.process_time() - begin
            for method in whole:
                model = copy.deepcopy(floats)
                begin = time.process_time()
                lowbit.calibrate(inner(model), texts, widths, method, tokenizer=tokenizer, window=WINDOW, max_tokens=1 << 20)
                seconds = assigned + time.process_time() - begin
                print(
                    f"| {name} | mixed | mixed | mixed | {bits_per_weight(model):.2f} | {method} | {quality(model):.4f} | "
                    f"{seconds:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
