"""Reads tensors of safetensors files with torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..packed.rounding import refuse_nan
from .io import read_bytes, read_row_bytes
from .safetensors import Stored

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CHUNK = 8 << 20


def read_rows(stored: Stored, begin: int, end: int) -> Tensor:
    """Rows [begin, end) of a floating-point tensor, in its own dtype."""
    return read_row_bytes(stored, begin, end).view(DTYPES[stored.dtype]).view(end - begin, *stored.shape[1:])


def chunks(stored: Stored) -> Iterator[Tensor]:
    """All bytes of a tensor, some megabytes at a time."""
    for begin in range(0, stored.bytes, _CHUNK):
        yield read_bytes(stored, begin, min(begin + _CHUNK, stored.bytes))


def check_numbers(name: str, dtype: str, data: Tensor) -> None:
    """As :func:`refuse_nan`, for some bytes of a tensor of a safetensors dtype."""
    if dtype in DTYPES:
        refuse_nan(name, data.view(DTYPES[dtype]))


def same_bytes(first: Stored, second: Stored) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(torch.equal(a, b) for a, b in zip(chunks(first), chunks(second), strict=True))
