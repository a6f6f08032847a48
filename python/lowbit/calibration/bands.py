"""Quantizes and packs a matrix in bands of rows, to bound the memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..packed.row_bands import Bands, rows_of_band
from .grid import MatrixConfig, Quantized, table_in

_BAND_WEIGHTS = 1 << 22  # weights that are quantized at a time, to bound the memory


def packed_in_bands(
    weight: Tensor, config: MatrixConfig, quantize: Callable[[Tensor, slice], Quantized], bias: Tensor | None
) -> Tensor:
    """A packed matrix, uint8 [bytes], quantized in bands of rows by ``quantize(weights float32 [rows, k], which rows)``.

    Each band is packed as a separate matrix, whose panels become part of the whole. ``weight`` is from
    ``config.as_rounded``. A table of levels must be given as numbers.
    """
    n, k = weight.shape
    rows = rows_of_band(k, _BAND_WEIGHTS)
    if n <= rows:
        return quantize(weight.float(), slice(0, n)).pack(bias)
    table = table_in(config)
    levels = None if table is None else table.by_code
    info = config.describe((n, k), bias is not None, levels)
    result = torch.empty(info.total_bytes, dtype=torch.uint8, device="cpu")
    bands = Bands(info, levels)
    at = bands.header_bytes
    for begin in range(0, n, rows):
        band = slice(begin, min(begin + rows, n))
        packed = quantize(weight[band].float(), band).pack(None if bias is None else bias[band])
        panels = bands.add(packed)
        result[at : at + len(panels)] = panels
        at += len(panels)
    result[: bands.header_bytes] = torch.frombuffer(bytearray(bands.header()), dtype=torch.uint8)
    return result
