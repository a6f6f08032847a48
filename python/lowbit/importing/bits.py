"""Unpacks codes from 32-bit words, for the three ways in which other projects pack them."""

from __future__ import annotations

import torch
from torch import Tensor


def from_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks codes stored without gaps from the lowest bit of the first word up. A code may span two words.

    Args:
        words: int32 [rows, words].
        bits: the width of a code, 1 to 8.
        count: codes in a row.

    Returns:
        uint8 [rows, count].
    """
    if 32 % bits == 0:
        return from_words(words, bits, count)
    start = torch.arange(count) * bits
    first, offset = start // 32, start % 32
    second = (first + 1).clamp(max=words.shape[1] - 1)
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    low, high = unsigned[:, first] >> offset, unsigned[:, second] << (32 - offset)
    return ((low | high) & (2**bits - 1)).to(torch.uint8)


def from_words(words: Tensor, bits: int, count: int) -> Tensor:
    """As :func:`from_stream`, but no code spans two words; a word's remaining high bits are unused."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes = (words[:, :, None] >> shifts) & (2**bits - 1)  # masks the sign bits that are shifted in
    return codes.to(torch.uint8).reshape(len(words), -1)[:, :count].contiguous()


def from_planes(words: Tensor, bits: int, count: int) -> Tensor:
    """As :func:`from_stream`, but 32 codes share ``bits`` words, in bit planes (GPTQModel's ``gptq_p``).

    The planes are 8, 4, 2 and 1 bits wide, the lowest bits of the codes first, so no code spans two words of a plane.

    Args:
        words: int32 [rows, words], a multiple of ``bits`` words.
        bits: the width of a code, 1 to 8.
        count: codes in a row, a multiple of 32.

    Returns:
        uint8 [rows, count].
    """
    blocks = words.reshape(len(words), -1, bits)
    codes = torch.zeros(len(words), blocks.shape[1], 32, dtype=torch.uint8)
    offset = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            plane = blocks[:, :, offset : offset + width].reshape(-1, width)
            codes |= from_stream(plane, width, 32).reshape(codes.shape) << offset
            offset += width
    return codes.reshape(len(words), -1)[:, :count].contiguous()


def words_of(count: int, bits: int, *, whole: bool = False) -> int:
    """Number of words for ``count`` codes; ``whole``: no code may span two words."""
    return -(-count // (32 // bits)) if whole else -(-count * bits // 32)
