"""Round-to-nearest quantization of tensors, and the configs that say how to quantize a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.computed_tensor import ComputedTensor
from ..levels import FIT, TABLES, fit_levels, round_to_levels
from .groups import per_input
from .header import PackedInfo
from .matrix import Unpacked, as_levels, check_activation_bits, check_format, describe, pack
from .rotation import block_of, rotate, rotate_weight

# Above this, the range of a group or its scale could overflow float32.
_LARGEST_WEIGHT = torch.finfo(torch.float32).max / 4
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPARED = 1024  # rows that show whether a float matrix and a packed one are the same
_SAME = 0.9  # the share of weights near their codes; 0.85 if half a standard deviation of noise changes 1-bit weights


@dataclass(frozen=True)
class Config:
    """Base class of :class:`LinearConfig`, :class:`EmbeddingConfig` and :class:`ConvConfig`."""

    bits: int = 4
    group_size: int | None = 32
    mapping: str = ""  # "" means not given; __post_init__ sets it
    scale: str = "mse"
    levels: str | Sequence[int] | None = None
    rotate: bool = False
    activation_bits: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.rotate, bool):
            raise TypeError(f"rotate is {self.rotate!r}; expected True or False")
        if self.levels is None and self.mapping == "levels":
            object.__setattr__(self, "levels", FIT)
        if self.mapping == "":
            object.__setattr__(self, "mapping", "symmetric" if self.levels is None else "levels")
        check_format(self.bits, self.group_size, self.mapping)
        check_activation_bits(self.activation_bits)
        if self.scale not in ("absmax", "mse"):
            raise ValueError(f"scale is {self.scale!r}; expected 'absmax' or 'mse'")
        if self.levels is None:
            return
        if self.mapping != "levels":
            raise ValueError(f"mapping is {self.mapping!r} with levels; expected 'levels', or levels=None")
        if isinstance(self.levels, str):
            if self.levels not in (FIT, *TABLES):
                raise ValueError(
                    f"levels is {self.levels!r}; expected {FIT!r}, {', '.join(map(repr, TABLES))}, or a list of them"
                )
            if self.levels != FIT and 2**self.bits != len(TABLES[self.levels]):
                raise ValueError(f"bits is {self.bits}; expected 4 with the levels {self.levels!r}")
        elif isinstance(self.levels, Sequence | Tensor):
            object.__setattr__(self, "levels", tuple(as_levels(self.levels, self.bits).tolist()))
            if len(set(self.levels)) < 2:
                raise ValueError(f"levels are all {self.levels[0]}; expected at least two different ones")
        else:
            raise TypeError(f"levels is a {type(self.levels).__name__}; expected a str or {2**self.bits} integers")

    def rotated_inputs(self, k: int) -> int:
        """The rotation's block size for a layer with ``k`` inputs; 0 if its inputs are not rotated."""
        return block_of(k) if self.rotate else 0

    def rotated(self, x: Tensor) -> Tensor:
        """The inputs [..., k] that the layer's weights multiply: rotated, in float32; or ``x`` itself."""
        return rotate(x, self.rotated_inputs(x.shape[-1]))

    def as_rounded(self, weight: Tensor) -> Tensor:
        """The weights [n, k] to round: those for rotated inputs, in float32; or ``weight`` itself."""
        return rotate_weight(weight, self.rotated_inputs(weight.shape[1]))

    def describe(self, shape: tuple[int, int], has_bias: bool, levels: Sequence[int] | None = None) -> PackedInfo:
        """The header of a weight of ``shape`` [n, k] quantized with this config (:func:`describe`)."""
        rotated = self.rotated_inputs(shape[1])
        return describe(shape, self.bits, self.group_size, self.mapping, has_bias, levels, rotated, self.activation_bits)


