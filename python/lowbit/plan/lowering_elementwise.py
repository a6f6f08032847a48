"""Lowers elementwise operators of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..operators.elementwise import ACTIVATIONS
from .plan_builder import LOWERINGS, Instruction, Lower, PlanBuilder, lowers, strides_of
from .plan_file import Compute, Extent, Op, Operand
from .recording import Call, Unplannable, View

_ATEN = torch.ops.aten


def elementwise(
    to: PlanBuilder, out: View | Operand, values: Sequence[Any], op: Compute, compute_in: torch.dtype | None = None
) -> None:
    """out = op(values), where values are tensors or numbers; converted to `compute_in`, or else the result's type."""
    common = compute_in or out.dtype
    inputs = [value for value in values if isinstance(value, (View, Operand))]
    code: list[Instruction] = []
    operands: list[Any] = []
    for number, value in enumerate(values):
        if not isinstance(value, (View, Operand)):
            # A comparison rounds its numbers to the common type, arithmetic only its result.
            operands.append(_number(value) if compute_in is None else _number(torch.tensor(value, dtype=common).item()))
            continue
        register = next(i for i, each in enumerate(inputs) if each is value)
        is_condition = op is Compute.SELECT and number == 0
        other_kind = common.is_floating_point != value.dtype.is_floating_point
        if not is_condition and (other_kind or compute_in not in (None, value.dtype)):
            code.append((Compute.CONVERT, [register], common))
            register = len(inputs) + len(code) - 1
        operands.append(register)
    to.compute([*code, (op, operands, out.dtype)], inputs, out)


def _number(value: Any) -> float:
    """A constant of a computation."""
    number = float(value)
    if isinstance(value, int) and (number != value or number == 2.0**63):
        raise Unplannable(f"the number {value} is not exact in float64")
    return number


def _common(values: Sequence[Any]) -> torch.dtype:
    """The type in which numbers are compared."""
    return torch.result_type(
        *(torch.empty((1,) * len(each.size), dtype=each.dtype) if isinstance(each, View) else each for each in values)
    )


def _of_two(op: Compute, in_place: bool) -> Lower:
    def lower(to: PlanBuilder, call: Call) -> None:
        a = call.arguments
        if a.get("alpha", 1) != 1 or a.get("rounding_mode") is not None:
            raise Unplannable(f"{call.operator} with these arguments is not supported in plans")
        values = [a["self"], a["other"]]
        if any(isinstance(value, Extent) for value in values):
            raise Unplannable("a number depends on the length of a call")
        compares = Compute.EQUAL <= op <= Compute.GREATER_EQUAL
        elementwise(to, a["self"] if in_place else call.results[0], values, op, _common(values) if compares else None)

    return lower


for _name, _op in {
    "add": Compute.ADD, "sub": Compute.SUB, "mul": Compute.MUL, "div": Compute.DIV, "multiply": Compute.MUL,
    "min": Compute.MINIMUM, "max": Compute.MAXIMUM, "minimum": Compute.MINIMUM, "maximum": Compute.MAXIMUM,
    "__or__": Compute.OR, "__and__": Compute.AND,
    "bitwise_or": Compute.OR, "bitwise_and": Compute.AND, "logical_and": Compute.AND, "logical_or": Compute.OR,
    "eq": Compute.EQUAL, "ne": Compute.NOT_EQUAL, "lt": Compute.LESS, "le": Compute.LESS_EQUAL, "gt": Compute.GREATER,
    "ge": Compute.GREATER_EQUAL, "greater": Compute.GREATER, "less": Compute.LESS,
}.items():  # fmt: skip
    for _suffix in ("", "_"):
        _packet = getattr(_ATEN, _name + _suffix, None)
        for _overload in ("Tensor", "Scalar", "default", "other") if _packet is not None else ():
            _operator = getattr(_packet, _overload, None)
            if _operator is not None and {"self", "other"} <= {argument.name for argument in _operator._schema.arguments}:
                LOWERINGS[_operator] = _of_two(_op, _suffix == "_")


def _of_one(op: Compute) -> Lower:
    return lambda to, call: elementwise(to, call.results[0], [call.arguments["self"]], op)


for _name, _op in {
    "neg": Compute.NEG, "abs": Compute.ABS, "reciprocal": Compute.RECIPROCAL, "sqrt": Compute.SQRT, "rsqrt": Compute.RSQRT,
    "exp": Compute.EXP, "log": Compute.LOG, "tanh": Compute.TANH, "sigmoid": Compute.SIGMOID, "sin": Compute.SIN,
    "expm1": Compute.EXPM1, "cos": Compute.COS, "floor": Compute.FLOOR, "logical_not": Compute.NOT, "log1p": Compute.LOG1P,
}.items():  # fmt: skip
    LOWERINGS[getattr(_ATEN, _name).default] = _of_one(_op)


