"""The libraries that `bench/llm.py` compares, each in a separate process; their modes read one prompt and decode greedily."""

from __future__ import annotations

import ctypes
import os
import time
import traceback
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20


class Absent(Exception):
    """The library is not installed."""


class Lowbit:
    """All modes on one decoder: the same packed weights."""

    def __init__(self, shape: str, options: dict[str, Any], directory: Path):
        import lowbit
        import torch
        from lowbit.llm import Decoder, random_model
        from lowbit.machine.memory import ReadBandwidth
        from lowbit.tools import model_speed

        torch.set_num_threads(max(options["threads"]))
        bits, group_size = options["bits"], options["group_size"]
        model = random_model(shape, lowbit.LinearConfig(bits, group_size), lowbit.EmbeddingConfig(bits, group_size))
        decoder = Decoder(model, options["max_length"])
        self.modes, self.prepared = {}, {}
        tokens = torch.tensor([options["prompt"]])
        for mode in options["modes"]:
            begin = time.perf_counter()
            self.modes[mode] = model_speed.make_step(decoder, mode)
            model_speed.measure(self.modes[mode], tokens, 2)
            self.prepared[mode] = time.perf_counter() - begin
        self.torch, self.bench, self.tokens, self.new = torch, model_speed, tokens, options["new"]
        self.bytes_per_token = model_speed.bytes_per_token(model)
        self.bandwidth = ReadBandwidth()
        self.note = f"{bits} bits, groups of {group_size}, also the embedding; float32 activations and caches"
        self.version = lowbit.__version__

    def turn(self, mode: str, threads: int) -> tuple[float, list[float]]:
        self.torch.set_num_threads(threads)
        return self.bench.measure(self.modes[mode], self.tokens, self.new)

    def read_bandwidth(self, threads: int) -> float:
        return self.bandwidth(threads)

    def parts(self, mode: str, threads: int) -> dict[str, float]:
        self.torch.set_num_threads(threads)
        return self.bench.profile(self.modes[mode], self.tokens.shape[1], 8)


