"""Packed weights in vLLM, which batches the requests of many users: docs/serving.md.

vLLM finds this module by its entry point. It serves packed checkpoints, and quantises float ones while it loads them.
Written for vLLM 0.32; what it calls is the interface of vLLM's own ways to quantise.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from . import ops
from .files.safetensors import files_of, orders_of, packed_info, read_files
from .hf.building import check_fits
from .hf.config import METHOD, LowBitConfig
from .hf.loading import meta_model
from .hf.names import tied_layers
from .layers import Experts, named_layers
from .memory import give_back, in_huge_pages
from .quantize import EmbeddingConfig, LinearConfig, quantize_tensor
from .slices import concat, slice_columns, slice_rows

_PACKED = "packed_weight"


def register() -> None:
    """Makes the method "lowbit" known to vLLM, which calls this in each of its processes."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(ServedConfig)


class ServedConfig(QuantizationConfig):
    """What vLLM knows of a model whose weights are packed, in its files or while they are loaded.

    Attributes:
        options: the arguments of :class:`lowbit.LowBitConfig`.
        packed: the files have packed weights, which count; the options do not.
        selected: of a float checkpoint the layers to quantise, by transformers' names.
        tables: transformers' names of tables of tokens.
    """

    def __init__(self, options: dict[str, Any] | None = None):
        super().__init__()
        self.options = dict(options or {})
        LowBitConfig(**self.options)  # refuses what is none
        self.packed = False
        self.selected: dict[str, LinearConfig | EmbeddingConfig] = {}
        self.tables: list[str] = []

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

        vLLM itself does not look for missing tensors where a model is quantised.

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
        packed = {name: stored for name, stored in tensors.items() if name.endswith(f".{_PACKED}")}
        experts = [name for name, layer in layers.items() if isinstance(layer, Experts)]
        if experts:
            raise ValueError(f"{directory} has experts ({experts[0]}); lowbit serves models without them in vLLM")
        for name in orders_of(tensors):
            raise ValueError(f"{name} has its inputs in an order of their own, which lowbit does not serve in vLLM")
        for name, stored in packed.items():
            found = packed_info(stored).format
            if found != "panel16":
                raise ValueError(f"{name} is in format {found}; expected panel16")
        self.packed = bool(packed)
        self.tables = [name for name, layer in layers.items() if isinstance(layer, torch.nn.Embedding)]
        ties = tied_layers(model)
        for head, table in ties.items():
            both = {f"{head}.{_PACKED}", f"{head}.weight"} & tensors.keys()
            if both:
                raise ValueError(f"{directory} has {both.pop()}, but its config.json says that {head} is {table}")
        if not self.packed:
            self.selected = LowBitConfig(**self.options).select(model)
            for head, table in ties.items():
                first, second = (self.selected.get(name) for name in (head, table))
                if (first and vars(first)) != (second and vars(second)):
                    raise ValueError(f"{head} and {table} are one matrix, but are to be quantised as {first} and {second}")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        if isinstance(layer, RoutedExperts):
            raise ValueError(f"{prefix} has experts; lowbit serves models without them in vLLM")
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            return PackedMethod(self, prefix)
        return None

    def name_of(self, layer: torch.nn.Module, prefix: str, part: str | int | None) -> str:
        """What transformers calls a layer, or a part of a fused one."""
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            if len(self.tables) != 1:
                raise ValueError(f"the model has the tables {self.tables}; lowbit quantises models with one in vLLM")
            return self.tables[0]
        parent, _, leaf = prefix.rpartition(".")
        if part is not None:
            leaf = self.packed_modules_mapping[leaf]["qkv".index(part) if isinstance(part, str) else part]
        return f"{parent}.{leaf}" if parent else leaf


