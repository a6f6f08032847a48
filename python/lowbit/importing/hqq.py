"""Reads HQQ's layout, that of ``HQQLinear.state_dict()`` (packing: ``hqq.core.bitpack``).

A matrix [n, k] is reshaped to rows of one group each, [n * k / size, size] (``axis`` 1). Tensors of a layer:

* ``W_q``: uint8, or int32 for ``3bit_32``, [rows / c, size]: an element holds the codes of c rows. With s elements per column,
  element r holds those of rows r, r + s, r + 2 s, ..., the first in the highest bits;
* ``scale``, ``zero``: float [rows, 1];
* ``packing``: uint8, the letters of a name in ``_PACKINGS``; ``shape``: int [2], n and k; ``nbits``, ``group_size``, ``axis``
  and other settings: one number each.

A weight is ``scale * (code - zero)``.
"""

from __future__ import annotations

import math

import torch

from ..checkpoint.codes import Matrix, Rows, SourceTensor, rows_of_grid
from ..files.io import read_bytes
from .stock import Stock, load

# Name of a packing -> bits per code, codes per element.
_PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
_UNUSED = (
    "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise",
    "optimize", "round_zero",
)  # fmt: skip


def read_hqq(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint quantized with HQQ.

    Raises:
        ValueError: a layer has groups along the outputs (``axis`` 0) or quantized scales; or one of its tensors is missing or
            has another shape or dtype.
    """
    return [*(_layer(stock, layer) for layer in stock.layers("W_q")), *stock.rest()]


def _number(stock: Stock, name: str, default: int) -> int:
    if not stock.has(name):
        return default
    value = load(stock.take(name, "I32", "I64", "U8"))
    if value.numel() != 1:
        raise ValueError(f"{name} in {stock.path} has {value.numel()} values; expected one")
    return int(value)


def _bits(stock: Stock, name: str, default: int) -> int:
    """Bits per code. HQQ says 1.58 bits for ternary weights, which it packs as 2-bit codes."""
    value = load(stock.take(name, "I32", "I64", "U8", "F32")) if stock.has(name) else torch.tensor(default)
    if value.numel() != 1:
        raise ValueError(f"{name} in {stock.path} has {value.numel()} values; expected one")
    bits = round(float(value), 2) if math.isfinite(value) else 0
    if bits != int(bits) and bits != 1.58:
        raise ValueError(f"{name} in {stock.path} is {bits:g}; expected whole bits, or 1.58")
    return math.ceil(bits)


def _layer(stock: Stock, layer: str) -> Matrix:
    stored = stock.take(f"{layer}.packing", "U8", shape=(None,))
    packing = bytes(read_bytes(stored, 0, min(stored.bytes, 32)).numpy()).decode("latin-1")
    if packing not in _PACKINGS:
        raise ValueError(f"{layer} in {stock.path} is packed as {packing!r}; expected {', '.join(_PACKINGS)}")
    for name, expected in (("axis", 1), ("view_as_float", 0), ("quant_scale", 0), ("quant_zero", 0)):
        value = _number(stock, f"{layer}.{name}", expected)
        if value != expected:
            raise ValueError(f"{layer} in {stock.path} has {name} {value}; lowbit imports {expected}")
    width, count = _PACKINGS[packing]
    bits = _bits(stock, f"{layer}.nbits", width)
    if not 1 <= bits <= width:
        raise ValueError(f"{layer} in {stock.path} has nbits {bits}; expected 1 to {width}, packed as {packing}")
    n, k = load(stock.take(f"{layer}.shape", "I64", "I32", shape=(2,))).tolist()
    size = _number(stock, f"{layer}.group_size", k)
    if min(n, k, size) < 1 or k % size:
        raise ValueError(f"{layer} in {stock.path} has the shape [{n}, {k}] in groups of {size}; expected whole groups")
    rows = n * k // size
    codes = stock.take(f"{layer}.W_q", "I32" if width == 3 else "U8", shape=(-(-rows // count), size))
    if width != 3 and rows % count:
        raise ValueError(f"{layer} in {stock.path} has {rows} groups; expected a multiple of {count}")
    scales, zeros = (stock.take(f"{layer}.{name}", "F16", "BF16", "F32", shape=(rows, 1)) for name in ("scale", "zero"))
    for name in _UNUSED:
        if stock.has(f"{layer}.{name}"):
            stock.take(f"{layer}.{name}", "U8", "I32", "F32", "I64")
    affine = bool((load(zeros).float() != 2 ** (bits - 1)).any()) or bits == 1
    step, groups = codes.shape[0], k // size

    def read(begin: int, end: int) -> Rows:
        rows = torch.arange(begin * groups, end * groups)
        shifts = width * (count - 1 - rows // step)
        values = (stock.load_kept(codes)[rows % step].int() >> shifts[:, None].int()) & (2**width - 1)
        scale, zero = (load(each)[begin * groups : end * groups].float().view(end - begin, groups) for each in (scales, zeros))
        return rows_of_grid(values.to(torch.uint8).view(end - begin, k), scale, zero if affine else None)

    total = codes.bytes + scales.bytes + zeros.bytes
    group = None if size == k else size
    return Matrix(f"{layer}.weight", f"HQQ, {bits} bits", (n, k), bits, group, affine, read, total)
