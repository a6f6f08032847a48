"""Times sampling of one token: CPU time of one thread, medians.

Logits are normal with a given deviation; with a small one, many tokens are likely.

    python bench/drawing.py [--vocabulary 128256] [--rounds 31]
"""

import argparse
import statistics
import time

import numpy
from lowbit.llm import sample
from lowbit.llm.sampling import random_generator

KINDS = (("the likeliest", 0.0, None, None), ("all", 0.6, None, None), ("top_k=50", 0.6, 50, None),
         ("top_p=0.9", 0.6, None, 0.9), ("both", 0.6, 50, 0.9))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    generator = random_generator(1)
    print("milliseconds, temperature 0.6 |", " | ".join(name for name, *_ in KINDS))
    for deviation in (1, 3, 6):
        logits = generator.standard_normal(arguments.vocabulary, dtype=numpy.float32) * numpy.float32(deviation)
        times: dict[str, list[float]] = {name: [] for name, *_ in KINDS}
        for _ in range(arguments.rounds):
            for name, temperature, top_k, top_p in KINDS:
                began = time.process_time()
                sample(logits, temperature, top_k, top_p, generator)
                times[name].append(1e3 * (time.process_time() - began))
        print(f"deviation {deviation} |", " | ".join(f"{statistics.median(taken):.2f}" for taken in times.values()))


if __name__ == "__main__":
    main()
