"""Modules with packed weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .layers.convolutions import CLASSES, Window, why_float, window_of
from .layers.embedding_layers import Table, give_state, table_of
from .layers.packed_module import Packed as Packed
from .layers.packed_module import dequantized_rows
from .layers.replacing import dtype_of, refuse_hooked_weights, refuse_prepared_layer, refuse_subclass, take_place
from .machine.memory import in_huge_pages
from .operators import ops
from .packed.header import PackedInfo, describe_features, describe_format
from .packed.rounding import ConvConfig, EmbeddingConfig, LinearConfig, quantize_tensor

WINDOW = "_lowbit_window"  # attribute of a torch.nn.Linear that stands for a convolution


class _Features:
    """The sizes of a linear layer, under the names of torch.nn.Linear."""

    _info: PackedInfo

    @property
    def in_features(self) -> int:
        return self._info.in_features

    @property
    def out_features(self) -> int:
        return self._info.out_features


def check_input_order(order: Tensor, inputs: int) -> None:
    """Raises ValueError unless ``order`` is an int32 permutation of 0 to ``inputs - 1``."""
    if order.dtype != torch.int32 or order.shape != (inputs,):
        raise ValueError(f"input_order is {order.dtype} {list(order.shape)}; expected torch.int32 [{inputs}]")
    identity = torch.arange(inputs, dtype=torch.int32, device=order.device)
    if order.device.type != "meta" and not torch.equal(order.sort().values, identity):
        raise ValueError(f"input_order has other numbers than 0 to {inputs - 1}, each once")


class _Product(_Features, Packed):
    """A layer with one matrix and an optional bias."""

    @property
    def bias(self) -> Tensor | None:
        """The bias, [out], in the dtype of ``weight``, read from the packed weight at each use; None if there is none."""
        if not self.info.has_bias:
            return None

        def compute() -> Tensor:
            zeros = torch.zeros(1, self.info.in_features, dtype=torch.float32, device=self.packed_weight.device)
            return ops.linear(zeros, self.packed_weight, self.info.out_features)[0].to(self._dtype)

        return self._computed(compute, (self.info.out_features,))


class Linear(_Product):
    """A linear layer with 1- to 8-bit weights and int8 activations, which are quantized on the fly.

    Input [..., in_features] float32, bfloat16 or float16; output [..., out_features] of the same dtype.
    The weight is frozen; the input's gradient is that of a float layer with the dequantized weight.

    With an act-order permutation (GPTQ), input ``j`` of the packed weight is input ``input_order[j]`` of the layer.
    """

    input_order: Tensor | None

    def __init__(
        self, packed_weight: Tensor | PackedInfo, dtype: torch.dtype = torch.float32, input_order: Tensor | None = None
    ):
        """
        Args:
            packed_weight: from :func:`lowbit.pack`, with the bias; or a :class:`lowbit.PackedInfo`, for a module on the meta
                device that a checkpoint loader fills.
            dtype: the dtype in which ``weight`` and ``bias`` are read: float32, bfloat16 or float16.
            input_order: int32 [in_features], a permutation; None: the inputs are not permuted.

        Raises:
            ValueError: not a valid packed weight, another dtype, or an order that is not a permutation.
        """
        super().__init__(packed_weight, dtype)
        if input_order is not None:
            check_input_order(input_order, self.info.in_features)
        self.register_buffer("input_order", input_order)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers.setdefault("input_order", None)  # earlier versions had no permutations

    @classmethod
    def from_float(cls, linear: torch.nn.Linear, config: LinearConfig) -> Linear:
        """Quantizes a float layer by round-to-nearest.

        Raises:
            TypeError, ValueError: a config of the wrong type, a subclass with its own forward method, a layer prepared for
                training, or weights that are not finite, not on the CPU, or computed by a hook.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"expected a torch.nn.Linear; found {type(linear).__name__}")
        refuse_prepared_layer(linear)
        refuse_subclass(linear)
        if not isinstance(config, LinearConfig):
            raise TypeError(f"expected a LinearConfig; found {type(config).__name__}")
        refuse_hooked_weights(linear)
        packed = quantize_tensor(linear.weight, config, bias=linear.bias)
        return in_place_of(linear, in_huge_pages(packed), dtype_of(linear))

    def verify(self) -> None:
        super().verify()
        if self.input_order is not None:
            check_input_order(self.input_order, self.info.in_features)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        weight = super()._dequantized(dtype)
        return weight if self.input_order is None else weight[:, self.input_order.long().argsort()]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *arguments: Any) -> None:
        error_msgs: list[str] = arguments[-1]
        # Packed bytes and the permutation of their inputs belong together: load both, or neither.
        loaded, order = state_dict.get(prefix + "packed_weight"), state_dict.get(prefix + "input_order")
        before, errors = self.input_order, len(error_msgs)
        if order is not None:
            try:
                check_input_order(order, self.info.in_features)
                if loaded is None:
                    raise ValueError("there is no packed_weight beside it; expected the one that has its inputs in this order")
            except ValueError as error:
                error_msgs.append(f"{prefix}input_order: {error}")
                return
        if loaded is not None:
            self.input_order = None if order is None else torch.empty_like(order)
        super()._load_from_state_dict(state_dict, prefix, metadata, *arguments)
        if len(error_msgs) > errors:
            self.input_order = before

    def forward(self, x: Tensor) -> Tensor:
        if self.input_order is not None:
            x = x.index_select(-1, self.input_order)
        if self._dtype is torch.float64 and x.dtype is torch.float64:
            return ops.linear(x.float(), self.packed_weight, self._info.out_features).double()
        return ops.linear(x, self.packed_weight, self._info.out_features)

    def extra_repr(self) -> str:
        return describe_features(self.info, self.input_order is not None)


