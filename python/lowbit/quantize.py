"""Round-to-nearest quantisation of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _C, ops

# Beyond this, the range of a group or its scale could overflow float32.
_LARGEST_WEIGHT = torch.finfo(torch.float32).max / 4


@dataclass(frozen=True)
class Config:
    """What :class:`LinearConfig` and :class:`EmbeddingConfig` have in common."""

    bits: int = 4
    group_size: int | None = 32
    mapping: str = "symmetric"
    scale: str = "mse"

    def __post_init__(self):
        ops.check_format(self.bits, self.group_size, self.mapping)
        if self.scale not in ("absmax", "mse"):
            raise ValueError(f"scale is {self.scale!r}; expected 'absmax' or 'mse'")


@dataclass(frozen=True)
class LinearConfig(Config):
    """How to quantise a linear layer.

    Args:
        bits: 1 to 8.
        group_size: inputs that share a scale, a multiple of 16; None for one scale per output row.
        mapping: "symmetric" (scale only) or "affine" (scale and minimum).
        scale: "absmax" covers the whole range of a group; "mse" tries smaller ranges too and keeps the one with the least
            squared error, which pays at 4 bits and below and takes several times as long.
    """


@dataclass(frozen=True)
class EmbeddingConfig(Config):
    """How to quantise an embedding table; the arguments are those of :class:`LinearConfig`."""


def _check_values(values: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} is a {type(values).__name__}; expected a tensor")
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(f"{name} has dtype {values.dtype}; expected a floating-point type")
    if values.device.type != "cpu":
        raise ValueError(f"{name} is on {values.device}; expected the CPU")
    if values.shape != shape:
        raise ValueError(f"{name} has shape {list(values.shape)}; expected {list(shape)}")
    low, high = (float(end) for end in torch.aminmax(values.detach()))  # one pass, and a NaN anywhere makes both NaN
    if not math.isfinite(high - low):
        bad = values.numel() - int(torch.isfinite(values).sum())
        if bad:
            raise ValueError(f"{name} has {bad} NaN or infinite values; expected finite values")
    if max(-low, high) > _LARGEST_WEIGHT:
        raise ValueError(f"{name} reaches from {low:g} to {high:g}; expected magnitudes up to {_LARGEST_WEIGHT:g}")


def check_layer(weight: Tensor, bias: Tensor | None, config: Config, prefix: str = "") -> None:
    """Refuses whatever the quantiser or the packer would refuse, before either starts."""
    if isinstance(weight, Tensor) and (weight.dim() != 2 or weight.numel() == 0):
        raise ValueError(f"{prefix}weight has shape {list(weight.shape)}; expected [n, k] with n and k at least 1")
    _check_values(weight, f"{prefix}weight", weight.shape if isinstance(weight, Tensor) else ())
    n, k = weight.shape
    if bias is not None:
        _check_values(bias, f"{prefix}bias", (n,))
    _C.packed_bytes(n, k, config.bits, config.group_size or 0, config.mapping == "affine", bias is not None)


def quantize_tensor(weight: Tensor, config: LinearConfig | EmbeddingConfig, bias: Tensor | None = None) -> Tensor:
    """Quantises a weight matrix by round-to-nearest and packs it.

    Args:
        weight: [n, k] of any floating-point dtype, finite, on the CPU.
        config: bits, group size, mapping and choice of scale.
        bias: [n] or None; stored as float32.

    Returns:
        uint8 [bytes], as :func:`lowbit.pack`.

    Raises:
        TypeError, ValueError: a wrong type, shape or device, or a value that is not finite.
    """
    if not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; expected a LinearConfig or an EmbeddingConfig")
    check_layer(weight, bias, config)
    if weight.dtype == torch.float64:
        weight = weight.float()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    affine = config.mapping == "affine"
    codes, scales, mins = torch.ops.lowbit.quantize(
        weight.detach(), config.bits, config.group_size or 0, affine, config.scale == "mse"
    )
    return ops.pack(
        codes,
        scales,
        mins if affine else None,
        None if bias is None else bias.detach().float(),
        bits=config.bits,
        group_size=config.group_size,
        mapping=config.mapping,
    )
