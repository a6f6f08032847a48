"""What the packed format can hold, in torch: stored scales, levels and codes of a matrix in groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import pack
from ..quantize import EmbeddingConfig, LinearConfig

Config = LinearConfig | EmbeddingConfig

_SCALE_BITS = 11  # significant bits of a float16
# Scales of a row that are smaller than its largest by more than this become 0. float16 holds 29 powers of two with all
# bits; the rest is room for a largest scale that grows while codes are chosen.
_SMALLEST = 2.0**-20


def stored(values: Tensor, largest: Tensor) -> Tensor:
    """Scales or mins as the format stores them: 11 significant bits, behind one power of two per row.

    :func:`lowbit.pack` stores such values without another rounding.

    Args:
        values: float32 [n, ...].
        largest: float32 [n, 1], the largest magnitude in each row, or an estimate of it.
    """
    fraction, exponent = torch.frexp(values)
    rounded = torch.ldexp((fraction * 2**_SCALE_BITS).round(), exponent - _SCALE_BITS)
    return torch.where(values.abs() < largest * _SMALLEST, 0.0, rounded)


def levels_near(values: Tensor, scale: Tensor, min: Tensor | None, bits: int) -> Tensor:
    """The levels nearest to ``values``, as floats.

    Symmetric: -2^(b-1) to 2^(b-1) - 1, at 1 bit -1 and 1. Affine: 0 to 2^b - 1.
    """
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    if min is not None:
        return ((values - min) * inverse).round_().clamp_(0, 2**bits - 1)
    if bits == 1:
        return torch.where(values * inverse >= 0, 1.0, -1.0)
    half = 2 ** (bits - 1)
    return (values * inverse).round_().clamp_(-half, half - 1)


@dataclass
class Quantised:
    """A matrix in the terms of the format."""

    levels: Tensor  # float32 [n, k]; symmetric -2^(b-1) .. 2^(b-1) - 1 (1 bit: -1, 1), affine 0 .. 2^b - 1
    scales: Tensor  # float32 [n, groups], as stored
    mins: Tensor | None  # float32 [n, groups], as stored; None: symmetric
    config: Config

    def per_input(self, values: Tensor) -> Tensor:
        """[n, groups] -> [n, k]"""
        n, k = self.levels.shape
        group = self.config.group_size or k
        return values.repeat_interleave(group, 1)[:, :k]

    def dequantize(self) -> Tensor:
        """The weights, float32 [n, k]."""
        weight = self.per_input(self.scales) * self.levels
        return weight if self.mins is None else weight + self.per_input(self.mins)

    def codes(self) -> Tensor:
        """uint8 [n, k], as :func:`lowbit.pack` takes them."""
        if self.mins is not None:
            return self.levels.to(torch.uint8)
        if self.config.bits == 1:
            return (self.levels > 0).to(torch.uint8)
        return (self.levels + 2 ** (self.config.bits - 1)).to(torch.uint8)

    def pack(self, bias: Tensor | None = None) -> Tensor:
        """As :func:`lowbit.pack`: uint8 [bytes]."""
        config = self.config
        return pack(
            self.codes(),
            self.scales.contiguous(),
            None if self.mins is None else self.mins.contiguous(),
            None if bias is None else bias.detach().float(),
            bits=config.bits,
            group_size=config.group_size,
            mapping=config.mapping,
        )


def nearest(weight: Tensor, scales: Tensor, mins: Tensor | None, config: Config) -> Quantised:
    """Rounds each weight to the nearest level of its group."""
    quantised = Quantised(weight, scales, mins, config)
    quantised.levels = levels_near(
        weight, quantised.per_input(scales), None if mins is None else quantised.per_input(mins), config.bits
    )
    return quantised
