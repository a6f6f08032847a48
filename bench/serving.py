"""Compares lowbit in vLLM with vLLM's bfloat16 and llama.cpp: random weights, concurrent requests, and a long prompt.

    make test-vllm                                               # makes build/vllm, the environment
    make bench-peers                                             # llama.cpp's libraries
    OMP_NUM_THREADS=1 build/vllm/bin/python bench/serving.py [--requests 1 8 32] [--rounds 5] [--variants 0 1]

Each variant is an engine in a separate process: vLLM's with packed files, or llama.cpp's library with the same weights, written
by `lowbit export`, where each request is a sequence of the batch, as in llama.cpp's server. All take turns in every round. The
table has medians over the rounds: tokens per second, and in brackets the ratio to the first variant in the same round. New
tokens are timed after all prompts of a batch are read; the column "prompt" has one prompt of --prompt tokens. With one thread,
CPU time is measured, which other work on the machine disturbs less. --profile adds the time of vLLM's operators. --experts: a
mixture of experts (Qwen3-MoE) instead of a Llama.

    scripts/llama_server.sh .venv/bin                            # llama.cpp's server, after make bench-peers
    OMP_NUM_THREADS=1 build/vllm/bin/python bench/serving.py --http --variants 1 5 10

--http: OpenAI-compatible servers, with requests over HTTP: tokens per second from the first request to the end of the last
answer, and below that the median seconds to the first text. Wall-clock time, because several processes work on an answer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import http_load
import numpy as np
import torch

SIZES = {  # 164 million parameters, 33 of them in the embedding table, which is also the head
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
EXPERTS = {  # 521 million parameters, 453 of them in experts; a token uses an eighth of the experts
    "hidden_size": 1024,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
# Name: bits, dtype of the activations, whether torch.compile is used.
VARIANTS = {"vLLM's bfloat16": (None, "bfloat16", False)}
VARIANTS |= {
    f"lowbit, {bits} bits, {dtype} activations": (bits, dtype, False) for bits in (4, 8) for dtype in ("float32", "bfloat16")
}
VARIANTS |= {f"{name}, compiled": (*options[:2], True) for name, options in VARIANTS.items()}
VARIANTS["llama.cpp, Q4_0"] = (4, None, False)
DEFAULT = [name for name, (_, _, compiled) in VARIANTS.items() if not compiled]
GROUP_SIZE = 32
TOKENIZER = Path(__file__).parents[1] / "examples" / "tiny_llama" / "model"
SHORT = 32  # tokens of the prompts before new tokens are counted
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1",
}  # fmt: skip


class Vllm:
    def __init__(self, directory: Path, dtype: str, compiled: bool, most: int, length: int):
        from vllm import LLM

        self.engine = LLM(
            str(directory), dtype=dtype, enforce_eager=not compiled, skip_tokenizer_init=True, max_model_len=length,
            max_num_seqs=most, max_num_batched_tokens=max(length, most * SHORT), enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 28,
        ).llm_engine  # fmt: skip

    def run(self, texts: list[list[int]], new: int, clock: Callable[[], float]) -> tuple[float, float]:
        """Returns the seconds of the prompts and of the new tokens."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for i, tokens in enumerate(texts):
            self.engine.add_request(f"{i} of {clock()}", {"prompt_token_ids": tokens}, greedy)
        begin, read = clock(), 0.0
        seen: dict[str, int] = {}
        while self.engine.has_unfinished_requests():
            for each in self.engine.step():
                seen[each.request_id] = len(each.outputs[0].token_ids)
            if not read and len(seen) == len(texts):
                read = clock()
        if list(seen.values()) != [new] * len(texts):
            raise RuntimeError(f"vLLM wrote {list(seen.values())} tokens; expected {new} each of {len(texts)} requests")
        return read - begin, clock() - read


class LlamaCpp:
    def __init__(self, path: Path, most: int, length: int):
        import llama_cpp

        self.library = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        parameters = llama_cpp.llama_context_default_params()
        # Separate caches for each sequence, as in its server.
        parameters.n_seq_max, parameters.n_ctx, parameters.kv_unified = most, most * -(-length // 256) * 256, False
        parameters.n_batch = max(length, most * SHORT)
        parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
        self.context = llama_cpp.llama_init_from_model(model, parameters)
        if not self.context:
            raise RuntimeError("llama.cpp could not create a context")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)

    def step(self, texts: list[list[int]], start: int) -> list[list[int]]:
        """The likeliest next token of each text, whose first token has the position `start`."""
        batch, last, count = self.batch, [], 0
        for sequence, tokens in enumerate(texts):
            for i, token in enumerate(tokens):
                batch.token[count], batch.pos[count], batch.logits[count] = token, start + i, i == len(tokens) - 1
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if self.library.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = [self.library.llama_get_logits_ith(self.context, i) for i in last]
        return [[int(np.ctypeslib.as_array(each, (self.vocabulary,)).argmax())] for each in logits]

    def run(self, texts: list[list[int]], new: int, clock: Callable[[], float]) -> tuple[float, float]:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        begin, start = clock(), len(texts[0])
        found = self.step(texts, 0)
        read = clock()
        for i in range(new - 1):
            found = self.step(found, start + i)
        return read - begin, clock() - read


