"""Reads the layouts of bitsandbytes: NF4 and FP4, as ``QuantState.as_dict(packed=True)`` names their tensors, and LLM.int8().

Tensors of a layer with n outputs and k inputs and codes of 4 bits:

* ``weight``: uint8 [n * k / 2, 1]: the codes of the matrix in row-major order, the first of two codes in the high half;
* ``weight.quant_map``: float32 [16]: the value of each code;
* ``weight.absmax``: float32 [blocks]: the factor of each block of weights; or, with double quantization, uint8 [blocks],
  and the factors are ``nested_quant_map[absmax] * nested_absmax + nested_offset``;
* ``weight.nested_quant_map``: float32 [256]; ``weight.nested_absmax``: float32, one for every ``nested_blocksize`` blocks;
* ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``): uint8, JSON with ``shape``, ``blocksize``, ``nested_blocksize`` and
  ``nested_offset``.

A weight is its code's value times its block's factor. Blocks divide the whole matrix, so a block may span two rows.

Tensors of a layer of LLM.int8(): ``weight`` int8 [n, k]; ``SCB`` float32 [n], the largest weight of each row, for the code 127;
``weight_format`` uint8 [], the order of the codes, 0 for rows.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.codes import Matrix, Rows, SourceTensor, Weights, rows_of_grid
from ..files.io import read_bytes, read_row_bytes
from ..files.safetensors import Stored
from ..packed.rounding import LinearConfig
from .stock import Stock, load

_STATE = "weight.quant_state.bitsandbytes__"
_MOST_STATE = 1 << 16


def read_bitsandbytes(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint of bitsandbytes.

    Raises:
        ValueError: a state is not a JSON object with these fields; 8-bit codes are not in rows; or a tensor of a layer is
            missing or has another shape or dtype.
    """
    matrices: list[SourceTensor] = [_eight_bits(stock, layer) for layer in stock.layers("SCB")]
    for kind in ("nf4", "fp4"):
        matrices += [_layer(stock, layer, kind) for layer in stock.layers(_STATE + kind)]
    return [*matrices, *stock.rest()]


def _eight_bits(stock: Stock, layer: str) -> Matrix:
    weight = stock.take(f"{layer}.weight", "I8", shape=(None, None))
    n, k = weight.shape
    largest = stock.take(f"{layer}.SCB", "F32", "F16", "BF16", shape=(n,))
    if stock.has(f"{layer}.weight_format") and (order := stock.number(f"{layer}.weight_format", "U8").item()) != 0:
        raise ValueError(f"{layer} in {weight.path} has weight_format {order:g}; expected 0, codes in rows")

    def read(begin: int, end: int) -> Rows:
        return rows_of_grid(read_row_bytes(weight, begin, end) ^ 128, load(largest)[begin:end, None].float() / 127)

    return Matrix(f"{layer}.weight", "bitsandbytes int8", (n, k), 8, None, False, read, weight.bytes + largest.bytes)


def _state(stock: Stock, layer: str, kind: str) -> dict[str, Any]:
    stored = stock.take(f"{layer}.{_STATE}{kind}", "U8", shape=(None,))
    try:
        if stored.bytes > _MOST_STATE:
            raise ValueError(f"it has {stored.bytes} bytes")
        state: dict[str, Any] = json.loads(bytes(read_bytes(stored).numpy()))
        n, k = state["shape"]
        numbers = [n, k, state["blocksize"], state.get("nested_blocksize", 1)]
        if not all(type(number) is int and 1 <= number < 1 << 31 for number in numbers):
            raise ValueError(f"it has the numbers {numbers}")
        state["nested_offset"] = float(state.get("nested_offset", 0.0))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{stored.name} in {stored.path} is not a quantization state of bitsandbytes: {error!r:.200}"
        ) from error
    return state


def _layer(stock: Stock, layer: str, kind: str) -> Matrix | Weights:
    state = _state(stock, layer, kind)
    (n, k), block = state["shape"], state["blocksize"]
    if n * k % 2:
        raise ValueError(f"{layer} in {stock.path} has {n} x {k} weights of 4 bits; expected whole bytes")
    codes = stock.take(f"{layer}.weight", "U8", shape=(n * k // 2, 1))
    table = load(stock.take(f"{layer}.weight.quant_map", "F32", shape=(16,)))
    blocks = -(-n * k // block)
    if stock.has(f"{layer}.weight.nested_absmax"):
        if "nested_blocksize" not in state:
            raise ValueError(f"{layer} in {stock.path} has nested_absmax, but no nested_blocksize in its state")
        count = -(-blocks // state["nested_blocksize"])
        nested = load(stock.take(f"{layer}.weight.nested_absmax", "F32", shape=(count,)))
        values = load(stock.take(f"{layer}.weight.nested_quant_map", "F32", shape=(256,)))
        indices = load(stock.take(f"{layer}.weight.absmax", "U8", shape=(blocks,))).long()
        largest = nested[torch.arange(blocks) // state["nested_blocksize"]]
        absmax = values[indices] * largest + state["nested_offset"]
    else:
        absmax = load(stock.take(f"{layer}.weight.absmax", "F32", shape=(blocks,)))
    return _matrix(stock, f"{layer}.weight", kind, (n, k), block, codes, table, absmax)


def _matrix(
    stock: Stock, name: str, kind: str, shape: tuple[int, int], block: int, codes: Stored, table: Tensor, absmax: Tensor
) -> Matrix | Weights:
    # With a table of tiny values the scales would underflow float32.
    if not torch.isfinite(table).all() or not 2**-20 <= float(table.abs().max()) <= 1 or len(table.unique()) < 2:
        raise ValueError(f"{name}.quant_map in {stock.path} is invalid; expected at least two different values, at most 1")
    n, k = shape

    def indices(begin: int, end: int) -> Tensor:
        pairs = read_bytes(codes, begin * k // 2, -(-end * k // 2))
        skip = begin * k % 2
        return torch.stack([pairs >> 4, pairs & 15], 1).reshape(-1)[skip : skip + (end - begin) * k].view(end - begin, k)

    group = math.gcd(k, block)  # inputs of a row that are in one block, wherever blocks begin
    if group % 16 and group != k:  # lowbit has no such groups

        def values(begin: int, end: int) -> Tensor:
            factors = absmax[torch.arange(begin * k, end * k) // block].view(end - begin, k)
            return table[indices(begin, end).long()] * factors

        return Weights(name, f"bitsandbytes {kind}, blocks across rows", shape, LinearConfig(8), values, codes.bytes)
    largest = float(table.abs().max())
    levels = (table * (127 / largest)).round()
    # lowbit stores 8-bit levels, so the table is rounded. The error must stay below half the distance of two levels.
    gaps = table.sort().values.diff()
    off = float((levels * (largest / 127) - table).abs().max() / gaps[gaps > 0].min())
    scales = (absmax * (largest / 127))[torch.arange(n * k // group) * group // block].view(n, k // group)

    def read(begin: int, end: int) -> Rows:
        return Rows(indices(begin, end), scales[begin:end].contiguous())

    return Matrix(
        name, f"bitsandbytes {kind}", (n, k), 4, None if group == k else group, False, read, codes.bytes,
        tuple(levels.int().tolist()), off,
    )  # fmt: skip
