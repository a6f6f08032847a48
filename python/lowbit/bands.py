"""Packed matrices some rows at a time: each band of whole panels is packed as a matrix of its own."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import Tensor

from . import _C
from .packed import PackedInfo

PANEL_ROWS = 16


def rows_of_band(k: int, weights: int) -> int:
    """The number of rows of k inputs in a band: whole panels with about this number of weights, at least one."""
    return max(1, weights // k // PANEL_ROWS) * PANEL_ROWS


class Bands:
    """Joins bands of packed rows into one packed matrix.

    Attributes:
        header_bytes: how many bytes a band begins with that the whole matrix does not have.
        folded: the checksum of the panels so far.
    """

    def __init__(self, info: PackedInfo, levels: Sequence[int] | None = None):
        """
        Args:
            info: of the whole matrix.
            levels: its table, where ``info`` has been made before it was fitted.
        """
        table = levels or info.levels
        self.info, self.folded = info, 0
        self._levels = None if table is None else struct.pack(f"{len(table)}b", *table)
        self.header_bytes = len(self.header())

    def add(self, packed: Tensor) -> Tensor:
        """Takes the next band, uint8 [bytes]; returns what of it belongs to the whole matrix."""
        self.folded = _C.fold_panels(packed.data_ptr(), packed.numel(), self.folded)
        return packed[self.header_bytes :]

    def header(self, rows: int | None = None, folded: int | None = None) -> bytes:
        """Of the matrix with all bands so far; or of one with so many rows and this checksum."""
        info = self.info
        return _C.packed_header(
            info.out_features if rows is None else rows, info.in_features, info.bits, info.group_size or 0,
            info.mapping == "affine", info.has_bias, self.folded if folded is None else folded, self._levels,
        )  # fmt: skip
