"""Other projects' formats, where their package is installed: a matrix as they would hold it, and its bytes.

They are evaluated by dequantising, with float activations, so what their kernels lose besides is not counted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

# [n, k] float32 -> the same as the format holds it, and the bytes of the format; ValueError: not for this shape.
Peer = Callable[[Tensor], tuple[Tensor, int]]

_GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4", "TQ2_0", "TQ1_0")
_TORCHAO_GROUP = 32


def peers(bits: list[int]) -> dict[str, Peer]:
    """What is installed: GGUF's types that the package ``gguf`` can quantise (nearest, without an importance matrix),
    and torchao's integers of these widths, symmetric, in groups of 32."""
    found: dict[str, Peer] = {}
    if importlib.util.find_spec("gguf") is not None:
        found |= {f"GGUF {name}": _gguf(name) for name in _GGUF}
    if importlib.util.find_spec("torchao") is not None:
        found |= {f"torchao int{width}": _torchao(width) for width in bits if width > 1}
    return found


def _gguf(name: str) -> Peer:
    def peer(weight: Tensor) -> tuple[Tensor, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        kind = GGMLQuantizationType[name]
        block = GGML_QUANT_SIZES[kind][0]
        if weight.shape[1] % block:
            raise ValueError(f"{name} has blocks of {block}; a matrix has {weight.shape[1]} inputs")
        held = quants.quantize(weight.numpy(), kind)
        return torch.from_numpy(quants.dequantize(held, kind).copy()), held.nbytes

    return peer


def _torchao(bits: int) -> Peer:
    def peer(weight: Tensor) -> tuple[Tensor, int]:
        from torchao.quantization import IntxUnpackedToInt8Tensor

        n, k = weight.shape
        if k % _TORCHAO_GROUP:
            raise ValueError(f"groups of {_TORCHAO_GROUP}; a matrix has {k} inputs")
        held = IntxUnpackedToInt8Tensor.from_hp(weight, (1, _TORCHAO_GROUP), getattr(torch, f"int{bits}"))
        # In this form a code is a byte. Counted as packed: `bits` per code and 16 per scale; zero points are all 0.
        return held.dequantize().float(), n * k * bits // 8 + 2 * n * (k // _TORCHAO_GROUP)

    return peer
