"""Counts equal greedy texts of three programs: lowbit's decoder, transformers' generate, and the float model in transformers.

    OMP_NUM_THREADS=1 python bench/equal_texts.py PACKED [--prompts N] [--new 64]

PACKED is the directory of a packed language model. It runs with 8-bit activations, with 16-bit ones in the head only, and with
16-bit ones in all layers. The float model has the dequantized weights. All models compute in float32. Prompts are lines of
bench/prompts.txt, in the model's chat template if it has one.

Prints a table with a column for each pair of programs: the share of equal texts, and in brackets the mean number of equal
tokens before the first difference. In the last row, lowbit's decoder runs the float model, too.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lowbit
import lowbit.transformers  # so that transformers loads packed checkpoints
import torch
import transformers
from lowbit import llm
from lowbit.llm.loading import load_tokenizer, stop_tokens
from lowbit.machine.facts import cpu_name

transformers.utils.logging.disable_progress_bar()

PROMPTS = Path(__file__).with_name("prompts.txt")
Texts = list[list[int]]


def prompt_tokens(tokenizer: Any, lines: Sequence[str]) -> Texts:
    if tokenizer.chat_template is None:
        return [tokenizer(line, verbose=False)["input_ids"] for line in lines]
    turns = [[{"role": "user", "content": line}] for line in lines]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"] for turn in turns]


@torch.inference_mode()
def by_decoder(model: torch.nn.Module, prompts: Texts, new: int, stop: list[int]) -> Texts:
    """The texts of ``lowbit generate --prompts``, each the same as if generated alone."""
    longest = max(map(len, prompts)) + new
    decoder = llm.Decoder(model, -(-longest // 16) * 16)
    texts = llm.generate_batch(decoder, prompts, new, at_once=len(prompts), stop=stop)
    decoder.release()
    return [text.tokens for text in texts]


@torch.inference_mode()
def by_transformers(model: torch.nn.Module, prompts: Texts, new: int, stop: list[int]) -> Texts:
    """The texts of transformers' generate, which pads the prompts."""
    longest, pad = max(map(len, prompts)), (stop or [0])[0]
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=stop or None, pad_token_id=pad)
    texts = model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:].tolist()
    return [list(takewhile(lambda token: token not in stop, text)) for text in texts]


def compare(texts: Texts, others: Texts) -> dict[str, float]:
    """The share of equal texts; for the others the mean number of tokens before the first difference (or NaN)."""
    places = [
        next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
        for text, other in zip(texts, others, strict=True)
        if text != other
    ]
    return {"equal": 1 - len(places) / len(texts), "first": statistics.mean(places) if places else float("nan")}


def measure(packed: torch.nn.Module, prompts: Texts, new: int, stop: list[int]) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting of activation bits of the packed model, and one for the float model."""
    floats = copy.deepcopy(packed)
    floats.dequantize()
    expected = by_transformers(floats, prompts, new, stop)
    layers = [layer for layer in packed.modules() if isinstance(layer, lowbit.nn.Packed)]
    head = packed.get_output_embeddings()
    for name, chosen in {"16 bits": layers, "8 bits": [], "16 bits in the head": [head]}.items():
        for layer in layers:
            layer.to_activation_bits(16 if layer in chosen else 8)
        decoder = by_decoder(packed, prompts, new, stop)
        other = by_transformers(packed, prompts, new, stop)
        yield {
            "activations": name, "programs": compare(decoder, other), "decoder": compare(decoder, expected),
            "transformers": compare(other, expected),
        }  # fmt: skip
    yield {"activations": "float model", "programs": compare(by_decoder(floats, prompts, new, stop), expected)}


TITLES = {"programs": "Decoder and transformers", "decoder": "Decoder and float", "transformers": "transformers and float"}


def cells(row: dict[str, Any]) -> list[str]:
    def cell(found: dict[str, float] | None) -> str:
        if found is None:
            return ""
        return f"{found['equal']:.0%}" + ("" if found["equal"] == 1 else f" ({found['first']:.0f})")

    return [row["activations"], *(cell(row.get(title)) for title in TITLES)]


def main() -> None:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="PACKED", help="directory of a packed language model")
    parser.add_argument("--prompts", type=int, default=len(lines), help="number of prompts; default: all %(default)s")
    parser.add_argument("--new", type=int, default=64, help="tokens of a text; default: %(default)s")
    options = parser.parse_args()
    for name, value, most in (("--prompts", options.prompts, len(lines)), ("--new", options.new, 4096)):
        if not 1 <= value <= most:
            parser.error(f"{name} is {value}; expected 1 to {most}")
    tokenizer = load_tokenizer(options.model)
    prompts = prompt_tokens(tokenizer, lines[: options.prompts])
    print(
        f"{cpu_name()}, {torch.get_num_threads()} threads; lowbit {lowbit.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. {len(prompts)} prompts, {options.new} tokens.\n"
    )
    print("| Activations | " + " | ".join(TITLES.values()) + " |\n" + "|---" * (1 + len(TITLES)) + "|", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True).eval()
    for row in measure(model, prompts, options.new, stop_tokens(model, tokenizer)):
        print(f"| {' | '.join(cells(row))} |", flush=True)


if __name__ == "__main__":
    main()
