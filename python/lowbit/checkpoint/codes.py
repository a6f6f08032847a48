"""The tensors of a source checkpoint before packing: floats, or codes with a scale, and possibly a min, per group of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..files.io import read_bytes, read_row_bytes
from ..files.safetensors import Stored
from ..files.tensors import DTYPES, read_rows
from ..packed.groups import per_input
from ..packed.header import PackedInfo
from ..packed.matrix import Unpacked, describe, pack, unpack
from ..packed.rounding import Config, quantize_tensor


class Rows(NamedTuple):
    """Rows of a quantized matrix: ``codes`` uint8 [rows, k], ``scales`` float32 [rows, groups], ``mins`` likewise or None.

    A weight is ``scale * (code - 2**(bits - 1))``, with mins ``scale * code + min``, with levels ``scale * level``.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None


def rows_of_grid(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, order: Tensor | None = None) -> Rows:
    """Rows whose weights are ``scale * (code - zero)``; symmetric without zeros.

    Args:
        order: as for :class:`Matrix`; the codes are still in the model's order.
    """
    codes = codes if order is None else codes[:, order]
    scales = scales.float().contiguous()
    return Rows(codes, scales, None if zeros is None else -zeros.float() * scales)


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix of a source."""

    name: str  # of the weight in the target checkpoint, such as "model.layers.0.mlp.up_proj.weight"
    source: str  # type in the source, such as "Q4_K" or "GPTQ, 4 bits"
    shape: tuple[int, int]  # [n, k]
    bits: int
    group_size: int | None  # None: one group per row
    affine: bool
    read: Callable[[int, int], Rows]  # rows [begin, end)
    bytes: int  # in the source
    levels: tuple[int, ...] | None = None  # int8 level of each code; None: no table
    levels_off: float = 0.0  # largest distance of a level from that of the source, in steps
    order: Tensor | None = None  # act-order, int64 [k]: input j of `read` is input order[j] of the model; None: not permuted

    def info(self, has_bias: bool) -> PackedInfo:
        """The header of the packed weight. Raises ValueError if the matrix cannot be packed."""
        return describe(self.shape, self.bits, self.group_size, self.mapping, has_bias, self.levels)

    @property
    def label(self) -> str:
        return self.name

    @property
    def mapping(self) -> str:
        return "levels" if self.levels else "affine" if self.affine else "symmetric"


@dataclass(frozen=True)
class Weights:
    """A matrix of a source that is quantized from its values: floats, or codes that lowbit cannot represent."""

    name: str
    source: str
    shape: tuple[int, int]
    config: Config  # how to quantize it
    read: Callable[[int, int], Tensor]  # [rows, k]
    bytes: int
    file: str = ""  # for messages

    @property
    def label(self) -> str:
        return f"{self.name} in {self.file}" if self.file else self.name

    def info(self, has_bias: bool) -> PackedInfo:
        return self.config.describe(self.shape, has_bias)


@dataclass(frozen=True)
class Stacked:
    """The matrices of all experts of a layer, which are one tensor in the model and in lowbit's files."""

    name: str  # of the parameter in the target checkpoint, such as "model.layers.0.mlp.experts.down_proj"
    experts: int
    of: Callable[[int], Matrix | Weights]  # the matrix of an expert; called lazily, as a file may claim millions of experts
    bytes: int  # in the source
    differ: str | None = None  # how the types of experts differ in the source; None: all are alike

    @property
    def source(self) -> str:
        return self.differ or self.of(0).source

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape [experts, n, k]."""
        return self.experts, *self.of(0).shape

    def info(self, has_bias: bool) -> PackedInfo:
        """The same as :meth:`Matrix.info`."""
        return replace(self.of(0).info(has_bias), experts=self.experts)


@dataclass(frozen=True)
class Float:
    """A tensor of a source that is written as floats."""

    name: str
    source: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]  # rows of the first dimension
    bytes: int  # that it takes when written
    dequantized: bool = False  # from quantized weights


SourceTensor: TypeAlias = Matrix | Stacked | Weights | Float
Read: TypeAlias = Callable[[int, int], Any]  # rows: Tensor or Rows


def stored_float(stored: Stored) -> Float:
    """A tensor of a file, unchanged. Rows of other dtypes than floats are read as bytes."""

    def read(begin: int, end: int) -> Tensor:
        if not stored.shape:
            return read_bytes(stored)
        return read_rows(stored, begin, end) if stored.dtype in DTYPES else read_row_bytes(stored, begin, end)

    return Float(stored.name, stored.dtype, stored.dtype, stored.shape, read, stored.bytes)


def put_together(pieces: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Joins pieces of rows: float tensors, or each field of quantized rows."""
    if isinstance(pieces[0], Tensor):
        return join(list(pieces))
    return Rows(*(None if part[0] is None else join(list(part)) for part in zip(*pieces, strict=True)))


