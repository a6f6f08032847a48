"""Modules with packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .memory import in_huge_pages
from .quantize import EmbeddingConfig, LinearConfig, quantize_tensor


class Packed(torch.nn.Module):
    """A module whose weight is one packed buffer, ``packed_weight`` (uint8)."""

    def __init__(self, packed_weight: Tensor | ops.PackedInfo):
        super().__init__()
        if isinstance(packed_weight, ops.PackedInfo):
            self.info = packed_weight
            packed_weight = torch.empty(self.info.total_bytes, dtype=torch.uint8, device="meta")
        else:
            self._describe(packed_weight)
        self.register_buffer("packed_weight", packed_weight)

    def _describe(self, packed_weight: Tensor) -> None:
        self.info = ops.info(packed_weight)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as [out, in] of ``dtype`` (float32, bfloat16 or float16).

        Raises:
            ValueError: the packed bytes were altered.
        """
        ops.verify(self.packed_weight)
        rows = torch.arange(self.info.out_features)
        return ops.embedding(rows, self.packed_weight, self.info.in_features, dtype=dtype)

    def to_format(self, format: str) -> Packed:
        """Replaces the packed weight by the same weight in another format (:func:`lowbit.repack`); returns the module.

        A buffer that was shared with another module is shared no more.

        Raises:
            TypeError, ValueError: as :func:`lowbit.repack`.
        """
        self.packed_weight = ops.repack(self.packed_weight, format)
        self._describe(self.packed_weight)
        return self

    def _format_repr(self) -> str:
        group = "per channel" if self.info.group_size is None else self.info.group_size
        format = "" if self.info.format == "panel16" else f"format={self.info.format}, "
        return (
            f"{format}bits={self.info.bits}, group_size={group}, mapping={self.info.mapping}, "
            f"{self.info.bits_per_weight:.2f} bits per weight"
        )

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        # The packed bytes describe themselves, so a checkpoint may have another width or group size than this module;
        # what must agree is the shape of the weight. Every byte is checked before any is used.
        key = prefix + "packed_weight"
        loaded = state_dict.get(key)
        if loaded is not None:
            try:
                described = ops.verify(loaded)
                shape = (described.out_features, described.in_features)
                expected = (self.info.out_features, self.info.in_features)
                if shape != expected:
                    raise ValueError(f"the weight has shape {list(shape)}; expected {list(expected)}")
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{key}: {error}")
                return
            if loaded.numel() != self.packed_weight.numel():
                if local_metadata.get("assign_to_params_buffers"):
                    self.packed_weight = loaded
                else:
                    # In place, so that a module that shares this buffer (a tied head) sees the change.
                    with torch.no_grad():
                        self.packed_weight.set_(torch.empty_like(loaded))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if loaded is not None:
            self._describe(self.packed_weight)


