"""The vLLM quantization config of the method "lowbit", which chooses how each layer is loaded and run."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from ..hf.config import METHOD, LowBitConfig
from .expert_layers import PackedExpertsMethod
from .linear import PackedMethod
from .model_facts import ServedModel

_GPT_OSS = (1.702, 7.0)  # alpha and limit that vLLM's experts use, whatever config.json says


class ServedConfig(QuantizationConfig):
    """The method "lowbit" for one model.

    Attributes:
        config: how to quantize float checkpoints.
        model: facts about the model.
        is_whole: whether this process builds all layers (no pipeline parallelism).
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Changes vLLM's layers, in each process that gets a configuration: some get it by pickle, which calls no __init__."""
        for kind in (VocabParallelEmbedding, ParallelLMHead, ReplicatedLinear):
            if kind.__name__ not in op_registry_oot:  # else it is done, or another plugin has its own
                kind.register_oot(_with_packed_weights(kind))
        return super().__new__(cls)

    def __init__(self, options: dict[str, Any] | None = None):
        super().__init__()
        self.config = LowBitConfig(**(options or {}))
        self.model = ServedModel()
        self.is_whole = True

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServedConfig:
        return cls(config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Reads the checkpoint, before vLLM builds anything; raises as :meth:`ServedModel.read`."""
        directory = Path(model_name)
        if not directory.is_dir():
            raise ValueError(f"{model_name} is not a directory; lowbit serves local checkpoints: download it first")
        self.model.read(directory, self.config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> PackedMethod | PackedExpertsMethod | None:
        current, model = get_current_vllm_config(), self.model
        self.is_whole, model.fused = current.parallel_config.pipeline_parallel_size == 1, self.packed_modules_mapping
        cache, dtype = current.cache_config.cache_dtype, str(current.model_config.dtype).removeprefix("torch.")
        known = CPUAttentionBackend.supported_kv_cache_dtypes
        if cache not in (*known, dtype):
            # vLLM does not check its own list: with another float type, or int8, it silently generates other tokens.
            raise ValueError(
                f"the kv cache is to be {cache} and the activations {dtype}; vLLM's attention for CPUs expects a cache of "
                f"the activations' type, or one of {', '.join(known)}"
            )
        if isinstance(layer, RoutedExperts):
            holder = model.holder_of(prefix)
            names = [name for name in model.quantized if name.rpartition(".")[0] == holder]
            model.asked.update(names)
            if not names and model.gates.get(holder, _GPT_OSS) != _GPT_OSS:
                raise ValueError(
                    f"{prefix} has float experts with alpha and limit {model.gates[holder]}; vLLM computes with {_GPT_OSS}: "
                    "pack them"
                )
            return PackedExpertsMethod(model, layer, prefix, holder) if names else None  # None: float, by vLLM
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            return PackedMethod(model, prefix)
        return None

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Names of tensors in the files -> names in vLLM, which calls this after it has built the model."""
        unasked = sorted(self.model.selected.keys() - self.model.asked - self.model.ties.keys())
        if unasked and self.is_whole:
            raise ValueError(
                f"{unasked[0]} would be quantized, but vLLM does not quantize it; leave it float: "
                f'"overrides": [["{unasked[0]}", null]]'
            )
        return super().get_checkpoint_weight_mapper() | WeightsMapper(orig_to_new_regex=self.model.renaming())


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
