"""Measures what a rank needs to load its part of a packed model: memory, bytes from the disk, and time. Linux.

    python bench/rank_memory.py [--ranks 1 2 4]

Writes a model with random weights once. torchrun then starts the ranks, each of which loads it with `tp_plan="auto"` and
generates one token. The table has the rank with the largest figures: peak and final memory above the start, private and mapped
from files (which the system can take back), and seconds. It also has the bytes that all ranks read from the disk, with no file
cached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MIB = 1 << 20
SIZES = {
    "small": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8,
        "vocab_size": 256,
    },
    # 697 million weights, a tenth of them in the largest matrix.
    "model": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
}  # fmt: skip


def memory() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {kind: int(lines[name].split()[0]) << 10 for kind, name in (("own", "RssAnon"), ("file", "RssFile"))}


def disk() -> int:
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def rank(directory: str, output: str) -> None:
    """Runs one rank, as a process of torchrun."""
    import lowbit.transformers  # noqa: F401
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ids = torch.arange(3, 11)[None]
    options = {"tp_plan": "auto"} if dist.get_world_size() > 1 else {}
    with torch.no_grad():
        # A small model first, so that imports and first calls are not counted.
        AutoModelForCausalLM.from_pretrained(f"{directory}/small", **options)(ids)
        before, begin, read, most, stop = memory(), time.perf_counter(), disk(), {}, threading.Event()

        def watch() -> None:
            while not stop.wait(0.002):
                for kind, now in memory().items():
                    most[kind] = max(most.get(kind, 0), now - before[kind])

        watcher = threading.Thread(target=watch)
        watcher.start()
        model = AutoModelForCausalLM.from_pretrained(f"{directory}/model", **options)
        model(ids)
        stop.set()
        watcher.join()
    found = {"seconds": time.perf_counter() - begin, "disk": disk() - read}
    found |= {f"most {kind}": value for kind, value in most.items()}
    found |= {f"left {kind}": now - before[kind] for kind, now in memory().items()}
    Path(output, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def make(directory: Path) -> None:
    """Writes the models."""
    import lowbit
    from lowbit.llm import random_model
    from transformers import LlamaConfig

    config = lowbit.LinearConfig(bits=4, group_size=32), lowbit.EmbeddingConfig(bits=4, group_size=32)
    for name, sizes in SIZES.items():
        random_model(LlamaConfig(**sizes), *config).save_pretrained(directory / name)


def forget(directory: Path) -> None:
    """Makes the system drop the files from memory."""
    for path in directory.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--directory", help="directory that keeps the models for later runs")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(*options.rank)
    from lowbit.machine.facts import cpu_name

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(options.directory or scratch)
        if not (directory / "model").exists():
            make(directory)
        size = sum(path.stat().st_size for path in (directory / "model").glob("*.safetensors"))
        print(f"{cpu_name()}; a model of {size / MIB:.0f} MiB; MiB of the rank that has most\n")
        print("| ranks | private memory, peak | at the end | mapped, peak | at the end | from disk, all ranks | seconds |")
        print("|---|---|---|---|---|---|---|")
        for ranks in options.ranks:
            forget(directory)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command += [__file__, "--rank", str(directory), scratch]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            found = [json.loads(Path(scratch, f"{each}.json").read_text()) for each in range(ranks)]
            largest = {key: max(each[key] for each in found) for key in found[0]}
            cells = [f"{largest[key] / MIB:.0f}" for key in ("most own", "left own", "most file", "left file")]
            cells.append(f"{sum(each['disk'] for each in found) / MIB:.0f}")
            print(f"| {ranks} | {' | '.join(cells)} | {largest['seconds']:.1f} |")


if __name__ == "__main__":
    main()
