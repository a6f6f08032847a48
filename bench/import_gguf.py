"""Imports a random Q4_K_M GGUF file in the shape of Llama 3.2 1B; prints time, sizes and peak memory.

python bench/import_gguf.py DIRECTORY    # writes 0.8 GB there, and imports it: another 0.9 GB
"""

import argparse
import resource
import struct
import time
from pathlib import Path

import lowbit
import lowbit.transformers
import numpy as np
from lowbit.files.gguf_reader import TYPES
from lowbit.hf import from_pretrained, gguf_tokenizer  # noqa: F401 (so that their imports are not counted)

WIDTH, INNER, LAYERS, VOCABULARY, KEYS = 2048, 8192, 16, 128256, 512
SETTINGS = {
    "general.architecture": "llama", "llama.context_length": 131072, "llama.embedding_length": WIDTH,
    "llama.block_count": LAYERS, "llama.feed_forward_length": INNER, "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 5e5,
}  # fmt: skip
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,), "F32": ()}  # where a block has float16 numbers
NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def tensors() -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of each tensor, as in llama.cpp's mix."""
    found = [("token_embd.weight", (VOCABULARY, WIDTH), "Q6_K"), ("output_norm.weight", (WIDTH,), "F32")]
    for layer in range(LAYERS):
        wider = "Q6_K" if layer % 2 else "Q4_K"
        shapes = {
            "attn_q": (WIDTH, WIDTH, "Q4_K"), "attn_k": (KEYS, WIDTH, "Q4_K"), "attn_v": (KEYS, WIDTH, wider),
            "attn_output": (WIDTH, WIDTH, "Q4_K"), "ffn_gate": (INNER, WIDTH, "Q4_K"), "ffn_up": (INNER, WIDTH, "Q4_K"),
            "ffn_down": (WIDTH, INNER, wider), "attn_norm": (WIDTH, "F32"), "ffn_norm": (WIDTH, "F32"),
        }  # fmt: skip
        found += [(f"blk.{layer}.{name}.weight", shape, kind) for name, (*shape, kind) in shapes.items()]
    return found


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def setting(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def write(path: Path) -> None:
    generator = np.random.default_rng(0)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors()), len(SETTINGS))
    header += b"".join(text(key) + setting(value) for key, value in SETTINGS.items())
    offset = 0
    for name, shape, kind in tensors():
        header += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += struct.pack("<IQ", NUMBERS[kind], offset)
        offset += int(np.prod(shape)) // TYPES[NUMBERS[kind]].block * TYPES[NUMBERS[kind]].bytes
    with open(path, "wb") as file:
        file.write(header + bytes(-len(header) % 32))
        for _, shape, kind in tensors():
            if kind == "F32":
                file.write(np.ones(shape, "<f4").tobytes())
                continue
            rows = generator.integers(0, 256, (64, shape[1] // 256, TYPES[NUMBERS[kind]].bytes), np.uint8)
            for at in SCALES[kind]:
                rows[..., at : at + 2] = generator.uniform(0.001, 0.01, (*rows.shape[:2], 1)).astype("<f2").view(np.uint8)
            for _ in range(shape[0] // 64):
                file.write(rows.tobytes())


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "q4_k_m.gguf"
    write(file)
    from_pretrained.causal_model_types()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    summary = lowbit.import_checkpoint(file, directory / "packed")
    seconds = time.process_time() - begin
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{summary.source_bytes / 1e6:.0f} MB to {summary.target_bytes / 1e6:.0f} MB in {seconds:.1f} s of CPU time")
    print(f"{more:.0f} MiB of memory more than the process had before")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    main(parser.parse_args().directory)
