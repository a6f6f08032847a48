"""Packed weights in vLLM, which batches the requests of many users: docs/serving.md.

vLLM finds this module by its entry point. It serves packed checkpoints, and quantises float ones while it loads them.
Written for vLLM 0.32; what it calls is the interface of vLLM's own ways to quantise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
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
from vllm.model_executor.models.utils import WeightsMapper

from . import ops
from .files.safetensors import files_of, float_name, orders_of, packed_info, read_files
from .hf.building import check_fits
from .hf.config import METHOD, LowBitConfig
from .hf.loading import meta_model
from .hf.names import tied_layers
from .layers import Experts, named_layers
from .memory import give_back, in_huge_pages
from .nn import _check_order
from .quantize import EmbeddingConfig, LinearConfig, quantize_tensor
from .slices import concat, slice_columns, slice_rows

_PACKED, _ORDER = "packed_weight", "input_order"
# The two matrices of each expert: what transformers calls them, and some of vLLM's models once they have renamed them.
_MATRICES = {"gate_up_proj": 0, "w13": 0, "down_proj": 1, "w2": 1}
_ACTIVATIONS = {
    MoEActivation.SILU: functional.silu,
    MoEActivation.GELU: functional.gelu,
    MoEActivation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}


def register() -> None:
    """Makes the method "lowbit" known to vLLM, which calls this in each of its processes."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(ServedConfig)
        for kind in (VocabParallelEmbedding, ParallelLMHead, ReplicatedLinear):
            if kind.__name__ not in op_registry_oot:  # else another plugin has its own
                kind.register_oot(_told_of_packed(kind))


class ServedConfig(QuantizationConfig):
    """What vLLM knows of a model whose weights are packed, in its files or while they are loaded.

    Attributes:
        options: the arguments of :class:`lowbit.LowBitConfig`.
        packed: the files have packed weights, which count; the options do not.
        ordered: of these some have their inputs in an order of their own.
        selected: of a float checkpoint the layers to quantise, by transformers' names.
        quantised: the layers that are packed in the files, or selected.
        tables: transformers' names of tables of tokens.
        holders: transformers' names of modules of experts.
        renamed: of these, those that vLLM calls otherwise, with the name there.
        ties: heads and the tables that they are.
        asked: the layers for which vLLM has asked how to quantise them.
        whole: a process builds all layers, not some (pipeline parallel).
    """

    def __init__(self, options: dict[str, Any] | None = None):
        super().__init__()
        self.options = dict(options or {})
        LowBitConfig(**self.options)  # refuses what is none
        self.packed = self.ordered = False
        self.selected: dict[str, LinearConfig | EmbeddingConfig] = {}
        self.quantised: set[str] = set()
        self.tables: list[str] = []
        self.holders: list[str] = []
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
        experts = [name.rpartition(".")[0] for name, layer in layers.items() if isinstance(layer, Experts)]
        self.holders = list(dict.fromkeys(experts))
        self.ordered = bool(orders_of(tensors))
        for name, stored in packed.items():
            found = packed_info(stored).format
            if found != "panel16":
                raise ValueError(f"{name} is in format {found}; expected panel16")
        self.packed = bool(packed)
        self.tables = [name for name, layer in layers.items() if isinstance(layer, torch.nn.Embedding)]
        ties = self.ties = tied_layers(model)
        for head, table in ties.items():
            both = {f"{head}.{_PACKED}", f"{head}.weight"} & tensors.keys()
            if both:
                raise ValueError(f"{directory} has {both.pop()}, but its config.json says that {head} is {table}")
        self.quantised = {float_name(name, stored.shape).removesuffix(".weight") for name, stored in packed.items()}
        if not self.packed:
            self.selected = LowBitConfig(**self.options).select(model)
            self.quantised = set(self.selected)
            for head, table in ties.items():
                first, second = (self.selected.get(name) for name in (head, table))
                if (first and vars(first)) != (second and vars(second)):
                    raise ValueError(f"{head} and {table} are one matrix, but are to be quantised as {first} and {second}")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        self.whole = get_current_vllm_config().parallel_config.pipeline_parallel_size == 1
        if isinstance(layer, RoutedExperts):
            holder = self.holder_of(prefix)
            names = [name for name in self.quantised if name.rpartition(".")[0] == holder]
            self.asked.update(names)
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
                f"{unasked[0]} is to be quantised, which vLLM does not do there; leave it float: "
                f'"overrides": [["{unasked[0]}", null]]'
            )
        parents = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in self.renamed.items()}
        patterns = {re.compile(rf"^{re.escape(old)}\."): f"{new}." for old, new in parents.items()}
        return super().get_checkpoint_weight_mapper() | WeightsMapper(orig_to_new_regex=patterns)

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
    ``_lowbit_rows``, how many each has, and ``_lowbit_orders``, the orders of their inputs or None.
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
        layer._lowbit_dtype, layer._lowbit_loaded, layer._lowbit_orders = params_dtype, {}, {}
        for part in (_whole_rows(layer) or [None]) if self.config.selected else ():
            self.config.asked.add(self.config.name_of(layer, self.prefix, part))
        dtypes = {_PACKED: torch.uint8, "weight": torch.uint8 if self.config.packed else params_dtype}
        for name, dtype in dtypes.items():
            parameter = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            parameter.weight_loader = partial(self._load, layer)
            layer.register_parameter(name, parameter)
        if self.config.ordered:
            parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
            parameter.weight_loader = partial(self._load_order, layer)
            layer.register_parameter(_ORDER, parameter)

    def _load_order(self, layer: torch.nn.Module, _, loaded: Tensor, part: str | int | None = None) -> None:
        if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
            raise ValueError(
                f"{self.prefix} has its inputs in an order of their own, which {layer.tp_size} ranks cannot share: a rank's "
                "inputs come from all of them; use one rank"
            )
        _check_order(loaded, layer.input_size)
        for each in [part] if part is not None else _whole_rows(layer) or [None]:
            layer._lowbit_orders[each] = loaded

    def _load(self, layer: torch.nn.Module, _, loaded: Tensor, part: str | int | None = None) -> None:
        if loaded.numel() == 0:
            return  # the guard beside a packed weight
        if isinstance(part, tuple):
            raise ValueError(f"{self.prefix} has the parts {part} in one matrix, which lowbit does not serve in vLLM")
        # Qwen2-MoE gives a vector for one output a second dimension.
        self._take(layer, loaded.flatten() if _is_packed(loaded) else loaded, part)
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
        orders = layer.__dict__.pop("_lowbit_orders", {})
        for name in (_PACKED, "weight", _ORDER):
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
        joined, layer._lowbit_orders = _joined(parts, [orders.get(part) for part in wanted])
        layer._lowbit_parts = [in_huge_pages(part) if _is_packed(part) else part for part in joined]
        layer._lowbit_rows = [
            ops.info(part).out_features if _is_packed(part) else len(part) for part in layer._lowbit_parts
        ]

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        source = layer.__dict__.get("_lowbit_tied", layer)
        outs = []
        for part, rows, order in zip(source._lowbit_parts, source._lowbit_rows, source._lowbit_orders, strict=True):
            inputs = x if order is None else x.index_select(-1, order)
            outs.append(ops.linear(inputs, part, rows) if _is_packed(part) else functional.linear(inputs, part))
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


