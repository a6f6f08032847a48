"""lowbit in vLLM beside vLLM's own bfloat16: a Llama with random weights, several requests at once, and a prompt.

    make test-vllm                                               # makes build/vllm, the environment
    OMP_NUM_THREADS=1 build/vllm/bin/python bench/serving.py [--requests 1 8 32] [--rounds 5] [--profile]

Each variant is a process of its own that serves in vLLM's eager mode, from packed files. In every round all take turns.
Written are medians over the rounds: tokens per second, and in brackets how many times those of bfloat16 in the same
round. New tokens are counted from when all prompts of a batch are read; the column "prompt" has one of --prompt tokens.
With one thread of CPU time, which other work on the machine disturbs less. --profile adds what the operators take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

SIZES = {  # 164 million parameters, of which the table of tokens, which is the head as well, has 33
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
FLOAT = "vLLM's bfloat16"
VARIANTS = {FLOAT: (None, "bfloat16")} | {
    f"lowbit, {bits} bits, {dtype} activations": (bits, dtype) for bits in (4, 8) for dtype in ("float32", "bfloat16")
}
GROUP_SIZE = 32
SHORT = 32  # tokens of the prompts before new tokens are counted
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1",
}  # fmt: skip


def serve(connection, directory: str, dtype: str, most: int, length: int) -> None:
    """A process: answers (requests, tokens of each prompt, new tokens) by seconds for the prompts and for the rest, and
    "profile" before that by a table."""
    from vllm import LLM, SamplingParams

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    engine = LLM(
        directory, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=length, max_num_seqs=most,
        max_num_batched_tokens=max(length, most * SHORT), enable_prefix_caching=False, kv_cache_memory_bytes=1 << 28,
    ).llm_engine  # fmt: skip
    numbers = random.Random(0)

    def run(requests: int, prompt: int, new: int) -> tuple[float, float]:
        greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for _ in range(requests):
            tokens = [numbers.randrange(SIZES["vocab_size"]) for _ in range(prompt)]
            engine.add_request(str(numbers.random()), {"prompt_token_ids": tokens}, greedy)
        begin, read = clock(), 0.0
        seen: dict[str, int] = {}
        while engine.has_unfinished_requests():
            for each in engine.step():
                seen[each.request_id] = len(each.outputs[0].token_ids)
            if not read and len(seen) == requests:
                read = clock()
        if list(seen.values()) != [new] * requests:
            raise RuntimeError(f"vLLM wrote {list(seen.values())} tokens; expected {new} each of {requests} requests")
        return read - begin, clock() - read

    connection.send(f"{torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "1 thread, CPU time")
    while question := connection.recv():
        if question[0] != "profile":
            connection.send(run(*question))
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run(*question[1:])
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50)
        connection.send(table)


def make_models(directory: Path) -> dict[int | None, str]:
    """The checkpoint in bfloat16, and packed of some widths: {bits: its directory}."""
    from transformers import LlamaConfig

    import lowbit
    from lowbit.llm import random_model

    found = {None: directory / "float"}
    random_model(LlamaConfig(**SIZES), None, None, torch.bfloat16).save_pretrained(found[None])
    for bits in {bits for bits, _ in VARIANTS.values()} - {None}:
        found[bits] = directory / str(bits)
        config = lowbit.LowBitConfig(bits=bits, group_size=GROUP_SIZE, scale="absmax")
        lowbit.quantize_checkpoint(found[None], found[bits], config)
    return {bits: str(path) for bits, path in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the one long prompt")
    parser.add_argument("--new", type=int, default=32, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", type=int, nargs="+", default=range(len(VARIANTS)), help="0 is bfloat16")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    from lowbit._machine import cpu_name

    context = multiprocessing.get_context("spawn")
    tasks = {f"{n} request{'s' if n > 1 else ''}": (n, SHORT, options.new + 1) for n in options.requests}
    tasks["prompt"] = (1, options.prompt, 1)
    length = max(SHORT + options.new + 1, options.prompt + 1)
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(ENVIRONMENT | {"VLLM_CACHE_ROOT": scratch})
        models, serving = make_models(Path(scratch)), {}
        for name in [list(VARIANTS)[i] for i in options.variants]:
            bits, dtype = VARIANTS[name]
            serving[name], theirs = context.Pipe()
            arguments = (theirs, models[bits], dtype, max(options.requests), length)
            context.Process(target=serve, args=arguments, daemon=True).start()
            theirs.close()
            how = serving[name].recv()
        for turn in range(-1, options.rounds):  # the first is not counted
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
            for task, question in tasks.items():
                for name, connection in serving.items():
                    connection.send(question)
                    prompts, rest = connection.recv()
                    if turn >= 0:
                        requests, tokens, new = question
                        rate = tokens / prompts if new == 1 else requests * (new - 1) / rest
                        times.setdefault((name, task), []).append(rate)
        import vllm

        print(f"{cpu_name()}, {how}, torch {torch.__version__}, vLLM {vllm.__version__}; groups of {GROUP_SIZE}\n")
        print("| tokens per second | " + " | ".join(tasks) + " |\n|" + "---|" * (len(tasks) + 1))
        for name in serving:
            cells = []
            for task in tasks:
                cell = f"{statistics.median(times[name, task]):.0f}"
                if name != FLOAT and FLOAT in serving:
                    pairs = zip(times[name, task], times[FLOAT, task], strict=True)
                    cell += f" ({statistics.median(own / other for own, other in pairs):.2f})"
                cells.append(cell)
            print(f"| {name} | " + " | ".join(cells) + " |")
        for name, connection in serving.items() if options.profile else ():
            for task, question in tasks.items():
                connection.send(("profile", *question))
                print(f"\n{name}, {task}\n{connection.recv()}")
        for connection in serving.values():
            connection.send(None)


if __name__ == "__main__":
    main()
