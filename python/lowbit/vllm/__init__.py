"""Packed weights in vLLM (docs/serving.md).

vLLM finds this package by its entry point. It serves packed checkpoints, and quantizes float ones while it loads them.
Written for vLLM 0.32; what it calls is the interface of vLLM's own ways to quantize.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from ..hf.config import METHOD
from .method import ServedConfig


def register() -> None:
    """Registers the method "lowbit" with vLLM, which calls this in each of its processes."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(ServedConfig)
        for kind in (VocabParallelEmbedding, ParallelLMHead, ReplicatedLinear):
            if kind.__name__ not in op_registry_oot:  # else another plugin has its own
                kind.register_oot(_with_packed_weights(kind))


def _with_packed_weights(kind: Any) -> type:
    """A subclass of a layer that uses lowbit's method if its model passes no method on and its weight is packed.

    Some of vLLM's models never quantize their tables of tokens, heads or gates of shared experts.
    """
    arguments = signature(kind.__init__)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = arguments.bind(self, *args, **kwargs)
        config = get_current_vllm_config().quant_config
        passed_on = any(given.arguments.get(name) for name in ("quant_config", "quant_method"))
        if isinstance(config, ServedConfig) and not passed_on:
            name, model = given.arguments.get("prefix", ""), config.model
            if kind is VocabParallelEmbedding:
                name = model.tables[0] if len(model.tables) == 1 else ""
            if name in model.quantized or model.ties.get(name) in model.quantized:
                given.arguments["quant_config"] = config
        kind.__init__(*given.args, **given.kwargs)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__doc__": kind.__doc__})