class PackedExpertsMethod(FusedMoEMethodBase):
    """How vLLM loads and runs the experts of a layer: as :class:`PackedMethod`, and as many ranks share their inner width.

    The layer gets ``_lowbit_experts``, the two matrices of all experts, each uint8 [experts, bytes].
    """

    def __init__(self, config: ServedConfig, layer: RoutedExperts, prefix: str, holder: str):
        """Args:
            prefix, holder: what vLLM and transformers call it.
        """
        super().__init__(layer.moe_config)
        self.config, self.prefix, self.holder = config, prefix, holder
        wrong = None
        numbers = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
        if layer.activation not in _ACTIVATIONS or any(number is not None for number in numbers):
            wrong = f"the activation {layer.activation.value}"
        elif self.moe.has_bias:
            wrong = "biases"
        elif layer.apply_router_weight_on_input:
            wrong = "weights of the router that multiply the inputs"
        elif self.moe.use_ep or self.moe.dp_size > 1 or self.moe.is_sequence_parallel:
            wrong = "their whole matrices on different ranks (expert, data or sequence parallel)"
        if wrong:
            raise ValueError(f"{prefix} has experts with {wrong}, which lowbit does not serve in vLLM")

    def maybe_roundup_sizes(self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config):
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None  # is of vLLM's own kernels

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        layer._lowbit_loaded = [{}, {}]  # of either matrix, by the number of the expert
        layer._lowbit_halves = {}
        for name in ("w13_weight", "w2_weight"):
            parameter = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            parameter.weight_loader = partial(self._load, layer)
            layer.register_parameter(name, parameter)
        layer.load_weights = partial(self._load_weights, layer)

    def _load_weights(self, layer: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        for name, loaded in weights:
            leaf, _, kind = name.rpartition(".")
            if kind == _PACKED and leaf in _MATRICES:
                self._take_packed(layer, _MATRICES[leaf], loaded)
                yield name
            elif loaded.numel():  # else the guard beside a packed weight
                yield from type(layer).load_weights(layer, [(name, loaded)])

    def _take_packed(self, layer: torch.nn.Module, which: int, loaded: Tensor) -> None:
        expected = [self.moe.num_experts, *self._shape(which)]
        found = list(ops.info_of_experts(loaded, verified=True).shape)
        if found != expected:
            raise ValueError(f"{self.prefix} has experts of shape {found}; vLLM expects {expected}")
        layer._lowbit_loaded[which] = {number: self._cut(which, one) for number, one in enumerate(loaded)}
        if self.moe.tp_size > 1:
            give_back(loaded)  # all of it was read, for the checksum

    def _load(
        self, layer: torch.nn.Module, param, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
        return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        """Takes a float matrix, and quantises it when it is whole: "w1" and "w3", gate and up, are one."""
        which, whole = int(shard_id == "w2"), loaded_weight
        if which == 0:
            halves = layer._lowbit_halves.setdefault(expert_id, {})
            halves[shard_id] = loaded_weight
            if len(halves) < 2:
                return True if return_success else None
            whole = torch.cat([halves["w1"], halves["w3"]])
            del layer._lowbit_halves[expert_id]
        found, expected = list(whole.shape), self._shape(which)
        if found != expected:
            raise ValueError(f"{self.prefix} has a matrix of shape {found}; vLLM expects {expected}")
        config = self.config.selected[f"{self.holder}.{('gate_up_proj', 'down_proj')[which]}"]
        layer._lowbit_loaded[which][expert_id] = self._cut(which, quantize_tensor(whole, config))
        return True if return_success else None

    def _inner(self) -> int:
        """The inner width of all ranks together."""
        return self.moe.intermediate_size

    def _shape(self, which: int) -> list[int]:
        return [self.moe.hidden_dim, self._inner()] if which else [2 * self._inner(), self.moe.hidden_dim]

    def _cut(self, which: int, packed: Tensor) -> Tensor:
        """The part of this rank: rows of gate and of up, or inputs of the second matrix."""
        rank, ranks, inner = self.moe.tp_rank, self.moe.tp_size, self._inner()
        if ranks == 1:
            return packed
        begin, end = rank * inner // ranks, (rank + 1) * inner // ranks
        try:
            if inner % ranks:
                raise ValueError(f"their inner width is {inner}")
            if which:
                return slice_columns(packed, begin, end)
            return concat([slice_rows(packed, first + begin, first + end) for first in (0, inner)])
        except ValueError as error:
            raise ValueError(f"{self.prefix} has experts that cannot be shared by {ranks} ranks: {error}") from error

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not hasattr(layer, "_lowbit_loaded"):
            return
        del layer.w13_weight, layer.w2_weight, layer._lowbit_halves
        layer._lowbit_experts = []
        for name, loaded in zip(("gate_up_proj", "down_proj"), layer._lowbit_loaded, strict=True):
            missing = [number for number in range(self.moe.num_experts) if number not in loaded]
            if missing:
                raise ValueError(f"{self.prefix} got no {name} from the files{_named(missing, 'experts')}")
            matrices = [loaded[number] for number in range(self.moe.num_experts)]
            layer._lowbit_experts.append(in_huge_pages(torch.stack(matrices)))
        del layer._lowbit_loaded

    def apply(
        self, layer: torch.nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts=None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [tokens, hidden], and the weights and numbers [tokens, e] of the experts of each; returns [tokens, hidden]."""
        first, second = layer._lowbit_experts
        experts = topk_ids.long()
        both = ops.linear_experts(x, first, experts, 2 * self.moe.intermediate_size_per_partition)
        gate, up = both.chunk(2, -1)
        inner = _ACTIVATIONS[layer.activation](gate) * up
        outputs = ops.linear_experts(inner, second, experts[..., None], self.moe.hidden_dim)[..., 0, :]
        return (outputs * topk_weights[..., None]).sum(-2).to(x.dtype)


def _told_of_packed(kind: Any) -> type:
    """A class of layers that takes lowbit's method where its model has not passed one on and its weight is packed.

    Some of vLLM's models keep their tables of tokens, heads or the gates of shared experts out of all quantisation.
    """
    arguments = signature(kind.__init__)

    def __init__(self, *args, **kwargs) -> None:
        given = arguments.bind(self, *args, **kwargs)
        config = get_current_vllm_config().quant_config
        passed_on = any(given.arguments.get(name) for name in ("quant_config", "quant_method"))
        if isinstance(config, ServedConfig) and not passed_on:
            name = given.arguments.get("prefix", "")
            if kind is VocabParallelEmbedding:
                name = config.tables[0] if len(config.tables) == 1 else ""
            if name in config.quantised or config.ties.get(name) in config.quantised:
                given.arguments["quant_config"] = config
        kind.__init__(*given.args, **given.kwargs)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__doc__": kind.__doc__})


def _is_packed(weight: Tensor) -> bool:
    return weight.dtype == torch.uint8


def _named(parts: list, kind: str = "parts") -> str:
    return "" if parts == [None] else f" for the {kind} {', '.join(map(str, parts))}"


def _joined(parts: list[Tensor], orders: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """As one matrix, with the order of its inputs, if they are alike: layers of other widths, packed and float ones, or such
    with inputs in other orders stay apart."""
    if not any(map(_is_packed, parts)):
        return [torch.cat(parts)], [None]
    kinds = {(info.bits, info.group_size, info.mapping) for info in map(ops.info, filter(_is_packed, parts))}
    first = orders[0]
    alike = all(order is None if first is None else order is not None and torch.equal(order, first) for order in orders)
    if len(parts) > 1 and all(map(_is_packed, parts)) and len(kinds) == 1 and alike:
        try:
            return [concat(parts)], [first]
        except ValueError:  # other tables of levels
            pass
    return parts, orders


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
