"""Lowers operators of torch that copy, join, select or repeat numbers, and those that make constants."""

from __future__ import annotations

from dataclasses import replace

import torch

from .plan_builder import PlanBuilder, check_last, expanded, lowers, permuted, product, strides_of
from .plan_file import Extent, Op, Operand
from .recording import Call, Unplannable, View

_ATEN = torch.ops.aten


@lowers(
    _ATEN.reshape.default, _ATEN.contiguous.default, _ATEN.clone.default, _ATEN.to.dtype, _ATEN.to.dtype_layout,
    _ATEN._to_copy.default, _ATEN.to.device, _ATEN.type_as.default, _ATEN.flatten.using_ints, _ATEN.dropout.default,
    _ATEN._reshape_copy.default,
)  # fmt: skip
def _copy(to: PlanBuilder, call: Call) -> None:
    source = next(view for view in call.arguments.values() if isinstance(view, View))
    target = to.operand(call.results[0])
    if product(source.size) != product(target.size):
        raise Unplannable(f"{call.operator} is not supported in plans if it repeats values")
    if target.size != source.size:
        if target.stride != strides_of(target.size):
            raise Unplannable(f"{call.operator} is not supported in plans if its result has gaps")
        target = replace(target, size=source.size, stride=strides_of(source.size))
    to.step(Op.COPY, [source, target])


@lowers(_ATEN.copy_.default)
def _copy_into(to: PlanBuilder, call: Call) -> None:
    target, source = (to.operand(call.arguments[name]) for name in ("self", "src"))
    to.step(Op.COPY, [expanded(source, target.size), target])


@lowers(_ATEN.repeat.default)
def _repeat(to: PlanBuilder, call: Call) -> None:
    source, target = to.operand(call.arguments["self"]), to.operand(call.results[0])
    if any(was not in (Extent(1), now) for was, now in zip(source.size[::-1], target.size[::-1])):
        raise Unplannable("plans repeat only dimensions of size 1")
    to.step(Op.COPY, [expanded(source, target.size), target])


@lowers(_ATEN.repeat_interleave.self_int)
def _repeat_interleave(to: PlanBuilder, call: Call) -> None:
    source, target = to.operand(call.arguments["self"]), to.operand(call.results[0])
    repeats, dim = call.arguments["repeats"], call.arguments["dim"]
    if dim is None or isinstance(repeats, Extent):
        raise Unplannable("plans support repeat_interleave only in one dimension, a constant number of times")
    dim %= len(source.size)

    def split(sizes: tuple[Extent, ...], more: Extent) -> tuple[Extent, ...]:
        return (*sizes[: dim + 1], more, *sizes[dim + 1 :])

    size = split(source.size, Extent(repeats))
    source = replace(source, size=size, stride=split(source.stride, Extent(0)))
    outer = [stride.times(repeats) if d == dim else stride for d, stride in enumerate(target.stride)]
    to.step(Op.COPY, [source, replace(target, size=size, stride=split(tuple(outer), target.stride[dim]))])


@lowers(_ATEN.cat.default, _ATEN.concat.default, _ATEN.stack.default)
def _cat(to: PlanBuilder, call: Call) -> None:
    target = to.operand(call.results[0])
    dim, at = call.arguments["dim"] % len(target.size), Extent(0)
    for view in call.arguments["tensors"]:
        source = to.operand(view)
        if call.operator is _ATEN.stack.default:
            source = permuted(source, [*range(dim), None, *range(dim, len(source.size))])
        if len(source.size) != len(target.size):
            continue  # an empty tensor
        offset = target.offset.plus(product([at, target.stride[dim]]))
        to.step(Op.COPY, [source, replace(target, size=source.size, offset=offset)])
        at = at.plus(source.size[dim])


@lowers(_ATEN.pad.default, _ATEN.constant_pad_nd.default)
def _pad(to: PlanBuilder, call: Call) -> None:
    a, target = call.arguments, to.operand(call.results[0])
    source, pad = to.operand(a["self"]), a["pad"]
    if a.get("mode", "constant") != "constant" or any(isinstance(each, Extent) or each < 0 for each in pad):
        raise Unplannable("plans support only padding by a constant, of constant size")
    to.fill(float(a["value"] or 0), target)
    offset = target.offset
    for stride, before in zip(target.stride[::-1], pad[::2]):  # the last dimension comes first
        offset = offset.plus(stride.times(before))
    to.step(Op.COPY, [source, replace(target, size=source.size, offset=offset)])


@lowers(_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step)
def _arange(to: PlanBuilder, call: Call) -> None:
    out, start, step = call.results[0], call.arguments.get("start", 0), call.arguments.get("step", 1)
    if any(type(value) is not int for value in (start, step)) or len(out.size) != 1:
        raise Unplannable("plans support arange only with constant integers")
    counted = out if out.dtype is torch.int64 else to.temporary(torch.int64, out.size)
    to.step(Op.COUNT_UP, [counted], [], [start, step])
    if counted is not out:
        to.step(Op.COPY, [counted, out])


@lowers(_ATEN.gather.default)
def _gather(to: PlanBuilder, call: Call) -> None:
    x, index = _indexed_rows(call, "gather")
    to.step(Op.GATHER, [x, index, *call.results])


@lowers(_ATEN.scatter_.value, _ATEN.scatter.value)
def _scatter(to: PlanBuilder, call: Call) -> None:
    out, index = _indexed_rows(call, "scatter")
    if call.operator is _ATEN.scatter.value:
        x, out = out, call.results[0]
        to.step(Op.COPY, [x, out])
    to.step(Op.SCATTER, [index, out], [], [call.arguments["value"]])


def _indexed_rows(call: Call, name: str) -> tuple[View, View]:
    x, index = call.arguments["self"], call.arguments["index"]
    check_last(name, call.arguments["dim"], x)
    if x.size[:-1] != index.size[:-1]:
        raise Unplannable(f"plans support {name} only for an index in each row")
    return x, index


@lowers(_ATEN.embedding.default)
def _embedding(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    to.step(Op.TAKE, [a["weight"], a["indices"], *call.results])


@lowers(_ATEN.index_select.default)
def _index_select(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    _take(to, a["self"], a["index"], a["dim"], call.results[0])


@lowers(_ATEN.index.Tensor)
def _index(to: PlanBuilder, call: Call) -> None:
    indices = call.arguments["indices"]
    places = [d for d, index in enumerate(indices) if index is not None]
    if len(places) != 1 or indices[places[0]].dtype not in (torch.int64, torch.int32):
        raise Unplannable("plans support indexing only by one tensor of integers")
    _take(to, call.arguments["self"], indices[places[0]], places[0], call.results[0])


def _take(to: PlanBuilder, x: View, index: View, dim: int, out: View) -> None:
    dim %= len(x.size)

    def first(view: View, count: int) -> Operand:
        """The ``count`` dimensions from ``dim`` before the others."""
        chosen = range(dim, dim + count)
        return permuted(to.operand(view), [*chosen, *(d for d in range(len(view.size)) if d not in chosen)])

    to.step(Op.TAKE, [first(x, 1), index, first(out, len(index.size))])