def below_each_other(reads: Sequence[Read], sizes: Sequence[int]) -> Read:
    """Reads rows of several tensors, concatenated by rows."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def read(begin: int, end: int) -> Any:
        spans = [(max(begin - start, 0), min(end - start, size)) for start, size in zip(starts, sizes, strict=True)]
        pieces = [one(first, last) for one, (first, last) in zip(reads, spans, strict=True) if first < last]
        return pieces[0] if len(pieces) == 1 else put_together(pieces, torch.cat)

    return read


class LastRead:
    """A function that reads a tensor, and keeps the last one: a matrix that is stored by columns is read once for all its rows.

    Tensors are compared by identity.
    """

    def __init__(self, read: Callable[[Any], Tensor]):
        self._read, self._last = read, (None, torch.empty(0))

    def __call__(self, stored: Any) -> Tensor:
        if self._last[0] is not stored:
            self._last = None, torch.empty(0)  # free it before the next one is allocated
            self._last = stored, self._read(stored)
        return self._last[1]


@dataclass
class Nearness:
    """The error of a matrix's packed weights against the source, over the bands so far.

    ``steps``: the largest change of a weight, as a fraction of its group's quantization step.
    ``error``: the root mean square of the changes, relative to that of the weights.
    """

    kind: str = "exact"  # or "rounded" (only the scales changed), or "requantized"
    steps: float = 0.0
    moved: float = 0.0  # sum of squares
    weight: float = 0.0

    @property
    def error(self) -> float:
        return math.sqrt(self.moved / self.weight) if self.weight else 0.0

    def round(self, steps: float) -> None:
        """Adds a band whose weights changed by up to ``steps`` steps."""
        if self.kind == "exact":  # "requantized" stays: experts may differ
            self.kind = "rounded"
        self.steps = max(self.steps, steps)


def pack_rows(matrix: Matrix, rows: Rows, bias: Tensor | None, nearness: Nearness | None = None) -> Tensor:
    """Packs some rows of a matrix, and adds the error of float16 scales to `nearness`.

    Raises:
        ValueError: a scale, min or bias is not finite, or a code exceeds the bit width.
    """
    scales, mins = rows.scales.float(), None if rows.mins is None else rows.mins.float()
    packed = pack(
        rows.codes, scales, mins, None if bias is None else bias.float(), bits=matrix.bits, group_size=matrix.group_size,
        mapping=matrix.mapping, levels=matrix.levels,
    )  # fmt: skip
    if nearness is not None:
        if matrix.levels_off:
            nearness.round(matrix.levels_off)
        _compare(matrix, scales, mins, unpack(packed), nearness)
    return packed


def _compare(matrix: Matrix, scales: Tensor, mins: Tensor | None, stored: Unpacked, nearness: Nearness) -> None:
    scale_off = (stored.scales - scales).abs()
    min_off = torch.zeros((), dtype=torch.float32) if mins is None else (stored.mins - mins).abs()
    if not scale_off.any() and not min_off.any():
        return
    if matrix.levels is None:
        most = 2**matrix.bits - 1 if matrix.affine else 2 ** (matrix.bits - 1)
        step = scales.abs()
    else:
        ordered = sorted(set(matrix.levels))
        most = max(map(abs, matrix.levels))
        step = scales.abs() * min(b - a for a, b in zip(ordered, ordered[1:], strict=False))
    # In a group with scale 0 all weights equal its min: use the largest step of the row instead.
    step = torch.where(step > 0, step, step.amax(1, keepdim=True))
    moved = torch.where(step > 0, (most * scale_off + min_off) / step, torch.zeros(()))
    nearness.round(matrix.levels_off + float(moved.max()))


def requantize_rows(weights: Weights, values: Tensor, bias: Tensor | None, nearness: Nearness | None = None) -> Tensor:
    """Quantizes some rows, and adds the squared errors to `nearness`.

    Raises:
        ValueError: a value is not finite.
    """
    packed = quantize_tensor(values, weights.config, bias)
    if nearness is not None:
        back = dequantize(unpack(packed))
        nearness.kind = "requantized"
        nearness.moved += float((back - values).double().square().sum())
        nearness.weight += float(values.double().square().sum())
    return packed


def dequantize(stored: Unpacked) -> Tensor:
    """The weights of an unpacked matrix, float32 [n, k]."""
    levels = None if stored.levels is None else tuple(stored.levels.tolist())
    return _weights(Rows(*stored[:3]), stored.bits, stored.group_size, levels)


def _weights(rows: Rows, bits: int, group_size: int | None, levels: tuple[int, ...] | None) -> Tensor:
    k = rows.codes.shape[1]
    scales = per_input(rows.scales.float(), group_size, k)
    if levels is not None:
        return scales * torch.tensor(levels, dtype=torch.float32)[rows.codes.long()]
    codes = rows.codes.float()
    if rows.mins is not None:  # rounded once, as in the kernels: the product is exact in float64
        return (scales.double() * codes + per_input(rows.mins, group_size, k)).float()
    return scales * (2 * codes - 1 if bits == 1 else codes - 2 ** (bits - 1))


def values_of(tensor: Matrix | Weights | Float) -> Callable[[int, int], Tensor]:
    """A function that reads the weights of rows [begin, end) as float32 [rows, k], for any kind of tensor."""
    if not isinstance(tensor, Matrix):
        return lambda begin, end: tensor.read(begin, end).float()

    def read(begin: int, end: int) -> Tensor:
        weights = _weights(tensor.read(begin, end), tensor.bits, tensor.group_size, tensor.levels)
        return weights if tensor.order is None else weights[:, tensor.order.argsort()]

    return read


def recoded(matrix: Matrix, bits: int, group_size: int | None, affine: bool) -> Matrix:
    """The same weights with codes of at least as many bits, the same or smaller groups, with or without minimums.

    Args:
        bits: 8 for a matrix with levels, which become the codes.
        group_size: a divisor of the matrix's group size; any size if the matrix has one group per row.
        affine: must be True if the matrix has minimums.
    """

    def finer(values: Tensor) -> Tensor:
        if group_size == matrix.group_size:
            return values
        return per_input(values, matrix.group_size, matrix.shape[1])[:, :: group_size or matrix.shape[1]].contiguous()

    def read(begin: int, end: int) -> Rows:
        codes, scales, mins = matrix.read(begin, end)
        scales, mins = finer(scales.float()), None if mins is None else finer(mins.float())
        if mins is not None or not affine and bits == matrix.bits and matrix.levels is None:
            return Rows(codes, scales, mins)
        if bits == 1:  # -1 and 1
            return Rows(codes, 2 * scales, -scales)
        half = 2 ** (bits - 1)
        codes = (_units(matrix.bits, matrix.levels)[codes.long()] + half).to(torch.uint8)
        return Rows(codes, scales, -half * scales if affine else None)

    return replace(matrix, bits=bits, group_size=group_size, affine=affine, levels=None, read=read)


def _units(bits: int, levels: tuple[int, ...] | None) -> Tensor:
    """The factor of the scale for each code of a matrix without minimums, int16."""
    codes = torch.arange(2**bits, dtype=torch.int16)
    if levels is not None:
        return torch.tensor(levels, dtype=torch.int16)
    return 2 * codes - 1 if bits == 1 else codes - 2 ** (bits - 1)


def order_of(groups: Tensor, size: int) -> Tensor | None:
    """The act-order permutation that makes every group contiguous, int64 [k]; None if all groups already are.

    Args:
        groups: int64 [k], the group of each input.
        size: inputs per group; the last group may have fewer.

    Raises:
        ValueError: a group has another number of inputs.
    """
    ordered, order = groups.sort(stable=True)
    if not torch.equal(ordered, torch.arange(len(groups)) // size):
        raise ValueError(f"its inputs are in groups that do not have {size} inputs each")
    return None if torch.equal(ordered, groups) else order


def as_floats(tensor: Matrix | Weights) -> Float:
    """The dequantized weights, float32, of a matrix that cannot be packed."""

    n, k = tensor.shape
    return Float(tensor.name, tensor.source, "F32", tensor.shape, values_of(tensor), 4 * n * k, dequantized=True)
