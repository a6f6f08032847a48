"""Quantization-aware training: fine-tunes a language model with 1- or 2-bit weights to recover its quality, and packs it.

    python examples/qat/train.py --output tiny-llama-2bit
    python examples/qat/train.py --output tiny-llama-2.5bit --target-bits 2.5

Trains examples/tiny_llama/model with 2-bit weights (lowbit.qat) on its training text, against the logits of the float model
(distillation). Then packs it, saves it with its tokenizer and prints its perplexity on heldout.txt. --target-bits first chooses
a width for each matrix, with this mean of bits per weight. Seeds are fixed: the same machine with the same versions and number
of threads gives the same model.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from pathlib import Path

import lowbit
import torch
import transformers
from lowbit.llm.perplexity import perplexity
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

TINY = Path(__file__).resolve().parents[1] / "tiny_llama"
sys.path.insert(0, str(TINY))
import corpus  # noqa: E402

LENGTH = 256  # tokens of a sequence
SEED = 0


def training_tokens(tokenizer: transformers.PreTrainedTokenizerBase, documents: int | None) -> Tensor:
    """The documents that the model was trained on, each followed by an end token, without those of heldout.txt."""
    texts = list(corpus.documents(corpus.read_heldout(), documents).values())
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for tokens in encoded for token in (*tokens, tokenizer.eos_token_id)])


def batch(tokens: Tensor, step: int, sequences: int, bos: int) -> Tensor:
    """[sequences, LENGTH]: rows of BOS and a random piece of the text."""
    generator = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(len(tokens) - LENGTH, (sequences,), generator=generator)
    rows = torch.stack([tokens[start : start + LENGTH] for start in starts])
    rows[:, 0] = bos
    return rows


def loss_of(model: torch.nn.Module, teacher: torch.nn.Module, rows: Tensor, share: float) -> Tensor:
    """Mean loss per token in nats: ``share`` times the divergence from the teacher, the rest from the text."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float().flatten(0, 1)
    loss = (1 - share) * cross_entropy(logits, rows[:, 1:].flatten()) if share < 1 else 0.0
    if share > 0:
        with torch.no_grad():
            aim = teacher(input_ids=rows[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        divergence = kl_div(log_softmax(logits, -1), log_softmax(aim, -1), reduction="batchmean", log_target=True)
        loss = loss + share * divergence
    return loss


def share_of_rate(step: int, steps: int) -> float:
    """A short warm-up, then half a cosine."""
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))


def configs(options: argparse.Namespace, model: torch.nn.Module, text: list[Tensor]) -> dict:
    """Patterns for lowbit.qat.prepare_. The head shares the table's weight, so it has the table's width."""
    if options.target_bits is not None:
        base = lowbit.LowBitConfig(mapping=options.mapping)
        # Tables of levels cannot be trained.
        widths = lowbit.assign_widths(model, text, base, options.target_bits, alternatives=("affine",))
        return widths.select(model)
    arguments = options.group_size, options.mapping
    table = options.embedding_bits, 32, "symmetric"
    return {
        "*": lowbit.LinearConfig(options.bits, *arguments),
        "lm_head": lowbit.LinearConfig(*table),
        "model.embed_tokens": lowbit.EmbeddingConfig(*table),
    }


def bits_per_weight(model: torch.nn.Module) -> float:
    """Bits per weight of all packed matrices, including scales; shared ones count once."""
    infos = {
        part.packed_weight.data_ptr(): part.info
        for part in model.modules()
        if isinstance(part, lowbit.nn.Linear | lowbit.nn.Embedding)
    }
    weights = sum(info.out_features * info.in_features for info in infos.values())
    return 8 * sum(info.total_bytes for info in infos.values()) / weights


