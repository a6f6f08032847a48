"""Measures the decoding speed of language models, relative to the memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import nn
from ..llm.compiled import compile_decoder
from ..llm.decoder import Decoder
from ..llm.sampling import most_likely
from ..llm.shapes import random_model
from ..machine.facts import cpu_name, peak_memory
from ..packed.rounding import EmbeddingConfig, LinearConfig
from .speed_turns import CHOSEN_EXPERTS, Feed, in_turns, parts_of, timed

MODES = ("plan", "eager", "compile", "aot")


def stored_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's state; shared tensors count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values() if tensor.numel()}.values())


def bytes_per_token(model: torch.nn.Module) -> int:
    """Packed bytes that decoding one token reads: linear layers, the token's experts, and a row of each embedding.

    All experts count if the configuration does not say how many each token uses.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module.info for module in model.modules() if isinstance(module, nn.Embedding)]
    rows = sum(table.total_bytes // table.out_features for table in tables)
    chosen, experts = _experts_per_token(model), 0
    for module in model.modules():
        if isinstance(module, nn.LinearExperts):
            experts += module.info.total_bytes * min(module.num_experts, chosen or module.num_experts)
    return int(sum(layer.info.total_bytes for layer in layers) + experts + rows)


def _experts_per_token(model: torch.nn.Module) -> int | None:
    config = getattr(model, "config", None)
    config = config.get_text_config() if config is not None else None
    counts = (getattr(config, name, None) for name in CHOSEN_EXPERTS)
    return next((count for count in counts if isinstance(count, int)), None)


def measure(step: Callable[..., torch.Tensor], prompt: torch.Tensor, new: int) -> tuple[float, list[float]]:
    """Seconds to the first token after a prompt [1, s], and for each of ``new`` further tokens, with greedy decoding."""
    with torch.inference_mode():
        return timed(_feed(step), prompt[0].tolist(), new)


def _feed(step: Callable[..., torch.Tensor]) -> Feed:
    """A step that takes lists."""
    return lambda tokens, start: step(torch.tensor([tokens]), torch.tensor([start]))[0]


def profile(step: Callable[..., torch.Tensor], position: int, count: int = 8) -> dict[str, float]:
    """Seconds to decode a token in packed linear layers, attention and the rest, measured by the plan or torch's profiler."""
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    if isinstance(step, Decoder):
        return _profile_of_plan(step, position, count)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.inference_mode(), torch.profiler.profile(activities=activities) as recorded:
        begin = time.perf_counter()
        for i in range(count):
            most_likely(step(tokens, torch.tensor([position + i]))[0])
        total = time.perf_counter() - begin
    parts = dict.fromkeys(("linear", "attention"), 0.0)
    for event in recorded.key_averages():
        part = {"lowbit::linear": "linear", "lowbit::linears": "linear", "lowbit::attention": "attention"}.get(event.key)
        if part is not None:
            parts[part] += 1e-6 * event.self_cpu_time_total / count
    return parts | {"rest": total / count - sum(parts.values())}


def _profile_of_plan(decoder: Decoder, position: int, count: int) -> dict[str, float]:
    def steps() -> None:
        for i in range(count):
            decoder(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([position + i]))

    with torch.inference_mode():
        begin = time.perf_counter()
        times = decoder.plan_times(steps)
        total = time.perf_counter() - begin
    return parts_of(times, total, count)


def make_step(decoder: Decoder, mode: str) -> Callable[..., torch.Tensor]:
    """The step of a decoder in one of ``MODES``."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
    if mode == "plan":
        if decoder.plan_refusal is not None:
            raise ValueError(f"the model has no plan: {decoder.plan_refusal}; expected the mode eager, compile or aot")
        return decoder
    if mode == "eager":
        return lambda tokens, start: decoder.run_pieces(decoder.run_eagerly, tokens, start)
    return compile_decoder(decoder, "inductor" if mode == "compile" else "aot")


def run(
    model_or_shape: torch.nn.Module | str | Any,
    bits: int = 4,
    group_size: int | None = 32,
    *,
    activation_bits: int = 8,
    prompt: int = 512,
    new: int = 64,
    threads: int | None = None,
    modes: Iterable[str] = ("plan",),
    rounds: int = 3,
    dtype: torch.dtype = torch.float32,
    cache: str | None = None,
) -> dict[str, Any]:
    """Measures prefill and decoding, in all modes by turns, with the read bandwidth before and after each turn.

    Figures are medians over the rounds.

    Args:
        model_or_shape: one of ``lowbit.llm.shapes.NAMES``, or a configuration of transformers, for random weights; or
            a quantized model of transformers, which a decoder then owns.
        bits, group_size, activation_bits: for the linear layers and embeddings of random weights.
        prompt: tokens of the prompt.
        new: number of tokens to decode after it, at least 1.
        threads: number of threads, restored at the end; None: torch's.
        modes: some of ``MODES``: "plan" (as lowbit generate), "eager" (the model's Python code), "compile" (torch.compile),
            "aot" (AOTInductor).
        rounds: number of turns of each mode.
        dtype: the dtype of the activations of random weights.
        cache: type of the KV cache, as in :class:`Decoder`.

    Returns:
        A JSON-serializable dict. ``modes`` has for each mode ``prefill_tokens_per_second``,
        ``seconds_to_first_token``, ``decode_tokens_per_second``, ``share_of_bandwidth`` (packed bytes per token times
        tokens per second, divided by the read bandwidth), ``parts`` (seconds per token in linear layers, attention and the
        rest) and ``prepare_seconds`` (to compile and run the first time).

    Raises:
        ValueError: an unknown shape or mode, or numbers below 1.
    """
    modes = list(modes)
    for name, value in (("prompt", prompt), ("new", new), ("rounds", rounds), ("threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more")
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
    before = torch.get_num_threads()
    threads = threads or before
    torch.set_num_threads(threads)
    try:
        if isinstance(model_or_shape, torch.nn.Module):
            model = model_or_shape
        else:
            linear = LinearConfig(bits, group_size, activation_bits=activation_bits)
            embedding = EmbeddingConfig(bits, group_size, activation_bits=activation_bits)
            model = random_model(model_or_shape, linear, embedding, dtype)
        config = model.config.get_text_config()
        decoder = Decoder(model, -(-(prompt + new + 1) // 16) * 16, cache)
        tokens = torch.randint(config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
        steps = {mode: _prepare(decoder, mode, tokens) for mode in modes}
        touched = bytes_per_token(model)
        feeds = {mode: _feed(step) for mode, (step, _) in steps.items()}
        with torch.inference_mode():
            bandwidth, figures = in_turns(feeds, tokens[0].tolist(), new, rounds, threads, touched)
        return {
            "shape": model_or_shape if isinstance(model_or_shape, str) else config.model_type,
            "machine": cpu_name(),
            "threads": threads,
            "linear": repr(next(layer for layer in model.modules() if isinstance(layer, nn.Linear))),
            "dtype": str(model.dtype).removeprefix("torch."),
            "cache": decoder.cache_type,
            "prompt": prompt,
            "new": new,
            "packed_bytes_per_token": touched,
            "read_bandwidth": bandwidth,
            "modes": {
                mode: figures[mode] | {"parts": profile(step, prompt, min(8, new)), "prepare_seconds": prepare_seconds}
                for mode, (step, prepare_seconds) in steps.items()
            },
            "peak_memory_bytes": peak_memory(),
        }
    finally:
        torch.set_num_threads(before)


def _prepare(decoder: Decoder, mode: str, tokens: torch.Tensor) -> tuple[Any, float]:
    """The step of a mode, and the seconds to compile it and to run it for the first time."""
    begin = time.perf_counter()
    step = make_step(decoder, mode)
    measure(step, tokens, 2)
    return step, time.perf_counter() - begin
