"""Reads 8- and 4-bit floats: DeepSeek's FP8, and FP8, NVFP4, MXFP4 and MXFP8 of NVIDIA ModelOpt and compressed-tensors.

* FP8 (E4M3): ``weight`` float8 [n, k] with a scale per tensor, per row, or per block of rows and columns.
* MXFP8: likewise, with ``weight_scale`` uint8 [n, k / 32], an exponent of two plus 127 (OCP Microscaling Formats 1.0).
* NVFP4: ``weight_packed`` or ``weight`` uint8 [n, k / 2], two E2M1 codes per byte, the first in the low half;
  ``weight_scale`` E4M3 [n, k / 16]; and a float32 scale per tensor: compressed-tensors divides by it, ModelOpt multiplies.
* MXFP4: codes as in NVFP4, scales as in MXFP8.
* INT8: ``weight`` int8 [n, k] with a scale per tensor or per row.

The 4-bit codes and INT8 are kept. FP8 levels are not equidistant, so FP8 is requantized to 8 bits in groups of 32.
"""

from __future__ import annotations

import math
import warnings
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.codes import Matrix, Rows, SourceTensor, Weights, rows_of_grid
from ..files.io import read_row_bytes
from ..files.safetensors import Stored
from ..levels import TABLES
from ..packed.rounding import LinearConfig
from .mxfp4 import nibbles, powers_of_two
from .stock import Stock, load

_SCALES = ("F32", "BF16", "F16")
_POWERS = ("U8", "F8_E8M0")
_FP8 = LinearConfig(8)
_MX, _NV = 32, 16  # group sizes
_BLOCK = (128, 128)  # rows and columns that share a scale in DeepSeek's files; the default
# Scales of activations and caches, which lowbit does not use: it computes them at each call.
_COMPUTED = (
    "input_scale", "input_global_scale", "input_zero_point", "activation_scale", "k_scale", "v_scale", "input_activation_scale",
    "output_activation_scale", "k_cache_scale", "v_cache_scale",
)  # fmt: skip


def _powers(stored: Stored, begin: int, end: int) -> Tensor:
    return powers_of_two(read_row_bytes(stored, begin, end))


def _fp8(stored: Stored, begin: int, end: int) -> Tensor:
    return read_row_bytes(stored, begin, end).view(torch.float8_e4m3fn).float()


