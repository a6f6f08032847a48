"""What vLLM knows of a model whose weights are packed, and which way each of its layers goes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from ..files.safetensors import files_of, float_name, orders_of, packed_info, read_files
from ..hf.building import check_fits
from ..hf.config import METHOD, LowBitConfig
from ..hf.loading import meta_model
from ..hf.names import tied_layers
from ..layers import Experts, named_layers
from ..quantize import EmbeddingConfig, LinearConfig
from .experts import PackedExpertsMethod
from .linear import PACKED, PackedMethod

_GPT_OSS = (1.702, 7.0)  # alpha and limit, with which vLLM's own experts compute whatever config.json says


class ServedConfig(QuantizationConfig):
    """What vLLM knows of a model whose weights are packed, in its files or while they are loaded.

    Attributes:
        options: the arguments of :class:`lowbit.LowBitConfig`.
        packed: the files have packed weights, which count; the options do not.
        ordered: of these some have their inputs in an order of their own.
        selected: of a float checkpoint the layers to quantize, by transformers' names.
        quantized: the layers that are packed in the files, or selected.
        tables: transformers' names of tables of tokens.
        holders: transformers' names of modules of experts.
        gates: of these, those of gpt-oss, with the numbers alpha and limit of their activation.
        renamed: of the holders, those that vLLM calls otherwise, with the name there.
        ties: heads and the tables that they are.
        asked: the layers for which vLLM has asked how to quantize them.
        whole: a process builds all layers, not some (pipeline parallel).
    """

    def __init__(self, options: dict[str, Any] | None = None):
        super().__init__()
        self.options = dict(options or {})
        LowBitConfig(**self.options)  # refuses invalid options
        self.packed = self.ordered = False
        self.selected: dict[str, LinearConfig | EmbeddingConfig] = {}
        self.quantized: set[str] = set()
        self.tables: list[str] = []
        self.holders: list[str] = []
        self.gates: dict[str, tuple[float, float]] = {}
        self.renamed: dict[str, str] = {}
        self.ties: dict[str, str] = {}
        self.asked: set[str] = set()
        self.whole = True

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
        """Holds the checkpoint against the model that its config.json describes, before vLLM builds anything.

        vLLM itself does not look for missing tensors where a model is quantized.

        Raises:
            OSError, ValueError: tensors are missing or of other shapes, or the model has what is not served.
        """
        directory = Path(model_name)
        if not directory.is_dir():
            raise ValueError(f"{model_name} is not a directory; lowbit serves local checkpoints: download it first")
        tensors = read_files(*files_of(directory))
        model = meta_model(directory, len(tensors))
        check_fits(model, tensors, directory)
        layers = dict(named_layers(model))
        packed = {name: stored for name, stored in tensors.items() if name.endswith(f".{PACKED}")}
        experts = [name.rpartition(".")[0] for name, layer in layers.items() if isinstance(layer, Experts)]
        self.holders = list(dict.fromkeys(experts))
        if model.config.model_type == "gpt_oss":
            modules = {name: model.get_submodule(name) for name in self.holders}
            self.gates = {name: (module.alpha, module.limit) for name, module in modules.items()}
        self.ordered = bool(orders_of(tensors))
        for name, stored in packed.items():
            found = packed_info(stored).format
            if found != "panel16":
                raise ValueError(f"{name} is in format {found}; expected panel16")
        self.packed = bool(packed)
        self.tables = [name for name, layer in layers.items() if isinstance(layer, torch.nn.Embedding)]
        ties = self.ties = tied_layers(model)
        for head, table in ties.items():
            both = {f"{head}.{PACKED}", f"{head}.weight"} & tensors.keys()
            if both:
                raise ValueError(f"{directory} has {both.pop()}, but its config.json says that {head} is {table}")
        self.quantized = {float_name(name, stored.shape).removesuffix(".weight") for name, stored in packed.items()}
        if self.gates and not self.packed:
            raise ValueError(
                f"{directory} is gpt-oss and not packed; use `lowbit import` if its experts are MXFP4, or `lowbit quantize`"
            )
        if not self.packed:
            self.selected = LowBitConfig(**self.options).select(model)
            self.quantized = set(self.selected)
            for head, table in ties.items():
                first, second = (self.selected.get(name) for name in (head, table))
                if (first and vars(first)) != (second and vars(second)):
                    raise ValueError(f"{head} and {table} are one matrix, but are to be quantized as {first} and {second}")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        current = get_current_vllm_config()
        self.whole = current.parallel_config.pipeline_parallel_size == 1
        cache, own = current.cache_config.cache_dtype, str(current.model_config.dtype).removeprefix("torch.")
        known = CPUAttentionBackend.supported_kv_cache_dtypes
        if cache not in (*known, own):
            # vLLM does not hold on to its own list: with another float type, or int8, it writes other tokens in silence.
            raise ValueError(
                f"the kv cache is to be {cache} and the activations {own}; vLLM's attention for CPUs expects a cache of "
                f"the activations' type, or one of {', '.join(known)}"
            )
        if isinstance(layer, RoutedExperts):
            holder = self.holder_of(prefix)
            names = [name for name in self.quantized if name.rpartition(".")[0] == holder]
            self.asked.update(names)
            if not names and self.gates.get(holder, _GPT_OSS) != _GPT_OSS:
                raise ValueError(
                    f"{prefix} has float experts with alpha and limit {self.gates[holder]}; vLLM computes with {_GPT_OSS}: "
                    "pack them"
                )
            return PackedExpertsMethod(self, layer, prefix, holder) if names else None  # float, in vLLM's own way
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            return PackedMethod(self, prefix)
        return None

    def holder_of(self, prefix: str) -> str:
        """What transformers calls the module of experts that vLLM calls so: the one in the layer of this number."""
        numbers = re.findall(r"\d+", prefix)
        found = [name for name in self.holders if name == prefix] or [
            name for name in self.holders if re.findall(r"\d+", name) == numbers
        ]
        if len(found) != 1:
            raise ValueError(f"{prefix} has experts of a form that lowbit does not serve in vLLM")
        if found[0] != prefix:
            self.renamed[found[0]] = prefix
        return found[0]

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """vLLM's names of tensors that files have under other ones; vLLM asks for it when it has built a model."""
        unasked = sorted(self.selected.keys() - self.asked - self.ties.keys())
        if unasked and self.whole:
            raise ValueError(
                f"{unasked[0]} is to be quantized, which vLLM does not do there; leave it float: "
                f'"overrides": [["{unasked[0]}", null]]'
            )
        parents = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in self.renamed.items()}
        patterns: dict[re.Pattern[str], str | None] = {
            re.compile(rf"^{re.escape(old)}\."): f"{new}." for old, new in parents.items()
        }
        patterns |= self._patterns_of_gpt_oss()
        return super().get_checkpoint_weight_mapper() | WeightsMapper(orig_to_new_regex=patterns)

    def _patterns_of_gpt_oss(self) -> dict[re.Pattern[str], str | None]:
        """vLLM's gpt-oss has names of its own, and renames float weights only."""
        found: dict[re.Pattern[str], str | None] = {}
        for holder in self.gates:
            if f"{holder}.down_proj" in self.quantized:
                start = rf"^{re.escape(holder)}\.(gate_up_proj|down_proj)"
                found[re.compile(rf"{start}\.{PACKED}$")] = rf"{holder}.routed_experts.packed_\1"
                found[re.compile(rf"{start}$")] = None  # the guard beside a packed weight
        if self.gates and self.tables:
            table = re.escape(self.tables[0])
            found[re.compile(rf"^{table}\.{PACKED}$")] = f"model.embedding.{PACKED}"
        return found

    def name_of(self, layer: torch.nn.Module, prefix: str, part: str | int | None) -> str:
        """What transformers calls a layer, or a part of a fused one."""
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            if len(self.tables) != 1:
                raise ValueError(f"the model has the tables {self.tables}; lowbit quantizes models with one in vLLM")
            return self.tables[0]
        parent, _, leaf = prefix.rpartition(".")
        if part is not None:
            leaf = self.packed_modules_mapping[leaf]["qkv".index(part) if isinstance(part, str) else part]
        return f"{parent}.{leaf}" if parent else leaf
