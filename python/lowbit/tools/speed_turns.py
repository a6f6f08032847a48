"""Times prefill and decoding, relative to the memory bandwidth; models with a plan are measured without torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy

from .. import _C
from ..files.config_json import read_config
from ..files.safetensors import ORDER_SUFFIX, PACKED_SUFFIX, files_of, packed_info, read_files
from ..llm.plan_files import PlannedModel
from ..llm.sampling import most_likely
from ..machine.facts import cpu_name, peak_memory
from ..machine.memory import ReadBandwidth
from ..packed.header import describe_features

Feed = Callable[[list[int], int], Any]  # (tokens, number of tokens before them) -> logits after the last one
# Names in config.json of the number of experts that each token uses.
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


def timed(feed: Feed, prompt: list[int], new: int) -> tuple[float, list[float]]:
    """Seconds to the first token after a prompt, and for each of ``new`` further tokens, with greedy decoding."""
    seconds, tokens, start = [], prompt, 0
    for _ in range(new + 1):
        begin = time.perf_counter()
        token = most_likely(feed(tokens, start))
        seconds.append(time.perf_counter() - begin)
        start += len(tokens)
        tokens = [token]
    return seconds[0], seconds[1:]


def in_turns(
    feeds: Mapping[str, Feed], prompt: list[int], new: int, rounds: int, threads: int, touched: int
) -> tuple[float, dict[str, dict[str, float]]]:
    """The read bandwidth, and the figures of each of ``feeds``, which take turns; medians over the rounds.

    Other programs take bandwidth too, so each turn is compared with the bandwidth before and after it.

    Args:
        touched: bytes of weights read per token.
    """
    bandwidth = ReadBandwidth()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in feeds}
    for _ in range(rounds):
        for name, feed in feeds.items():
            roofs = [bandwidth(threads)]
            first, later = timed(feed, prompt, new)
            roofs.append(bandwidth(threads))
            token, roof = statistics.median(later), statistics.mean(roofs)
            turns[name].append({"first": first, "token": token, "roof": roof, "share": touched / token / roof})
    roof = statistics.median(turn["roof"] for each in turns.values() for turn in each)
    return roof, {name: _medians(each, len(prompt)) for name, each in turns.items()}


def _medians(turns: list[dict[str, float]], prompt: int) -> dict[str, float]:
    median = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return {
        "prefill_tokens_per_second": prompt / median["first"],
        "seconds_to_first_token": median["first"],
        "decode_tokens_per_second": 1 / median["token"],
        "share_of_bandwidth": median["share"],
    }


def parts_of(times: Mapping[str, float], total: float, count: int) -> dict[str, float]:
    """Seconds per token in packed linear layers, attention and the rest, from a plan's times of ``count`` tokens."""
    parts = {part: sum(times.get(name, 0.0) for name in (part, f"{part}s")) / count for part in ("linear", "attention")}
    return parts | {"rest": total / count - sum(parts.values())}


def run_plan(planned: PlannedModel, threads: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """What :func:`lowbit.tools.model_speed.run` measures, of a model that runs by the plan beside its weights."""
    config = read_config(planned.directory)
    config = config.get("text_config") or config
    tokens = numpy.random.default_rng(0).integers(planned.plan.vocabulary, size=prompt).tolist()
    decoder = planned.decoder(-(-(prompt + new + 1) // 16) * 16)
    begin = time.perf_counter()
    timed(decoder.feed, tokens, 2)
    prepare_seconds = time.perf_counter() - begin
    touched, linear = weights_of(planned.directory, planned.plan, config)
    bandwidth, figures = in_turns({"plan": decoder.feed}, tokens, new, rounds, threads, touched)
    count = min(8, new)
    planned.plan.measure()
    begin = time.perf_counter()
    for i in range(count):
        decoder.feed([0], prompt + i)
    total = time.perf_counter() - begin
    parts = parts_of(planned.plan.times(), total, count)
    return {
        "shape": config.get("model_type"),
        "machine": cpu_name(),
        "threads": threads,
        "linear": linear,
        "dtype": decoder.dtype,
        "cache": decoder.cache_type,
        "prompt": prompt,
        "new": new,
        "packed_bytes_per_token": touched,
        "read_bandwidth": bandwidth,
        "modes": {"plan": figures["plan"] | {"parts": parts, "prepare_seconds": prepare_seconds}},
        "peak_memory_bytes": peak_memory(),
    }


def weights_of(directory: Path, plan: _C.PlanModel, config: Mapping[str, Any]) -> tuple[int, str]:
    """Packed bytes that a decoding step reads, and a description of the first linear layer.

    Bytes are those of :func:`lowbit.tools.model_speed.bytes_per_token`.
    """
    stored = read_files(*files_of(directory))
    chosen = next((config[name] for name in CHOSEN_EXPERTS if isinstance(config.get(name), int)), None)
    touched, linear = 0, ""
    for operator, name, size in plan.weights:
        if operator not in ("linear", "linears", "linear_experts", "embedding"):
            continue
        info = packed_info(stored[name])
        if operator == "embedding":
            touched += info.total_bytes // info.out_features
        elif operator == "linear_experts":
            assert info.experts is not None
            touched += info.total_bytes * min(info.experts, chosen or info.experts)
        else:
            touched += size
            has_order = name.removesuffix(PACKED_SUFFIX) + ORDER_SUFFIX in stored
            linear = linear or f"Linear({describe_features(info, has_order)})"
    return touched, linear
