"""Reads AWQ's layout for matrix products ("gemm"), as AutoAWQ's ``WQLinear_GEMM`` packs it.

Tensors of a layer with n outputs and k inputs:

* ``qweight``: int32 [k, n / 8]: each word has the 4-bit codes of eight consecutive outputs;
* ``qzeros``: int32 [groups, n / 8]: the zero points, packed likewise;
* ``scales``: float [groups, n].

From the lowest bits of a word up, its outputs are 0, 2, 4, 6, 1, 3, 5, 7. A weight is ``scale * (code - zero)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.codes import Matrix, Rows, SourceTensor, rows_of_grid
from .stock import Stock, load

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read_awq(stock: Stock) -> list[SourceTensor]:
    """The tensors of a checkpoint in AWQ's layout.

    Raises:
        ValueError: the checkpoint has another version or width; a tensor of a layer is missing or has another shape or dtype;
            or the groups differ in size.
    """
    stock.setting("bits", (4,), stock.settings.get("w_bit", 4))
    for name in ("version", "format"):
        value = stock.settings.get(name, "gemm")
        if not isinstance(value, str) or value.lower() != "gemm":
            raise ValueError(f"{stock.path} has quantization_config.{name} {value!r}; lowbit imports 'gemm'")
    layers = [_layer(stock, layer) for layer in stock.layers("qweight")]
    _check_activations(stock)
    return [*layers, *stock.rest()]


def _check_activations(stock: Stock) -> None:
    """Drops the factors that AutoAWQ applies after activation functions, if all are 1.

    Raises:
        ValueError: some are not 1, and the model has no place for them.
    """
    for layer in stock.layers("scales"):
        stored = stock.take(f"{layer}.scales", "F16", "BF16", "F32")
        if (load(stored) != 1).any():
            raise ValueError(f"{stored.name} in {stored.path} scales an activation function, which lowbit does not import")


def _layer(stock: Stock, layer: str) -> Matrix:
    scales = stock.take(f"{layer}.scales", "F16", "BF16", "F32", shape=(None, None))
    groups, n = scales.shape
    if n % 8:
        raise ValueError(f"{layer} in {scales.path} has {n} outputs; expected a multiple of 8")
    codes = stock.take(f"{layer}.qweight", "I32", shape=(None, n // 8))
    zeros = stock.take(f"{layer}.qzeros", "I32", shape=(groups, n // 8))
    k = codes.shape[0]
    if k % groups:
        raise ValueError(f"{layer} in {scales.path} has {groups} groups for {k} inputs; expected groups of one size")
    size = stock.settings.get("group_size", stock.settings.get("q_group_size", k // groups))
    if size != k // groups and not (size == -1 and groups == 1) and "extra_config" not in stock.settings:
        raise ValueError(f"{layer} in {scales.path} has groups of {k // groups} inputs; expected {size!r}")
    if stock.order(f"{layer}.g_idx", k, k // groups, none=(0,)) is not None:
        raise ValueError(f"{layer} in {scales.path} has an act-order permutation; expected none in AWQ's layout")
    affine = bool((_outputs(load(zeros)) != 8).any())

    def read(begin: int, end: int) -> Rows:
        first, last = begin // 8, -(-end // 8)
        part = slice(begin - 8 * first, end - 8 * first)
        values = _outputs(stock.load_kept(codes)[:, first:last])[:, part].T.contiguous()
        zero = _outputs(load(zeros)[:, first:last])[:, part].T if affine else None
        return rows_of_grid(values, load(scales)[:, begin:end].T, zero)

    total = codes.bytes + scales.bytes + zeros.bytes
    return Matrix(f"{layer}.weight", "AWQ, 4 bits", (n, k), 4, None if groups == 1 else k // groups, affine, read, total)


def _outputs(words: Tensor) -> Tensor:
    """Unpacks int32 [rows, words] to codes uint8 [rows, 8 * words], in the order of the outputs."""
    shifts = torch.tensor([4 * _ORDER.index(output) for output in range(8)], dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).reshape(len(words), -1)
