"""Times attention over caches of each type: one layer, the same call in turns.

    python bench/caches.py [--prompt] [--lengths 512 2048 8192 32768] [--heads 32] [--kv-heads 8] [--width 64] [--rounds 21]

For each number of positions it prints the size of the caches and the CPU time relative to float32 caches: of one token after
that many positions, or of a prompt of that length. Figures are medians of the ratios of turns; activations are float32. Each
turn of a token reads another layer's caches, up to 256 MB in all, so that they come from memory as in a model.
"""

import argparse
import statistics
import time

import lowbit
import torch
from lowbit.llm.caches import CACHES, dtypes_of
from lowbit.operators.ops import cache_storage, cache_width


def full(kv_heads: int, length: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache with all bytes written; not one shared page of zeros. Scales of codes are 0x3f3f3f3f: 0.75."""
    stored = cache_storage(dtype)
    return torch.full((1, kv_heads, length, cache_width(width, dtype)), 0x3F if stored is torch.int8 else 0.75, dtype=stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", action="store_true", help="all positions are new")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    width = options.width
    print(f"{torch.get_num_threads()} threads, {options.heads} heads over {options.kv_heads}, width {width}; ratios to float32")
    for length in options.lengths:
        count = length if options.prompt else 1
        q, new = torch.randn(1, options.heads, count, width), torch.randn(1, options.kv_heads, count, width)
        layers = 1 if options.prompt else max(1, min(16, 256_000_000 // (2 * 4 * options.kv_heads * length * width)))
        caches, start = {}, torch.tensor([length - count])
        for name in CACHES:
            caches[name] = [[full(options.kv_heads, length, width, dtype) for dtype in dtypes_of(name)] for _ in range(layers)]
        times = {name: [] for name in CACHES}
        for _ in range(options.rounds + 1):
            for name, kept in caches.items():
                begin = time.process_time()
                for pair in kept:
                    lowbit.attention(q, new, new, *pair, start)
                times[name].append((time.process_time() - begin) / layers)
        for name, taken in times.items():
            size = sum(cache.nbytes for cache in caches[name][0])
            ratio = statistics.median(a / b for a, b in zip(taken[1:], times["float32"][1:], strict=True))
            print(f"{length:6} {name:9} {size / 2**20:8.2f} MiB a layer {ratio:6.2f}")


if __name__ == "__main__":
    main()
