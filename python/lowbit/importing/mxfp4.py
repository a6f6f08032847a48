"""Reads MXFP4 as stored by gpt-oss: 4-bit floats, 32 of which share a power of two (OCP Microscaling Formats 1.0).

Tensors for each parameter NAME of the experts:

* ``NAME_blocks``: uint8 [experts, out, in / 32, 16]: two codes per byte, the first in its low half;
* ``NAME_scales``: uint8 [experts, out, in / 32]: the exponent of two, plus 127; 255 is NaN.

Biases are float tensors.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..checkpoint.codes import Float, Matrix, Rows, Stacked
from ..files.io import read_bytes
from ..files.safetensors import Stored
from ..levels import TABLES
from .stock import Stock

_LEAVES = ("gate_up_proj", "down_proj")
_GROUP = 32


def nibbles(pairs: Tensor) -> Tensor:
    """Unpacks the codes of bytes [..., size], the first in the low half: uint8 [..., 2 size]."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def powers_of_two(codes: Tensor) -> Tensor:
    """Decodes exponents of two plus 127 to float32; 255 is NaN."""
    return torch.where(codes == 255, torch.nan, torch.ldexp(torch.ones(codes.shape), codes.int() - 127))


def _read(blocks: Stored, scales: Stored, expert: int, begin: int, end: int) -> Rows:
    _, n, groups, _ = blocks.shape
    first, last = (expert * n + begin) * groups, (expert * n + end) * groups
    codes = nibbles(read_bytes(blocks, first * 16, last * 16)).view(end - begin, groups * _GROUP)
    powers = powers_of_two(read_bytes(scales, first, last)).view(end - begin, groups)
    return Rows(codes, powers / 2)  # a level is twice the value


def _matrix(name: str, blocks: Stored, scales: Stored, expert: int) -> Matrix:
    experts, n, groups, _ = blocks.shape
    return Matrix(
        f"{name}, expert {expert}", "MXFP4", (n, groups * _GROUP), 4, _GROUP, False,
        partial(_read, blocks, scales, expert), (blocks.bytes + scales.bytes) // experts, TABLES["mxfp4"],
    )  # fmt: skip


def read_mxfp4(stock: Stock) -> list[Stacked | Float]:
    """The tensors of an MXFP4 checkpoint.

    Raises:
        ValueError: a tensor is missing, or has another shape or dtype.
    """
    tensors: list[Stacked | Float] = []
    for leaf in _LEAVES:
        for holder in stock.layers(f"{leaf}_blocks"):
            name = f"{holder}.{leaf}"
            blocks = stock.take(f"{name}_blocks", "U8", shape=(None, None, None, 16))
            scales = stock.take(f"{name}_scales", "U8", shape=blocks.shape[:3])
            experts = blocks.shape[0]
            tensors.append(Stacked(name, experts, partial(_matrix, name, blocks, scales), blocks.bytes + scales.bytes))
    return tensors + stock.rest()
