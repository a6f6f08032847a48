"""Reads checkpoints that MLX quantized (``mlx.core.quantize``; mlx-lm and mlx-vlm write the files).

Tensors of a layer with n outputs, k inputs and codes of b bits in groups of g inputs:

* ``weight``: uint32 [n, k * b / 32]: the codes of a row in sequence, from the lowest bit up; a code may span two words;
* ``scales``: [n, k / g]: float in the mode "affine", uint8 in the others;
* ``biases``: float [n, k / g], in the mode "affine" only.

A weight is ``scale * code + bias``. The other modes have no bias: "mxfp4" and "mxfp8" have floats and a power of two for 32 of
them, "nvfp4" 4-bit floats and an E4M3 scale for 16. Embedding tables have the same tensors. All experts of a layer are one
tensor, ``switch_mlp.gate_proj.weight`` [experts, n, words] for example. config.json has the settings in ``quantization``: the
mode, bits and group size of all layers, and of single layers by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.codes import Matrix, Rows, SourceTensor, Weights
from ..files.io import read_bytes
from ..files.safetensors import Stored
from ..levels import TABLES
from ..packed.rounding import LinearConfig
from .bits import from_stream
from .mxfp4 import powers_of_two
from .stock import Stock

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WIDTHS = (1, 2, 3, 4, 5, 6, 8)
_OF_MODE = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits, group size
# Names of an expert's matrices: in MLX, and in the files of transformers, by the name of the layer that holds the experts.
_EXPERTS = {
    "mlp": {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"},
    "block_sparse_moe": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
}
_STACK = "switch_mlp"


def read_mlx(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint in MLX's layout.

    Raises:
        ValueError: an unknown mode; a tensor is missing or has another shape or dtype; or experts have an unknown name.
    """
    layers = [layer for layer in stock.layers("scales") if stock.has(f"{layer}.weight")]
    return [*(matrix for layer in layers for matrix in _layer(stock, layer)), *stock.rest()]


def _settings(stock: Stock, layer: str) -> tuple[str, Any, Any]:
    """Mode, bits and group size of a layer; None for bits and a size that the settings leave out."""
    own = stock.settings.get(layer)
    # Without a mode of its own such a layer is affine, whatever the mode of the others.
    settings = {**stock.settings, "mode": "affine", **own} if isinstance(own, dict) else stock.settings
    mode = settings.get("mode", "affine")
    if mode != "affine" and (not isinstance(mode, str) or mode not in _OF_MODE):
        raise ValueError(f"{stock.path} has the mode {mode!r:.100} for {layer}; lowbit imports affine, {', '.join(_OF_MODE)}")
    return mode, settings.get("bits"), settings.get("group_size")


def _layer(stock: Stock, layer: str) -> Iterator[Matrix | Weights]:
    mode, bits, group = _settings(stock, layer)
    packed = stock.take(f"{layer}.weight", "U32")
    scales = stock.take(f"{layer}.scales", *(_FLOATS if mode == "affine" else ("U8",)))
    biases = stock.take(f"{layer}.biases", *_FLOATS, shape=scales.shape) if mode == "affine" else None
    if mode != "affine":
        bits, group = _OF_MODE[mode]
    *stack, n, words = packed.shape if len(packed.shape) in (2, 3) else (0, 0, 0, 0)
    groups = scales.shape[-1]
    sound = all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in (bits, group))
    if not sound or bits not in _WIDTHS or scales.shape != (*stack, n, groups) or words * 32 != groups * group * bits:
        raise ValueError(
            f"{layer} in {packed.path} has weight {list(packed.shape)} and scales {list(scales.shape)}; expected those of "
            f"{bits!r:.20} bits in groups of {group!r:.20}, as the settings say"
        )
    total = packed.bytes + scales.bytes + (0 if biases is None else biases.bytes)
    k, share = groups * group, total // (stack[0] if stack else 1)
    read: Callable[..., Any]
    for expert, name in enumerate(_names(stock, layer, stack)):
        place = expert * n
        if mode == "affine":
            assert biases is not None
            read = partial(_affine, packed, scales, biases, bits, k, place)
            yield Matrix(name, f"MLX, {bits} bits", (n, k), bits, group if groups > 1 else None, True, read, share)
        elif bits == 4:
            read = partial(_four_bits, packed, scales, mode, k, place)
            source = f"MLX, {mode.upper()}"
            yield Matrix(name, source, (n, k), 4, group, False, read, share, TABLES[mode])
        else:
            read = partial(_eight_bits, packed, scales, place)
            yield Weights(name, "MLX, MXFP8", (n, k), LinearConfig(8), read, share)


def _names(stock: Stock, layer: str, stack: list[int]) -> list[str]:
    """The names of a layer's matrix, or those of all experts."""
    if not stack:
        return [f"{layer}.weight"]
    holder, _, matrix = layer.rpartition(".")
    block, _, last = holder.rpartition(".")
    names = _EXPERTS.get(block.rpartition(".")[2], {})
    if last != _STACK or matrix not in names:
        raise ValueError(f"{stock.path} has a stack of matrices {layer}.weight; lowbit imports those of mlp.{_STACK}")
    return [f"{block}.experts.{expert}.{names[matrix]}.weight" for expert in range(stack[0])]


def _rows(stored: Stored, place: int, begin: int, end: int) -> Tensor:
    """Bytes of the rows [begin, end) after row ``place``, uint8 [rows, bytes]."""
    rows = 1
    for size in stored.shape[:-1]:
        rows *= size
    row = stored.bytes // rows
    return read_bytes(stored, (place + begin) * row, (place + end) * row).view(end - begin, row)


def _codes(packed: Stored, bits: int, k: int, place: int, begin: int, end: int) -> Tensor:
    return from_stream(_rows(packed, place, begin, end).view(torch.int32), bits, k)


def _affine(packed: Stored, scales: Stored, biases: Stored, bits: int, k: int, place: int, begin: int, end: int) -> Rows:
    scale, low = (_rows(one, place, begin, end).view(_FLOATS[one.dtype]).float() for one in (scales, biases))
    return Rows(_codes(packed, bits, k, place, begin, end), scale, low)


def _four_bits(packed: Stored, scales: Stored, mode: str, k: int, place: int, begin: int, end: int) -> Rows:
    stored = _rows(scales, place, begin, end)
    scale = powers_of_two(stored) if mode == "mxfp4" else stored.view(torch.float8_e4m3fn).float()
    return Rows(_codes(packed, 4, k, place, begin, end), scale / 2)  # a level is twice the value


def _eight_bits(packed: Stored, scales: Stored, place: int, begin: int, end: int) -> Tensor:
    values = _rows(packed, place, begin, end).view(torch.float8_e4m3fn).float()
    return values * powers_of_two(_rows(scales, place, begin, end)).repeat_interleave(32, 1)
