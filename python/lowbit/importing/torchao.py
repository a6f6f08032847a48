"""Reads torchao's ``IntxUnpackedToInt8Tensor`` (one byte per code) as written by torchao's safetensors support.

Tensors of a layer with n outputs, k inputs and codes of b bits:

* ``_weight_qdata``: int8 [n, k]: codes from -2^(b - 1) to 2^(b - 1) - 1;
* ``_weight_scale``: float [n, groups];
* ``_weight_zero_point``: int8 or float [n, groups].

A weight is ``scale * (code - zero point)``. The file's metadata has a JSON object for each weight: torchao's class, dtype,
block size and activation quantization.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ..checkpoint.codes import Matrix, Rows, SourceTensor, rows_of_grid
from ..files.io import read_row_bytes
from ..files.safetensors import read_metadata
from ..files.untrusted import printable
from .stock import Stock, load

_CLASS = "IntxUnpackedToInt8Tensor"
_LEAF = "_weight_qdata"
_WIDTHS = {f"int{bits}": bits for bits in range(1, 9)}
# Supported activation quantization of the source: none, or int8 per row. lowbit quantizes activations to int8 in both cases.
_ACTIVATIONS = (None, "int8_asym_per_token")


def read_torchao(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint quantized with torchao.

    Raises:
        ValueError: a tensor has another class of torchao; the metadata does not describe it; or a tensor of a layer is
            missing or has another shape or dtype. When rows are read: a code exceeds the bit width.
    """
    described: dict[str, str] = {}
    for path in stock.paths():
        described |= read_metadata(path)
    return [*(_layer(stock, layer, described) for layer in stock.layers(_LEAF)), *stock.rest()]


class _OtherClass(ValueError):
    pass


def _described(stock: Stock, layer: str, described: dict[str, str]) -> tuple[str, list[int], str | None]:
    """The dtype of the codes, the block shape that shares a scale, and the activation quantization."""
    try:
        content: dict[str, Any] = json.loads(described[f"{layer}.weight"])
        kind = content["_type"]
        if kind != _CLASS:
            actual = printable(kind) if isinstance(kind, str) else repr(kind)
            raise _OtherClass(f"{layer} in {stock.path} is a {actual:.200} of torchao; lowbit imports {_CLASS}")
        data = content["_data"]
        activations = data["activation_quantization"]
        return (
            data["target_dtype"]["_data"],
            list(data["block_size"]),
            activations["_data"] if isinstance(activations, dict) else activations,
        )
    except _OtherClass:
        raise
    except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(
            f"the files of {stock.path} do not say what {layer}.weight is ({type(error).__name__}); expected {_CLASS} in "
            "their metadata"
        ) from error


def _layer(stock: Stock, layer: str, described: dict[str, str]) -> Matrix:
    dtype, block, activations = _described(stock, layer, described)
    if not isinstance(dtype, str) or dtype not in _WIDTHS or activations not in _ACTIVATIONS:
        raise ValueError(
            f"{layer} in {stock.path} has codes of {dtype!r:.200} and activations {activations!r:.200}; expected int1 to "
            "int8, and float activations or int8_asym_per_token"
        )
    bits = _WIDTHS[dtype]
    codes = stock.take(f"{layer}.{_LEAF}", "I8", shape=(None, None))
    n, k = codes.shape
    if len(block) != 2 or block[0] != 1 or type(block[1]) is not int or block[1] < 1 or k % block[1]:
        raise ValueError(f"{layer} in {stock.path} has blocks {block} for {k} inputs; expected [1, whole groups]")
    scales = stock.take(f"{layer}._weight_scale", "F32", "F16", "BF16", shape=(n, k // block[1]))
    zeros = stock.take(f"{layer}._weight_zero_point", "I8", "F32", "F16", "BF16", shape=(n, k // block[1]))
    # At 1 bit torchao's codes are -1 and 0, but lowbit's symmetric levels are -1 and 1.
    affine = bits == 1 or bool(load(zeros).any())
    half = 2 ** (bits - 1)

    def read(begin: int, end: int) -> Rows:
        values = read_row_bytes(codes, begin, end).view(torch.int8).to(torch.int16) + half
        if (values < 0).any() or (values >= 2 * half).any():
            raise ValueError(f"{codes.name} in {codes.path} has codes that exceed {bits} bits")
        zero = load(zeros)[begin:end].float() + half if affine else None
        return rows_of_grid(values.to(torch.uint8), load(scales)[begin:end], zero)

    total = codes.bytes + scales.bytes + zeros.bytes
    size = None if block[1] == k else block[1]
    return Matrix(f"{layer}.weight", f"torchao, {bits} bits", (n, k), bits, size, affine, read, total)
