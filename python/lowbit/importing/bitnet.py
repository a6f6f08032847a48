"""Reads BitNet's packed ternary weights, as transformers packs them (``transformers.integrations.bitnet``).

Tensors of a layer with n outputs and k inputs:

* ``weight``: uint8 [n / 4, k]; bits 2 i and 2 i + 1 of a byte in row r are the digit of output ``i * n / 4 + r``;
* ``weight_scale``: float [1].

The digits 0, 1 and 2 mean -1, 0 and 1. With ``linear_class`` "bitlinear" weights are ``value / weight_scale``, with
"autobitlinear" ``value * weight_scale``.
"""

from __future__ import annotations

import torch

from ..checkpoint.codes import Matrix, Rows, SourceTensor, rows_of_grid
from .stock import Stock


def read_bitnet(stock: Stock) -> list[SourceTensor]:
    """The tensors of a BitNet checkpoint.

    Raises:
        ValueError: the weights are not packed; the layers have a norm; or a tensor of a layer is missing or has another shape
            or dtype. When rows are read: a digit is 3.
    """
    stock.setting("quantization_mode", ("offline",), "offline")
    stock.setting("use_rms_norm", (False,), False)
    kind = stock.setting("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    return [*(_layer(stock, layer, kind == "bitlinear") for layer in stock.layers("weight_scale")), *stock.rest()]


def _layer(stock: Stock, layer: str, divide: bool) -> Matrix:
    scale = stock.number(f"{layer}.weight_scale")
    weight = stock.take(f"{layer}.weight", "U8", shape=(None, None))
    scale = 1 / scale if divide else scale
    quarter, k = weight.shape

    def read(begin: int, end: int) -> Rows:
        rows = torch.arange(begin, end)
        digits = (stock.load_kept(weight)[rows % quarter] >> (2 * (rows // quarter)).to(torch.uint8)[:, None]) & 3
        if (digits == 3).any():
            raise ValueError(f"{weight.name} in {weight.path} has the digit 3; expected 0 to 2")
        return rows_of_grid(digits + 1, scale.expand(end - begin, 1))

    return Matrix(f"{layer}.weight", "BitNet", (4 * quarter, k), 2, None, False, read, weight.bytes)