@dataclass(frozen=True)
class LinearConfig(Config):
    """How to quantize a linear layer.

    Args:
        bits: 1 to 8.
        group_size: inputs that share a scale, a multiple of 16; None for one scale per output row.
        mapping: "symmetric" (scale only; the default), "affine" (scale and minimum) or, at 2, 3 and 4 bits, "levels": a
            scale, and one table for the whole matrix from codes to levels.
        scale: "absmax" covers the whole range of a group; "mse" tries smaller ranges too and keeps the one with the least
            squared error, which helps at 4 bits and below and takes several times as long.
        levels: the table: "fit" (to each matrix; :func:`lowbit.levels.fit_levels`), at 4 bits "nf4", "iq4_nl", "mxfp4" or
            "nvfp4", or ``2**bits`` integers from -127 to 127. ``levels`` implies mapping "levels"; mapping "levels" implies
            levels "fit".
        rotate: multiply the inputs by signs and a Hadamard matrix, block by block, and the weights by the inverse. This
            spreads outliers of the inputs over a block, so low bit widths lose less quality. The block size is the largest
            power of two that divides the number of inputs, at most 64; if that is below 16, inputs are not rotated.
        activation_bits: 8: the layer rounds its inputs to int8, with a scale for each 64 or fewer of them. 16: it also rounds
            the remaining error to int8, and adds the products of both. Results then differ from those of float inputs by about
            1e-5 of their size. The weights are read once for both, so decoding, which is bound by memory, takes little longer.
    """


@dataclass(frozen=True)
class EmbeddingConfig(Config):
    """How to quantize an embedding table; the arguments are those of :class:`LinearConfig`.

    ``activation_bits`` are those of a head that shares the table.
    """


@dataclass(frozen=True)
class ConvConfig(Config):
    """How to quantize a convolution; the arguments are those of :class:`LinearConfig`, with 8 bits by default.

    The default is high because convolutions hold few of a model's weights and often read its raw input.
    """

    bits: int = 8


def _check_values(values: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} is a {type(values).__name__}; expected a tensor")
    is_wrapper = type(values).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if is_wrapper and not isinstance(values, ComputedTensor):  # such as torchao's, whose memory does not hold the values
        raise TypeError(f"{name} is a {type(values).__name__}; expected a plain tensor of floating-point values")
    if values.layout is not torch.strided:
        raise TypeError(f"{name} has the layout {values.layout}; expected torch.strided (to_dense())")
    if values.dtype not in _FLOATS:
        raise TypeError(f"{name} has dtype {values.dtype}; expected float32, bfloat16, float16 or float64")
    if values.device.type != "cpu":
        raise ValueError(f"{name} is on {values.device}; expected the CPU")
    if values.shape != shape:
        raise ValueError(f"{name} has shape {list(values.shape)}; expected {list(shape)}")
    low, high = (float(end) for end in torch.aminmax(values.detach()))  # one pass; any NaN makes both NaN
    if not math.isfinite(high - low):
        bad = values.numel() - int(torch.isfinite(values).sum())
        if bad:
            raise ValueError(f"{name} has {bad} NaN or infinite values; expected finite values")
    if max(-low, high) > _LARGEST_WEIGHT:
        raise ValueError(f"{name} reaches from {low:g} to {high:g}; expected magnitudes up to {_LARGEST_WEIGHT:g}")


def refuse_nan(name: str, values: Tensor) -> None:
    """Raises ValueError for a NaN in a tensor that stays float. Some models store infinite limits."""
    plain = values.layout is torch.strided and values.dtype in _FLOATS and values.numel()
    if plain and bool(values.max().isnan()):  # the maximum of values with a NaN is NaN
        raise ValueError(f"{name} has NaN values; expected numbers: the model is damaged, or its training has failed")