class Conv(_Product):
    """A 1-, 2- or 3-dimensional convolution with 1- to 8-bit weights, computed as a matrix product over its windows (im2col).

    Input [batch, in_channels, *sizes] or [in_channels, *sizes], float32, bfloat16 or float16; output [batch, out_channels,
    *places] of the same dtype, channels last in memory. ``weight`` is [out_channels, in_channels, *kernel]. Otherwise as
    :class:`Linear`. :func:`lowbit.quantize_` says which convolutions are packed.
    """

    groups = 1
    padding_mode = "zeros"

    def __init__(self, packed_weight: Tensor | PackedInfo, window: Window, dtype: torch.dtype = torch.float32):
        """
        Args:
            packed_weight: from :func:`lowbit.pack`, [out_channels, in_channels * kernel] with the bias; or a
                :class:`lowbit.PackedInfo` as for :class:`Linear`.
            window: kernel, stride and padding, each with a number per dimension.
            dtype: the dtype in which ``weight`` and ``bias`` are read: float32, bfloat16 or float16.

        Raises:
            ValueError: not a valid packed weight, another dtype, or a number of inputs that is not a multiple of the
                kernel's size.
        """
        super().__init__(packed_weight, dtype)
        self._window = window
        taps = math.prod(window.kernel)
        if self.info.in_features % taps:
            raise ValueError(f"the weight has {self.info.in_features} inputs; expected a multiple of the kernel's {taps}")
        self.kernel_size, self.stride, self.padding = window.kernel, window.stride, window.padding
        self.dilation = (1,) * len(window.kernel)

    @classmethod
    def from_float(cls, conv: torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d, config: ConvConfig) -> Conv:
        """Quantizes a float layer by round-to-nearest.

        Raises:
            TypeError, ValueError: a config of the wrong type, a convolution that cannot be packed, or weights that are not
                finite, not on the CPU, or computed by a hook.
        """
        if not isinstance(conv, CLASSES):
            raise TypeError(f"expected a torch.nn.Conv1d, Conv2d or Conv3d; found {type(conv).__name__}")
        if not isinstance(config, ConvConfig):
            raise TypeError(f"expected a ConvConfig; found {type(config).__name__}")
        window = window_of(conv)
        if window is None:
            raise ValueError(f"it is {why_float(conv)}, which lowbit does not pack")
        refuse_hooked_weights(conv)
        packed = in_huge_pages(quantize_tensor(conv.weight.flatten(1), config, bias=conv.bias))
        layer = cls(packed, window, dtype_of(conv))
        take_place(layer, conv)
        return layer

    @property
    def in_channels(self) -> int:
        return self._info.in_features // math.prod(self._window.kernel)

    @property
    def out_channels(self) -> int:
        return self._info.out_features

    def _shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels, *self._window.kernel)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        return super()._dequantized(dtype).view(self._shape())

    def forward(self, x: Tensor) -> Tensor:
        dims = len(self._window.kernel)
        if x.dim() not in (dims + 1, dims + 2) or x.shape[-dims - 1] != self.in_channels:
            sizes = ", ".join(["batch", str(self.in_channels), *("size" for _ in range(dims))])
            raise ValueError(f"x has shape {list(x.shape)}; expected [{sizes}]")
        alone = x.dim() == dims + 1
        rows = self._window.rows(x[None] if alone else x)
        double = self._dtype is torch.float64 and x.dtype is torch.float64
        places = ops.linear(rows.float() if double else rows, self.packed_weight, self._info.out_features).movedim(-1, 1)
        places = places.double() if double else places
        return places[0] if alone else places

    def extra_repr(self) -> str:
        window = self._window
        padding = f"padding={window.padding}, " if any(window.padding) else ""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={window.kernel}, stride={window.stride}, {padding}"
            f"bias={self.info.has_bias}, " + describe_format(self.info)
        )