@lowers(_ATEN.bitwise_not.default)
def _not(to: PlanBuilder, call: Call) -> None:
    if call.results[0].dtype is not torch.bool:
        raise Unplannable("bitwise_not of integers is not supported in plans")
    elementwise(to, call.results[0], [call.arguments["self"]], Compute.NOT)


@lowers(_ATEN.relu.default)
def _relu(to: PlanBuilder, call: Call) -> None:
    elementwise(to, call.results[0], [call.arguments["self"], 0.0], Compute.MAXIMUM)


@lowers(_ATEN.silu.default, _ATEN.gelu.default)
def _activation(to: PlanBuilder, call: Call) -> None:
    kind = "silu" if call.operator is _ATEN.silu.default else "gelu_tanh" if call.arguments["approximate"] == "tanh" else "gelu"
    out = to.operand(call.results[0])
    made = out if out.stride == strides_of(out.size) else to.temporary(out.dtype, out.size)
    to.step(Op.ACTIVATE, [to.contiguous(call.arguments["self"]), None, made], [ACTIVATIONS.index(kind)])
    if made is not out:
        to.step(Op.COPY, [made, out])


@lowers(_ATEN.softplus.default)
def _softplus(to: PlanBuilder, call: Call) -> None:
    if (call.arguments["beta"], call.arguments["threshold"]) != (1, 20):
        raise Unplannable("plans support softplus only with beta 1 and threshold 20")
    elementwise(to, call.results[0], [call.arguments["self"]], Compute.SOFTPLUS)


@lowers(_ATEN.pow.Tensor_Scalar, _ATEN.square.default)
def _pow(to: PlanBuilder, call: Call) -> None:
    x, exponent, out = call.arguments["self"], float(call.arguments.get("exponent", 2)), call.results[0]
    if exponent == 2:
        elementwise(to, out, [x, x], Compute.MUL)
    elif abs(exponent) == 0.5:
        elementwise(to, out, [x], Compute.SQRT if exponent > 0 else Compute.RSQRT)
    else:
        raise Unplannable(f"the power {exponent:g} is not supported in plans")


@lowers(_ATEN.clamp.default, _ATEN.clamp_.default, _ATEN.clamp_min.default, _ATEN.clamp.Tensor)
def _clamp(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    bounds = [(Compute.MAXIMUM, a.get("min")), (Compute.MINIMUM, a.get("max"))]
    x, out = a["self"], a["self"] if call.operator is _ATEN.clamp_.default else call.results[0]
    inputs = [x, *(bound for _, bound in bounds if isinstance(bound, View))]
    code: list[Instruction] = [(Compute.CONVERT, [0], out.dtype)]
    for op, bound in bounds:
        if bound is not None:
            other = inputs.index(bound) if isinstance(bound, View) else _number(bound)
            code.append((op, [len(inputs) + len(code) - 1, other], out.dtype))
    to.compute(code, inputs, out)


@lowers(_ATEN.where.self, _ATEN.where.ScalarOther, _ATEN.where.ScalarSelf, _ATEN.where.Scalar)
def _where(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    elementwise(to, call.results[0], [a["condition"], a["self"], a["other"]], Compute.SELECT)


@lowers(_ATEN.masked_fill.Scalar, _ATEN.masked_fill_.Scalar, _ATEN.masked_fill.Tensor)
def _masked_fill(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    out = a["self"] if call.operator is _ATEN.masked_fill_.Scalar else call.results[0]
    elementwise(to, out, [a["mask"], a["value"], a["self"]], Compute.SELECT)


@lowers(_ATEN.index_put_.default)
def _index_put(to: PlanBuilder, call: Call) -> None:
    """Lowers x[mask] = number."""
    a = call.arguments
    x, indices, values = a["self"], a["indices"], a["values"]
    if len(indices) != 1 or indices[0].dtype is not torch.bool or indices[0].size != x.size or values.size or a["accumulate"]:
        raise Unplannable("plans support only assignments of a number where a mask is true")
    elementwise(to, x, [indices[0], values, x], Compute.SELECT)


@lowers(
    _ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default, _ATEN.ones.default, _ATEN.new_ones.default,
    _ATEN.ones_like.default, _ATEN.full.default, _ATEN.full_like.default, _ATEN.new_full.default,
    _ATEN.empty.memory_format, _ATEN.new_empty.default, _ATEN.empty_like.default,
)  # fmt: skip
def _fill(to: PlanBuilder, call: Call) -> None:
    to.fill(_number(call.arguments.get("fill_value", "ones" in str(call.operator))), call.results[0])


@lowers(_ATEN.fill_.Scalar, _ATEN.zero_.default)
def _fill_in_place(to: PlanBuilder, call: Call) -> None:
    to.fill(_number(call.arguments.get("value", 0)), call.arguments["self"])
