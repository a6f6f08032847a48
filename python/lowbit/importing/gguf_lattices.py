"""Codes of ggml's lattice types, IQ1 to IQ3, whose blocks hold indices of vectors with 4 or 8 weights.

All weights of a type are a few levels times the scale of a group, so the codes of a table of levels keep them, in 3 or 4 bits
instead of the lattice's 1.6 to 3.4. The package gguf has the vectors and computes the weights; the scales are read here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from .gguf_blocks import BlockType, Decoded, half

Dequantize = Callable[[np.ndarray], np.ndarray]  # of gguf: blocks uint8 [rows, bytes] -> float32 [rows, inputs]


@dataclass(frozen=True)
class Lattice:
    """A type: positive levels, and the scales [rows, groups] of blocks [rows, blocks, bytes]."""

    magnitudes: tuple[int, ...]
    group_size: int
    scales: Callable[[np.ndarray], np.ndarray]

    def block_type(self, dequantize: Dequantize) -> BlockType:
        bits = 3 if len(self.magnitudes) <= 4 else 4
        levels = sorted((*self.magnitudes, *(-each for each in self.magnitudes)))
        levels += [levels[-1]] * ((1 << bits) - len(levels))  # codes that no weight has
        return BlockType(bits, self.group_size, False, partial(self._decode, dequantize, levels), tuple(levels))

    def _decode(self, dequantize: Dequantize, levels: list[int], blocks: np.ndarray) -> Decoded:
        rows = len(blocks)
        scales = self.scales(blocks).reshape(rows, -1)
        weights = dequantize(blocks.reshape(rows, -1)).reshape(rows, scales.shape[1], self.group_size)
        with np.errstate(divide="ignore"):
            found = np.where(scales == 0, 0, 1 / scales)[..., None] * weights
        middles = (np.array(levels[1:], np.float32) + levels[:-1]) / 2
        return np.searchsorted(middles, found).astype(np.uint8).reshape(rows, -1), scales, None


def _words(blocks: np.ndarray, begin: int, end: int, form: str) -> np.ndarray:
    """Little-endian numbers in bytes [begin, end) of every block."""
    return np.ascontiguousarray(blocks[..., begin:end]).view(form)


def _nibbles(blocks: np.ndarray, begin: int) -> np.ndarray:
    """The low and the high half of each byte from ``begin`` on, in turn, as float32."""
    bytes_ = blocks[..., begin:]
    return np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(*blocks.shape[:2], -1).astype(np.float32)


def _of_high_bits(begin: int, end: int, factor: float, every: int, blocks: np.ndarray) -> np.ndarray:
    """Scales in the highest 4 bits of every second word, or of all."""
    codes = (_words(blocks, begin, end, "<u4")[..., every - 1 :: every] >> 28).astype(np.float32)
    return half(blocks, 0)[..., None] * (0.5 + codes) * factor


def _of_halves(begin: int, blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0)[..., None] * (0.5 + _nibbles(blocks, begin)) * 0.25


def _iq3_s(blocks: np.ndarray) -> np.ndarray:
    return half(blocks, 0)[..., None] * (1 + 2 * _nibbles(blocks, 106))


def _iq1_s(blocks: np.ndarray) -> np.ndarray:
    codes = (_words(blocks, 34, 50, "<u2") >> 12 & 7).astype(np.float32)
    return half(blocks, 0)[..., None] * (2 * codes + 1) / 8


def _iq1_m(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 48, 56, "<u2")  # the scale of the block is in their highest bits
    whole = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=-1).view("<f2").astype(np.float32)
    codes = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(*blocks.shape[:2], -1)
    return whole[..., None] * (2 * codes.astype(np.float32) + 1) / 8


_IQ1, _IQ2 = (1, 7, 9), (8, 25, 43)  # IQ1: -1, 0 or 1, plus or minus an eighth, in eighths
LATTICES = {
    "IQ1_S": Lattice(_IQ1, 32, _iq1_s),
    "IQ1_M": Lattice(_IQ1, 16, _iq1_m),
    "IQ2_XXS": Lattice(_IQ2, 32, partial(_of_high_bits, 2, 66, 0.25, 2)),
    "IQ2_XS": Lattice(_IQ2, 16, partial(_of_halves, 66)),
    "IQ2_S": Lattice(_IQ2, 16, partial(_of_halves, 74)),
    "IQ3_XXS": Lattice((4, 12, 20, 28, 36, 44, 52, 62), 32, partial(_of_high_bits, 66, 98, 0.5, 1)),
    "IQ3_S": Lattice((1, 3, 5, 7, 9, 11, 13, 15), 32, _iq3_s),
}
