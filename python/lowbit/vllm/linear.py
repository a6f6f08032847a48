"""Linear layers, embedding tables and heads with packed weights in vLLM."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from ..machine.memory import give_back, in_huge_pages
from ..nn import check_input_order
from ..operators import ops
from ..packed.rounding import quantize_tensor
from ..packed.slices import concat, slice_columns, slice_rows
from .model_facts import PACKED, ServedModel

_ORDER = "input_order"


class PackedMethod(LinearMethodBase):
    """Loads and runs a linear layer or an embedding table. Loading collects this rank's part of its weights.

    A layer gets ``_lowbit_parts``, packed weights (uint8) or float matrices, whose outputs are concatenated;
    ``_lowbit_rows``, the rows of each part; ``_lowbit_orders``, the act-order permutation of each part or None.
    """

    def __init__(self, model: ServedModel, prefix: str):
        self.model, self.prefix = model, prefix

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        layer._lowbit_dtype, layer._lowbit_loaded, layer._lowbit_orders = params_dtype, {}, {}
        for part in (_whole_rows(layer) or [None]) if self.model.selected else ():
            self.model.asked.add(self.model.name_of(layer, self.prefix, part))
        dtypes = {PACKED: torch.uint8, "weight": torch.uint8 if self.model.packed else params_dtype}
        for name, dtype in dtypes.items():
            parameter = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            parameter.weight_loader = partial(self._load, layer)
            layer.register_parameter(name, parameter)
        if self.model.has_orders:
            parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)
            parameter.weight_loader = partial(self._load_order, layer)
            layer.register_parameter(_ORDER, parameter)

    def _load_order(self, layer: torch.nn.Module, _: Any, loaded: Tensor, part: str | int | None = None) -> None:
        if isinstance(layer, RowParallelLinear) and layer.tp_size > 1:
            raise ValueError(
                f"{self.prefix} has an act-order permutation, which {layer.tp_size} ranks cannot share: a rank's inputs come "
                "from all of them; use one rank"
            )
        check_input_order(loaded, layer.input_size)
        for key in [part] if part is not None else _whole_rows(layer) or [None]:
            layer._lowbit_orders[key] = loaded

    def _load(self, layer: torch.nn.Module, _: Any, loaded: Tensor, part: str | int | None = None) -> None:
        if loaded.numel() == 0:
            return  # a guard (files/safetensors.py)
        if isinstance(part, tuple):
            raise ValueError(f"{self.prefix} has the parts {part} in one matrix, which lowbit does not support in vLLM")
        # Qwen2-MoE adds a dimension to the packed weight of a layer with one output.
        self._take(layer, loaded.flatten() if _is_packed(loaded) else loaded, part)
        if layer.tp_size > 1:
            give_back(loaded)  # verifying the checksum has read all of it

    def _take(self, layer: torch.nn.Module, loaded: Tensor, part: str | int | None) -> None:
        fused = None if part is not None else _whole_rows(layer)
        if fused is None:
            layer._lowbit_loaded[part] = self._cut(layer, loaded, part)
            return
        # The files have one matrix for all parts.
        begin, packed = 0, self._packed_of(layer, loaded, None)
        for key, rows in fused.items():
            piece = slice_rows(packed, begin, begin + rows) if _is_packed(packed) else packed[begin : begin + rows]
            layer._lowbit_loaded[key] = self._cut(layer, piece, key)
            begin += rows

    def _packed_of(self, layer: torch.nn.Module, loaded: Tensor, part: str | int | None) -> Tensor:
        """The weight, quantized if it is float and selected."""
        if _is_packed(loaded) or self.model.packed:
            return loaded
        config = self.model.selected.get(self.model.name_of(layer, self.prefix, part))
        return loaded if config is None else quantize_tensor(loaded, config)

    def _cut(self, layer: torch.nn.Module, loaded: Tensor, part: str | int | None) -> Tensor:
        """This rank's part of a matrix."""
        weight = self._packed_of(layer, loaded, part)
        whole = tuple(ops.verify(weight).shape if _is_packed(weight) else weight.shape)
        rows, columns = _local_rows(layer, part), _local_inputs(layer)
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
        layer.__dict__["_lowbit_tied"] = embed_tokens  # in __dict__, so that it is not registered as a submodule again
        layer.packed_weight, layer.weight = embed_tokens.packed_weight, embed_tokens.weight
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        loaded = layer.__dict__.pop("_lowbit_loaded", {})
        orders = layer.__dict__.pop("_lowbit_orders", {})
        for name in (PACKED, "weight", _ORDER):
            layer._parameters.pop(name, None)
        # vLLM's LoRA reads device and dtype of the weight.
        nothing = torch.empty(0, dtype=layer._lowbit_dtype)
        layer.register_parameter("weight", torch.nn.Parameter(nothing, requires_grad=False))
        if "_lowbit_tied" in layer.__dict__:
            return
        wanted = list(_whole_rows(layer) or [None])
        missing = [part for part in wanted if part not in loaded]
        if missing:
            raise ValueError(f"{self.prefix or type(layer).__name__} got no weight{listed(missing)} from the files")
        parts = [loaded[part] for part in wanted]
        biased = [_is_packed(part) and ops.info(part).has_bias for part in parts]
        if any(biased):
            layer.bias = None  # the packed weights contain it, with zeros for parts without a bias
        joined, layer._lowbit_orders = _joined(parts, [orders.get(part) for part in wanted])
        layer._lowbit_parts = [in_huge_pages(part) if _is_packed(part) else part for part in joined]
        layer._lowbit_rows = [ops.info(part).out_features if _is_packed(part) else len(part) for part in layer._lowbit_parts]

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        source = layer.__dict__.get("_lowbit_tied", layer)
        outs = []
        for part, rows, order in zip(source._lowbit_parts, source._lowbit_rows, source._lowbit_orders, strict=True):
            inputs = x if order is None else x.index_select(-1, order)
            outs.append(ops.linear(inputs, part, rows) if _is_packed(part) else functional.linear(inputs, part))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
        if isinstance(layer, ParallelLMHead) and layer.tp_size > 1:
            # Ranks gather logits of the same size; vLLM drops the padding.
            out = functional.pad(out, (0, layer.num_embeddings_per_partition - out.shape[-1]))
        return out if bias is None else out + bias

    def embedding(self, layer: torch.nn.Module, input_: Tensor) -> Tensor:
        (table,) = layer._lowbit_parts
        if not _is_packed(table):
            return functional.embedding(input_, table)
        return ops.embedding(input_, table, layer.embedding_dim, dtype=layer._lowbit_dtype)


