"""Measures continuous batching and prefix caching: the same texts one after the other and together, in turns.

    python bench/texts.py [MODEL] [--bits 4] [--new 64] [--rounds 5] [--texts 1 4 8 16]
    python bench/texts.py --shape qwen3-0.6b       # random weights of a known shape

For each number of texts it prints the ratio of new tokens per second, together to one after the other (`llm.generate`),
including prompts. Then, for prompts with a shared prefix of --prefix tokens, it compares the seconds until all prompts are
read, with the prefix computed for each text, computed once, and cached before (Decoder.read). Figures are medians
over rounds; with one thread (OMP_NUM_THREADS=1) of CPU time, which other work on the machine disturbs less. Checks that the
texts are equal.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

import lowbit
import torch
import transformers
from lowbit import llm

ROOT = Path(__file__).parents[1]


def make_decoder(options: argparse.Namespace) -> llm.Decoder:
    linear, embedding = lowbit.LinearConfig(options.bits, 32), lowbit.EmbeddingConfig(options.bits, 32)
    if options.shape is not None:
        model = llm.random_model(options.shape, linear, embedding)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
        model = lowbit.quantize_(model.eval(), {"*": linear, "*embed_tokens": embedding})
    return llm.Decoder(model, max_length=512, cache=options.cache)


def timed(run):
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    found = run()
    return clock() - begin, found


def ratio(found: dict, name: str, other: str) -> str:
    return f"{statistics.median(a / b for a, b in zip(found[name], found[other], strict=True)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "examples" / "tiny_llama" / "model")
    parser.add_argument("--shape", choices=llm.shapes.NAMES)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--cache", choices=["float32", "bfloat16", "float16", "int8"])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--prefix", type=int, default=256, help="tokens of the shared prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 8, 16])
    options = parser.parse_args()
    decoder = make_decoder(options)
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(decoder.vocabulary) for _ in range(count)]

    model = options.shape or options.model.parent.name
    print(f"{model}, {options.bits} bits, {torch.get_num_threads()} threads, {options.rounds} rounds in turns")
    print(f"prompts of about {options.prompt} tokens and {options.new} new ones")
    for count in options.texts:
        prompts = [tokens(options.prompt - count // 2 + i) for i in range(count)]
        seconds: dict[str, list[float]] = {"alone": [], "together": []}
        for _ in range(options.rounds):
            took, alone = timed(lambda: [llm.generate(decoder, prompt, options.new, max_length=512) for prompt in prompts])
            seconds["alone"].append(took)
            took, together = timed(lambda: llm.generate_batch(decoder, prompts, options.new))
            seconds["together"].append(took)
            assert [each.tokens for each in alone] == [each.tokens for each in together]
        rate = count * options.new / statistics.median(seconds["alone"])
        print(f"  {count:2} texts: {ratio(seconds, 'alone', 'together')} times ({rate:.0f} tokens/s one after the other)")
    beginning = tokens(options.prefix)
    kept = decoder.read(beginning)
    print(f"first tokens of prompts with {options.prefix} shared tokens and about {options.prompt} others")
    for count in options.texts:
        own = [tokens(options.prompt - count // 2 + i) for i in range(count)]
        prompts = [beginning + each for each in own]
        seconds = {"anew": [], "once": [], "kept": []}
        for _ in range(options.rounds):
            took, anew = timed(lambda: [llm.generate(decoder, prompt, 1, max_length=512) for prompt in prompts])
            seconds["anew"].append(took)
            for name, prefixes in (("once", []), ("kept", [kept])):
                took, found = timed(lambda: llm.generate_batch(decoder, prompts, 1, prefixes=prefixes))
                seconds[name].append(took)
                assert [each.tokens for each in found] == [each.tokens for each in anew]
        print(f"  {count:2} texts: once {ratio(seconds, 'anew', 'once')} times, cached {ratio(seconds, 'anew', 'kept')} times")


if __name__ == "__main__":
    main()
