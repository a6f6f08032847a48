"""Reads checkpoints of ``quant_method: gemma``, Gemma 4's mobile models (``transformers.integrations.gemma_quant``).

Tensors of a linear layer with n outputs and k inputs:

* ``weight``: int8 [n, k]; at 4 bits uint8 [n, k / 2], at 2 bits uint8 [n, k / 4]: codes plus 8 or 2, the first in the lowest
  bits;
* ``weight_scale``: float [n, 1];
* ``input_activation_scale``, ``output_activation_scale``: one number, optional.

Embedding tables have ``embedding_quantized`` in the same forms, and ``embedding_scale`` [rows, groups]. A weight is ``scale *
code`` with signed codes. The settings have the width of a layer: ``num_bits``, or the first of ``module_quant_configs`` whose
regular expression is found in the layer's name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import regex
import torch
from torch import Tensor

from ..checkpoint.codes import Matrix, Rows, SourceTensor, rows_of_grid
from ..files.io import read_row_bytes
from ..files.safetensors import Stored
from .small_floats import drop_computed_scales
from .stock import Stock, load

_FLOATS = ("F32", "F16", "BF16")
_SECONDS = 1.0  # for one search; a malicious expression may take forever


def read_gemma(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint of Gemma's own quantizer.

    Scales of activations and caches are dropped with a warning.

    Raises:
        ValueError: a tensor is missing or has another shape or dtype; or a layer's width is none of 2, 4 and 8 bits.
    """
    matrices = [
        *(_matrix(stock, layer, "weight", "weight_scale") for layer in stock.layers("weight_scale")),
        *(_matrix(stock, layer, "embedding_quantized", "embedding_scale") for layer in stock.layers("embedding_scale")),
    ]
    drop_computed_scales(stock)
    return [*matrices, *stock.rest()]


def _bits(stock: Stock, layer: str) -> int:
    """The width of a layer in the settings."""
    settings: Any = stock.settings
    bits, of_modules = settings.get("num_bits", 4), settings.get("module_quant_configs") or {}
    if not isinstance(of_modules, dict):
        raise ValueError(f"{stock.path} has module_quant_configs {of_modules!r:.200}; expected an object")
    for pattern, own in of_modules.items():
        try:
            found = regex.search(pattern, layer, timeout=_SECONDS)
        except (regex.error, TimeoutError) as error:
            raise ValueError(f"{stock.path} has the expression {pattern!r:.200} in module_quant_configs: {error}") from error
        if found:
            bits = own.get("num_bits", bits) if isinstance(own, dict) else own
            break
    if isinstance(bits, bool) or bits not in (2, 4, 8):
        raise ValueError(f"{stock.path} has {bits!r:.100} bits for {layer}; expected 2, 4 or 8")
    return int(bits)


def _matrix(stock: Stock, layer: str, leaf: str, scale: str) -> Matrix:
    bits = _bits(stock, layer)
    packed = stock.take(f"{layer}.{leaf}", "I8" if bits == 8 else "U8", shape=(None, None))
    n, k = packed.shape[0], packed.shape[1] * 8 // bits
    scales = stock.take(f"{layer}.{scale}", *_FLOATS, shape=(n, None))
    groups = scales.shape[1]
    if k % groups:
        raise ValueError(f"{scales.name} in {scales.path} is {list(scales.shape)} for {k} inputs; expected whole groups")
    read, group = partial(_read, packed, scales, bits), None if groups == 1 else k // groups
    return Matrix(f"{layer}.weight", f"Gemma, {bits} bits", (n, k), bits, group, False, read, packed.bytes + scales.bytes)


def _read(packed: Stored, scales: Stored, bits: int, begin: int, end: int) -> Rows:
    stored = read_row_bytes(packed, begin, end)
    return rows_of_grid(stored ^ 128 if bits == 8 else _unpacked(stored, bits), load(scales)[begin:end])


def _unpacked(stored: Tensor, bits: int) -> Tensor:
    """The codes of bytes [rows, size], the first in the lowest bits: uint8 [rows, 8 / bits * size]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((stored[:, :, None] >> shifts) & (2**bits - 1)).flatten(1)