def _is_packed(weight: Tensor) -> bool:
    return bool(weight.dtype == torch.uint8)


def listed(parts: list[Any], kind: str = "parts") -> str:
    return "" if parts == [None] else f" for the {kind} {', '.join(map(str, parts))}"


def _joined(parts: list[Tensor], orders: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Joins the parts to one matrix with its act-order permutation, if all are packed alike or all are float."""
    if not any(map(_is_packed, parts)):
        return [torch.cat(parts)], [None]
    kinds = {
        (info.bits, info.group_size, info.mapping, info.rotated_inputs, info.activation_bits)
        for info in map(ops.info, filter(_is_packed, parts))
    }
    first = orders[0]
    alike = all(order is None if first is None else order is not None and torch.equal(order, first) for order in orders)
    if len(parts) > 1 and all(map(_is_packed, parts)) and len(kinds) == 1 and alike:
        try:
            return [concat(parts)], [first]
        except ValueError:  # level tables differ
            pass
    return parts, orders


def _whole_rows(layer: torch.nn.Module) -> dict[str | int | None, int] | None:
    """Part of a fused layer -> its rows on all ranks together; None if the layer is not fused."""
    if isinstance(layer, QKVParallelLinear):
        return {part: _rows_of(layer, part) for part in "qkv"}
    if isinstance(layer, MergedColumnParallelLinear):
        return dict(enumerate(layer.output_sizes))
    return None


def _rows_of(layer: torch.nn.Module, part: str | int | None) -> int:
    """The rows of a layer, or of a part of a fused one, on all ranks together."""
    if isinstance(layer, QKVParallelLinear):
        heads = layer.total_num_heads if part == "q" else layer.total_num_kv_heads
        return int(heads * (layer.v_head_size if part == "v" else layer.head_size))
    if isinstance(layer, MergedColumnParallelLinear):
        return int(layer.output_sizes[part])
    return int(layer.org_vocab_size if isinstance(layer, VocabParallelEmbedding) else layer.output_size)


def _local_rows(layer: torch.nn.Module, part: str | int | None) -> tuple[int, int]:
    """The rows [begin, end) of this rank."""
    rows, rank, ranks = _rows_of(layer, part), layer.tp_rank, layer.tp_size
    if isinstance(layer, VocabParallelEmbedding):
        return layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    if isinstance(layer, RowParallelLinear | ReplicatedLinear):
        return 0, rows
    if isinstance(layer, QKVParallelLinear) and part != "q":  # several ranks may have the same KV heads
        rank, ranks = rank // layer.num_kv_head_replicas, ranks // layer.num_kv_head_replicas
    count = rows // ranks
    return rank * count, (rank + 1) * count


def _local_inputs(layer: torch.nn.Module) -> tuple[int, int]:
    """The inputs [begin, end) of this rank."""
    if not isinstance(layer, RowParallelLinear):
        return 0, layer.input_size
    count = layer.input_size_per_partition
    return layer.tp_rank * count, (layer.tp_rank + 1) * count
