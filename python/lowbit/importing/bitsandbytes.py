"""Reads the 4-bit layouts of bitsandbytes, NF4 and FP4, as ``QuantState.as_dict(packed=True)`` names their tensors.

Tensors of a layer with n outputs and k inputs:

* ``weight``: uint8 [n * k / 2, 1]: the codes of the matrix in row-major order, the first of two codes in the high half;
* ``weight.quant_map``: float32 [16]: the value of each code;
* ``weight.absmax``: float32 [blocks]: the factor of each block of weights; or, with double quantization, uint8 [blocks],
  and the factors are ``nested_quant_map[absmax] * nested_absmax + nested_offset``;
* ``weight.nested_quant_map``: float32 [256]; ``weight.nested_absmax``: float32, one for every ``nested_blocksize`` blocks;
* ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``): uint8, JSON with ``shape``, ``blocksize``, ``nested_blocksize`` and
  ``nested_offset``.

A weight is its code's value times its block's factor.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.codes import Matrix, Rows, SourceTensor
from ..files.io import read_bytes
from ..files.safetensors import Stored
from .stock import Stock, load

_STATE = "weight.quant_state.bitsandbytes__"
_MOST_STATE = 1 << 16


def read_bitsandbytes(stock: Stock) -> list[SourceTensor]:
    """The tensors of a 4-bit checkpoint of bitsandbytes.

    Raises:
        ValueError: the checkpoint has 8-bit layers; a block spans two rows; a state is not a JSON object with these fields; or
            a tensor of a layer is missing or has another shape or dtype.
    """
    stock.setting("load_in_8bit", (False,), False)
    stock.setting("_load_in_8bit", (False,), False)
    matrices: list[SourceTensor] = []
    for kind in ("nf4", "fp4"):
        matrices += [_layer(stock, layer, kind) for layer in stock.layers(_STATE + kind)]
    return [*matrices, *stock.rest()]


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


def _layer(stock: Stock, layer: str, kind: str) -> Matrix:
    state = _state(stock, layer, kind)
    (n, k), block = state["shape"], state["blocksize"]
    if k % block:
        raise ValueError(
            f"{layer} in {stock.path} has {k} inputs in blocks of {block}: some blocks span two rows, which lowbit cannot pack"
        )
    if n * k % 2:
        raise ValueError(f"{layer} in {stock.path} has {n} x {k} weights of 4 bits; expected whole bytes")
    codes = stock.take(f"{layer}.weight", "U8", shape=(n * k // 2, 1))
    table = load(stock.take(f"{layer}.weight.quant_map", "F32", shape=(16,)))
    blocks = n * k // block
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
) -> Matrix:
    # With a table of tiny values the scales would underflow float32.
    if not torch.isfinite(table).all() or not 2**-20 <= float(table.abs().max()) <= 1 or len(table.unique()) < 2:
        raise ValueError(f"{name}.quant_map in {stock.path} is invalid; expected at least two different values, at most 1")
    n, k = shape
    largest = float(table.abs().max())
    levels = (table * (127 / largest)).round()
    # lowbit stores 8-bit levels, so the table is rounded. The error must stay below half the distance of two levels.
    gaps = table.sort().values.diff()
    off = float((levels * (largest / 127) - table).abs().max() / gaps[gaps > 0].min())
    scales = (absmax * (largest / 127)).view(n, k // block)

    def read(begin: int, end: int) -> Rows:
        first, last = begin * k // 2, -(-end * k // 2)
        pairs = read_bytes(codes, first, last)
        indices = torch.stack([pairs >> 4, pairs & 15], 1).reshape(-1)
        skip = begin * k - 2 * first
        return Rows(indices[skip : skip + (end - begin) * k].view(end - begin, k), scales[begin:end].contiguous())

    group = None if block == k else block
    return Matrix(
        name, f"bitsandbytes {kind}", (n, k), 4, group, False, read, codes.bytes, tuple(levels.int().tolist()), off
    )  # fmt: skip