def random_text(numbers: random.Random, tokens: int) -> list[int]:
    return [numbers.randrange(3, SIZES["vocab_size"]) for _ in range(tokens)]


def serve(connection, path: Path, dtype: str | None, compiled: bool, most: int, length: int) -> None:
    """Runs a process that answers (requests, tokens of each prompt, new tokens) with tokens per second: of the prompt if one
    token is new. Answers "profile" with a table."""
    engine = LlamaCpp(path, most, length) if dtype is None else Vllm(path, dtype, compiled, most, length)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    numbers = random.Random(0)

    def run(requests: int, prompt: int, new: int) -> float:
        texts = [random_text(numbers, prompt) for _ in range(requests)]
        prompts, rest = engine.run(texts, new, clock)
        return requests * (new - 1) / rest if new > 1 else prompt / prompts

    connection.send("ready")
    while question := connection.recv():
        if question[0] != "profile":
            connection.send(run(*question))
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run(*question[1:])
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50)
        connection.send(table)


def make_models(directory: Path, wanted: set[tuple[int | None, str | None]], experts: bool) -> dict:
    """Makes the checkpoint in bfloat16 and packed at several widths: {bits: directory} and {(bits, None): a GGUF file}."""
    import lowbit
    from lowbit.exports.gguf import export_gguf
    from lowbit.llm import random_model
    from transformers import LlamaConfig, Qwen3MoeConfig

    found: dict = {None: directory / "float"}
    config = Qwen3MoeConfig(**EXPERTS) if experts else LlamaConfig(**SIZES)
    random_model(config, None, None, torch.bfloat16).save_pretrained(found[None])
    # A GGUF file needs a name for each token.
    shutil.copy(TOKENIZER / "tokenizer_config.json", found[None])
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"token{i}": i for i in range(len(vocabulary), SIZES["vocab_size"])}
    (found[None] / "tokenizer.json").write_text(json.dumps(tokenizer))
    for bits in {bits for bits, _ in wanted} - {None}:
        found[bits] = directory / str(bits)
        config = lowbit.LowBitConfig(bits=bits, group_size=GROUP_SIZE, scale="absmax")
        lowbit.quantize_checkpoint(found[None], found[bits], config)
        if (bits, None) in wanted:
            found[bits, None] = directory / f"{bits}.gguf"
            export_gguf(found[bits], found[bits, None])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the one long prompt")
    parser.add_argument("--new", type=int, default=32, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=5)
    numbered = "; ".join(f"{i}: {name}" for i, name in enumerate(VARIANTS))
    parser.add_argument("--variants", type=int, nargs="+", choices=range(len(VARIANTS)), help=numbered)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts instead of a Llama")
    parser.add_argument("--http", action="store_true", help="measure the servers over HTTP")
    own = Path(__file__).parents[1] / ".venv" / "ggml" / "llama-server"
    parser.add_argument("--llama-server", type=Path, default=own, help="llama.cpp's server, for --http")
    options = parser.parse_args()
    from lowbit.machine.facts import cpu_name

    context = multiprocessing.get_context("spawn")
    tasks = {f"{n} request{'s' if n > 1 else ''}": (n, SHORT, options.new + 1) for n in options.requests}
    tasks["prompt"] = (1, options.prompt, 1)
    length = max(SHORT + options.new + 1, options.prompt + 1)
    default = [name for name in DEFAULT if not options.experts or VARIANTS[name][1] is not None]
    names = [list(VARIANTS)[i] for i in options.variants] if options.variants else default
    if options.experts and any(VARIANTS[name][1] is None for name in names):
        parser.error("lowbit exports no experts to GGUF: with --experts choose other --variants than llama.cpp")
    if options.http:
        if any(VARIANTS[name][1] is None for name in names) and not options.llama_server.exists():
            parser.error(f"{options.llama_server} does not exist: run scripts/llama_server.sh, or choose other --variants")
        return over_http(options, names, length, cpu_name())
    if any(VARIANTS[name][1] is None for name in names) and find_spec("llama_cpp") is None:
        parser.error("llama-cpp-python is not installed: run `make bench-peers`, or choose other --variants")
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(ENVIRONMENT | {"VLLM_CACHE_ROOT": scratch})
        models = make_models(Path(scratch), {VARIANTS[name][:2] for name in names}, options.experts)
        serving = {}
        for name in names:
            bits, dtype, compiled = VARIANTS[name]
            serving[name], theirs = context.Pipe()
            path = models[bits, None] if dtype is None else models[bits]
            arguments = (theirs, path, dtype, compiled, max(options.requests), length)
            context.Process(target=serve, args=arguments, daemon=True).start()
            theirs.close()
            serving[name].recv()
        for turn in range(-1, options.rounds):  # the first is not counted
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
            for task, question in tasks.items():
                for name, connection in serving.items():
                    connection.send(question)
                    rate = connection.recv()
                    if turn >= 0:
                        rates.setdefault((name, task), []).append(rate)
        report(rates, names, list(tasks), cpu_name())
        for name, connection in serving.items() if options.profile else ():
            for task, question in tasks.items():
                connection.send(("profile", *question))
                print(f"\n{name}, {task}\n{connection.recv()}")
        for connection in serving.values():
            connection.send(None)


