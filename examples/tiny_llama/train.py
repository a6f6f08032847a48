"""Trains a small language model of the Llama family on the documentation of Python's standard library.

    python examples/tiny_llama/train.py --output tiny-llama-out

Writes config, weights (bfloat16), tokenizer and generation settings to OUTPUT/model, for AutoModelForCausalLM and
AutoTokenizer. An interrupted run continues from OUTPUT/checkpoint.pt. The text comes from corpus.py, without the documents of
heldout.txt.

Seeds are fixed: the same machine with the same versions gives the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import corpus
import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

# corpus.fingerprint of the text that the model in this directory was trained on.
SHIPPED_PYTHON = "3.11.7"
SHIPPED_CORPUS = "cd2db1e41fda414bb487092649bdbd528bcaad4cec3c4f908fa382789df77035"

VOCABULARY = 2048
STEPS = 1000
BATCH = 4096  # tokens, in every batch
WORKERS = 2  # threads
LENGTH = 256  # of a sequence, in tokens
LONG = 1024  # tokens of a sequence in every eighth batch, so that the model learns all positions
ADAMW_RATE, MUON_RATE = 3e-3, 1e-2
WEIGHT_DECAY = 0.1  # of the matrices
WARMUP = 40  # steps
DECAY = 0.3  # share of the steps in which the rate falls to 0
VALIDATION = 40  # one of this many bytes is for validation
REPORT = 50  # steps from one validation to the next
CHECKPOINT = 25  # steps
SEED = 0

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
# Line ends with the next line's indentation; words with the space before them; single digits; the rest.
PIECES = r"\n+ *| ?[A-Za-z]+| ?[0-9]| ?[^A-Za-z0-9\s]+|\s"


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    intermediate: int
    documents: int | None  # None: all
    vocabulary: int = VOCABULARY

    def config(self) -> transformers.LlamaConfig:
        heads = self.hidden // 32
        return transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4 or 1,
            head_dim=32,
            max_position_embeddings=LONG,
            tie_word_embeddings=True,
            initializer_range=0.04,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )


FULL = Size(hidden=256, layers=5, intermediate=512, documents=None)
SMALL = Size(hidden=64, layers=2, intermediate=128, documents=40, vocabulary=512)


def train_tokenizer(texts: list[str], vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded, and every token of an ASCII text is ASCII."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=LONG,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: transformers.PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts in one row, an EOS after each."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for tokens in encoded for token in (*tokens, EOS_ID)])


def batch(tokens: Tensor, step: int) -> Tensor:
    """[sequences, length]: rows of BOS and a random piece of the text."""
    length = LONG if step % 8 == 7 else LENGTH
    generator = torch.Generator().manual_seed(SEED + step)
    starts = torch.randint(len(tokens) - length, (BATCH // length,), generator=generator)
    rows = torch.stack([tokens[start : start + length] for start in starts])
    rows[:, 0] = BOS_ID
    return rows


def loss_of(model: transformers.LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Mean loss per token, in nats."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def backward(model: transformers.LlamaForCausalLM, rows: Tensor, pool: ThreadPoolExecutor) -> float:
    """Sets all gradients, and returns the loss."""

    # Each thread computes half of the rows, instead of all threads sharing each operation. So the sums do not depend on torch's
    # number of threads, and a step does not wait for a busy core thousands of times.
    def part(rows: Tensor) -> tuple[float, tuple[Tensor, ...]]:
        loss = loss_of(model, rows) / WORKERS
        return loss.item(), torch.autograd.grad(loss, list(model.parameters()))

    losses, gradients = zip(*pool.map(part, rows.chunk(WORKERS)), strict=True)
    for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = sum(parts)
    return sum(losses)


@torch.no_grad()
def validate(model: transformers.LlamaForCausalLM, tokens: Tensor) -> float:
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH).clone()
    rows[:, 0] = BOS_ID
    return sum(loss_of(model, part).item() * len(part) for part in rows.split(16)) / len(rows)


def share_of_rate(step: int, steps: int) -> float:
    """Warm-up, constant rate, linear decay to 0; before the decay, the rate does not depend on `steps`."""
    return min((step + 1) / WARMUP, 1.0, (steps - step) / (DECAY * steps))


class Optimizer:
    """Muon for the matrices of the layers; AdamW for the embedding, which is also the head, and for the norms."""

    def __init__(self, model: transformers.LlamaForCausalLM) -> None:
        layers = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
        norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        embedding = model.get_input_embeddings().weight
        self.parts = [
            torch.optim.Muon(layers, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([embedding], lr=ADAMW_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.95)),
            torch.optim.AdamW(norms, lr=ADAMW_RATE, weight_decay=0.0, betas=(0.9, 0.95)),
        ]
        self.rates = [part.param_groups[0]["lr"] for part in self.parts]

    def step(self, share: float) -> None:
        for part, rate in zip(self.parts, self.rates, strict=True):
            part.param_groups[0]["lr"] = rate * share
            part.step()
            part.zero_grad()

    def state_dicts(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dicts(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def choose_validation(texts: corpus.Documents) -> list[str]:
    """Names of documents, chosen by hash, with 1/VALIDATION of the text or a little more."""
    names = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    sizes = itertools.accumulate(len(texts[name]) for name in names)
    wanted = sum(map(len, texts.values())) / VALIDATION
    return names[: 1 + sum(size < wanted for size in sizes)]


def train(size: Size, steps: int, output: Path) -> list[float]:
    """Trains, writes OUTPUT/model and returns the validation losses from before the first step to after the last."""
    texts = corpus.documents(corpus.read_heldout(), size.documents)
    validation = choose_validation(texts)
    found, size_of_text = corpus.fingerprint(texts), sum(map(len, texts.values()))
    print(f"Python {platform.python_version()}: {len(texts)} documents, {size_of_text:,} bytes, {found}")
    if size is FULL and found != SHIPPED_CORPUS:
        print(f"not the text of the model in this directory, Python {SHIPPED_PYTHON}'s: {found}, not {SHIPPED_CORPUS}")

    training = [text for name, text in texts.items() if name not in validation]
    tokenizer = train_tokenizer(training, size.vocabulary)
    tokens = encode(tokenizer, training)
    validation_tokens = encode(tokenizer, [texts[name] for name in validation])

    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(size.config())
    optimizer = Optimizer(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters; {len(tokens):,} tokens, read {steps * BATCH / len(tokens):.1f} times")

    checkpoint = output / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        check_resumable(state, size, steps, checkpoint)
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dicts(state["optimizer"])
        print(f"continues from {checkpoint}")
    losses = [validate(model, validation_tokens)]
    print(f"step {first}: validation {losses[0]:.3f} nats per token", flush=True)

    pool = ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
    start = time.monotonic()
    for step in range(first, steps):
        loss = backward(model, batch(tokens, step), pool)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(share_of_rate(step, steps))
        done = step + 1
        if done % CHECKPOINT == 0:
            output.mkdir(parents=True, exist_ok=True)
            state = {
                "size": repr(size),
                "steps": steps,
                "step": done,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dicts(),
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        if done % REPORT == 0 or done == steps:
            losses.append(validate(model, validation_tokens))
            seconds = time.monotonic() - start
            print(f"step {done}: training {loss:.3f}, validation {losses[-1]:.3f}, {seconds:.0f} s", flush=True)

    model.to(torch.bfloat16).save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    checkpoint.unlink(missing_ok=True)
    print(f"written: {output / 'model'}")
    return losses


def check_resumable(state: dict, size: Size, steps: int, checkpoint: Path) -> None:
    remedy = f"remove {checkpoint} or choose another --output"
    if state["size"] != repr(size):
        raise SystemExit(f"train: {checkpoint} is of {state['size']}, not of {size!r}; {remedy}")
    # Before the decay of the rate a run does not depend on its length.
    step, planned = state["step"], state["steps"]
    if planned != steps and step > (1 - DECAY) * min(steps, planned):
        raise SystemExit(f"train: {checkpoint} is of step {step} of {planned}, not of {steps}; {remedy}")


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Trains a small Llama on the standard library's documentation.")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of {BATCH} tokens; default: %(default)s")
    parser.add_argument("--small", action="store_true", help="a tiny model on a few documents, in seconds: for tests")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, not {options.steps}")
    torch.set_num_threads(1)
    return train(SMALL if options.small else FULL, options.steps, options.output)


if __name__ == "__main__":
    main()
