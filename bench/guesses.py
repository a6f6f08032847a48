"""Measures the speedup of speculative decoding from the text so far: with and without guesses, in turns.

    python bench/guesses.py [MODEL] [--bits 4] [--new 120] [--rounds 5]
    python bench/guesses.py [MODEL] --draft SMALL [--draft-bits 4]     # a smaller model guesses

Two prompts: one whose text the model repeats, one without repetition. Prints tokens per second of plain decoding (median), and
for each number of guesses the ratio to it (median over rounds), the calls of the model and the accepted guesses. Checks that
the texts are equal.
"""

import argparse
import statistics
from pathlib import Path

import lowbit
import torch
import transformers
from lowbit import llm
from lowbit.llm.loading import load_tokenizer

ROOT = Path(__file__).parents[1]
PROMPTS = {
    "repeats": "The list contains the following items: one, two, three. " * 3 + "The list contains",
    "does not": "Return the number of items",
}


def make_decoder(path: Path, bits: int) -> llm.Decoder:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    config = {"*": lowbit.LinearConfig(bits, 32), "*embed_tokens": lowbit.EmbeddingConfig(bits, 32)}
    return llm.Decoder(lowbit.quantize_(model.eval(), config), max_length=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "examples" / "tiny_llama" / "model")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--new", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--guesses", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--draft-bits", type=int, default=4)
    options = parser.parse_args()
    decoder = make_decoder(options.model, options.bits)
    draft = None if options.draft is None else make_decoder(options.draft, options.draft_bits)
    tokenizer = load_tokenizer(options.model)
    print(f"{torch.get_num_threads()} threads, {options.bits} bits, {options.new} tokens, {options.rounds} rounds in turns")
    for name, prompt in PROMPTS.items():
        ids = tokenizer(prompt)["input_ids"]
        runs: dict[int, list[llm.Generation]] = {guesses: [] for guesses in [0, *options.guesses]}
        for _ in range(options.rounds):
            for guesses, found in runs.items():
                small = draft if guesses else None
                found.append(llm.generate(decoder, ids, options.new, max_length=512, guesses=guesses, draft=small))
                assert found[-1].tokens == runs[0][0].tokens
        plain = runs.pop(0)
        print(f"text that {name}: plain {statistics.median(run.decode_rate for run in plain):.0f} tokens/s")
        for guesses, found in runs.items():
            ratio = statistics.median(a.decode_rate / b.decode_rate for a, b in zip(found, plain, strict=True))
            last = found[-1]
            print(
                f"  {guesses:2} guesses: {ratio:.2f} times; {last.decode_calls} calls, {last.accepted} of {last.guessed} right"
            )


if __name__ == "__main__":
    main()
