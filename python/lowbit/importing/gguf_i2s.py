"""Reads the ternary type I2_S of bitnet.cpp's GGUF files.

A byte has four 2-bit digits, the first in its highest bits; the digits 0, 1 and 2 mean -1, 0 and 1. After all rows come 32
bytes, of which the first four are a float32: the scale of the whole matrix. Which four weights share a byte depends on the
build of the program that wrote the file (``quantize_i2_s`` in bitnet.cpp's ``ggml-bitnet-mad.cpp``), which the file does not
record, so the order is an argument.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..checkpoint.codes import Rows
from ..files.gguf_reader import StoredBlocks
from ..files.io import read_bytes, read_row_bytes

# Order -> run length: number of consecutive bytes in which the same bits hold consecutive inputs.
_RUNS = {"x86": 32, "arm": 16}
ORDERS = (*_RUNS, "rows")  # "rows": a byte holds one input of four rows, as in x86 builds without ACT_PARALLEL
_SHIFTS = np.array([6, 4, 2, 0], np.uint8)[:, None]


def check_order(order: str | None) -> None:
    """Raises ValueError unless ``order`` is one of ``ORDERS``."""
    if order is not None and order not in ORDERS:
        raise ValueError(f"the order of I2_S is {order!r}; expected {', '.join(ORDERS)}")


def i2s_reader(stored: StoredBlocks, order: str | None) -> Callable[[int, int], Rows]:
    """A function that reads rows [begin, end) of a matrix as 2-bit codes with one scale.

    Args:
        stored: the matrix [n, k] in its file.
        order: one of ``ORDERS``; None is refused.

    Returns:
        A function of ``begin`` and ``end``. It raises ValueError for a digit 3, and OSError for a file that became shorter.

    Raises:
        ValueError: the order is None or incompatible with the shape.
    """
    n, k = stored.shape
    if order is None:
        raise ValueError(
            f"{stored.path}: {stored.name} has the type I2_S of bitnet.cpp, whose order of codes depends on the "
            "processor of the program that wrote it, and is not in the file; expected the option "
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
            data = read_row_bytes(stored, first, -(-end // 4) * 4).numpy().reshape(-1, 1, k)
            digits = (data >> _SHIFTS & 3).reshape(-1, k)[begin - first : end - first]
        else:
            data = read_row_bytes(stored, begin, end).numpy().reshape(end - begin, -1, 1, _RUNS[order])
            digits = (data >> _SHIFTS & 3).reshape(end - begin, k)
        if (digits == 3).any():
            raise ValueError(f"{stored.path}: {stored.name} has the digit 3; expected 0 to 2")
        scale = read_bytes(stored, stored.bytes, stored.bytes + 4).view(torch.float32)  # after the last row
        return Rows(torch.from_numpy(np.ascontiguousarray(digits + 1)), scale.repeat(end - begin, 1))

    return read
