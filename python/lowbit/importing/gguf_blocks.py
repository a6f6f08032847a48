"""Decodes the blocks of ggml's types into codes and scales. ``_TYPES`` lists the types.

A block holds consecutive inputs of one row. A decoder takes blocks as uint8 [rows, blocks, bytes] and returns codes
[rows, inputs], scales and mins [rows, groups]. The layouts are those of llama.cpp's ``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..checkpoint.codes import Rows
from ..levels import TABLES

Decoded = tuple[np.ndarray, np.ndarray, np.ndarray | None]

NL4, FP4 = TABLES["iq4_nl"], TABLES["mxfp4"]
_CRUMBS = np.arange(0, 8, 2, dtype=np.uint8)[:, None]  # shifts of the four 2-bit fields of a byte


@dataclass(frozen=True)
class BlockType:
    """How to read a type; the fields are those of :class:`lowbit.checkpoint.codes.Matrix`."""

    bits: int
    group_size: int
    affine: bool
    decode: Callable[[np.ndarray], Decoded]
    levels: tuple[int, ...] | None = None


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at offset ``at`` of every block, as float32 [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1)


def _nibbles(bytes_: np.ndarray) -> np.ndarray:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


def _bits(bytes_: np.ndarray) -> np.ndarray:
    return np.unpackbits(bytes_, axis=-1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> Decoded:
    return _flat(_nibbles(blocks[..., 2:])), half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> Decoded:
    return _flat(_nibbles(blocks[..., 4:])), half(blocks, 0), half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> Decoded:
    return _flat(_nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4), half(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> Decoded:
    return _flat(_nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4), half(blocks, 0), half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Decoded:
    return _flat(blocks[..., 2:] ^ 0x80), half(blocks, 0), None


def _q1_0(blocks: np.ndarray) -> Decoded:
    return _flat(_bits(blocks[..., 2:])), half(blocks, 0), None


def _from_minus_one(codes: np.ndarray, scales: np.ndarray) -> Decoded:
    """Codes 0 to 3 mean -1 to 2 times the scale; with the opposite sign of the scale they are lowbit's -2 to 1."""
    return _flat(3 - codes), -scales, None


def _q2_0(blocks: np.ndarray) -> Decoded:
    return _from_minus_one((blocks[..., 2:, None] >> _CRUMBS[:, 0]) & 3, half(blocks, 0))


def _tq1_0(blocks: np.ndarray) -> Decoded:
    """Five base-3 digits in a byte, as a fraction of 256: each digit is the overflow when the byte is tripled."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]

    def digits(bytes_: np.ndarray, count: int) -> np.ndarray:
        shifted = bytes_[..., None, :] * powers[:count]  # wraps around in uint8, which drops the digits already read
        return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*bytes_.shape[:2], -1)

    parts = [digits(blocks[..., :32], 5), digits(blocks[..., 32:48], 5), digits(blocks[..., 48:52], 4)]
    return _from_minus_one(np.concatenate(parts, axis=-1), half(blocks, 52))


def _crumbs(bytes_: np.ndarray) -> np.ndarray:
    """For each run of 32 bytes, the lowest two bits of all bytes, then the next two: [rows, blocks, runs, 4, 32]."""
    return (bytes_.reshape(*bytes_.shape[:2], -1, 1, 32) >> _CRUMBS) & 3


def _tq2_0(blocks: np.ndarray) -> Decoded:
    return _from_minus_one(_crumbs(blocks[..., :64]), half(blocks, 64))


def _q2_k(blocks: np.ndarray) -> Decoded:
    sub = blocks[..., :16]
    scales = half(blocks, 80)[..., None] * (sub & 15)
    mins = -half(blocks, 82)[..., None] * (sub >> 4)
    return _flat(_crumbs(blocks[..., 16:80])), _flat(scales), _flat(mins)


def _q3_k(blocks: np.ndarray) -> Decoded:
    low = _crumbs(blocks[..., 32:96])
    high = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    packed = blocks[..., 96:108]
    sub = _nibbles(packed[..., :8]) | _flat_crumbs(packed[..., 8:]) << 4
    scales = half(blocks, 108)[..., None] * (sub.astype(np.int8) - 32)
    return _flat(low | high.reshape(low.shape) << 2), _flat(scales), None


def _flat_crumbs(bytes_: np.ndarray) -> np.ndarray:
    """The lowest two bits of all bytes, then the next two: [rows, blocks, 4 * bytes]."""
    crumbs = (bytes_[..., None, :] >> _CRUMBS) & 3
    return crumbs.reshape(*bytes_.shape[:2], -1)


def _sub_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpacks eight scales and eight mins of 6 bits each from 12 bytes."""
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=-1)
    mins = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=-1)
    return scales, mins


