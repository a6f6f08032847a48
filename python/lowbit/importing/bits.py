"""Codes packed into words of 32 bits, by formats of several projects."""

from __future__ import annotations

import torch
from torch import Tensor


def from_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes that follow each other without gaps, from the lowest bit of the first word on, also across words.

    Args:
        words: int32 [rows, words].
        bits: of a code, 1 to 8.
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
    """As :func:`from_stream`, but each code is in one word, and what is left of a word is empty."""
    shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes = (words[:, :, None] >> shifts) & (2**bits - 1)  # the sign that is shifted in is masked
    return codes.to(torch.uint8).reshape(len(words), -1)[:, :count].contiguous()


def from_planes(words: Tensor, bits: int, count: int) -> Tensor:
    """As :func:`from_stream`, but of 32 codes at a time: the words of their lowest bits, then those of the next bits,
    in planes that are 8, 4, 2 and 1 bits wide, so that no code lies in two words (GPTQModel's ``gptq_p``).

    Args:
        count: a multiple of 32.
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
    """How many words `count` codes take; `whole`: none of which is in two words."""
    return -(-count // (32 // bits)) if whole else -(-count * bits // 32)
