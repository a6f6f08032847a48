"""Tensors of a source that are one in the model: matrices below each other, and those of all experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._rounding import LinearConfig
from .codes import Float, Matrix, Rows, SourceTensor, Stacked, Weights, values_of

Read: TypeAlias = Callable[[int, int], Any]  # rows: Tensor or Rows


def put_together(pieces: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Rows of several tensors as one: float ones, or each part of quantized ones."""
    if isinstance(pieces[0], Tensor):
        return join(list(pieces))
    return Rows(*(None if part[0] is None else join(list(part)) for part in zip(*pieces, strict=True)))


def below_each_other(reads: Sequence[Read], sizes: Sequence[int]) -> Read:
    """Reads rows of several tensors that lie below each other."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]

    def read(begin: int, end: int) -> Any:
        spans = [(max(begin - start, 0), min(end - start, size)) for start, size in zip(starts, sizes, strict=True)]
        pieces = [one(first, last) for one, (first, last) in zip(reads, spans, strict=True) if first < last]
        return put_together(pieces, torch.cat)

    return read


def joined(parts: Sequence[Matrix | Weights | Float], name: str, path: Path) -> Matrix | Weights | Float:
    """Tensors below each other as one; matrices of several types are requantized.

    Raises:
        ValueError: they have different numbers of columns.
    """
    first, sizes = parts[0], [part.shape[0] for part in parts]
    if any(part.shape[1:] != first.shape[1:] for part in parts):
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        raise ValueError(f"{path}: the parts of {name} are {shapes}; expected as many columns in each")
    shape, total = (sum(sizes), *first.shape[1:]), sum(part.bytes for part in parts)
    if all(part.source == first.source for part in parts):
        read_all = below_each_other([part.read for part in parts], sizes)
        if isinstance(first, Float):
            return replace(first, name=name, shape=shape, bytes=total, read=read_all)
        return replace(first, name=name, shape=(shape[0], shape[1]), bytes=total, read=read_all)
    if not all(isinstance(part, Matrix | Weights | Float) and len(part.shape) == 2 for part in parts):
        raise ValueError(f"{path}: the parts of {name} are {' and '.join(part.source for part in parts)}; expected one type")
    read = below_each_other([values_of(part) for part in parts], sizes)
    bits = max(
        part.bits if isinstance(part, Matrix) else part.config.bits if isinstance(part, Weights) else 8 for part in parts
    )
    sources = " and ".join(dict.fromkeys(part.source for part in parts))
    return Weights(name, sources, (shape[0], shape[1]), LinearConfig(min(bits + 1, 8)), read, total)


def _form(tensor: SourceTensor) -> tuple[Any, ...]:
    """What has to be alike in the matrices of all experts."""
    if isinstance(tensor, Matrix):
        return (tensor.source, tensor.shape, tensor.bits, tensor.group_size, tensor.affine, tensor.levels)
    return (tensor.source, tensor.shape)


def stacked(experts: Sequence[Sequence[SourceTensor]], name: str, path: Path) -> Stacked | None:
    """The matrices of all experts, each of one part or of parts below each other, as one tensor.

    None if they are not quantized, not all alike, or have inputs in an order of their own.
    """
    first = experts[0]
    for parts in experts:
        for tensor, other in zip(parts, first, strict=True):
            if not isinstance(tensor, Matrix | Weights) or _form(tensor) != _form(other):
                return None
            if isinstance(tensor, Matrix) and tensor.order is not None:
                return None

    def of(expert: int) -> Matrix | Weights:
        matrix = joined(experts[expert], f"{name}, expert {expert}", path)  # type: ignore[arg-type]  # checked above
        assert not isinstance(matrix, Float)
        return matrix

    return Stacked(name, len(experts), of)