def is_same_weight(stored: Unpacked, weight: Tensor) -> bool:
    """Whether a float matrix [n, k] is the one that was quantized to ``stored``: not another one, or one trained from it.

    Its weights lie within one step of their levels, or beyond the outermost one; calibration can move them by more than the
    half step of rounding. With up to 4 levels a step is as large as most weights; there the nearest level counts. GPTQ gives a
    fifth of the weights another level then, as training does, so its matrices count as others: keeping both loses nothing.
    """
    if stored.codes.shape != weight.shape:
        return False
    size, k = stored.group_size, weight.shape[1]
    scales, mins = (None if each is None else per_input(each, size, k) for each in (stored.scales, stored.mins))
    x = rotate_weight(weight.float(), stored.rotated_inputs)
    x = (x if mins is None else x - mins) / scales  # a scale of zero gives NaN, which is near, or infinity
    levels, places = stored.factors().unique(return_inverse=True)
    reach = levels.diff() * (1.0 if len(levels) > 4 else 0.5)
    infinite = torch.tensor([torch.inf])
    lowest, highest = torch.cat([-infinite, levels[1:] - reach]), torch.cat([levels[:-1] + reach, infinite])
    place = places[stored.codes.long()]
    far = (x < lowest[place]) | (x > highest[place])
    return float(far.float().mean()) <= 1 - _SAME


def check_layer(weight: Tensor, bias: Tensor | None, config: Config, prefix: str = "") -> None:
    """Raises TypeError or ValueError for weights that the quantizer or the packer would refuse."""
    if isinstance(weight, Tensor) and (weight.dim() != 2 or weight.numel() == 0):
        raise ValueError(f"{prefix}weight has shape {list(weight.shape)}; expected [n, k] with n and k at least 1")
    _check_values(weight, f"{prefix}weight", weight.shape if isinstance(weight, Tensor) else ())
    n, k = weight.shape
    if bias is not None:
        _check_values(bias, f"{prefix}bias", (n,))
    config.describe((n, k), bias is not None)


def table_of(config: Config, weight: Tensor, importance: Tensor | None = None) -> tuple[int, ...]:
    """The level table of a config with mapping "levels".

    If the config says "fit", they are fitted to ``weight`` [n, k], as it is rounded, with squared errors weighted by
    ``importance`` [k] or [n, k].
    """
    if config.levels == FIT:
        return fit_levels(weight, config.bits, config.group_size, importance)
    return TABLES[config.levels] if isinstance(config.levels, str) else tuple(config.levels or ())


def quantize_tensor(weight: Tensor, config: Config, bias: Tensor | None = None) -> Tensor:
    """Quantizes a weight matrix by round-to-nearest and packs it.

    Args:
        weight: [n, k] of any floating-point dtype, finite, on the CPU.
        config: a :class:`LinearConfig`, :class:`EmbeddingConfig` or :class:`ConvConfig`: bits, group size, mapping and
            choice of scale.
        bias: [n] or None; stored as float32.

    Returns:
        uint8 [bytes], as :func:`lowbit.pack`.

    Raises:
        TypeError, ValueError: a wrong type, shape or device, or a value that is not finite.
    """
    if not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; expected a LinearConfig or an EmbeddingConfig, or a ConvConfig")
    check_layer(weight, bias, config)
    if weight.dtype == torch.float64:
        weight = weight.float()
    rotated = config.rotated_inputs(weight.shape[1])
    weight = config.as_rounded(weight.detach())
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    float_bias = None if bias is None else bias.detach().float()
    if config.mapping == "levels":
        levels = table_of(config, weight)
        codes, scales = round_to_levels(weight, levels, config.group_size, search=config.scale == "mse")
        return pack(
            codes, scales, None, float_bias, bits=config.bits, group_size=config.group_size, levels=levels,
            rotated_inputs=rotated, activation_bits=config.activation_bits,
        )  # fmt: skip
    affine = config.mapping == "affine"
    codes, scales, mins = torch.ops.lowbit.quantize(
        weight.detach(), config.bits, config.group_size or 0, affine, config.scale == "mse"
    )
    return pack(
        codes,
        scales,
        mins if affine else None,
        float_bias,
        bits=config.bits,
        group_size=config.group_size,
        mapping=config.mapping,
        rotated_inputs=rotated,
        activation_bits=config.activation_bits,
    )
