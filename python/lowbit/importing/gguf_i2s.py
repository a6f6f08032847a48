"""BitNet's ternary weights in GGUF files of bitnet.cpp: the type I2_S.

Two bits are a weight, 0, 1, 2 for -1, 0, 1; the first of the four in a byte is in its highest bits. Behind all rows is
the scale of the whole matrix, a float32 in 32 bytes. Which four weights share a byte depends on how the program was built
that wrote the file (``quantize_i2_s`` of ``ggml-bitnet-mad.cpp``), and the file does not say it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import torch

from ..files.gguf import StoredBlocks
from .codes import Rows

# The inputs that lie next to each other in neighboring bytes; those of the next bits follow them.
_RUNS = {"x86": 32, "arm": 16}
ORDERS = (*_RUNS, "rows")  # "rows": a byte has one input of four rows, as without ACT_PARALLEL on x86
_SHIFTS = np.array([6, 4, 2, 0], np.uint8)[:, None]


def check_order(order: str | None) -> None:
    """Raises ValueError unless the argument is an order."""
    if order is not None and order not in ORDERS:
        raise ValueError(f"the order of I2_S is {order!r}; expected {', '.join(ORDERS)}")


def i2s_reader(
    stored: StoredBlocks, order: str | None, read_blocks: Callable[[StoredBlocks, int, int], np.ndarray]
) -> Callable[[int, int], Rows]:
    """What reads rows of a matrix as 2-bit codes with one scale.

    Args:
        order: one of ``ORDERS``.
        read_blocks: gives the bytes of rows, uint8 [rows, k / 4].

    Raises:
        ValueError: no order is said, or the shape is none that the order has.
    """
    n, k = stored.shape
    if order is None:
        raise ValueError(
            f"{stored.path}: {stored.name} has the type I2_S of bitnet.cpp, whose order of codes depends on the "
            "processor of the program that wrote it and is not in the file; expected it to be said: "
            f"--i2s-order {'|'.join(ORDERS)}"
        )
    if order == "rows" and n % 4:
        raise ValueError(f"{stored.path}: {stored.name} has {n} rows; expected a multiple of 4 for I2_S by rows")
    if order != "rows" and k % (4 * _RUNS[order]):
        raise ValueError(
            f"{stored.path}: {stored.name} has rows of {k} values; expected a multiple of {4 * _RUNS[order]} for "
            f"I2_S in the order of {order}"
        )

    def read(begin: int, end: int) -> Rows:
        if order == "rows":
            first = begin // 4 * 4
            data = read_blocks(stored, first, -(-end // 4) * 4).reshape(-1, 1, k)
            digits = (data >> _SHIFTS & 3).reshape(-1, k)[begin - first : end - first]
        else:
            data = read_blocks(stored, begin, end).reshape(end - begin, -1, 1, _RUNS[order])
            digits = (data >> _SHIFTS & 3).reshape(end - begin, k)
        if (digits == 3).any():
            raise ValueError(f"{stored.path}: {stored.name} has the digit 3; expected 0 to 2")
        scale = torch.full((end - begin, 1), _scale(stored), dtype=torch.float32)
        return Rows(torch.from_numpy(np.ascontiguousarray(digits + 1)), scale)

    return read


def _scale(stored: StoredBlocks) -> float:
    with open(stored.path, "rb") as file:
        file.seek(stored.offset + stored.bytes)
        data = file.read(4)
    if len(data) != 4:
        raise OSError(f"{stored.path} ended in the middle of {stored.name}: it was changed while being read")
    return float(struct.unpack("<f", data)[0])
