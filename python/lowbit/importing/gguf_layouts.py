"""Converts GGUF tensors whose layout differs from transformers': split, in another order, or transformed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.codes import Float, Matrix, Read, Rows, Weights, put_together


@dataclass(frozen=True)
class Order:
    """A permutation: row or column i of the model is number ``numbers()[i]`` of the ``count`` in the file.

    ``numbers`` is called only after the file's count has been checked.
    """

    count: int
    numbers: Callable[[], Tensor]


@dataclass(frozen=True)
class Layout:
    """How to convert a tensor of a file to transformers' layout."""

    rows: Order | None = None
    columns: Order | None = None
    values: Callable[[Tensor], Tensor] | None = None  # converts the values of a float tensor
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None  # shape of a float tensor, from that in the file


def tiled(keys: int, values: int, width: int, before: int = 0) -> Order | None:
    """The order of the rows of value heads, ``width`` each, after ``before`` other rows.

    transformers stores the ``values // keys`` value heads of a key head together; llama.cpp stores the first value heads of
    all key heads, then the second ones, and so on. None: the two orders are the same.
    """
    if keys == values:
        return None
    count = before + values * width

    def numbers() -> Tensor:
        heads = torch.arange(values * width).view(values // keys, keys, width).transpose(0, 1).reshape(-1)
        return torch.cat([torch.arange(before), heads + before])

    return Order(count, numbers)


def _gathered(read: Read, numbers: Tensor) -> Read:
    """Reads rows in another order, with one read per run of consecutive rows."""

    def gather(begin: int, end: int) -> Any:
        wanted = numbers[begin:end]
        ends = [*(torch.nonzero(wanted.diff() != 1)[:, 0] + 1).tolist(), len(wanted)]
        pieces, start = [], 0
        for stop in ends:
            first = int(wanted[start])
            pieces.append(read(first, first + stop - start))
            start = stop
        return put_together(pieces, torch.cat)

    return gather


def _numbers(tensor: Matrix | Weights | Float, order: Order, axis: int, path: Any) -> Tensor:
    shape = tensor.shape
    if len(shape) <= axis or shape[axis] != order.count:
        raise ValueError(f"{path}: {tensor.name} is {list(shape)}; expected {order.count} {('rows', 'columns')[axis]}")
    return order.numbers()


def _with_columns(tensor: Matrix | Weights | Float, numbers: Tensor, path: Any) -> Matrix | Weights | Float:
    if not isinstance(tensor, Matrix):
        values = tensor.read
        return replace(tensor, read=lambda begin, end: values(begin, end)[:, numbers])
    read = tensor.read
    size = tensor.group_size or tensor.shape[1]
    groups = numbers.view(-1, size)
    firsts = groups[:, 0] // size
    if not torch.equal(groups, (firsts * size)[:, None] + torch.arange(size)):
        raise ValueError(
            f"{path}: {tensor.name} is {tensor.source}, whose groups of {size} inputs belong to two heads each; expected "
            "heads of whole groups"
        )

    def chosen(begin: int, end: int) -> Rows:
        rows = read(begin, end)
        return Rows(rows.codes[:, numbers], *(None if part is None else part[:, firsts] for part in rows[1:]))

    return replace(tensor, read=chosen)


def laid_out(tensor: Matrix | Weights | Float, layout: Layout, path: Any) -> Matrix | Weights | Float:
    """Converts a tensor to transformers' layout.

    Raises:
        ValueError: its shape does not match the layout, or the layout would split groups of inputs.
    """
    if layout.rows is not None:
        tensor = replace(tensor, read=_gathered(tensor.read, _numbers(tensor, layout.rows, 0, path)))
    if layout.columns is not None:
        tensor = _with_columns(tensor, _numbers(tensor, layout.columns, 1, path), path)
    if layout.values is None and layout.shape is None:
        return tensor
    if not isinstance(tensor, Float):
        raise ValueError(f"{path}: {tensor.name} is {tensor.source}; expected floats")
    change, read, shape = layout.values, tensor.read, tensor.shape if layout.shape is None else layout.shape(tensor.shape)

    def floats(begin: int, end: int) -> Tensor:
        values = (
            read(begin, end) if len(shape) == len(tensor.shape) or shape[0] == tensor.shape[0] else read(0, tensor.shape[0])
        )
        values = values if change is None else change(values)
        if shape[0] == tensor.shape[0]:
            return values.reshape(end - begin, *shape[1:])
        return values.reshape(shape)[begin:end]

    return replace(tensor, shape=shape, read=floats)


def without_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [n] for [n, 1] or [n]."""
    return shape[:-1] if len(shape) == 2 and shape[1] == 1 else shape


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape),)


def depthwise(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [channels, 1, taps] for [channels, taps]."""
    return (shape[0], 1, *shape[1:])


def log_of_negative(values: Tensor) -> Tensor:
    """Returns ``A_log`` for ``A = -exp(A_log)``."""
    return torch.log(-values)
