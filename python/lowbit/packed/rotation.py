"""Rotation of a layer's inputs by signs and a Hadamard matrix, in blocks (kernels/ukernel.h).

A rotated layer computes the same outputs, because its weights undo the rotation. Outliers of inputs spread over a block, so
fewer bits lose less (Ashkboos et al.: "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST, MOST = 16, 64  # block sizes, in inputs; larger blocks gain nothing (docs/measurements/quality.md)
_BLOCKS = 1024  # that fit into a cache
_SIGNS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # kRotationSigns of kernels/ukernel.h


def block_of(k: int) -> int:
    """Block size for rotating ``k`` inputs: the largest power of two that divides k, at most 64; 0 if that is below 16."""
    block = min(k & -k, MOST)
    return block if block >= LEAST else 0


def _factors(block: int) -> Tensor:
    bits = [_SIGNS[i // 32] >> i % 32 & 1 for i in range(block)]
    return (1.0 - 2.0 * torch.tensor(bits, dtype=torch.float32)) * 2.0 ** -(block.bit_length() // 2)


def _hadamard(x: Tensor, block: int) -> Tensor:
    """Multiplies each block of the last dimension by the Hadamard matrix, summing in the kernels' order."""
    blocks = x.reshape(-1, block)
    if blocks.requires_grad or torch.compiler.is_compiling():
        return _of_blocks(blocks).view(x.shape)
    return torch.cat([_of_blocks(part) for part in blocks.split(_BLOCKS)]).view(x.shape)


def _of_blocks(blocks: Tensor) -> Tensor:
    """The same for [blocks, block]."""
    count, block = blocks.shape
    x, half = blocks.T.contiguous(), 1
    while half < block:
        a, b = x.view(block // (2 * half), 2, half, count).unbind(1)
        x = torch.stack((a + b, a - b), 1).view(block, count)
        half *= 2
    return x.T.contiguous()


def rotate(x: Tensor, block: int) -> Tensor:
    """Rotates inputs: float32 [..., k], differentiable, bit for bit as the kernels do. Returns ``x`` if ``block`` is 0."""
    return x if block == 0 else _hadamard(x.float() * _factors(block).repeat(x.shape[-1] // block), block)


def rotate_weight(weight: Tensor, block: int) -> Tensor:
    """Weights [n, k] for rotated inputs: float32, differentiable. Returns ``weight`` if ``block`` is 0."""
    if block == 0:
        return weight
    # For blocks of 32 or 128 inputs the combined factor of inputs and weights is half of the inverse rotation's.
    return rotate(weight, block) * (1.0 if block.bit_length() % 2 else 2.0)


def rotate_back(weight: Tensor, block: int) -> Tensor:
    """The inverse of :func:`rotate_weight`: float32, bit for bit as ``lowbit::embedding`` does it."""
    return weight if block == 0 else _hadamard(weight.float(), block) * _factors(block).repeat(weight.shape[-1] // block)
