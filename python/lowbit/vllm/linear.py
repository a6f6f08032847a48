"""Linear layers, tables of tokens and heads in vLLM, with packed weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

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

from .. import ops
from ..memory import give_back, in_huge_pages
from ..nn import _check_order
from ..quantize import quantize_tensor
from ..slices import concat, slice_columns, slice_rows

if TYPE_CHECKING:
    from .config import ServedConfig

PACKED, _ORDER = "packed_weight", "input_order"


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
        dtypes = {PACKED: torch.uint8, "weight": torch.uint8 if self.config.packed else params_dtype}
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
        """The weight, quantized if it is float and to be quantized."""
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
        for name in (PACKED, "weight", _ORDER):
            layer._parameters.pop(name, None)
        # vLLM's LoRA asks the weight for its device and dtype.
        nothing = torch.empty(0, dtype=layer._lowbit_dtype)
        layer.register_parameter("weight", torch.nn.Parameter(nothing, requires_grad=False))
        if "_lowbit_tied" in layer.__dict__:
            return
        wanted = list(_whole_rows(layer) or [None])
        missing = [part for part in wanted if part not in loaded]
        if missing:
            raise ValueError(f"{self.prefix or type(layer).__name__} got no weight{named(missing)} from the files")
        parts = [loaded[part] for part in wanted]
        biased = [_is_packed(part) and ops.info(part).has_bias for part in parts]
        if any(biased):
            layer.bias = None  # it is in the packed weights, zeros where a part has none
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


def named(parts: list, kind: str = "parts") -> str:
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
    if isinstance(layer, QKVParallelLinear) and part != "q":  # several ranks may have the same KV heads
        rank, ranks = rank // layer.num_kv_head_replicas, ranks // layer.num_kv_head_replicas
    each = rows // ranks
    return rank * each, (rank + 1) * each


def _own_inputs(layer: torch.nn.Module) -> tuple[int, int]:
    """This rank's inputs."""
    if not isinstance(layer, RowParallelLinear):
        return 0, layer.input_size
    each = layer.input_size_per_partition
    return layer.tp_rank * each, (layer.tp_rank + 1) * each
