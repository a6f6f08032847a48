"""Layers with 1- to 8-bit weights, for CPUs.

>>> packed = lowbit.pack_linear(layer.weight, layer.bias, bits=4)
>>> y = lowbit.linear(x, packed, layer.out_features)

`ops` has all operators of lowbit. They have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import layers
from ._ops import NAMESPACE, ops

__all__ = [
    "NAMESPACE", "embedding", "layers", "linear", "linears", "ops", "pack", "pack_linear", "quantize", "rms_norm", "unpack",
]  # fmt: skip


def quantize(
    weight: Tensor, *, bits: int = 4, group_size: int = 32, affine: bool = False, search: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rounds a weight to codes.

    Args:
        weight: [n, k] float32, bfloat16 or float16.
        bits: 1 to 8.
        group_size: inputs per group, a multiple of 16; 0: one group per row.
        affine: each group also has a minimum.
        search: whether to try smaller ranges than that of the group for the least squared error, which takes longer.

    Returns:
        The codes [n, k], and the scales and minimums [n, groups]; the minimums are None unless affine.
    """
    codes, scales, mins = ops.quantize(weight.detach(), bits, group_size, affine, search)
    return codes, scales, mins if affine else None


def pack(
    codes: Tensor, scales: Tensor, mins: Tensor | None = None, bias: Tensor | None = None, *, bits: int, group_size: int
) -> Tensor:
    """Packs codes for :func:`linear` and :func:`embedding`.

    A weight is ``scale * (code - 2 ** (bits - 1))``, or ``scale * code + min`` with minimums.

    Args:
        codes: [n, k] uint8, each below ``2 ** bits``.
        scales: [n, groups] float32; stored as float16 with a float32 factor per row.
        mins: as scales.
        bias: [n] float32.
        bits: 1 to 8.
        group_size: inputs per group, a multiple of 16; 0: one group per row.

    Returns:
        uint8 [bytes], the same on every CPU.
    """
    mins = None if mins is None else mins.contiguous()
    return ops.pack(codes.contiguous(), scales.contiguous(), mins, bias, bits, group_size)


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, bits: int = 4, group_size: int = 32) -> Tensor:
    """Rounds and packs the weight and the bias of a linear layer, as :func:`quantize` and :func:`pack`."""
    codes, scales, mins = quantize(weight, bits=bits, group_size=group_size)
    return pack(codes, scales, mins, None if bias is None else bias.detach().float(), bits=bits, group_size=group_size)


def unpack(packed_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The codes, scales, minimums and bias of a packed weight; empty tensors for what it does not have."""
    return ops.unpack(packed_weight)


def linear(x: Tensor, packed_weight: Tensor, out_features: int) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight; x, of float32, bfloat16 or float16, is rounded to int8 on the fly."""
    return ops.linear(x, packed_weight, out_features)


def linears(x: Tensor, packed_weights: Sequence[Tensor], out_features: Sequence[int]) -> tuple[Tensor, ...]:
    """:func:`linear` for several packed weights. Rounds x once; the results are the same."""
    return ops.linears(x, list(packed_weights), list(out_features)).split(list(out_features), -1)


def embedding(indices: Tensor, packed_weight: Tensor, embedding_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a packed table."""
    return ops.embedding(indices, packed_weight, embedding_dim, dtype=dtype)


def rms_norm(x: Tensor, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension, computed in float32 and rounded once; weight has x's dtype."""
    return ops.rms_norm(x, weight, epsilon)