def _runs(bytes_: np.ndarray) -> np.ndarray:
    """For each run of 32 bytes, the low halves, then the high halves: [rows, blocks, 2 * runs, 32]."""
    runs = bytes_.reshape(*bytes_.shape[:2], -1, 1, 32)
    both = np.concatenate([runs & 15, runs >> 4], axis=-2)
    return both.reshape(*bytes_.shape[:2], -1, 32)


def _of_sub_blocks(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and mins of a block's eight groups: 6-bit codes times the scale and the min of the block."""
    sub, low = _sub_scales(blocks[..., 4:16])
    return _flat(half(blocks, 0)[..., None] * sub), _flat(-half(blocks, 2)[..., None] * low)


def _q4_k(blocks: np.ndarray) -> Decoded:
    return _flat(_runs(blocks[..., 16:])), *_of_sub_blocks(blocks)


def _q5_k(blocks: np.ndarray) -> Decoded:
    high = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _flat(_runs(blocks[..., 48:]) | high << 4), *_of_sub_blocks(blocks)


def _q6_k(blocks: np.ndarray) -> Decoded:
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-2)
    scales = half(blocks, 208)[..., None] * blocks[..., 192:208].view(np.int8)
    return _flat(low | _crumbs(blocks[..., 128:192]) << 4), _flat(scales), None


def _iq4_xs(blocks: np.ndarray) -> Decoded:
    low = blocks[..., 4:8]
    low = np.stack([low & 15, low >> 4], axis=-1).reshape(*blocks.shape[:2], 8)
    high = (blocks[..., 2:4, None] >> _CRUMBS[:, 0] & 3).reshape(*blocks.shape[:2], 8)
    scales = half(blocks, 0)[..., None] * ((low | high << 4).astype(np.int8) - 32)
    return _flat(_nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))), _flat(scales), None


def _mxfp4(blocks: np.ndarray) -> Decoded:
    # The exponent's offset is 128, not 127, because levels are twice the values.
    return _flat(_nibbles(blocks[..., 1:])), np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128), None


def unsigned_e4m3(bytes_: np.ndarray) -> np.ndarray:
    """Decodes unsigned E4M3 to float32; 0x7f, NaN elsewhere, is zero in ggml."""
    exponent, mantissa = (bytes_ >> 3 & 15).astype(np.int32), (bytes_ & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(bytes_ == 0x7F, 0, np.where(exponent == 0, np.ldexp(mantissa, -9), normal)).astype(np.float32)


def _nvfp4(blocks: np.ndarray) -> Decoded:
    codes = _nibbles(blocks[..., 4:].reshape(*blocks.shape[:2], 4, 8))
    return _flat(codes), _flat(unsigned_e4m3(blocks[..., :4]) / 2), None


_TYPES = {
    "Q4_0": BlockType(4, 32, False, _q4_0),
    "Q4_1": BlockType(4, 32, True, _q4_1),
    "Q5_0": BlockType(5, 32, False, _q5_0),
    "Q5_1": BlockType(5, 32, True, _q5_1),
    "Q8_0": BlockType(8, 32, False, _q8_0),
    "Q1_0": BlockType(1, 128, False, _q1_0),
    "Q2_0": BlockType(2, 64, False, _q2_0),
    "TQ1_0": BlockType(2, 256, False, _tq1_0),
    "TQ2_0": BlockType(2, 256, False, _tq2_0),
    "Q2_K": BlockType(2, 16, True, _q2_k),
    "Q3_K": BlockType(3, 16, False, _q3_k),
    "Q4_K": BlockType(4, 32, True, _q4_k),
    "Q5_K": BlockType(5, 32, True, _q5_k),
    "Q6_K": BlockType(6, 16, False, _q6_k),
    "IQ4_NL": BlockType(4, 32, False, _q4_0, NL4),
    "IQ4_XS": BlockType(4, 32, False, _iq4_xs, NL4),
    "MXFP4": BlockType(4, 32, False, _mxfp4, FP4),
    "NVFP4": BlockType(4, 16, False, _nvfp4, FP4),
}


def block_type(name: str) -> BlockType | None:
    """How to decode the type of this name into codes; None if that is not possible."""
    return _TYPES.get(name)


def decode(kind: BlockType, blocks: np.ndarray) -> Rows:
    """Decodes rows of blocks, uint8 [rows, blocks, bytes], into codes and scales."""
    with np.errstate(invalid="ignore", over="ignore"):  # packing refuses values that are not finite
        codes, scales, mins = kind.decode(blocks)
    return Rows(*(None if array is None else torch.from_numpy(np.ascontiguousarray(array)) for array in (codes, scales, mins)))
