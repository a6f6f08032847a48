"""What quantisation costs in quality: nearest, searches without data, and calibration, on two models.

    python3 bench/quality.py [--models tiny_llama minilm] [--bits 4 3 2] [--methods nearest search gptq+descent ...]

prints a row per model, width, group size and method, and writes nothing. examples/tiny_llama: perplexity of heldout.txt
over that of the float model; every matrix is quantised, the table that embedding and head share too. all-MiniLM-L6-v2:
the mean cosine of the embeddings of examples/minilm/sentences.txt with the float ones. Both are calibrated on the
documentation in Python's standard library, without what is in heldout.txt (examples/tiny_llama/corpus.py).
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lowbit
from lowbit import EmbeddingConfig, LinearConfig
from lowbit.calibration import model as calibration
from lowbit.calibration.grid import levels_near, nearest
from lowbit.calibration.importance import in_groups, search, stored_grid

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES / "tiny_llama"), str(EXAMPLES / "minilm")]

WINDOW = 512

# Without data: a search for each matrix. With data: a method and the arguments of lowbit.calibration.gptq.gptq.
DATA_FREE = ("nearest", "search", "squares", "hqq")
CALIBRATED = {
    "importance": ("importance", {}),
    "auto": ("auto", {}),
    "gptq": ("gptq", {"correction": 0.0, "sweeps": 0}),
    "gptaq-0.25": ("gptq", {"correction": 0.25, "sweeps": 0}),
    "gptaq": ("gptq", {"correction": 1.0, "sweeps": 0}),
    "gptaq-act-order": ("gptq", {"correction": 1.0, "sweeps": 0, "by_importance": True}),
    "gptaq-0.25+1": ("gptq", {"correction": 0.25, "sweeps": 1}),
    "gptq+2": ("gptq", {"correction": 0.0, "sweeps": 2}),
    "gptaq+4": ("gptq", {"correction": 1.0, "sweeps": 4}),
}


def hqq(weight: torch.Tensor, config: LinearConfig, power: float = 0.7, beta: float = 10.0, steps: int = 20):
    """Half-quadratic quantisation (Badri and Shaji, 2023): the min of each group makes a sparse error small.

    Symmetric weights have no min; there the same shrinking of outliers refits the scale.
    """
    x = in_groups(weight, config)
    top = 2**config.bits - 1
    if config.mapping == "affine":
        low = x.amin(2, keepdim=True)
        scale = ((x.amax(2, keepdim=True) - low) / top).clamp(min=1e-8)
    else:
        start = search(weight, None, config)
        scale, low = start.scales[:, :, None], None
    for _ in range(steps):
        if low is None:
            levels = levels_near(x, scale, None, config.bits)
            rounded = levels * scale
        else:
            levels = ((x - low) / scale).round().clamp(0, top)
            rounded = levels * scale + low
        error = x - rounded
        # Errors relative to the step, as HQQ has them in its constants.
        relative = error / scale.abs()
        shrunk = relative.sign() * (relative.abs() - relative.abs().clamp(min=1e-6).pow(power - 1) / beta).clamp(min=0)
        wanted = x - shrunk * scale.abs()
        if low is None:
            squares = (levels * levels).sum(2, keepdim=True)
            scale = torch.where(squares > 0, (wanted * levels).sum(2, keepdim=True) / squares.clamp(min=1), scale)
        else:
            low = (wanted - levels * scale).mean(2, keepdim=True)
        beta *= 1.01
    scales, mins = stored_grid(scale[:, :, 0], None if low is None else low[:, :, 0])
    return nearest(weight, scales, mins, config)


def data_free(method: str, weight: torch.Tensor, config: LinearConfig | EmbeddingConfig) -> torch.Tensor:
    """The packed matrix."""
    weight = weight.detach().float()
    if method == "nearest":
        return lowbit.quantize_tensor(weight, config)
    if method == "hqq":
        return hqq(weight, config).pack()
    importance = weight.square() + weight.square().mean() if method == "squares" else None
    return search(weight, importance, config).pack()


def quantise(
    model: torch.nn.Module, floats: torch.nn.Module, method: str, patterns: dict, texts: list[str], tokenizer
) -> None:
    if method in CALIBRATED:
        name, options = CALIBRATED[method]
        calibration.run(
            model, texts, patterns, name, tokenizer=tokenizer, window=WINDOW, max_tokens=1 << 20, progress=None,
            options=options
        )
        return
    lowbit.quantize_(model, patterns)
    if method == "nearest":
        return
    for name, module in model.named_modules():
        if isinstance(module, lowbit.nn.Linear | lowbit.nn.Embedding):
            layer = floats.get_submodule(name)
            info = module.info
            config = LinearConfig(info.bits, info.group_size, info.mapping)
            weight = lowbit.unpack(data_free(method, layer.weight, config))
            module.packed_weight = lowbit.pack(
                weight.codes, weight.scales, weight.mins, lowbit.unpack(module.packed_weight).bias,
                bits=info.bits, group_size=info.group_size, mapping=info.mapping,
            )


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

    return model, quality, {"model.embed_tokens": EmbeddingConfig}, calibration_texts(size), tokenizer


def minilm(size: int, tokens: int | None) -> tuple[torch.nn.Module, Callable, dict, list[str], object]:
    import demo

    encoder = demo.load_model()
    texts, topics = demo.read_sentences(demo.SENTENCES, None)
    corpus_ = demo.tokenise(encoder, texts, topics)
    expected = demo.embed(encoder, corpus_)
    print(f"minilm: {len(texts)} sentences", flush=True)

    def quality(changed: torch.nn.Module) -> float:
        return float((demo.embed(changed, corpus_) * expected).sum(1).mean())

    # Sentences, as those that it is measured on: paragraphs of documentation are longer.
    import corpus

    sentences = [
        part.strip() for text in calibration_texts(size) for paragraph in corpus.split(text)
        for part in paragraph.replace("\n", " ").split(". ") if len(part.split()) >= 5
    ]
    patterns = {"*pooler*": None, "*word_embeddings": EmbeddingConfig}
    return encoder, quality, patterns, sentences, encoder.tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny_llama", "minilm"], choices=["tiny_llama", "minilm"])
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--group-sizes", nargs="+", type=int, default=[32])
    parser.add_argument("--mappings", nargs="+", default=["symmetric"], choices=["symmetric", "affine"])
    parser.add_argument("--methods", nargs="+", default=[*DATA_FREE, *CALIBRATED], choices=[*DATA_FREE, *CALIBRATED])
    parser.add_argument("--characters", type=int, default=50_000, help="of calibration text; default: %(default)s")
    parser.add_argument("--tokens", type=int, help="of heldout.txt to measure on; default: all")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in options.models:
        floats, quality, patterns, texts, tokenizer = globals()[name](options.characters, options.tokens)
        print("| model | bits | group | mapping | bits per weight | method | quality | s |\n" + 8 * "|---" + "|")
        for bits in options.bits:
            for group in options.group_sizes:
                for mapping in options.mappings:
                    arguments = (bits, group, mapping)
                    config = {"*": LinearConfig(*arguments)}
                    config |= {pattern: kind and kind(*arguments) for pattern, kind in patterns.items()}
                    for method in options.methods:
                        model = copy.deepcopy(floats)
                        begin = time.process_time()
                        inner = (lambda encoder: encoder[0].auto_model) if name == "minilm" else (lambda whole: whole)
                        quantise(inner(model), inner(floats), method, config, texts, tokenizer)
                        seconds = time.process_time() - begin
                        print(
                            f"| {name} | {bits} | {group} | {mapping} | {bits_per_weight(model):.2f} | {method} | "
                            f"{quality(model):.4f} | {seconds:.0f} |",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