class PackedMethod(LinearMethodBase):
    """How vLLM loads and runs a layer: its weights, packed or float, are collected while vLLM reads the files, cut to this
    rank's part, and joined afterwards.

    A layer gets ``_lowbit_parts``, uint8 packed weights or float matrices, whose outputs follow one another, and
    ``_lowbit_rows``, how many each has.
    """

    def __init__(self, config: ServedConfig, prefix: str):
        self.config, self.prefix = config, prefix

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        layer._lowbit_dtype, layer._lowbit_loaded = params_dtype, {}
        dtypes = {_PACKED: torch.uint8, "weight": torch.uint8 if self.config.packed else params_dtype}
        for name, dtype in dtypes.items():
            parameter = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            parameter.weight_loader = partial(self._load, layer)
            layer.register_parameter(name, parameter)

    def _load(self, layer: torch.nn.Module, _, loaded: Tensor, part: str | int | None = None) -> None:
        if loaded.numel() == 0:
            return  # the guard beside a packed weight
        if isinstance(part, tuple):
            raise ValueError(f"{self.prefix} has the parts {part} in one matrix, which lowbit does not serve in vLLM")
        self._take(layer, loaded, part)
        if layer.tp_size > 1:
            give_back(loaded)  # all of it was read, for the checksum

    def _take(self, layer: torch.nn.Module, loaded: Tensor, part: str | int | None) -> None:
        fused = None if part is not None else _whole_rows(layer)
        if fused is None:
            layer._lowbit_loaded[part] = self._cut(layer, loaded, part)
            return
        # One matrix in the files is what vLLM keeps as several.
        begin, packed = 0, self._packed_of(layer, loaded, None)
        for each, rows in fused.items():
            piece = slice_rows(packed, begin, begin + rows) if _is_packed(packed) else packed[begin : begin + rows]
            layer._lowbit_loaded[each] = self._cut(layer, piece, each)
            begin += rows

    def _packed_of(self, layer: torch.nn.Module, loaded: Tensor, part: str | int | None) -> Tensor:
        """The weight, quantised if it is float and to be quantised."""
        if _is_packed(loaded) or self.config.packed:
            return loaded
        config = self.config.selected.get(self.config.name_of(layer, self.prefix, part))
        return loaded if config is None else quantize_tensor(loaded, config)

    def _cut(self, layer: torch.nn.Module, loaded: Tensor, part: str | int | None) -> Tensor:
        """The part of this rank."""
        weight = self._packed_of(layer, loaded, part)
        whole = tuple(ops.verify(weight).shape if _is_packed(weight) else weight.shape)
        rows, columns = _own_rows(layer, part), _own_inputs(layer)
        expected = _rows_of(layer, part), layer.input_size
        if whole != expected:
            raise ValueError(f"{self.prefix} has a matrix of shape {list(whole)}; vLLM expects {list(expected)}")
        if rows[0] >= rows[1]:
            raise ValueError(f"{self.prefix} has {whole[0]} rows, too few for {layer.tp_size} ranks")
        if not _is_packed(weight):
            return weight[slice(*rows), slice(*columns)].to(layer._lowbit_dtype)
        if columns != (0, whole[1]):
            try:
                weight = slice_columns(weight, *columns)
            except ValueError as error:
                raise ValueError(f"{self.prefix} cannot be shared by {layer.tp_size} ranks: {error}") from error
        return weight if rows == (0, whole[0]) else slice_rows(weight, *rows)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.__dict__["_lowbit_tied"] = embed_tokens  # no submodule: it has its place in the model
        layer.packed_weight, layer.weight = embed_tokens.packed_weight, embed_tokens.weight
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        loaded = layer.__dict__.pop("_lowbit_loaded", {})
        for name in (_PACKED, "weight"):
            layer._parameters.pop(name, None)
        if "_lowbit_tied" in layer.__dict__:
            return
        wanted = list(_whole_rows(layer) or [None])
        missing = [part for part in wanted if part not in loaded]
        if missing:
            raise ValueError(f"{self.prefix or type(layer).__name__} got no weight{_named(missing)} from the files")
        parts = [loaded[part] for part in wanted]
        biased = [_is_packed(part) and ops.info(part).has_bias for part in parts]
        if any(biased):
            layer.bias = None  # it is in the packed weights, zeros where a part has none
        layer._lowbit_parts = [in_huge_pages(part) if _is_packed(part) else part for part in _joined(parts)]
        layer._lowbit_rows = [
            ops.info(part).out_features if _is_packed(part) else len(part) for part in layer._lowbit_parts
        ]

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        source = layer.__dict__.get("_lowbit_tied", layer)
        outs = [
            ops.linear(x, part, rows) if _is_packed(part) else functional.linear(x, part)
            for part, rows in zip(source._lowbit_parts, source._lowbit_rows, strict=True)
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
        if isinstance(layer, ParallelLMHead) and layer.tp_size > 1:
            # Ranks gather logits of one size; vLLM knows which are of no token.
            out = functional.pad(out, (0, layer.num_embeddings_per_partition - out.shape[-1]))
        return out if bias is None else out + bias

    def embedding(self, layer: torch.nn.Module, input_: Tensor) -> Tensor:
        (table,) = layer._lowbit_parts
        if not _is_packed(table):
            return functional.embedding(input_, table)
        return ops.embedding(input_, table, layer.embedding_dim, dtype=layer._lowbit_dtype)


def _is_packed(weight: Tensor) -> bool:
    return weight.dtype == torch.uint8


def _named(parts: list) -> str:
    return "" if parts == [None] else f" for the parts {', '.join(map(str, parts))}"


def _joined(parts: list[Tensor]) -> list[Tensor]:
    """As one matrix if they are alike: layers of other widths, or packed and float ones, stay apart."""
    kinds = {(info.bits, info.group_size, info.mapping) for info in map(ops.info, filter(_is_packed, parts))}
    if len(parts) == 1 or not all(map(_is_packed, parts)) or len(kinds) > 1:
        return parts if any(map(_is_packed, parts)) else [torch.cat(parts)]
    try:
        return [concat(parts)]
    except ValueError:  # other tables of levels
        return parts


def _whole_rows(layer: torch.nn.Module) -> dict[str | int | None, int] | None:
    """The parts of a fused layer and the rows of each on all ranks together; None: it is not fused."""
    if isinstance(layer, QKVParallelLinear):
        return {part: _rows_of(layer, part) for part in "qkv"}
    if isinstance(layer, MergedColumnParallelLinear):
        return dict(enumerate(layer.output_sizes))
    return None


def _rows_of(layer: torch.nn.Module, part: str | int | None) -> int:
    """The rows of a layer, or of a part of a fused one, on all ranks together."""
    if isinstance(layer, QKVParallelLinear):
        heads = layer.total_num_heads if part == "q" else layer.total_num_kv_heads
        return heads * (layer.v_head_size if part == "v" else layer.head_size)
    if isinstance(layer, MergedColumnParallelLinear):
        return layer.output_sizes[part]
    return layer.org_vocab_size if isinstance(layer, VocabParallelEmbedding) else layer.output_size


def _own_rows(layer: torch.nn.Module, part: str | int | None) -> tuple[int, int]:
    """This rank's rows."""
    rows, rank, ranks = _rows_of(layer, part), layer.tp_rank, layer.tp_size
    if isinstance(layer, VocabParallelEmbedding):
        return layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    if isinstance(layer, RowParallelLinear | ReplicatedLinear):
        return 0, rows
    if isinstance(layer, QKVParallelLinear) and part != "q":  # several ranks may have the same heads of keys
        rank, ranks = rank // layer.num_kv_head_replicas, ranks // layer.num_kv_head_replicas
    each = rows // ranks
    return rank * each, (rank + 1) * each


def _own_inputs(layer: torch.nn.Module) -> tuple[int, int]:
    """This rank's inputs."""
    if not isinstance(layer, RowParallelLinear):
        return 0, layer.input_size
    each = layer.input_size_per_partition
    return layer.tp_rank * each, (layer.tp_rank + 1) * each
