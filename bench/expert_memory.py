"""Times decoding of a mixture of experts with a bounded expert cache, with the whole model in memory, and with page faults.

    bench/expert_memory.py [--layers 6] [--experts 32] [--limit 700] [--memory 200]

Makes a random packed mixture in Qwen3-MoE's shapes, and decodes it three times, each in a separate process: with all weights in
memory; then under a memory limit (a Linux cgroup, which needs root), with weights mapped from the files, and with
--expert-memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
import json, os, sys, time
group = sys.argv[4]
if group:
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
import torch
from lowbit import llm
from lowbit.llm.loading import load_model
torch.set_num_threads(2)
model = load_model(sys.argv[1])
places = llm.stream_experts(model, sys.argv[1], int(sys.argv[2])) if int(sys.argv[2]) else 0
decoder = llm.Decoder(model, 256)
tokens = [5 + 7 * i for i in range(16)]
llm.generate(decoder, tokens, 4, max_length=256)
begin = time.perf_counter()
made = llm.generate(decoder, tokens, int(sys.argv[3]), max_length=256).tokens
seconds = time.perf_counter() - begin
read = sum(getattr(layer, "read_bytes", 0) for layer in model.modules())
print(json.dumps({"ms": 1000 * seconds / len(made), "tokens": made, "places": places, "read": read}))
"""


def make(directory: Path, layers: int, experts: int) -> None:
    import lowbit
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2048, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=experts, num_experts_per_tok=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            module.__init__(config)
    lowbit.quantize_(model, lowbit.LinearConfig(4, 32)).save_pretrained(directory)


def limited(megabytes: int) -> str:
    """Makes a cgroup with this memory limit.

    Raises:
        OSError: this user cannot make one.
    """
    name = f"lowbit-{os.getpid()}"
    for root, file in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        if (root / "cgroup.procs").exists() and (root.name == "memory" or (root / "cgroup.controllers").exists()):
            group = root / name
            group.mkdir()
            (group / file).write_text(str(megabytes << 20))
            return str(group)
    raise OSError("cannot make a cgroup with a memory limit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--limit", type=int, default=700, help="megabytes for the whole process")
    parser.add_argument("--memory", type=int, default=200, help="megabytes for experts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        make(directory, options.layers, options.experts)
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors")) >> 20
        print(f"a mixture of {size} MB, {options.tokens} tokens, 2 threads")
        runs = [
            ("all in memory", 0, False),
            ("limited, page faults", 0, True),
            ("limited, --expert-memory", options.memory, True),
        ]
        texts = []
        for title, memory, limit in runs:
            group = limited(options.limit) if limit else ""
            begin = time.perf_counter()
            command = [sys.executable, "-c", RUN, str(directory), str(memory << 20), str(options.tokens), group]
            done = subprocess.run(command, capture_output=True, text=True)
            if group:
                os.rmdir(group)
            if done.returncode:
                print(f"{title}: ended with {done.returncode} after {time.perf_counter() - begin:.0f} s")
                continue
            result = json.loads(done.stdout.splitlines()[-1])
            texts.append(result["tokens"])
            more = f", {result['places']} experts per layer in memory, {result['read'] >> 20} MB read" if memory else ""
            print(f"{title}: {result['ms']:.0f} ms a token{more}")
        print("the texts are the same" if all(text == texts[0] for text in texts) else "THE TEXTS DIFFER")
    return 0


if __name__ == "__main__":
    sys.exit(main())
