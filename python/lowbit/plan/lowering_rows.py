"""Lowers operators of torch along dimensions: products, convolutions, sums, norms, and the largest numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .lowering_elementwise import elementwise
from .plan_builder import Instruction, PlanBuilder, check_last, lowers, permuted, product, strides_of
from .plan_file import Compute, Extent, Kind, Op, Operand
from .recording import Call, Unplannable, View

_MOST_SHORT = 4  # largest inner size of batched matrix products that become elementwise operators
_MOST_FLOATS = 1 << 19  # largest float weight to multiply with many rows, for which torch is several times as fast
_ATEN = torch.ops.aten


@lowers(_ATEN.linear.default)
def _linear(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    _float_linear(to, a["input"], to.operand(a["weight"]), a["bias"], call.results[0])


@lowers(_ATEN.matmul.default, _ATEN.mm.default, _ATEN.bmm.default)
def _matmul(to: PlanBuilder, call: Call) -> None:
    x, other = call.arguments["self"], call.arguments["other" if "other" in call.arguments else "mat2"]
    out = call.results[0]
    if min(len(x.size), len(other.size)) >= 2 and x.size[-1] == other.size[-2] == Extent(1):  # as of frequencies and positions
        elementwise(to, out, [x, other], Compute.MUL)
    elif not _short_product(to, to.operand(x), to.operand(other), out):
        if len(other.size) != 2:
            raise Unplannable("batched matrix products are not supported in plans")
        _float_linear(to, x, permuted(to.operand(other), [1, 0]), None, out)


def _float_linear(to: PlanBuilder, x: View, weight: Operand, bias: View | None, out: View) -> None:
    if to.plan.buffers[weight.buffer].kind not in (Kind.WEIGHT, Kind.CONSTANT):
        raise Unplannable("products of activations are not supported in plans")
    rows = product(x.size[:-1])
    if (rows.per_row or rows.constant > 16) and product(weight.size).constant > _MOST_FLOATS:
        raise Unplannable("it has float layers, which torch multiplies faster")
    to.step(Op.FLOAT_LINEAR, [x, weight, bias, out])


def _short_product(to: PlanBuilder, a: Operand, b: Operand, out: View) -> bool:
    """Lowers a product of batches of matrices [..., n, k] @ [..., k, m] with a small k, number by number."""
    count = a.size[-1].constant
    short = a.size[-1] == Extent(count) and count <= _MOST_SHORT
    if len(a.size) < 3 or len(b.size) < 3 or not short or not out.dtype.is_floating_point:
        return False
    columns = [replace(a, size=(*a.size[:-1], Extent(1)), offset=a.offset.plus(a.stride[-1].times(i))) for i in range(count)]
    rows = [
        replace(b, size=(*b.size[:-2], Extent(1), b.size[-1]), offset=b.offset.plus(b.stride[-2].times(i)))
        for i in range(count)
    ]
    code: list[Instruction] = [(Compute.MUL, [i, count + i], torch.float32) for i in range(count)]
    for i in range(1, count):
        code.append((Compute.ADD, [2 * count if i == 1 else 2 * count + len(code) - 1, 2 * count + i], torch.float32))
    to.compute([*code, (Compute.CONVERT, [2 * count + len(code) - 1], out.dtype)], [*columns, *rows], out)
    return True


@lowers(
    _ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default,
    _ATEN.conv1d.padding, _ATEN.conv2d.padding, _ATEN.conv3d.padding,
)  # fmt: skip
def _convolution(to: PlanBuilder, call: Call) -> None:
    """Lowers to a product over the windows of the input (im2col)."""
    a = call.arguments
    x, weight, out = (to.operand(each) for each in (a["input"], a["weight"], call.results[0]))
    axes = len(weight.size) - 2
    strides, padding = (a[name] if type(a[name]) is str else _per_axis(a[name], axes) for name in ("stride", "padding"))
    if a["groups"] != 1 or set(_per_axis(a["dilation"], axes)) != {1} or len(x.size) != axes + 2 or padding == "same":
        raise Unplannable("plans support only convolutions of batches, without groups, dilation and padding to the same size")
    texts, channels, *lengths = x.size
    if padding != "valid" and any(padding):
        lengths = [length.plus(Extent(2 * each)) for length, each in zip(lengths, padding)]
        padded = to.temporary(x.dtype, (texts, channels, *lengths))
        to.fill(0.0, padded)
        first = Extent(0)
        for stride, each in zip(padded.stride[2:], padding):
            first = first.plus(stride.times(each))
        to.step(Op.COPY, [x, replace(padded, size=x.size, offset=first)])
        x = padded
    kernels, taps, places = weight.size[0], weight.size[2:], out.size[2:]
    windows = (texts, *places, channels, *taps)
    steps = [stride.times(each) for stride, each in zip(x.stride[2:], strides)]
    source = replace(x, size=windows, stride=(x.stride[0], *steps, x.stride[1], *x.stride[2:]))
    flat = replace(weight, size=(kernels, product(weight.size[1:])), stride=(product(weight.size[1:]), Extent(1)))
    rows = to.temporary(x.dtype, (texts, *places, flat.size[1]))
    to.step(Op.COPY, [source, replace(rows, size=windows, stride=strides_of(windows))])
    to.step(Op.FLOAT_LINEAR, [rows, flat, a["bias"], permuted(out, [0, *range(2, axes + 2), 1])])


def _per_axis(numbers: Any, axes: int) -> list[int]:
    values = list(numbers) if isinstance(numbers, (list, tuple)) else [numbers]
    return values * axes if len(values) == 1 else values


def _reduced(to: PlanBuilder, call: Call) -> tuple[Operand, Operand]:
    """The operands of a sum over one dimension, which becomes the last one."""
    source, out, dims = to.operand(call.arguments["self"]), to.operand(call.results[0]), call.arguments["dim"]
    if not dims or len(dims) != 1 or not out.dtype.is_floating_point or not source.dtype.is_floating_point:
        raise Unplannable("plans support only sums of floats over one dimension")
    dim = dims[0] % len(source.size)
    others = [d for d in range(len(source.size)) if d != dim]
    return permuted(source, [*others, dim]), permuted(out, others) if call.arguments.get("keepdim") else out


@lowers(_ATEN.sum.dim_IntList)
def _sum(to: PlanBuilder, call: Call) -> None:
    to.step(Op.SUM, _reduced(to, call))


@lowers(_ATEN.mean.dim)
def _mean(to: PlanBuilder, call: Call) -> None:
    _mean_of_rows(to, *_reduced(to, call))


def _mean_of_rows(to: PlanBuilder, x: Operand, out: Operand) -> None:
    count = x.size[-1]
    if count.per_row or count.per_kept:
        raise Unplannable("a mean over the tokens of a call is not supported in plans")
    total = to.temporary(torch.float32, out.size)
    to.step(Op.SUM, [x, total])
    to.compute([(Compute.DIV, [0, float(count.constant)], out.dtype)], [total], out)


@lowers(_ATEN.std.dim)
def _std(to: PlanBuilder, call: Call) -> None:
    if call.arguments["unbiased"]:
        raise Unplannable("plans support std only with unbiased=False")
    x, out = _reduced(to, call)
    mean, variance = (to.temporary(torch.float32, out.size) for _ in range(2))
    _mean_of_rows(to, x, mean)
    means = permuted(mean, [*range(len(mean.size)), None])
    squares = to.temporary(torch.float32, x.size)
    to.compute([(Compute.SUB, [0, 1], torch.float32), (Compute.MUL, [2, 2], torch.float32)], [x, means], squares)
    _mean_of_rows(to, squares, variance)
    to.compute([(Compute.SQRT, [0], out.dtype)], [variance], out)


@lowers(_ATEN.linalg_vector_norm.default, _ATEN.norm.ScalarOpt_dim)
def _norm(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    x, out = to.operand(a["self"]), to.operand(call.results[0])
    dims, order, last = list(a["dim"] or []), a.get("ord", a.get("p")), len(x.size) - 1
    if order != 2 or len(dims) != 1 or dims[0] % len(x.size) != last or x.dtype is not out.dtype or a.get("dtype") is not None:
        raise Unplannable("plans support only Euclidean norms over the last dimension")
    squares = to.temporary(torch.float32, x.size)
    to.compute([(Compute.MUL, [0, 0], torch.float32)], [x], squares)
    total = to.temporary(torch.float32, x.size[:-1])
    to.step(Op.SUM, [squares, total])
    to.compute([(Compute.SQRT, [0], out.dtype)], [total], permuted(out, range(last)))


@lowers(_ATEN.softmax.int, _ATEN._softmax.default)
def _softmax(to: PlanBuilder, call: Call) -> None:
    x = call.arguments["self"]
    check_last("softmax", call.arguments["dim"], x)
    to.step(Op.SOFTMAX, [x, *call.results])


@lowers(_ATEN.layer_norm.default, _ATEN.native_layer_norm.default)
def _layer_norm(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    if len(a["normalized_shape"]) != 1:
        raise Unplannable("plans support layer_norm only over the last dimension")
    # native_layer_norm also returns means and deviations, for gradients.
    to.step(Op.LAYER_NORM, [to.contiguous(a["input"]), a["weight"], a["bias"], call.results[0]], [], [a["eps"]])


@lowers(_ATEN.topk.default)
def _topk(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    check_last("topk", a["dim"], a["self"])
    if not a["largest"]:
        raise Unplannable("plans support topk only for the largest numbers")
    to.step(Op.TOP, [a["self"], *call.results])


@lowers(_ATEN.max.dim)
def _max(to: PlanBuilder, call: Call) -> None:
    x, outputs = call.arguments["self"], list(map(to.operand, call.results))
    check_last("max", call.arguments["dim"], x)
    if not x.dtype.is_floating_point:
        raise Unplannable("plans support max only of floats")
    if not call.arguments["keepdim"]:
        outputs = [permuted(out, [*range(len(out.size)), None]) for out in outputs]
    to.step(Op.TOP, [x, *outputs])
