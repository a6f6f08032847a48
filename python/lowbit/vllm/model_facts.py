"""Reads the facts about a model that packed layers in vLLM need, from config.json and the headers of the files."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from ..files.safetensors import files_of, float_name, orders_of, packed_info, read_files
from ..hf.building import check_fits
from ..hf.config import LowBitConfig
from ..hf.from_pretrained import meta_model
from ..hf.names import tied_layers
from ..layers.expert_stacks import Experts
from ..layers.packable import named_layers
from ..packed.rounding import ConvConfig, EmbeddingConfig, LinearConfig

PACKED = "packed_weight"


class ServedModel:
    """A model whose weights are packed in its files or while they are loaded. Names are those of transformers.

    Attributes:
        packed: whether the files have packed weights.
        has_orders: whether some packed weights have an act-order permutation.
        selected: layer of a float checkpoint to quantize -> config.
        quantized: layers that are packed in the files, or selected.
        tables: token embedding tables.
        holders: modules of experts.
        gates: gpt-oss's modules of experts -> alpha and limit of their activation.
        renamed: holder -> its name in vLLM, if different.
        ties: head -> the table to which it is tied.
        asked: layers for which vLLM has requested a quantization method.
        fused: leaf of a fused layer in vLLM -> the leaves of its parts; vLLM's ``packed_modules_mapping``.
    """

    def __init__(self) -> None:
        self.packed = self.has_orders = False
        self.selected: dict[str, LinearConfig | EmbeddingConfig | ConvConfig] = {}
        self.quantized: set[str] = set()
        self.tables: list[str] = []
        self.holders: list[str] = []
        self.gates: dict[str, tuple[float, float]] = {}
        self.renamed: dict[str, str] = {}
        self.ties: dict[str, str] = {}
        self.asked: set[str] = set()
        self.fused: dict[str, list[str]] = {}

    def read(self, directory: Path, config: LowBitConfig) -> None:
        """Sets the facts after checking the files against the model in config.json.

        The check is needed because vLLM does not check a quantized model for missing tensors.

        Raises:
            OSError, ValueError: tensors are missing or have other shapes, or the model has unsupported layers.
        """
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
        self.has_orders = bool(orders_of(tensors))
        for name, stored in packed.items():
            format = packed_info(stored).format
            if format != "panel16":
                raise ValueError(f"{name} is in format {format}; expected panel16")
        self.packed = bool(packed)
        self.tables = [name for name, layer in layers.items() if isinstance(layer, torch.nn.Embedding)]
        self.ties = tied_layers(model)
        for head, table in self.ties.items():
            both = {f"{head}.{PACKED}", f"{head}.weight"} & tensors.keys()
            if both:
                raise ValueError(f"{directory} has {both.pop()}, but its config.json says that {head} is {table}")
        self.quantized = {float_name(name, stored.shape).removesuffix(".weight") for name, stored in packed.items()}
        if self.gates and not self.packed:
            raise ValueError(
                f"{directory} is gpt-oss and not packed; use `lowbit import` if its experts are MXFP4, or `lowbit quantize`"
            )
        if not self.packed:
            self.selected = config.select(model)
            self.quantized = set(self.selected)
            for head, table in self.ties.items():
                first, second = (self.selected.get(name) for name in (head, table))
                if (first and vars(first)) != (second and vars(second)):
                    raise ValueError(f"{head} and {table} are one matrix, but are to be quantized as {first} and {second}")

    def holder_of(self, prefix: str) -> str:
        """The module of experts that vLLM calls ``prefix``: the one in the layer with the same index."""
        numbers = re.findall(r"\d+", prefix)
        same_layer = [name for name in self.holders if re.findall(r"\d+", name) == numbers]
        names = [prefix] if prefix in self.holders else same_layer
        if len(names) != 1:
            raise ValueError(f"{prefix} has experts of a form that lowbit does not support in vLLM")
        if names[0] != prefix:
            self.renamed[names[0]] = prefix
        return names[0]

    def renaming(self) -> dict[re.Pattern[str], str | None]:
        """Patterns of tensor names in the files -> names in vLLM; None: the tensor is dropped."""
        parents = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in self.renamed.items()}
        patterns: dict[re.Pattern[str], str | None] = {
            re.compile(rf"^{re.escape(old)}\."): f"{new}." for old, new in parents.items()
        }
        # vLLM's gpt-oss uses other names, and renames only float weights.
        for holder in self.gates:
            if f"{holder}.down_proj" in self.quantized:
                start = rf"^{re.escape(holder)}\.(gate_up_proj|down_proj)"
                patterns[re.compile(rf"{start}\.{PACKED}$")] = rf"{holder}.routed_experts.packed_\1"
                patterns[re.compile(rf"{start}$")] = None  # a guard (files/safetensors.py)
        if self.gates and self.tables:
            table = re.escape(self.tables[0])
            patterns[re.compile(rf"^{table}\.{PACKED}$")] = f"model.embedding.{PACKED}"
        return patterns

    def name_of(self, layer: torch.nn.Module, prefix: str, part: str | int | None) -> str:
        """The name of a layer, or of a part of a fused one."""
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            if len(self.tables) != 1:
                raise ValueError(f"the model has the tables {self.tables}; lowbit quantizes models with one in vLLM")
            return self.tables[0]
        parent, _, leaf = prefix.rpartition(".")
        if part is not None:
            leaf = self.fused[leaf]["qkv".index(part) if isinstance(part, str) else part]
        return f"{parent}.{leaf}" if parent else leaf