class Embedding(Packed):
    """An embedding table of 1 to 8 bits per weight.

    Input [...] int32 or int64; output [..., embedding_dim] in the module's dtype, which ``module.to(dtype)`` changes. If it
    replaces a table of transformers that scales or normalizes its rows, it does so too, but ``weight`` holds the raw rows.
    """

    _table = Table()  # in pickles of earlier versions, which packed no other tables

    def __init__(
        self,
        packed_weight: Tensor | PackedInfo,
        dtype: torch.dtype = torch.float32,
        padding_idx: int | None = None,
        table: Table = Table(),
    ):
        """
        Args:
            packed_weight: from :func:`lowbit.pack`, or a :class:`lowbit.PackedInfo` as for :class:`Linear`.
            dtype: the dtype of the output: float32, bfloat16 or float16.
            padding_idx: for information only; the row is stored like any other.
            table: what happens to rows after the lookup. If it has a norm, the caller sets that module as ``embed_norm``.

        Raises:
            ValueError: not a valid packed weight, or another dtype.
        """
        super().__init__(packed_weight, dtype)
        self.padding_idx, self._table = padding_idx, table

    @classmethod
    def from_float(cls, embedding: torch.nn.Embedding, config: EmbeddingConfig) -> Embedding:
        """Quantizes a float table by round-to-nearest.

        Raises:
            TypeError, ValueError: a config of the wrong type, a table of a class that lowbit does not know, prepared for
                training or with ``max_norm`` (it rescales its rows at each lookup), or weights that are not finite, not on the
                CPU, or computed by a hook.
        """
        if not isinstance(embedding, torch.nn.Embedding):
            raise TypeError(f"expected a torch.nn.Embedding; found {type(embedding).__name__}")
        refuse_prepared_layer(embedding)
        if not isinstance(config, EmbeddingConfig):
            raise TypeError(f"expected an EmbeddingConfig; found {type(config).__name__}")
        refuse_hooked_weights(embedding)
        if embedding.max_norm is not None:
            raise ValueError(f"the embedding has max_norm={embedding.max_norm}; expected None: it changes the weights")
        packed = quantize_tensor(embedding.weight, config)
        return in_place_of(embedding, in_huge_pages(packed), dtype_of(embedding))

    @property
    def num_embeddings(self) -> int:
        return self._info.out_features

    @property
    def embedding_dim(self) -> int:
        return self._info.in_features

    def forward(self, indices: Tensor) -> Tensor:
        return self.finish(dequantized_rows(indices, self.packed_weight, self._info.in_features, self._dtype))

    def finish(self, rows: Tensor) -> Tensor:
        """The output for looked-up rows: unchanged, scaled or normalized."""
        return self._table.finish(rows, self)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        scale = "" if self._table.scale is None else f"scale={self._table.scale.value:g}, "
        return f"{self.num_embeddings}, {self.embedding_dim}, {padding}{scale}" + describe_format(self.info)