def serve_http(name: str, path: Path, options: argparse.Namespace, length: int, log: Path) -> http_load.Server:
    """Starts the server of a variant, with torch's number of threads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _, dtype, compiled = VARIANTS[name]
    most, threads = max(options.requests), str(torch.get_num_threads())
    environment = os.environ | {"OMP_NUM_THREADS": threads, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if dtype is None:
        command = [str(options.llama_server), "--model", str(path), "--threads", threads, "--threads-batch", threads]
        command += ["--parallel", str(most), "--ctx-size", str(most * -(-length // 256) * 256), "--cache-ram", "0"]
        command += ["--batch-size", str(max(length, most * SHORT)), "--ubatch-size", str(max(length, most * SHORT))]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--dtype", dtype]
        command += ["--served-model-name", "model", "--max-model-len", str(length), "--max-num-seqs", str(most)]
        command += ["--max-num-batched-tokens", str(max(length, most * SHORT)), "--no-enable-prefix-caching"]
        command += ["--kv-cache-memory-bytes", str(1 << 28), *([] if compiled else ["--enforce-eager"])]
    return http_load.Server([*command, "--host", "127.0.0.1", "--port", str(port)], port, environment, log)


def over_http(options: argparse.Namespace, names: list[str], length: int, cpu: str) -> None:
    numbers, tasks = random.Random(0), [f"{n} request{'s' if n > 1 else ''}" for n in options.requests]
    rates: dict[tuple[str, str], list[float]] = {}
    firsts: dict[tuple[str, str], list[float]] = {}
    servers: dict[str, http_load.Server] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(ENVIRONMENT | {"VLLM_CACHE_ROOT": scratch})
        models = make_models(Path(scratch), {VARIANTS[name][:2] for name in names}, options.experts)
        try:
            for number, name in enumerate(names):
                bits, dtype, _ = VARIANTS[name]
                path = models[bits, None] if dtype is None else models[bits]
                servers[name] = serve_http(name, path, options, length, Path(scratch, f"{number}.log"))
            for turn in range(-1, options.rounds):  # the first is not counted
                print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
                for task, requests in zip(tasks, options.requests, strict=True):
                    for name, server in servers.items():
                        texts = [random_text(numbers, SHORT) for _ in range(requests)]
                        rate, first = http_load.load(server.port, texts, options.new)
                        if turn >= 0:
                            rates.setdefault((name, task), []).append(rate)
                            firsts.setdefault((name, task), []).append(1e3 * first)
        finally:
            for server in servers.values():
                server.stop()
    report(rates, names, tasks, cpu, f"{torch.get_num_threads()} threads for each server, over HTTP")
    print()
    table("milliseconds to the first text", firsts, names, tasks)


def report(
    rates: dict[tuple[str, str], list[float]], names: list[str], tasks: list[str], cpu: str, how: str | None = None
) -> None:
    import vllm

    if how is None:
        how = f"{torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "1 thread, CPU time"
    versions = [f"torch {torch.__version__}", f"vLLM {vllm.__version__}"]
    if any(VARIANTS[name][1] is None for name in names) and find_spec("llama_cpp") is not None:
        versions.append(f"llama-cpp-python {version('llama-cpp-python')}")
    print(f"{cpu}, {how}, {', '.join(versions)}; groups of {GROUP_SIZE}\n")
    table("tokens per second", rates, names, tasks)


def table(what: str, found: dict[tuple[str, str], list[float]], names: list[str], tasks: list[str]) -> None:
    print(f"| {what} | " + " | ".join(tasks) + " |\n|" + "---|" * (len(tasks) + 1))
    for name in names:
        cells = []
        for task in tasks:
            own, first = found[name, task], found[names[0], task]
            cell = f"{statistics.median(own):.0f}"
            if name != names[0]:
                cell += f" ({statistics.median(a / b for a, b in zip(own, first, strict=True)):.2f})"
            cells.append(cell)
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
