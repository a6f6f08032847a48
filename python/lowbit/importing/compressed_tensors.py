"""Reads the "pack-quantized" format of the compressed-tensors library (``compressed_tensors.compressors``).

:mod:`.small_floats` reads its other formats.

Tensors of a layer with n outputs, k inputs and codes of b bits:

* ``weight_packed``: int32 [n, ceil(k * b / 32)]: the codes of a row plus 2^(b - 1), in sequence. A code may span two words,
  but not in older files; the number of words tells which;
* ``weight_scale``: float [n, groups];
* ``weight_zero_point``: int32 [ceil(n * b / 32), groups], optional: packed likewise along columns;
* ``weight_shape``: int [2]: n and k;
* ``weight_g_idx``: int [k], optional: the group of each input; -1 everywhere means no act-order.

A weight is ``scale * (code - zero)`` with signed codes and zero points.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..checkpoint.codes import Matrix, Rows, SourceTensor, rows_of_grid
from ..files.io import read_row_bytes
from ..files.safetensors import Stored
from .bits import from_stream, from_words, words_of
from .small_floats import read_layers
from .stock import Stock, load

_FORMAT = "pack-quantized"
_OTHERS = (
    "float-quantized", "naive-quantized", "int-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "mixed-precision",
)  # fmt: skip


def read_compressed_tensors(stock: Stock) -> list[SourceTensor]:
    """The tensors of a compressed-tensors checkpoint.

    Raises:
        ValueError: an unknown format, transformed layers, or a tensor of a layer is missing or has another shape or dtype.
    """
    stock.setting("format", (_FORMAT, *_OTHERS), _FORMAT)
    if stock.settings.get("transform_config"):
        raise ValueError(f"{stock.path} has a quantization_config.transform_config, which lowbit does not import")
    groups = stock.settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{stock.path} has no quantization_config.config_groups; expected the widths of its layers")
    widths = {bits for scheme in groups.values() if (bits := _scheme(stock, scheme)) is not None}
    packed = [layer for layer in stock.layers("weight_packed") if stock.dtype(f"{layer}.weight_packed") == "I32"]
    schemes = [scheme.get("weights") for scheme in groups.values() if isinstance(scheme, dict)]
    asymmetric = all(isinstance(weights, dict) and weights.get("symmetric") is False for weights in schemes)
    matrices = [_layer(stock, layer, widths, asymmetric) for layer in packed]
    return [*matrices, *read_layers(stock), *stock.rest()]


def _scheme(stock: Stock, scheme: Any) -> int | None:
    """The width of a group of layers; None: their tensors show it."""
    if isinstance(scheme, dict) and scheme.get("format", stock.settings.get("format")) in _OTHERS:
        return None
    weights: Any = scheme.get("weights") if isinstance(scheme, dict) else scheme
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8 or weights.get("type", "int") != "int":
        raise ValueError(
            f"{stock.path} has layers with weights {weights!r:.200} in quantization_config; expected 1 to 8 bits, type int"
        )
    return bits


def _has_order(stock: Stock) -> bool:
    """Whether layers have an act-order permutation. If not, some writers leave weight_g_idx as zeros."""
    weights = [scheme.get("weights") for scheme in stock.settings["config_groups"].values() if isinstance(scheme, dict)]
    return any(isinstance(one, dict) and one.get("actorder") not in (None, False, "weight", "static") for one in weights)


def _layer(stock: Stock, layer: str, known: set[int], asymmetric: bool) -> Matrix:
    shape = load(stock.take(f"{layer}.weight_shape", "I64", "I32", shape=(2,))).tolist()
    n, k = shape
    if not min(shape) >= 1 or max(shape) >= 1 << 31:
        raise ValueError(f"{layer} in {stock.path} has weight_shape {shape}; expected rows and columns")
    codes = stock.take(f"{layer}.weight_packed", "I32", shape=(n, None))
    widths = {
        (bits, whole and 32 % bits != 0)
        for bits in known
        for whole in (False, True)
        if words_of(k, bits, whole=whole) == codes.shape[1]
    }
    if len(widths) > 1:  # 7 bits with no code in two words have as many words as 8 bits, but leave 4 bits of each unused
        words = load(codes)
        unused = {width for width in widths if width[1] and not (words >> 32 // width[0] * width[0]).any()}
        widths = unused or {width for width in widths if not width[1]}
    if len(widths) != 1:
        raise ValueError(
            f"{layer} in {codes.path} has {codes.shape[1]} words for {k} inputs; expected those of "
            f"{' or '.join(map(str, sorted(known)))} bits" + (", in one way only" if widths else "")
        )
    bits, whole = widths.pop()
    scales = stock.take(f"{layer}.weight_scale", "F16", "BF16", "F32")
    if scales.shape in ((), (1,)):  # one scale for the whole tensor
        scales = replace(scales, shape=(1, 1))
    if len(scales.shape) != 2 or scales.shape[0] not in (1, n) or (scales.shape[0] != n and scales.shape[1] != 1):
        raise ValueError(f"{layer} in {scales.path} has weight_scale {list(scales.shape)}; expected [{n}, groups] or [1, 1]")
    groups = scales.shape[1]
    size = -(-k // groups)
    if groups > 1 and k % groups:
        raise ValueError(f"{layer} in {scales.path} has {groups} groups for {k} inputs; expected groups of one size")
    order = stock.order(f"{layer}.weight_g_idx", k, size, none=(-1,) if groups == 1 or _has_order(stock) else (-1, 0))
    zeros = None
    if asymmetric or stock.has(f"{layer}.weight_zero_point"):
        words = words_of(scales.shape[0], bits, whole=whole)
        zeros = stock.take(f"{layer}.weight_zero_point", "I32")
        zeros = replace(zeros, shape=(1, 1)) if zeros.shape in ((), (1,)) else zeros
        if zeros.shape != (words, groups):
            raise ValueError(f"{zeros.name} in {zeros.path} is {list(zeros.shape)}; expected {[words, groups]}")
        if not (_zeros(zeros, bits, whole, scales.shape[0]) != 1 << (bits - 1)).any():
            zeros = None
    # At 1 bit the codes are -1 and 0, but symmetric codes of the packed format mean -1 and 1.
    affine = zeros is not None or bits == 1

    def of_rows(values: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return values[begin:end] if len(values) > 1 else values.expand(end - begin, -1)

    def read(begin: int, end: int) -> Rows:
        words = read_row_bytes(codes, begin, end).view(torch.int32)
        values, scale = (from_words if whole else from_stream)(words, bits, k), of_rows(load(scales), begin, end)
        zero = None
        if zeros is not None:
            zero = of_rows(_zeros(zeros, bits, whole, scales.shape[0]), begin, end)
        elif affine:
            zero = torch.full(scale.shape, 1 << (bits - 1))
        return rows_of_grid(values, scale, zero, order)

    total = codes.bytes + scales.bytes + (0 if zeros is None else zeros.bytes)
    source = f"compressed-tensors, {bits} bits"
    group = None if groups == 1 else size
    return Matrix(f"{layer}.weight", source, (n, k), bits, group, affine, read, total, order=order)


def _zeros(zeros: Stored, bits: int, whole: bool, rows: int) -> torch.Tensor:
    """The zero points plus the offset of the codes: uint8 [rows, groups]."""
    return (from_words if whole else from_stream)(load(zeros).T.contiguous(), bits, rows).T