class TorchBfloat16:
    """transformers' own model in bfloat16: torch.compile, its static cache, its attention."""

    def __init__(self, shape: str, options: dict[str, Any], directory: Path):
        import torch
        import transformers
        from lowbit.llm import random_model
        from lowbit.tools import model_speed

        torch.set_num_threads(max(options["threads"]))
        model = random_model(shape, None, None, torch.bfloat16)
        cache = transformers.StaticCache(config=model.config, max_cache_len=options["max_length"])
        name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before transformers 5.24
        held = {name: cache}
        tokens = torch.tensor([options["prompt"]])

        def step(tokens, start):
            positions = start + torch.arange(tokens.shape[1])
            output = model(input_ids=tokens, position_ids=positions[None], use_cache=True, logits_to_keep=1, **held)
            return output.logits[:, -1]

        one, many = (torch.compile(step, fullgraph=True, dynamic=dynamic) for dynamic in (False, True))

        def run(tokens, start):
            if tokens.shape[1] == 1:
                return one(tokens, start)
            cache.reset()
            return many(tokens, start)

        self.modes, self.prepared = {"compile": run}, {}
        begin = time.perf_counter()
        model_speed.measure(run, tokens, 2)
        self.prepared["compile"] = time.perf_counter() - begin
        self.torch, self.bench, self.tokens, self.new = torch, model_speed, tokens, options["new"]
        weights = {id(layer.weight): layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
        self.bytes_per_token = sum(weight.numel() * weight.element_size() for weight in weights.values())
        self.note = "transformers' model and static cache, torch.compile"
        self.version = f"{torch.__version__}, transformers {transformers.__version__}"

    turn = Lowbit.turn


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level functions, with a GGUF file of random weights."""

    def __init__(self, shape: str, options: dict[str, Any], directory: Path):
        try:
            import gguf
            import llama_cpp
        except (ImportError, OSError, RuntimeError) as error:
            raise Absent(f"{error}; make bench-peers installs it") from None
        self.library = llama_cpp
        path = directory / f"{shape}-q4_0.gguf"
        self.bytes_per_token = write_gguf(gguf, shape, path)
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        path.unlink()
        if not self.model:
            raise RuntimeError("llama.cpp does not load the GGUF file")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = options["max_length"]
        parameters.n_batch = parameters.n_ubatch = max(512, len(options["prompt"]))
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError("llama.cpp could not create a context")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.prompt, self.new = options["prompt"], options["new"]
        self.modes, self.prepared = {"llama_decode": None}, {"llama_decode": 0.0}
        self.note = "every weight Q4_0 (4.5 bits), including embedding and head; llama.cpp's default repacking; float16 caches"
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.turn("llama_decode", max(options["threads"]))

    def step(self, tokens: list[int]) -> int:
        array = (self.library.llama_token * len(tokens))(*tokens)
        batch = self.library.llama_batch_get_one(array, len(tokens))
        if self.library.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = self.library.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def turn(self, mode: str, threads: int) -> tuple[float, list[float]]:
        self.library.llama_set_n_threads(self.context, threads, threads)
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        seconds, tokens = [], self.prompt
        for _ in range(self.new + 1):
            begin = time.perf_counter()
            tokens = [self.step(tokens)]
            seconds.append(time.perf_counter() - begin)
        return seconds[0], seconds[1:]


def write_gguf(gguf, shape: str, path: Path) -> int:
    """Writes a GGUF file of a named shape: random Q4_0 weights, norms of 1, no vocabulary. Returns the bytes read per token."""
    from lowbit.llm import shape_config

    config = shape_config(shape)
    kind = {"llama": "llama", "qwen3": "qwen3"}[config.model_type]
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    random = np.random.default_rng(0)
    pool = random.integers(0, 256, 64 * MIB, dtype=np.uint8)
    touched = 0

    def linear(name: str, n: int, k: int, read: bool = True) -> None:
        nonlocal touched
        blocks = np.resize(pool, (n, k // 32, 18))  # a float16 scale, 32 codes
        scales = (random.random((n, k // 32), dtype=np.float32) + 0.5) * random.choice([-1, 1], (n, k // 32))
        blocks[:, :, :2] = (scales / (4.6 * np.sqrt(k))).astype("<f2")[:, :, None].view(np.uint8)
        writer.add_tensor(name, blocks.reshape(n, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        touched += blocks.nbytes if read else blocks.nbytes // n

    def norm(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads * width, config.num_key_value_heads * width
    linear("token_embd.weight", config.vocab_size, hidden, read=config.tie_word_embeddings)
    norm("output_norm.weight", hidden)
    if not config.tie_word_embeddings:
        linear("output.weight", config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        norm(f"blk.{i}.attn_norm.weight", hidden)
        norm(f"blk.{i}.ffn_norm.weight", hidden)
        if kind == "qwen3":
            norm(f"blk.{i}.attn_q_norm.weight", width)
            norm(f"blk.{i}.attn_k_norm.weight", width)
        for name, n, k in (
            ("attn_q", heads, hidden),
            ("attn_k", kv_heads, hidden),
            ("attn_v", kv_heads, hidden),
            ("attn_output", hidden, heads),
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            linear(f"blk.{i}.{name}.weight", n, k)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return touched


LIBRARIES = {"lowbit": Lowbit, "torch bfloat16": TorchBfloat16, "llama.cpp Q4_0": LlamaCpp}


def serve(connection, name: str, shape: str, options: dict[str, Any], directory: str) -> None:
    """The process: answers (method, arguments) with ("ok", result), ("absent", reason) or ("failed", reason)."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for torch's float weights too
    try:
        library = LIBRARIES[name](shape, options, Path(directory))
        description = {key: getattr(library, key) for key in ("note", "version", "bytes_per_token", "prepared")}
        connection.send(("ok", description | {"modes": list(library.modes)}))
        while True:
            method, arguments = connection.recv()
            connection.send(("ok", getattr(library, method)(*arguments)))
    except (EOFError, KeyboardInterrupt):
        pass
    except Absent as error:
        connection.send(("absent", str(error)))
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {error}"))
