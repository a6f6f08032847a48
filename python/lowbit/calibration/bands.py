"""Packs a matrix some rows at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _C, ops
from .grid import Config, Quantised, table_in

_PANEL_ROWS = 16
_BAND_WEIGHTS = 1 << 22  # of a matrix that are quantised at a time, which bounds the memory


def packed_in_bands(
    weight: Tensor, config: Config, quantise: Callable[[Tensor], Quantised], bias: Tensor | None
) -> Tensor:
    """A packed matrix, uint8 [bytes], of what ``quantise`` makes of its rows, some at a time.

    Each band is packed as a matrix of its own, whose panels are the whole one's. A table of levels is there in numbers.
    """
    n, k = weight.shape
    rows = max(1, _BAND_WEIGHTS // k // _PANEL_ROWS) * _PANEL_ROWS
    if n <= rows:
        return quantise(weight.float()).pack(bias)
    table = table_in(config)
    levels = None if table is None else table.by_code
    info = ops.describe((n, k), config.bits, config.group_size, config.mapping, bias is not None, levels)
    result = torch.empty(info.total_bytes, dtype=torch.uint8, device="cpu")
    header_bytes = 64 if levels is None else 128
    folded, at = 0, header_bytes
    for begin in range(0, n, rows):
        band = slice(begin, min(begin + rows, n))
        packed = quantise(weight[band].float()).pack(None if bias is None else bias[band])
        folded = _C.fold_panels(packed.data_ptr(), packed.numel(), folded)
        count = packed.numel() - header_bytes
        result[at : at + count] = packed[header_bytes:]
        at += count
    held = None if levels is None else struct.pack(f"{2**config.bits}b", *levels)
    header = _C.packed_header(n, k, info.bits, info.group_size or 0, info.mapping == "affine", info.has_bias, folded, held)
    result[:header_bytes] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return result
