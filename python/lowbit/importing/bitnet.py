"""BitNet's packed ternary weights, as transformers stores them.

``weight`` uint8 [n / 4, k]: two bits of a byte are a row, of which the n / 4 first are in the lowest bits; 0, 1, 2 for
-1, 0, 1. ``weight_scale`` [1]: what the weights are divided by, or multiplied with (``linear_class`` "autobitlinear").
"""

from __future__ import annotations

import functools

import torch

from ..files.safetensors import Stored
from .codes import Matrix, Rows, SourceTensor
from .stock import Stock, load


def read_bitnet(stock: Stock) -> list[SourceTensor]:
    """The layers of a BitNet checkpoint.

    Raises:
        ValueError: weights that are not packed, a norm in the layers, or a layer that is not whole.
    """
    stock.setting("quantization_mode", ("offline",), "offline")
    stock.setting("use_rms_norm", (False,), False)
    kind = stock.setting("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    return [*(_layer(stock, layer, kind == "bitlinear") for layer in stock.layers("weight_scale")), *stock.rest()]


def _layer(stock: Stock, layer: str, divide: bool) -> Matrix:
    scale = load(stock.take(f"{layer}.weight_scale", "F32", "F16", "BF16", shape=(1,))).float()
    weight = stock.take(f"{layer}.weight", "U8", shape=(None, None))
    scale = 1 / scale if divide else scale
    n, k = 4 * weight.shape[0], weight.shape[1]
    read = functools.partial(_read, stock, weight, scale)
    return Matrix(f"{layer}.weight", "BitNet", (n, k), 2, None, False, read, weight.bytes)


def _read(stock: Stock, weight: Stored, scale: torch.Tensor, begin: int, end: int) -> Rows:
    rows = torch.arange(begin, end)
    quarter = weight.shape[0]
    digits = (stock.load_kept(weight)[rows % quarter] >> (2 * (rows // quarter)).to(torch.uint8)[:, None]) & 3
    if (digits == 3).any():
        raise ValueError(f"{weight.name} in {weight.path} has the digit 3; expected 0 to 2")
    return Rows(digits + 1, scale.expand(end - begin, 1).contiguous())
