"""Makes plans shorter without changing their results: copies that only change strides, and activations with gates."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .plan_file import ELEMENT_TYPES, Compute, Extent, Kind, Op, Operand, Plan, Step

_OUTPUTS = {Op.ROTARY: 2, Op.TOP: 2}
# Operators that read these operands with any strides; `activate` needs equidistant rows of consecutive numbers.
_STRIDED = {
    Op.LINEAR: (0,),
    Op.LINEARS: (0,),
    Op.ATTENTION: (0, 1, 2),
    Op.COMPUTE: range(12),
    Op.COPY: (0,),
    Op.ACTIVATE: (0, 1),
}


def shortened(plan: Plan) -> Plan:
    """The plan without steps that others can do."""
    _Shortener(plan).run()
    return plan


class _Shortener:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def run(self) -> None:
        for step in list(self.plan.steps):
            if step.op is Op.COPY:
                self._read_source(step)
        for step in list(self.plan.steps):
            if step.op is Op.COMPUTE:
                self._gate(step)

    def _uses(self, buffer: int) -> Iterator[tuple[Step, int]]:
        for step in self.plan.steps:
            for place, operand in enumerate(step.operands):
                if operand is not None and operand.buffer == buffer:
                    yield step, place

    def _is_temporary(self, operand: Operand) -> bool:
        return self.plan.buffers[operand.buffer].kind is Kind.TEMPORARY

    def _writes(self, buffer: int) -> list[Step]:
        return [step for step, place in self._uses(buffer) if place >= len(step.operands) - _OUTPUTS.get(step.op, 1)]

    def _read_source(self, copy: Step) -> None:
        """Makes the readers of a copy read its source, if they accept the strides."""
        source, target = copy.operands
        assert source is not None and target is not None
        if source.dtype is not target.dtype or not self._is_temporary(target) or len(self._writes(target.buffer)) != 1:
            return
        if self._is_temporary(source) and len(self._writes(source.buffer)) != 1:
            return  # it may change in between
        if self.plan.buffers[source.buffer].kind in (Kind.OUTPUT, Kind.CACHE):
            return
        readers = [(step, place) for step, place in self._uses(target.buffer) if step is not copy]
        rows = _has_rows(source)
        for step, place in readers:
            operand = step.operands[place]
            if not _same(operand, target) or place not in _STRIDED.get(step.op, ()) or (step.op is Op.ACTIVATE and not rows):
                return
        for step, place in readers:
            step.operands = [source if i == place else each for i, each in enumerate(step.operands)]
        self.plan.steps.remove(copy)

    def _gate(self, product: Step) -> None:
        """Joins silu(x) * gate to one operator, whose single rounding is the same in float32."""
        code = (Compute.MUL, 0, 1, 0, ELEMENT_TYPES[torch.float32])
        other_way = (Compute.MUL, 1, 0, 0, ELEMENT_TYPES[torch.float32])
        if tuple(product.integers) not in (code, other_way) or len(product.operands) != 3:
            return
        for place in (0, 1):
            activated, gate, out = product.operands[place], product.operands[1 - place], product.operands[2]
            assert activated is not None and gate is not None and out is not None
            uses = [step for step, _ in self._uses(activated.buffer)]
            if not self._is_temporary(activated) or len(uses) != 2 or uses[0].op is not Op.ACTIVATE or uses[1] is not product:
                continue
            activate = uses[0]
            x, before, result = activate.operands
            if (
                before is not None
                or not _same(result, activated)
                or activated.dtype is not torch.float32
                or not _has_rows(gate)
            ):
                continue
            product.op, product.operands = Op.ACTIVATE, [x, gate, out]
            product.integers, product.numbers = activate.integers, ()
            self.plan.steps.remove(activate)
            return


def _same(a: Operand | None, b: Operand | None) -> bool:
    """Whether two views have the same numbers; strides of dimensions of size 1 do not matter."""
    if a is None or b is None or (a.buffer, a.dtype, a.size, a.offset) != (b.buffer, b.dtype, b.size, b.offset):
        return False
    return all(x == y or size == Extent(1) for x, y, size in zip(a.stride, b.stride, a.size, strict=True))


def _has_rows(operand: Operand) -> bool:
    """Whether a tensor is rows of consecutive numbers at one distance."""
    sizes = [(size, stride) for size, stride in zip(operand.size, operand.stride, strict=True) if size != Extent(1)]
    if not sizes or sizes[-1][1] != Extent(1):
        return False
    outer = sizes[:-1]
    return all(a[1] == _outer_stride(b) for a, b in zip(outer, outer[1:]))


def _outer_stride(dimension: tuple[Extent, Extent]) -> Extent | None:
    """The stride of the dimension before this one, if rows are equidistant; None if it grows with the square of the tokens."""
    size, stride = dimension
    if size.per_row or size.per_kept:
        return None if stride.per_row or stride.per_kept else size.times(stride.constant)
    return stride.times(size.constant)
