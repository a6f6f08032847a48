"""Reads GPTQ's layout, as AutoGPTQ, GPTQModel and AutoRound write it (``checkpoint_format`` gptq, gptq_v2 and gptq_p).

Tensors of a layer with n outputs, k inputs and codes of b bits:

* ``qweight``: int32 [k * b / 32, n]: the codes of a column in sequence; at 3 bits a code may span two words;
* ``qzeros``: int32 [groups, n * b / 32]: the zero points of a group, packed likewise along a row; ``gptq`` stores zero - 1;
* ``scales``: float [groups, n];
* ``g_idx``: int32 [k], optional: the group of each input. With act-order a group's inputs are not adjacent. Without
  act-order (``desc_act`` false) it may be empty or zeros.

A weight is ``scale * (code - zero)``. ``gptq_p`` packs codes in planes (:func:`.bits.from_planes`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..checkpoint.codes import Matrix, Rows, SourceTensor, rows_of_grid
from .bits import from_planes, from_stream, words_of
from .stock import Stock, load

_WIDTHS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "gptq_p": (2, 3, 4, 5, 6, 7, 8)}


def read_gptq(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint in GPTQ's layout.

    Raises:
        ValueError: a tensor of a layer is missing or has another shape or dtype; groups differ in size; a zero point of the
            first version is ambiguous; or the zero points are those of the other version.
    """
    version = stock.setting("checkpoint_format", tuple(_WIDTHS), stock.settings.get("format", "gptq"))
    other = stock.setting("format", tuple(_WIDTHS), version)  # GPTQModel writes both
    if version != other:
        raise ValueError(
            f"{stock.path} has quantization_config.format {other!r} and checkpoint_format {version!r}; expected one"
        )
    return [*(_layer(stock, layer, version) for layer in stock.layers("qweight")), *stock.rest()]


def _layer(stock: Stock, layer: str, version: str) -> Matrix:
    offset = 1 if version == "gptq" else 0
    unpack = from_planes if version == "gptq_p" else from_stream
    scales = stock.take(f"{layer}.scales", "F16", "BF16", "F32", shape=(None, None))
    groups, n = scales.shape
    codes = stock.take(f"{layer}.qweight", "I32", shape=(None, n))
    zeros = stock.take(f"{layer}.qzeros", "I32", shape=(groups, None))
    stated = stock.settings.get("bits")
    widths = _WIDTHS[version]
    fitting = [bits for bits in widths if words_of(n, bits) == zeros.shape[1]]  # a few outputs fit several widths
    bits = next((bits for bits in fitting if bits == stated), fitting[0] if fitting else 0)
    planes = unpack is from_planes
    if not bits or codes.shape[0] * (1 if planes else 32) % bits or (planes and n % 32):
        raise ValueError(
            f"{layer} in {codes.path} has qweight {list(codes.shape)}, qzeros {list(zeros.shape)} and scales "
            f"{list(scales.shape)}; expected those of {', '.join(map(str, widths[:-1]))} or {widths[-1]} bits"
        )
    k = codes.shape[0] * 32 // bits
    size, order = _groups(stock, layer, k, groups)
    # The zero points say whether the layer is symmetric. If "sym" is set, they may also be all zeros, as allocated.
    words = load(zeros)
    stored_zeros = unpack(words, bits, n).to(torch.int32) + offset
    if offset and (stored_zeros == 1 << bits).any():
        raise ValueError(
            f"{layer} in {zeros.path} has a zero point that the format's first version has for both 0 and {1 << bits}; "
            "expected the second version (checkpoint_format gptq_v2)"
        )
    middle, beside = 1 << (bits - 1), int(stored_zeros[0, 0])
    may_be_symmetric = stock.settings.get("sym") is not False and words.any()
    if abs(beside - middle) == 1 and may_be_symmetric and (stored_zeros == beside).all():
        raise ValueError(
            f"{layer} in {zeros.path} has the zero point {beside} everywhere; expected {middle}, or several: the settings name "
            f"another version of the format than the one that wrote it (checkpoint_format {version!r})"
        )
    affine = bool((stored_zeros != middle).any()) and not (stock.settings.get("sym") is True and not words.any())

    def read(begin: int, end: int) -> Rows:
        values = unpack(stock.load_kept(codes)[:, begin:end].T.contiguous(), bits, k)
        zero = unpack(load(zeros), bits, n)[:, begin:end].T.float() + offset if affine else None
        return rows_of_grid(values, load(scales)[:, begin:end].T, zero, order)

    total = codes.bytes + scales.bytes + zeros.bytes
    return Matrix(f"{layer}.weight", f"GPTQ, {bits} bits", (n, k), bits, size, affine, read, total, order=order)


def _groups(stock: Stock, layer: str, k: int, groups: int) -> tuple[int | None, torch.Tensor | None]:
    """The group size, None for one group per row, and the act-order permutation, None without one."""
    size = stock.settings.get("group_size", -1)
    if "dynamic" in stock.settings or "extra_config" in stock.settings:  # settings of single layers
        size = k // groups if k % groups == 0 else size
    if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
        raise ValueError(f"{stock.path} has quantization_config.group_size {size!r}; expected inputs per group, or -1")
    size = k if size == -1 else min(size, k)
    if -(-k // size) != groups:
        raise ValueError(
            f"{layer} in {stock.path} has {groups} groups for {k} inputs; expected {-(-k // size)}, of {size} inputs"
        )
    # Without act-order some writers leave the tensor as allocated, with zeros.
    none = () if stock.settings.get("desc_act") else (0,)
    return (None if groups == 1 else size), stock.order(f"{layer}.g_idx", k, size, none)


def renamed(matrices: list[SourceTensor], source: str) -> list[SourceTensor]:
    """The same tensors with another source type in the report."""
    return [
        replace(matrix, source=f"{source}, {matrix.bits} bits") if isinstance(matrix, Matrix) else matrix for matrix in matrices
    ]