def _blocks_of(weight: Stored, scales: Stored, block: tuple[int, int]) -> tuple[int, int]:
    """The numbers of rows and columns that share a scale."""
    (n, k), shape = weight.shape, scales.shape
    if math.prod(shape) == 1:
        return n, k
    if shape in ((n,), (n, 1)):
        return 1, k
    if shape == (-(-n // block[0]), -(-k // block[1])):
        return block
    if len(shape) == 2 and shape[0] == n and k % shape[1] == 0:
        return 1, k // shape[1]
    raise ValueError(
        f"{scales.name} in {scales.path} is {list(shape)} for a weight {[n, k]}; expected one scale, one for each row, for "
        f"each block of {block[0]} rows and {block[1]} columns, or for each group of a row"
    )


def _read_fp8(weight: Stored, scales: Stored, block: tuple[int, int], begin: int, end: int) -> Tensor:
    (rows, columns), (n, k) = block, weight.shape
    grid = load(scales).float().view(-(-n // rows), -(-k // columns))
    return _fp8(weight, begin, end) * grid[torch.arange(begin, end) // rows].repeat_interleave(columns, 1)[:, :k]


def _read_mxfp8(weight: Stored, scales: Stored, begin: int, end: int) -> Tensor:
    return _fp8(weight, begin, end) * _powers(scales, begin, end).repeat_interleave(_MX, 1)


def _codes(packed: Stored, begin: int, end: int) -> Tensor:
    return nibbles(read_row_bytes(packed, begin, end))


def _read_nvfp4(packed: Stored, scales: Stored, factor: Tensor, begin: int, end: int) -> Rows:
    return Rows(_codes(packed, begin, end), _fp8(scales, begin, end) * (factor / 2))  # a level is twice the value


def _read_mxfp4(packed: Stored, scales: Stored, begin: int, end: int) -> Rows:
    return Rows(_codes(packed, begin, end), _powers(scales, begin, end) / 2)


def _read_int8(weight: Stored, scales: Stored, zeros: Stored | None, begin: int, end: int) -> Rows:
    def of_rows(stored: Stored) -> Tensor:
        values = load(stored).float().view(-1, 1) if math.prod(stored.shape) == 1 else load(stored).float()
        values = values.view(len(values), -1)
        return values[begin:end].contiguous() if len(values) > 1 else values.expand(end - begin, 1).contiguous()

    return rows_of_grid(
        read_row_bytes(weight, begin, end) ^ 128, of_rows(scales), None if zeros is None else of_rows(zeros) + 128
    )


def _single(stock: Stock, name: str) -> Tensor:
    """Reads a scalar.

    Raises:
        ValueError: it is not a single positive finite number.
    """
    value = stock.number(name, *_SCALES).reshape(())
    if not 0 < value < math.inf:
        raise ValueError(f"{name} in {stock.path} is {float(value)}; expected a positive number")
    return value


def _four_bits(stock: Stock, layer: str, leaf: str) -> Matrix:
    packed = stock.take(f"{layer}.{leaf}", "U8", shape=(None, None))
    n, k = packed.shape[0], 2 * packed.shape[1]
    factor = None
    if stock.has(f"{layer}.weight_global_scale"):
        factor = 1 / _single(stock, f"{layer}.weight_global_scale")
    elif stock.has(f"{layer}.weight_scale_2"):
        factor = _single(stock, f"{layer}.weight_scale_2")
    source, group, dtypes = ("MXFP4", _MX, _POWERS) if factor is None else ("NVFP4", _NV, ("F8_E4M3",))
    if k % group:
        raise ValueError(
            f"{packed.name} in {packed.path} has {k} inputs; expected a multiple of {group}, as {source} has groups"
        )
    scales = stock.take(f"{layer}.weight_scale", *dtypes, shape=(n, k // group))
    read = partial(_read_mxfp4, packed, scales) if factor is None else partial(_read_nvfp4, packed, scales, factor)
    return Matrix(f"{layer}.weight", source, (n, k), 4, group, False, read, packed.bytes + scales.bytes, TABLES[source.lower()])


def _eight_bits(stock: Stock, layer: str, block: tuple[int, int]) -> Matrix | Weights:
    name = f"{layer}.weight"
    weight = stock.take(name, "F8_E4M3", "I8", shape=(None, None))
    n, k = weight.shape
    leaf = "weight_scale_inv" if stock.has(f"{layer}.weight_scale_inv") else "weight_scale"
    scales = stock.take(f"{layer}.{leaf}", *_SCALES, *_POWERS)
    total = weight.bytes + scales.bytes
    if weight.dtype == "I8":
        zeros = stock.take(f"{layer}.weight_zero_point", "I8") if stock.has(f"{layer}.weight_zero_point") else None
        rows, columns = _blocks_of(weight, scales, (1, k))
        if rows not in (1, n) or (zeros is not None and zeros.shape != scales.shape):
            raise ValueError(
                f"{layer} in {scales.path} has scales {list(scales.shape)} and other zero points; expected the same"
            )
        group = None if columns == k else columns
        return Matrix(name, "INT8", (n, k), 8, group, zeros is not None, partial(_read_int8, weight, scales, zeros), total)
    if scales.dtype in _POWERS and scales.shape == (n, k // _MX) and k % _MX == 0:
        return Weights(name, "MXFP8", (n, k), _FP8, partial(_read_mxfp8, weight, scales), total)
    if scales.dtype == "U8":
        raise ValueError(
            f"{scales.name} in {scales.path} is {list(scales.shape)}; expected {[n, k // _MX]}, as MXFP8 has groups"
        )
    return Weights(name, "FP8", (n, k), _FP8, partial(_read_fp8, weight, scales, _blocks_of(weight, scales, block)), total)


def read_layers(stock: Stock, block: tuple[int, int] = _BLOCK) -> list[Matrix | Weights]:
    """All layers of these formats, recognized by the dtypes of their tensors.

    Scales of activations and caches are dropped with a warning.

    Args:
        block: rows and columns that share a scale, if scales are per block.

    Raises:
        ValueError: a layer is incomplete, or its scales have another shape.
    """
    layers: list[Matrix | Weights] = []
    for leaf in ("weight_packed", "weight"):
        for layer in stock.layers(leaf):
            if not (stock.has(f"{layer}.weight_scale") or stock.has(f"{layer}.weight_scale_inv")):
                continue
            if stock.dtype(f"{layer}.{leaf}") == "U8":
                layers.append(_four_bits(stock, layer, leaf))
            elif leaf == "weight":
                layers.append(_eight_bits(stock, layer, block))
    drop_computed_scales(stock)
    return layers


def drop_computed_scales(stock: Stock) -> None:
    """Takes the scales of activations and caches, with a warning."""
    dropped = [name for leaf in _COMPUTED for name in (f"{layer}.{leaf}" for layer in stock.layers(leaf))]
    for name in dropped:
        stock.take(name, *_SCALES, "I8", "U8")
    if dropped:
        warnings.warn(
            f"{stock.path} has {len(dropped)} scales of activations or caches, {dropped[0]} for example: lowbit computes "
            "its own, so they are left out",
            stacklevel=7,
        )


def read_fp8(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint in DeepSeek's FP8 format, which transformers calls fine-grained FP8."""
    stock.setting("fmt", ("e4m3",), "e4m3")
    block = stock.settings.get("weight_block_size") or list(_BLOCK)
    whole = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not whole:
        raise ValueError(f"{stock.path} has quantization_config.weight_block_size {block!r:.100}; expected rows and columns")
    return [*read_layers(stock, (block[0], block[1])), *stock.rest()]


def read_modelopt(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint of NVIDIA ModelOpt."""
    names = ("FP8", "NVFP4", "MXFP8", "MXFP4", "W4A16_NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION")
    algorithm = stock.settings.get("quant_algo", "FP8")
    if algorithm not in names:
        raise ValueError(
            f"{stock.path} has quantization_config.quant_algo {algorithm!r:.100}; lowbit imports {', '.join(names)}"
        )
    return [*read_layers(stock), *stock.rest()]
