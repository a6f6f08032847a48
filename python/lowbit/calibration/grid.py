"""Computes scales, levels and codes of a matrix in torch, rounded as the packed format stores them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..levels import TABLES, Table
from ..packed.groups import per_input
from ..packed.matrix import pack
from ..packed.rounding import ConvConfig, EmbeddingConfig, LinearConfig, table_of

MatrixConfig = LinearConfig | EmbeddingConfig | ConvConfig

_SCALE_BITS = 11  # significant bits of a float16
# Scales below this fraction of the row's largest become 0. float16 has 29 powers of two with full precision; the rest is
# headroom for a largest scale that grows while codes are chosen.
_SMALLEST = 2.0**-20
_FITTED = 1 << 16  # a table of levels is fitted to this many weights, or up to twice as many


def stored(values: Tensor, largest: Tensor) -> Tensor:
    """Scales or mins rounded to 11 significant bits, so that :func:`lowbit.pack` stores them exactly.

    Args:
        values: float32 [n, ...].
        largest: float32 [n, 1], the largest magnitude of each row, or an estimate.
    """
    fraction, exponent = torch.frexp(values)
    rounded = torch.ldexp((fraction * 2**_SCALE_BITS).round(), exponent - _SCALE_BITS)
    return torch.where(values.abs() < largest * _SMALLEST, 0.0, rounded)


def with_table(config: MatrixConfig, weight: Tensor, importance: Tensor | None = None) -> MatrixConfig:
    """The config with its table of levels, if any, as numbers.

    The levels "fit" are fitted to ``weight`` [n, k], with squared errors weighted by ``importance`` [k].
    """
    if config.mapping != "levels" or not isinstance(config.levels, str):
        return config
    step = max(1, weight.numel() // _FITTED)
    return replace(config, levels=table_of(config, weight[::step], importance))


def table_in(config: MatrixConfig) -> Table | None:
    """The level table of a config; None: its levels are consecutive integers."""
    if config.mapping != "levels":
        return None
    if config.levels is None or isinstance(config.levels, str) and config.levels not in TABLES:
        raise ValueError(f"levels are {config.levels!r}; expected numbers: with_table fits them to a matrix")
    return Table(torch.tensor(TABLES[config.levels] if isinstance(config.levels, str) else config.levels))


def levels_near(values: Tensor, scale: Tensor, min: Tensor | None, bits: int, table: Table | None = None) -> Tensor:
    """The nearest levels of ``values``, as floats.

    Symmetric: -2^(b-1) to 2^(b-1) - 1, at 1 bit -1 and 1. Affine: 0 to 2^b - 1. With a table: its levels.
    """
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    if table is not None:
        return table.nearest(values * inverse)[1]
    if min is not None:
        return ((values - min) * inverse).round_().clamp_(0, 2**bits - 1)
    if bits == 1:
        return torch.where(values * inverse >= 0, 1.0, -1.0)
    half = 2 ** (bits - 1)
    return (values * inverse).round_().clamp_(-half, half - 1)


@dataclass
class Quantized:
    """A quantized matrix: levels, scales and mins; with ``config.rotate``, of the weights for rotated inputs."""

    # float32 [n, k]; symmetric -2^(b-1) .. 2^(b-1) - 1 (1 bit: -1, 1), affine 0 .. 2^b - 1, or levels of the config's table
    levels: Tensor
    scales: Tensor  # float32 [n, groups], as stored
    mins: Tensor | None  # float32 [n, groups], as stored; None: symmetric
    config: MatrixConfig

    def per_input(self, values: Tensor) -> Tensor:
        """Repeats the values of groups [n, groups] for their inputs: [n, k]."""
        return per_input(values, self.config.group_size, self.levels.shape[1])

    def dequantize(self) -> Tensor:
        """The weights, float32 [n, k]."""
        weight = self.per_input(self.scales) * self.levels
        return weight if self.mins is None else weight + self.per_input(self.mins)

    def codes(self) -> Tensor:
        """The codes for :func:`lowbit.pack`, uint8 [n, k]."""
        table = table_in(self.config)
        if table is not None:
            return table.codes(self.levels)
        if self.mins is not None:
            return self.levels.to(torch.uint8)
        if self.config.bits == 1:
            return (self.levels > 0).to(torch.uint8)
        return (self.levels + 2 ** (self.config.bits - 1)).to(torch.uint8)

    def pack(self, bias: Tensor | None = None) -> Tensor:
        """The same as :func:`lowbit.pack`: uint8 [bytes]."""
        config, table = self.config, table_in(self.config)
        return pack(
            self.codes(),
            self.scales.contiguous(),
            None if self.mins is None else self.mins.contiguous(),
            None if bias is None else bias.detach().float(),
            bits=config.bits,
            group_size=config.group_size,
            mapping=config.mapping,
            levels=None if table is None else table.by_code,
            rotated_inputs=config.rotated_inputs(self.levels.shape[1]),
            activation_bits=config.activation_bits,
        )


def nearest(weight: Tensor, scales: Tensor, mins: Tensor | None, config: MatrixConfig) -> Quantized:
    """Rounds each weight to the nearest level of its group."""
    quantized = Quantized(weight, scales, mins, config)
    quantized.levels = levels_near(
        weight, quantized.per_input(scales), None if mins is None else quantized.per_input(mins), config.bits, table_in(config)
    )
    return quantized
