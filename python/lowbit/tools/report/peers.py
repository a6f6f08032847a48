"""Quantization formats of other projects whose packages are installed: dequantized weights and bytes of a matrix.

Formats are evaluated by dequantizing, with float activations, so rounding in their kernels does not count.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Misfit(ValueError):
    """A format does not support the shape of a matrix."""


# (weight float32 [n, k], mean square of each input [k] or None) -> (dequantized weight, bytes).
Hold = Callable[[Tensor, Tensor | None], tuple[Tensor, int]]


@dataclass(frozen=True)
class Peer:
    """A format of another project."""

    hold: Hold
    importance: bool = False  # whether it uses the mean square of each input
    instead: Hold | None = None  # the format that its project uses for matrices of other shapes


def hold_all(peer: Peer, matrices: Iterable[tuple[Tensor, Tensor | None]]) -> Iterator[tuple[Tensor, int]]:
    """Yields the result of :data:`Hold` for each matrix of a model.

    Raises:
        Misfit: a matrix does not fit the format or, if the format has a replacement, no matrix fits.
    """
    misfit, fits = None, False
    for weight, importance in matrices:
        try:
            held = peer.hold(weight, importance)
            fits = True
        except Misfit as error:
            if peer.instead is None:
                raise
            misfit, held = error, peer.instead(weight, importance)
        yield held
    if misfit is not None and not fits:
        raise misfit


# Quantized by the Python package gguf, by round-to-nearest.
_GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4", "TQ2_0", "TQ1_0")
# Quantized by ggml's library, with a search and optionally an importance matrix, and dequantized by gguf. These 1- and 2-bit
# types require the importance matrix.
_NEEDS_IMPORTANCE = ("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
_GGML = ("Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "IQ4_NL", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", *_NEEDS_IMPORTANCE)
# Replacements in llama.cpp's quantizer for rows that are not a multiple of the block size.
_INSTEAD = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}
_INSTEAD |= dict.fromkeys(("Q3_K", "Q2_K", "TQ2_0", "TQ1_0"), "Q4_0")
_INSTEAD |= dict.fromkeys(("IQ4_XS", "IQ3_S", "IQ3_XXS", *_NEEDS_IMPORTANCE), "IQ4_NL")
_TORCHAO_GROUP = 32
_HQQ_GROUP = 64
_HQQ_BITS = (8, 4, 3, 2, 1)


def peers(bits: list[int], importance: bool) -> dict[str, Peer]:
    """The peers that are installed.

    GGUF's types that the package ``gguf`` or llama-cpp-python's library can quantize, torchao's symmetric integers of these
    widths in groups of 32, and HQQ's with a zero point in groups of 64.

    Args:
        bits: for torchao and HQQ.
        importance: whether there is a calibration text: then GGUF's types with an importance matrix too.
    """
    installed: dict[str, Peer] = {}
    if importlib.util.find_spec("gguf") is not None:
        installed |= {f"GGUF {name}": _of_gguf(_gguf, name) for name in _GGUF}
        if _ggml_file() is not None:
            installed |= {f"GGUF {name}": _of_gguf(_ggml, name) for name in _GGML if name not in _NEEDS_IMPORTANCE}
            if importance:
                installed |= {f"GGUF {name}, importance": _of_gguf(_ggml, name, True) for name in _GGML}
    if importlib.util.find_spec("torchao") is not None:
        installed |= {f"torchao int{width}": Peer(_torchao(width)) for width in bits if width > 1}
    if importlib.util.find_spec("hqq") is not None:
        installed |= {f"HQQ {width} bits": Peer(_hqq(width)) for width in bits if width in _HQQ_BITS}
    return installed


def _of_gguf(made_by: Callable[[str], Hold], name: str, importance: bool = False) -> Peer:
    return Peer(made_by(name), importance, made_by(_INSTEAD[name]) if name in _INSTEAD else None)


def _blocks(kind: Any, weight: Tensor) -> None:
    from gguf import GGML_QUANT_SIZES

    block = GGML_QUANT_SIZES[kind][0]
    if weight.shape[1] % block:
        raise Misfit(f"{kind.name} has blocks of {block}; a matrix has {weight.shape[1]} inputs")


def _gguf(name: str) -> Hold:
    def hold(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, int]:
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType[name]
        _blocks(kind, weight)
        held = quants.quantize(weight.numpy(), kind)
        return torch.from_numpy(quants.dequantize(held, kind).copy()), held.nbytes

    return hold


def _ggml_file() -> Path | None:
    """The library of llama-cpp-python with ggml's quantizers."""
    spec = importlib.util.find_spec("llama_cpp")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for library in sorted((Path(place) / "lib").glob("libggml-base.*")):
            return library
    return None


@functools.cache
def _ggml_library(file: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(file))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    return library


def _ggml(name: str) -> Hold:
    def hold(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, int]:
        import numpy
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        kind = GGMLQuantizationType[name]
        _blocks(kind, weight)
        block, size = GGML_QUANT_SIZES[kind]
        (n, k), weight = weight.shape, weight.contiguous()
        held = numpy.empty((n, k // block * size), dtype=numpy.uint8)
        matrix = None if importance is None else importance.float().contiguous()
        library = _ggml_library(_ggml_file())
        written = library.ggml_quantize_chunk(
            int(kind), weight.data_ptr(), held.ctypes.data, 0, n, k, None if matrix is None else matrix.data_ptr()
        )
        if written != held.nbytes:
            raise ValueError(f"ggml wrote {written} bytes of {name}; expected {held.nbytes}")
        return torch.from_numpy(quants.dequantize(held, kind).copy()), held.nbytes

    return hold


def _torchao(bits: int) -> Hold:
    def hold(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, int]:
        from torchao.quantization import IntxUnpackedToInt8Tensor

        n, k = weight.shape
        if k % _TORCHAO_GROUP:
            raise Misfit(f"groups of {_TORCHAO_GROUP}; a matrix has {k} inputs")
        held = IntxUnpackedToInt8Tensor.from_hp(weight, (1, _TORCHAO_GROUP), getattr(torch, f"int{bits}"))
        # This form stores a byte per code. Count the packed size: `bits` per code and 16 per scale; zero points are all 0.
        return held.dequantize().float(), n * k * bits // 8 + 2 * n * (k // _TORCHAO_GROUP)

    return hold


def _hqq(bits: int) -> Hold:
    def hold(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, int]:
        from hqq.core.quantize import Quantizer

        n, k = weight.shape
        if k % _HQQ_GROUP:
            raise Misfit(f"groups of {_HQQ_GROUP}; a matrix has {k} inputs")
        codes, meta = Quantizer.quantize(
            weight, nbits=bits, group_size=_HQQ_GROUP, axis=1, optimize=True, device="cpu", compute_dtype=torch.float32,
            bitpack=False,
        )  # fmt: skip
        # HQQ's layers store scale and zero point in 16 bits each.
        meta |= {name: meta[name].half().float() for name in ("scale", "zero")}
        return Quantizer.dequantize(codes, meta).float().view(n, k), n * k * bits // 8 + 4 * n * (k // _HQQ_GROUP)

    return hold
