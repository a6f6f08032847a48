"""Measures time and memory of quantizing and loading a checkpoint with random weights in the shapes of a real model.

    .venv/bin/python bench/checkpoint.py DIRECTORY   # llama-3.1-8b: 16 GB of bfloat16, 4.5 GB packed; deleted after it

Each step runs in a separate process, which also measures the cost of imports, so that peak memory is that of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lowbit.files.safetensors import INDEX, Writer
from lowbit.llm.shapes import NAMES, shape_config
from lowbit.machine.facts import cpu_name

SHARD_BYTES = 5_000_000_000


def make(directory: Path, name: str) -> int:
    """Writes a sharded bfloat16 checkpoint of a named shape; returns its bytes. Memory: some megabytes."""
    from transformers import AutoModelForCausalLM

    config = shape_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}  # without tied ones
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    shards, size = [[]], 0
    for name, shape in shapes.items():
        count = 2 * torch.Size(shape).numel()
        if shards[-1] and size + count > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, "BF16", shape, count))
        size += count
    random = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    ones = torch.ones(1 << 16, dtype=torch.bfloat16)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with Writer(directory / name, shard) as writer:
            for tensor, _, shape, count in shard:
                weight_map[tensor] = name
                # Values differ between tensors; within a tensor a few million repeat.
                source = ones if len(shape) == 1 else random.roll(len(weight_map))
                data = memoryview(source.view(torch.uint8).numpy())
                for at in range(0, count, len(data)):
                    writer.write(data[: min(len(data), count - at)])
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return sum(count for shard in shards for *_, count in shard)


PRELUDE = """
import json, os, resource, sys, time
def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
begin = time.perf_counter()
import torch, lowbit.transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM
imported = {"import_s": time.perf_counter() - begin, "import_rss": status("VmHWM")}
"""
QUANTIZE = """
source, target, bits, group_size, scale = sys.argv[1:]
config = lowbit.LowBitConfig(bits=int(bits), group_size=int(group_size), scale=scale)
done = lowbit.quantize_checkpoint(source, target, config)
print(json.dumps(imported | {"s": done.seconds, "read": done.source_bytes, "written": done.target_bytes,
                             "rss": status("VmHWM")}))
"""
LOAD = """
before = status("RssAnon")
begin = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
loaded = time.perf_counter() - begin
anonymous = status("RssAnon") - before
begin = time.perf_counter()
logits = model(torch.tensor([[1, 2, 3, 4]])).logits
assert bool(torch.isfinite(logits).all())
print(json.dumps(imported | {"s": loaded, "anonymous": anonymous, "first_s": time.perf_counter() - begin}))
"""


def run(script: str, *arguments: object, limit: float | None = None) -> dict:
    """Runs a step; `limit`: the most GiB of private memory that it may allocate."""

    def set_limit() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 2**30), int(limit * 2**30)))

    command = [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, preexec_fn=set_limit)
    if done.returncode != 0:
        sys.exit(f"a step failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def evict(directory: Path) -> None:
    """Asks the system to drop the files' pages, so that they come from the disk (or its host's cache)."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory with enough free space: 21 GB for the 8B model")
    parser.add_argument("--model", choices=NAMES, default="llama-3.1-8b")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--scale", choices=("mse", "absmax"), default="mse")
    parser.add_argument("--limit", type=float, default=6.0, help="GiB that quantizing may allocate (6)")
    arguments = parser.parse_args()

    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}; {arguments.model}, "
          f"{arguments.bits} bits, groups of {arguments.group_size}, {arguments.scale}", flush=True)  # fmt: skip
    base = Path(tempfile.mkdtemp(prefix="lowbit-", dir=arguments.directory))
    try:
        begin = time.perf_counter()
        size = make(base / "float", arguments.model)
        print(f"made {size / 1e9:.2f} GB of bfloat16 in {time.perf_counter() - begin:.0f} s", flush=True)
        done = run(
            QUANTIZE, base / "float", base / "packed", arguments.bits, arguments.group_size, arguments.scale,
            limit=arguments.limit,
        )  # fmt: skip
        print(
            f"quantized: {done['read'] / 1e9:.2f} GB to {done['written'] / 1e9:.2f} GB in {done['s']:.1f} s, "
            f"{done['read'] / done['s'] / 1e9:.3f} GB/s; peak memory {done['rss'] / 2**20:.0f} MiB, of which importing "
            f"torch and transformers {done['import_rss'] / 2**20:.0f} MiB",
            flush=True,
        )
        evict(base / "packed")
        for state in ("after the pages were evicted", "warm", "warm", "warm"):
            load = run(LOAD, base / "packed")
            print(
                f"loaded, {state}: {load['s']:.2f} s and {load['anonymous'] / 2**20:.0f} MiB of memory besides the "
                f"mapped file; imports {load['import_s']:.1f} s, first pass of 4 tokens {load['first_s']:.2f} s",
                flush=True,
            )
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
