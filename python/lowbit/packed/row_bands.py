"""Packs a matrix in bands of rows: each band consists of whole panels and is packed as a separate matrix."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import Tensor

from .. import _C
from .header import PackedInfo

PANEL_ROWS = 16


def rows_of_band(k: int, weights: int) -> int:
    """Rows per band for rows of k inputs: as many whole panels as hold about ``weights`` weights, at least one."""
    return max(1, weights // k // PANEL_ROWS) * PANEL_ROWS


class Bands:
    """Joins bands of packed rows into one packed matrix.

    Attributes:
        header_bytes: the size of a band's header, which is dropped when bands are joined.
        folded: the checksum of all panels so far.
    """

    def __init__(self, info: PackedInfo, levels: Sequence[int] | None = None):
        """
        Args:
            info: describes the whole matrix.
            levels: its table, if ``info`` was made before the table was fitted.
        """
        table = levels or info.levels
        self.info, self.folded = info, 0
        self._levels = None if table is None else struct.pack(f"{len(table)}b", *table)
        self.header_bytes = len(self.header())

    def add(self, packed: Tensor) -> Tensor:
        """Adds the next band, uint8 [bytes]; returns its panels, the next bytes of the whole matrix."""
        self.folded = _C.fold_panels(packed.data_ptr(), packed.numel(), self.folded)
        return packed[self.header_bytes :]

    def header(self, rows: int | None = None, folded: int | None = None) -> bytes:
        """The header of the matrix with all bands so far, or with ``rows`` rows and the checksum ``folded``."""
        info = self.info
        return _C.packed_header(
            info.out_features if rows is None else rows, info.in_features, info.bits, info.group_size or 0,
            info.mapping == "affine", info.has_bias, self.folded if folded is None else folded, self._levels,
            info.rotated_inputs, info.activation_bits,
        )  # fmt: skip