class Linear(Packed):
    """A linear layer with 1- to 8-bit weights: int8 activations per row, quantised on the fly.

    Input [..., in_features] float32, bfloat16 or float16; output [..., out_features] of the same dtype.
    The weight is fixed; the input's gradient is that of a float layer with the dequantised weight.
    """

    def __init__(self, packed_weight: Tensor | ops.PackedInfo):
        """Args:
            packed_weight: from :func:`lowbit.pack`; the bias is in it. A description instead gives a module on the meta
                device, which a checkpoint's loader fills.

        Raises:
            ValueError: not a valid packed weight.
        """
        super().__init__(packed_weight)

    @classmethod
    def from_float(cls, linear: torch.nn.Linear, config: LinearConfig) -> Linear:
        """Quantises a float layer by round-to-nearest.

        Raises:
            TypeError, ValueError: a config of the wrong type, or weights that are not finite or not on the CPU.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"expected a torch.nn.Linear; found {type(linear).__name__}")
        if not isinstance(config, LinearConfig):
            raise TypeError(f"expected a LinearConfig; found {type(config).__name__}")
        packed = quantize_tensor(linear.weight, config, bias=linear.bias)
        return cls(in_huge_pages(packed)).train(linear.training)

    @property
    def in_features(self) -> int:
        return self.info.in_features

    @property
    def out_features(self) -> int:
        return self.info.out_features

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.packed_weight, self.info.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.info.has_bias}, "
            + self._format_repr()
        )


class Embedding(Packed):
    """An embedding table of 1 to 8 bits per weight.

    Input [...] int32 or int64; output [..., embedding_dim] of the module's dtype, which follows ``module.to(dtype)``.
    """

    def __init__(
        self,
        packed_weight: Tensor | ops.PackedInfo,
        dtype: torch.dtype = torch.float32,
        padding_idx: int | None = None,
    ):
        """Args:
            packed_weight: from :func:`lowbit.pack`, or a description as for :class:`Linear`.
            dtype: of the output: float32, bfloat16 or float16.
            padding_idx: kept for information; the row is stored like any other.

        Raises:
            ValueError: not a valid packed weight, or another dtype.
        """
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {dtype}; expected torch.float32, torch.bfloat16 or torch.float16")
        super().__init__(packed_weight)
        self.padding_idx = padding_idx
        # Empty: it only carries the dtype, so that model.to(torch.bfloat16) changes it as it would a float table's.
        self.register_buffer("_dtype", torch.empty(0, dtype=dtype), persistent=False)

    @classmethod
    def from_float(cls, embedding: torch.nn.Embedding, config: EmbeddingConfig) -> Embedding:
        """Quantises a float table by round-to-nearest.

        Raises:
            TypeError, ValueError: a config of the wrong type, a table with ``max_norm`` (it rescales its rows at each
                lookup), or weights that are not finite or not on the CPU.
        """
        if not isinstance(embedding, torch.nn.Embedding):
            raise TypeError(f"expected a torch.nn.Embedding; found {type(embedding).__name__}")
        if not isinstance(config, EmbeddingConfig):
            raise TypeError(f"expected an EmbeddingConfig; found {type(config).__name__}")
        if embedding.max_norm is not None:
            raise ValueError(f"the embedding has max_norm={embedding.max_norm}; expected None: it changes the weights")
        packed = quantize_tensor(embedding.weight, config)
        return cls(in_huge_pages(packed), embedding.weight.dtype, embedding.padding_idx).train(embedding.training)

    @property
    def num_embeddings(self) -> int:
        return self.info.out_features

    @property
    def embedding_dim(self) -> int:
        return self.info.in_features

    def forward(self, indices: Tensor) -> Tensor:
        return torch.ops.lowbit.embedding(
            indices, self.packed_weight, self.info.in_features, dtype=self._dtype.dtype
        )

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return f"{self.num_embeddings}, {self.embedding_dim}, {padding}" + self._format_repr()


def in_place_of(
    layer: torch.nn.Linear | torch.nn.Embedding, packed_weight: Tensor | ops.PackedInfo, dtype: torch.dtype
) -> Linear | Embedding:
    """The module with this packed weight that replaces a float layer; ``dtype`` is that of an embedding's output."""
    if isinstance(layer, torch.nn.Embedding):
        return Embedding(packed_weight, dtype, layer.padding_idx)
    return Linear(packed_weight)


def use_huge_pages(model: torch.nn.Module) -> int:
    """Moves the packed weights of a model into huge pages, where Linux gives them on request.

    Then a matrix that is read from memory comes faster: the CPU looks up a five-hundredth of the addresses, and fetches
    ahead beyond 4 KiB. :func:`lowbit.quantize_` does it by itself; call this for weights that were loaded, and above all
    for those mapped from a file, which then take memory of their own.

    Args:
        model: any; what it shares, such as the table of a tied head, stays shared.

    Returns:
        How many bytes were moved. Only weights of a huge page (2 MiB, usually) or more are. 0 where the system gives no huge
        pages, or gives them unasked.
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
