"""Builds a plan from recorded operators: its buffers, operands and steps, and the table of functions that lower operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .plan_file import ELEMENT_TYPES, Buffer, Compute, Extent, Kind, Op, Operand, Plan, Step
from .recording import Call, Recording, Sizes, Unplannable, View, check_alike, flat, unified

_MOST_CONSTANT = 1 << 20  # bytes of a constant in a plan
_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32, torch.int64, torch.bool}

# Operation, registers or floats for constants, and type of the result.
Instruction: TypeAlias = tuple[Compute, Sequence[Any], torch.dtype]


@dataclass(frozen=True)
class Roles:
    """The roles of the given tensors of the recordings, which are the first storages of each recording."""

    inputs: int
    caches: Sequence[tuple[int, int]]  # layer and slot of each, after the inputs
    start: int = -1  # the input with the number of earlier tokens, which each text of a call has


class PlanBuilder:
    def __init__(self, recordings: Sequence[Recording], roles: Roles, weights: Mapping[str, Tensor]):
        self.recordings, self.sizes, self.roles = recordings, Sizes(), roles
        check_alike(recordings)
        self.whole = recordings[0]
        self.plan = Plan()
        self.weights: dict[int, list[tuple[str, Tensor]]] = {}  # by storage
        for name, tensor in weights.items():
            if tensor.is_contiguous():
                self.weights.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
        self.bound: dict[int, Tensor] = {}  # buffer -> weight
        self._buffers: dict[int, int] = {}  # storage -> buffer
        self._weight_buffers: dict[str, int] = {}
        self.outputs: dict[int, int] = {}  # storage -> number of the output

    def run(self) -> None:
        self.whole = whole = unified(self.recordings, self.sizes, self._needed())
        given = self.roles.inputs + len(self.roles.caches)
        for number, view in enumerate(whole.results):
            new = view.storage >= given and view.storage in whole.changing and view.storage not in self.outputs
            contiguous = view.offset == Extent(0) and view.stride == strides_of(view.size)
            if not new or not contiguous or bytes_of(view) != self._bytes_of(view.storage):
                raise Unplannable("its results are not new contiguous tensors that depend on the input")
            self.outputs[view.storage] = number
        for call in whole.calls:
            lower = LOWERINGS.get(call.operator)
            if lower is None:
                raise Unplannable(f"{call.operator} is not supported in plans")
            lower(self, call)

    def _bytes_of(self, storage: int) -> Extent:
        return self.sizes.extent(tuple(recording.bytes_of(storage) for recording in self.recordings))

    def _needed(self) -> list[int]:
        """The calls that the results depend on, without those that only make views or constants."""
        whole, chosen = self.whole, []
        caches = range(self.roles.inputs, self.roles.inputs + len(self.roles.caches))
        needed = {view.storage for view in whole.results} | {*caches}
        for number in reversed(range(len(whole.calls))):
            call = whole.calls[number]
            written = {view.storage for view in call.results if whole.made_by.get(view.storage) == number} | self._changed(call)
            if written & needed and not all(map(self._is_constant, written)):
                chosen.append(number)
                needed |= _storages(call.arguments.values())
        return chosen[::-1]

    def _changed(self, call: Call) -> set[int]:
        """Storages that an operator of torch changes in place."""
        return _storages(
            call.arguments[argument.name]
            for argument in call.operator._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )

    def _is_constant(self, storage: int) -> bool:
        """Whether a storage has the same bytes in all recordings, few enough for a plan."""
        sizes = {recording.bytes_of(storage) for recording in self.recordings}
        if storage in self.whole.changing or len(sizes) != 1 or sizes.pop() > _MOST_CONSTANT:
            return False
        one = self.recordings[0].content(storage)
        return all(recording.content(storage) == one for recording in self.recordings[1:])

    def buffer(self, storage: int) -> int:
        if storage not in self._buffers:
            self._buffers[storage] = len(self.plan.buffers)
            self.plan.buffers.append(self._new_buffer(storage))
        return self._buffers[storage]

    def _new_buffer(self, storage: int) -> Buffer:
        inputs, caches = self.roles.inputs, self.roles.caches
        if storage < inputs:
            return Buffer(Kind.INPUT, index=storage)
        if storage < inputs + len(caches):
            layer, slot = caches[storage - inputs]
            return Buffer(Kind.CACHE, index=layer, slot=slot)
        if storage in self.outputs:
            return Buffer(Kind.OUTPUT, index=self.outputs[storage])
        size = self._bytes_of(storage)
        if self._is_constant(storage):
            return Buffer(Kind.CONSTANT, size, content=self.recordings[0].content(storage))
        if storage not in self.whole.made_by:
            raise Unplannable(f"it uses a tensor of {size.constant} bytes that is not part of its state")
        return Buffer(Kind.TEMPORARY, size)

    def temporary(self, dtype: torch.dtype, size: Sequence[Extent]) -> Operand:
        """A new contiguous tensor."""
        self.plan.buffers.append(Buffer(Kind.TEMPORARY, product(size).times(dtype.itemsize)))
        return Operand(len(self.plan.buffers) - 1, dtype, tuple(size), strides_of(size))

    def operand(self, view: View | Operand) -> Operand:
        if isinstance(view, Operand):
            return view
        if view.dtype not in _DTYPES:
            raise Unplannable(f"tensors of {view.dtype} are not supported in plans")
        key = self.recordings[0].tensors[view.storage].untyped_storage()._cdata
        for name, tensor in self.weights.get(key, ()):
            operand = self._within(view, name, tensor)
            if operand is not None:
                return operand
        return Operand(self.buffer(view.storage), view.dtype, view.size, view.stride, view.offset)

    def _within(self, view: View, name: str, tensor: Tensor) -> Operand | None:
        """A view of a weight, if it lies within."""
        if view.dtype is not tensor.dtype or any(n != Extent(n.constant) for n in (view.offset, *view.size)):
            return None
        begin = view.offset.constant - tensor.storage_offset()
        last = begin + sum((n.constant - 1) * step.constant for n, step in zip(view.size, view.stride))
        if begin < 0 or last >= tensor.numel():
            return None
        if name not in self._weight_buffers:
            self._weight_buffers[name] = len(self.plan.buffers)
            self.bound[len(self.plan.buffers)] = tensor
            self.plan.buffers.append(Buffer(Kind.WEIGHT, Extent(tensor.nbytes), name=name))
        return Operand(self._weight_buffers[name], view.dtype, view.size, view.stride, Extent(begin))

    def step(
        self, op: Op, operands: Sequence[View | Operand | None], integers: Sequence[int] = (), numbers: Sequence[float] = ()
    ) -> None:
        if any(isinstance(each, Extent) for each in integers):
            raise Unplannable("an argument of an operator depends on the length of a call")
        found = [None if each is None else self.operand(each) for each in operands]
        self.plan.steps.append(Step(op, found, list(map(int, integers)), list(map(float, numbers))))

    def contiguous(self, view: View) -> Operand:
        """The same values without gaps."""
        operand = self.operand(view)
        if operand.stride == strides_of(operand.size):
            return operand
        copy = self.temporary(operand.dtype, operand.size)
        self.step(Op.COPY, [operand, copy])
        return copy

    def compute(self, instructions: Sequence[Instruction], inputs: Sequence[View | Operand], out: View | Operand) -> None:
        """An elementwise computation."""
        constants: list[float] = []

        def register(value: Any) -> int:
            if type(value) is int:
                return value
            constants.append(value)
            return -len(constants)

        code: list[int] = []
        for op, operands, dtype in instructions:
            registers = [register(value) for value in operands]
            code += [op, *registers, *[0] * (3 - len(registers)), ELEMENT_TYPES[dtype]]
        target = self.operand(out)
        sources = [expanded(self.operand(each), target.size) for each in inputs]
        self.step(Op.COMPUTE, [*sources, target], code, constants)

    def fill(self, value: float, out: View | Operand) -> None:
        self.compute([(Compute.CONVERT, [value], out.dtype)], [], out)


def _storages(values: Iterable[Any]) -> set[int]:
    return {view.storage for view in flat(list(values)) if isinstance(view, View)}


def product(sizes: Sequence[Extent]) -> Extent:
    """The product of sizes of which at most one depends on the call."""
    result = Extent(1)
    for size in sizes:
        if size.per_row or size.per_kept:
            if result.per_row or result.per_kept:
                raise Unplannable("the size of a tensor grows with the square of the tokens")
            result = size.times(result.constant)
        else:
            result = result.times(size.constant)
    return result


def bytes_of(view: View) -> Extent:
    """The bytes of a contiguous tensor."""
    return product(view.size).times(view.dtype.itemsize)


def strides_of(size: Sequence[Extent]) -> tuple[Extent, ...]:
    """The strides of a contiguous tensor."""
    return tuple(product(size[d + 1 :]) for d in range(len(size)))


def expanded(operand: Operand, size: tuple[Extent, ...]) -> Operand:
    """A view that repeats dimensions of size 1."""
    missing = len(size) - len(operand.size)
    old = [Extent(1)] * missing + list(operand.size)
    strides = [Extent(0)] * missing + list(operand.stride)
    return replace(operand, size=size, stride=tuple(Extent(0) if was == Extent(1) else by for was, by in zip(old, strides)))


def permuted(operand: Operand, dims: Iterable[int | None]) -> Operand:
    """A view with these dimensions, in this order; None is a new one of size 1."""
    order = list(dims)
    size, stride = (tuple(Extent(1) if d is None else of[d] for d in order) for of in (operand.size, operand.stride))
    return replace(operand, size=size, stride=stride)


def check_last(operator: str, dim: int, x: View | Operand) -> None:
    """Raises Unplannable unless ``dim`` is the last dimension."""
    if dim % len(x.size) != len(x.size) - 1:
        raise Unplannable(f"plans support {operator} only over the last dimension")


Lower: TypeAlias = Callable[[PlanBuilder, Call], None]
LOWERINGS: dict[Any, Lower] = {}  # by operator


def lowers(*operators: Any) -> Callable[[Lower], Lower]:
    """A decorator of the function that adds the steps of these operators to a plan."""

    def register(function: Lower) -> Lower:
        LOWERINGS.update(dict.fromkeys(operators, function))
        return function

    return register