class LinearExperts(_Features, Packed):
    """The linear layers of all experts of a mixture (MoE), with 1- to 8-bit weights: ``packed_weight`` is [experts, bytes].

    Input [..., in_features] float32, bfloat16 or float16 and int64 [..., e], the e experts of each row; output [..., e,
    out_features], as of :func:`lowbit.linear_experts`. The weights are frozen; gradients are those of :class:`Linear`.
    """

    def __init__(self, packed_weight: Tensor | PackedInfo, dtype: torch.dtype = torch.float32):
        """
        Args:
            packed_weight: weights from :func:`lowbit.pack`, with their biases, stacked; or a :class:`lowbit.PackedInfo` as for
                :class:`Linear`.
            dtype: the dtype in which ``weight`` is read: float32, bfloat16 or float16.

        Raises:
            ValueError: not valid packed weights of one shape, width and group size, or another dtype.
        """
        super().__init__(packed_weight, dtype)

    def _describe(self, packed_weight: Tensor) -> None:
        self._info = ops.info_of_experts(packed_weight)

    def _verified(self, packed_weight: Tensor) -> PackedInfo:
        return ops.info_of_experts(packed_weight, verified=True)

    @property
    def num_experts(self) -> int:
        return self._info.experts or 0  # at least 1

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        rows = torch.arange(self.info.out_features, device=self.packed_weight.device)
        return torch.stack([dequantized_rows(rows, matrix, self.info.in_features, dtype) for matrix in self.packed_weight])

    def to_format(self, format: str) -> LinearExperts:
        """Returns the module unchanged: experts can only have the format of :func:`lowbit.pack`.

        Raises:
            ValueError: any other format.
        """
        if format != "panel16":
            raise ValueError(f"format is {format!r}; expected 'panel16': the weights of experts have no other")
        return self

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        if self._dtype is torch.float64 and x.dtype is torch.float64:
            return ops.linear_experts(x.float(), self.packed_weight, experts, self._info.out_features).double()
        return ops.linear_experts(x, self.packed_weight, experts, self._info.out_features)

    def extra_repr(self) -> str:
        return (
            f"experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.info.has_bias}, " + describe_format(self.info)
        )


def in_place_of(
    layer: torch.nn.Linear | torch.nn.Embedding,
    packed_weight: Tensor | PackedInfo,
    dtype: torch.dtype,
    input_order: Tensor | None = None,
) -> Linear | Conv | Embedding:
    """The packed module that replaces a float layer, with the layer's hooks, mode and attributes.

    A torch.nn.Linear that stands for a convolution is replaced by a :class:`Conv`. ``dtype`` is that of an embedding's output
    and of ``weight``; ``input_order`` applies to linear layers only.
    """
    if isinstance(layer, torch.nn.Embedding):
        table = table_of(layer)
        if table is None:
            raise TypeError(f"a {type(layer).__name__} may use its weight in its own way; expected a torch.nn.Embedding")
        packed = Embedding(packed_weight, dtype, layer.padding_idx, table)
        take_place(packed, layer)
        give_state(packed, table, layer)
        return packed
    window = getattr(layer, WINDOW, None)
    linear = Linear(packed_weight, dtype, input_order) if window is None else Conv(packed_weight, window, dtype)
    take_place(linear, layer)
    return linear


def use_huge_pages(model: torch.nn.Module) -> int:
    """Moves the packed weights of a model into huge pages if Linux provides them on request.

    This speeds up reading matrices: the CPU translates a five-hundredth of the addresses and prefetches across 4 KiB
    boundaries. :func:`lowbit.quantize_` does it already. Call this for loaded weights, above all for weights mapped from a
    file, which are then copied to anonymous memory.

    Args:
        model: any model. Shared weights, such as a tied head, stay shared.

    Returns:
        The number of bytes moved. Weights smaller than a huge page (usually 2 MiB) are not moved; 0 if the system has no
        huge pages or provides them without a request.
    """
    moved: dict[tuple[int, int], Tensor] = {}
    for module in model.modules():
        if isinstance(module, Packed):
            weight = module.packed_weight
            key = (weight.data_ptr(), weight.numel())
            if key not in moved:
                moved[key] = in_huge_pages(weight)
            module.packed_weight = moved[key]
    return sum(tensor.numel() for (address, _), tensor in moved.items() if tensor.data_ptr() != address)