def train(options: argparse.Namespace) -> dict[str, float]:
    """Trains, saves, and returns the perplexity ratios before and after training."""
    torch.manual_seed(SEED)
    torch.set_num_threads(options.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    teacher = copy.deepcopy(model).requires_grad_(False)
    heldout = tokenizer((TINY / "heldout.txt").read_text("ascii"), verbose=False)["input_ids"][: options.heldout_tokens]
    float_perplexity = perplexity(teacher, heldout).perplexity

    def over_float(changed: torch.nn.Module) -> float:
        return perplexity(changed, heldout).perplexity / float_perplexity

    tokens = training_tokens(tokenizer, options.documents)
    text = [batch(tokens, options.steps + i, 8, tokenizer.bos_token_id) for i in range(8)]  # not used by any step
    selected = configs(options, model, text)
    lowbit.qat.prepare_(model, selected)
    result = {"float": float_perplexity, "nearest": over_float(lowbit.qat.convert_(copy.deepcopy(model)))}
    nearest = result["nearest"]
    print(f"float: perplexity {float_perplexity:.2f}; rounded to nearest: {nearest:.3f} times that", flush=True)

    grids = [value for name, value in model.named_parameters() if name.endswith(("weight_scale", "weight_min"))]
    known = {id(value) for value in grids}
    others = [value for value in model.parameters() if id(value) not in known]
    rates = [options.rate, options.scale_rate]
    optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": grids}], weight_decay=0.0, betas=(0.9, 0.95)
    )  # no decay, which would pull weights towards other levels
    begin = time.process_time()
    for step in range(options.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share_of_rate(step, options.steps)
        rows = batch(tokens, step, options.sequences, tokenizer.bos_token_id)
        loss = loss_of(model, teacher, rows, options.distillation)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.report == 0 or step + 1 == options.steps:
            seconds = time.process_time() - begin
            print(f"step {step + 1} of {options.steps}: loss {loss.item():.4f}, {seconds:.0f} s of CPU time", flush=True)

    lowbit.qat.convert_(model)
    result["trained"] = over_float(model)
    result["bits"] = bits_per_weight(model.model.layers)
    result["all bits"] = bits_per_weight(model)
    if options.output is not None:
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
    bits = f"{result['bits']:.2f} bits per weight in the layers, {result['all bits']:.2f} with the table"
    print(f"trained: {result['trained']:.3f} times the perplexity of the float model, with {bits}")
    return result


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=TINY / "model", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory for the packed model; default: not saved")
    parser.add_argument("--bits", type=int, default=2, help="width of the layers; default: %(default)s")
    parser.add_argument(
        "--target-bits", type=float, metavar="MEAN",
        help="mixed precision per layer, including the table, with this mean; replaces --bits, --group-size and "
        "--embedding-bits",
    )  # fmt: skip
    parser.add_argument("--group-size", type=int, default=32, help="weights per scale; default: %(default)s")
    parser.add_argument("--mapping", default="symmetric", choices=["symmetric", "affine"], help="default: %(default)s")
    parser.add_argument("--embedding-bits", type=int, default=4, help="width of the table; default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--sequences", type=int, default=8, help=f"sequences of {LENGTH} tokens per step; default: %(default)s")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of weights; default: %(default)s")
    parser.add_argument("--scale-rate", type=float, default=1e-3, help="learning rate of scales and mins; default: %(default)s")
    parser.add_argument("--distillation", type=float, default=1.0, help="the teacher's share of the loss; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--report", type=int, default=50, help="steps between lines; default: %(default)s")
    parser.add_argument("--documents", type=int, help="documents of the training text; default: all")
    parser.add_argument("--heldout-tokens", type=int, help="tokens of heldout.txt to measure on; default: all")
    options = parser.parse_args(arguments)
    for name in ("steps", "sequences", "threads", "report", "documents"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} is {value}; expected 1 or more")
    if not 0 <= options.distillation <= 1:
        parser.error(f"--distillation is {options.distillation}; expected 0 to 1")
    return options


if __name__ == "__main__":
    train(parse(None))
