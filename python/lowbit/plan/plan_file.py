"""The parts of a plan, and its bytes; ../../../plan/plan.h has their meaning, plan/read.cpp reads them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from ..operators.cache_layout import Slot as Slot

_MAGIC = b"lowbit plan\n"
_VERSION = 1
CHECKED = 4096

# The numbers of ElementType in ops/tensor_view.h.
ELEMENT_TYPES: dict[torch.dtype, int] = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3, torch.int32: 4, torch.int64: 5, torch.float64: 6,
    torch.int8: 7, torch.int16: 8, torch.bool: 9,
}  # fmt: skip


class Kind(IntEnum):
    """What a buffer is."""

    INPUT, OUTPUT, WEIGHT, CACHE, CONSTANT, TEMPORARY = range(6)


class Op(IntEnum):
    """The operators of a plan."""

    LINEAR, LINEARS, LINEAR_EXPERTS, EMBEDDING, ATTENTION, MASKED_ATTENTION, FIXED_ATTENTION, LINEAR_ATTENTION, \
        SHORT_CONV, ACTIVATE, RMS_NORM, LAYER_NORM, ROTARY, COPY, COMPUTE, FLOAT_LINEAR, SUM, SOFTMAX, TOP, GATHER, TAKE, \
        SCATTER, COUNT_UP, POOL = range(24)  # fmt: skip


class Compute(IntEnum):
    """The instructions of an elementwise computation."""

    CONVERT, ADD, SUB, MUL, DIV, MINIMUM, MAXIMUM, NEG, ABS, RECIPROCAL, SQRT, RSQRT, EXP, LOG, TANH, SIGMOID, SOFTPLUS, SIN, \
        COS, FLOOR, EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, AND, OR, NOT, SELECT, \
        LOG1P, EXPM1 = range(32)  # fmt: skip


class Extent(NamedTuple):
    """A size that depends on a call: constant + rows * per_row + kept * per_kept."""

    constant: int
    per_row: int = 0
    per_kept: int = 0

    def at(self, rows: int, kept: int) -> int:
        return self.constant + rows * self.per_row + kept * self.per_kept

    def is_possible(self) -> bool:
        """Whether it is never below 0, for any rows and any kept rows among them."""
        slope = min(self.per_row, self.per_row + self.per_kept)
        return slope >= 0 and self.constant + slope >= 0

    def times(self, factor: int) -> Extent:
        return Extent(self.constant * factor, self.per_row * factor, self.per_kept * factor)

    def plus(self, other: Extent) -> Extent:
        return Extent(*map(sum, zip(self, other)))


@dataclass
class Buffer:
    kind: Kind
    size: Extent = Extent(0)  # in bytes
    index: int = 0  # the number of an input or output, the layer of a cache
    slot: int = 0
    name: str = ""
    content: bytes = b""
    file: str = ""  # beside the plan's, with the weight
    offset: int = 0
    checksum: int = 0  # of the weight's first CHECKED bytes
    shape: tuple[int, ...] = ()  # of a cache of one text: [heads, width], or that of a state
    dtype: torch.dtype = torch.float32  # of a state


@dataclass(frozen=True)
class Operand:
    """A strided view of a buffer; offset and strides in elements."""

    buffer: int
    dtype: torch.dtype
    size: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    offset: Extent = Extent(0)


@dataclass
class Step:
    op: Op
    operands: Sequence[Operand | None]
    integers: Sequence[int] = ()
    numbers: Sequence[float] = ()


@dataclass
class Plan:
    about: dict[str, list[int]] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class _Writer:
    def __init__(self) -> None:
        self.bytes = bytearray()

    def number(self, value: int) -> None:
        """LEB128 of the zigzag code."""
        code = value << 1 if value >= 0 else (-value << 1) - 1
        while code >= 0x80:
            self.bytes.append(code & 0x7F | 0x80)
            code >>= 7
        self.bytes.append(code)

    def numbers(self, *values: int) -> None:
        for value in values:
            self.number(value)

    def text(self, value: bytes) -> None:
        self.number(len(value))
        self.bytes += value


def to_bytes(plan: Plan) -> bytes:
    """The bytes of a plan's file."""
    writer = _Writer()
    writer.numbers(_VERSION, len(plan.about))
    for name, values in plan.about.items():
        writer.text(name.encode())
        writer.numbers(len(values), *values)
    writer.number(len(plan.buffers))
    for buffer in plan.buffers:
        writer.numbers(buffer.kind, *buffer.size, buffer.index, buffer.slot)
        writer.text(buffer.name.encode())
        writer.text(buffer.content)
        writer.text(buffer.file.encode())
        writer.numbers(buffer.offset, buffer.checksum, len(buffer.shape), *buffer.shape, ELEMENT_TYPES[buffer.dtype])
    writer.number(len(plan.steps))
    for step in plan.steps:
        writer.numbers(step.op, len(step.operands))
        for operand in step.operands:
            if operand is None:
                writer.number(-1)
                continue
            writer.numbers(operand.buffer, ELEMENT_TYPES[operand.dtype], len(operand.size), *operand.offset)
            for size, stride in zip(operand.size, operand.stride, strict=True):
                writer.numbers(*size, *stride)
        writer.numbers(len(step.integers), *step.integers, len(step.numbers))
        writer.bytes += struct.pack(f"<{len(step.numbers)}d", *step.numbers)
    content = _MAGIC + bytes(writer.bytes)
    return content + struct.pack("<I", zlib.crc32(content))
