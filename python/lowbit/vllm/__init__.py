"""The vLLM plugin: serves packed checkpoints, and quantizes float ones while they are loaded (docs/vllm.md).

vLLM finds this package by its entry point. The plugin is written for vLLM 0.32 and implements its interface for quantization
methods.
"""

from __future__ import annotations

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

from ..hf.config import METHOD
from .method import ServedConfig


def register() -> None:
    """Registers the method "lowbit" with vLLM, which calls this in each of its processes.

    Nothing else of vLLM changes until a model uses the method.
    """
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(ServedConfig)
