"""Makes a plan from recorded operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..operators.elementwise import ACTIVATIONS
from . import pooling as _pooling  # noqa: F401  registers an operator
from .peephole import shortened
from .plan_file import ELEMENT_TYPES, Buffer, Compute, Extent, Kind, Op, Operand, Plan, Slot, Step
from .recording import Call, Recording, Sizes, Unplannable, View, check_alike, unified

_MOST_CONSTANT = 1 << 20  # bytes of a constant in a plan
_MOST_SHORT = 4  # largest inner size of batched matrix products that become elementwise operators
_MOST_FLOATS = 1 << 19  # largest float weight to multiply with many rows, for which torch is several times as fast
_DTYPES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.uint8: 1, torch.int32: 4, torch.int64: 8, torch.bool: 1}


@dataclass(frozen=True)
class Roles:
    """The roles of the given tensors of the recordings, which are the first storages of each recording."""

    inputs: int
    caches: Sequence[tuple[int, int]]  # layer and slot of each, after the inputs
    start: int = -1  # the input with the number of earlier tokens, which each text of a call has


class _Lowering:
    def __init__(self, recordings: Sequence[Recording], sizes: Sizes, roles: Roles, weights: Mapping[str, Tensor]):
        self.recordings, self.sizes, self.roles = recordings, sizes, roles
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
            if (
                view.storage < given
                or view.storage not in whole.changing
                or view.storage in self.outputs
                or not self._is_whole(view)
            ):
                raise Unplannable("its results are not new contiguous tensors that depend on the input")
            self.outputs[view.storage] = number
        for call in whole.calls:
            lower = _LOWERINGS.get(call.operator)
            if lower is None:
                raise Unplannable(f"{call.operator} is not supported in plans")
            lower(self, call)

    def _is_whole(self, view: View) -> bool:
        if view.dtype not in _DTYPES:
            raise Unplannable(f"tensors of {view.dtype} are not supported in plans")
        numel = [math.prod(size.at(*call) for size in view.size) for call in self.sizes.calls]
        sizes = [recording.bytes_of(view.storage) for recording in self.recordings]
        contiguous = view.offset == Extent(0) and view.stride == strides_of(view.size)
        return contiguous and all(n * _DTYPES[view.dtype] == size for n, size in zip(numel, sizes))

    def _needed(self) -> list[int]:
        """The calls that the results depend on, without those that only make views or constants."""
        whole, chosen = self.whole, []
        needed = {view.storage for view in whole.results}
        for number in reversed(range(len(whole.calls))):
            call = whole.calls[number]
            made = {view.storage for view in call.results if whole.made_by.get(view.storage) == number}
            changed = self._changed(call)
            if not (made | changed) & needed and not self._changes_caches(call):
                continue
            if not any(self.is_changing(storage) for storage in made | changed) and all(map(self._is_constant, made | changed)):
                continue
            chosen.append(number)
            needed |= {view.storage for view in _views(call.arguments.values())}
        return chosen[::-1]

    def is_changing(self, storage: int) -> bool:
        return storage in self.whole.changing

    def _changed(self, call: Call) -> set[int]:
        """Storages that an operator of torch changes in place."""
        return {
            view.storage
            for argument in call.operator._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for view in _views([call.arguments[argument.name]])
        }

    def _changes_caches(self, call: Call) -> bool:
        given = self.roles.inputs + len(self.roles.caches)
        return any(self.roles.inputs <= storage < given for storage in self._changed(call))

    def _is_constant(self, storage: int) -> bool:
        """Whether a storage has the same bytes in all recordings, few enough for a plan."""
        sizes = {recording.bytes_of(storage) for recording in self.recordings}
        if self.is_changing(storage) or len(sizes) != 1 or sizes.pop() > _MOST_CONSTANT:
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
        size = self.sizes.extent(tuple(recording.bytes_of(storage) for recording in self.recordings))
        if storage in self.outputs:
            return Buffer(Kind.OUTPUT, index=self.outputs[storage])
        if storage in self.whole.made_by and not self._is_constant(storage):
            return Buffer(Kind.TEMPORARY, size)
        if not self._is_constant(storage):
            raise Unplannable(f"it uses a tensor of {size.constant} bytes that is not part of its state")
        return Buffer(Kind.CONSTANT, size, content=self.recordings[0].content(storage))

    def temporary(self, dtype: torch.dtype, size: Sequence[Extent]) -> Operand:
        """A new contiguous tensor."""
        stride = strides_of(size)
        count = product(size)
        self.plan.buffers.append(Buffer(Kind.TEMPORARY, count.times(_DTYPES[dtype])))
        return Operand(len(self.plan.buffers) - 1, dtype, tuple(size), stride)

    def operand(self, view: View | Operand | None) -> Operand | None:
        if view is None or isinstance(view, Operand):
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
        if view.dtype is not tensor.dtype or not all(
            type(n) is int or n == Extent(n.constant) for n in (view.offset, *view.size)
        ):
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
        self.plan.steps.append(
            Step(op, [self.operand(each) for each in operands], list(map(_integer, integers)), list(map(float, numbers)))
        )

    def contiguous(self, view: View | Operand) -> Operand:
        """The same values without gaps."""
        operand = self.operand(view)
        assert operand is not None
        if operand.stride == strides_of(operand.size):
            return operand
        copy = self.temporary(operand.dtype, operand.size)
        self.step(Op.COPY, [operand, copy])
        return copy

    def compute(
        self, instructions: Sequence[tuple[Compute, Sequence[Any], torch.dtype]], inputs: Sequence[Any], out: Any
    ) -> None:
        """An elementwise computation: each instruction has registers, or floats for constants."""
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
        assert target is not None
        sources = [expanded(self.operand(each), target.size) for each in inputs]
        self.step(Op.COMPUTE, [*sources, target], code, constants)


def _integer(value: Any) -> int:
    if isinstance(value, Extent):
        raise Unplannable("an argument of an operator depends on the length of a call")
    return int(value)


def _views(values: Any) -> list[View]:
    found: list[View] = []
    for value in values:
        if isinstance(value, View):
            found.append(value)
        elif isinstance(value, list):
            found += _views(value)
    return found


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
    return product(view.size).times(_DTYPES[view.dtype])


def strides_of(size: Sequence[Extent]) -> tuple[Extent, ...]:
    """The strides of a contiguous tensor."""
    return tuple(product(size[d + 1 :]) for d in range(len(size)))


def expanded(operand: Operand | None, size: tuple[Extent, ...]) -> Operand:
    """A view that repeats dimensions of size 1."""
    assert operand is not None
    missing = len(size) - len(operand.size)
    old = [Extent(1)] * missing + list(operand.size)
    strides = [Extent(0)] * missing + list(operand.stride)
    return replace(operand, size=size, stride=tuple(Extent(0) if was == Extent(1) else by for was, by in zip(old, strides)))


_LOWERINGS: dict[Any, Callable[[_Lowering, Call], None]] = {}
_ATEN = torch.ops.aten


def _lowers(*operators: Any) -> Callable[[Callable[[_Lowering, Call], None]], Callable[[_Lowering, Call], None]]:
    def register(function: Callable[[_Lowering, Call], None]) -> Callable[[_Lowering, Call], None]:
        _LOWERINGS.update(dict.fromkeys(operators, function))
        return function

    return register


def _our_operators() -> None:
    """lowbit's operators; C++ has the same operands in the same order."""
    ops = torch.ops.lowbit

    def simple(
        operator: Any, op: Op, tensors: Sequence[str], integers: Sequence[str] = (), numbers: Sequence[str] = ()
    ) -> None:
        def lower(to: _Lowering, call: Call) -> None:
            a = call.arguments
            to.step(op, [*(a[name] for name in tensors), *call.results], [a[n] for n in integers], [a[n] for n in numbers])

        _LOWERINGS[operator.default] = lower

    simple(ops.linear, Op.LINEAR, ["x", "packed_weight"], ["out_features"])
    simple(ops.linear_experts, Op.LINEAR_EXPERTS, ["x", "packed_weights", "experts"], ["out_features"])
    simple(ops.embedding, Op.EMBEDDING, ["indices", "packed_weight"], ["embedding_dim"])
    simple(ops.activate, Op.ACTIVATE, ["x", "gate"], ["activation"])
    simple(ops.rms_norm, Op.RMS_NORM, ["x", "weight"], [], ["epsilon", "weight_offset"])
    simple(ops.layer_norm, Op.LAYER_NORM, ["x", "weight", "bias"], [], ["epsilon"])
    simple(ops.rotary, Op.ROTARY, ["q", "k", "cos", "sin"], ["heads_dim", "layout", "round_once"])
    simple(ops.masked_attention, Op.MASKED_ATTENTION, ["q", "k", "v", "bounds"], [], ["scale", "softcap"])


@_lowers(torch.ops.lowbit.linears.default)
def _linears(to: _Lowering, call: Call) -> None:
    a = call.arguments
    to.step(Op.LINEARS, [a["x"], *a["packed_weights"], *call.results], a["out_features"])


def _cache(to: _Lowering, view: View) -> tuple[int, int]:
    number = view.storage - to.roles.inputs
    if not 0 <= number < len(to.roles.caches):
        raise Unplannable("its attention uses caches that the decoder did not make")
    to.buffer(view.storage)
    return to.roles.caches[number]


def _check_start(to: _Lowering, arguments: dict[str, Any]) -> None:
    if arguments["start"].storage != to.roles.start:
        raise Unplannable("its layers start at another position than the text")


def _held(to: _Lowering, layer: int) -> None:
    """A buffer for ``held`` of a text whose caches hold only a window."""
    if not any(b.kind is Kind.CACHE and (b.index, b.slot) == (layer, Slot.HELD) for b in to.plan.buffers):
        to.plan.buffers.append(Buffer(Kind.CACHE, index=layer, slot=Slot.HELD))


@_lowers(torch.ops.lowbit.attention.default)
def _attention(to: _Lowering, call: Call) -> None:
    a = call.arguments
    (layer, slot), (other, values) = _cache(to, a["k_cache"]), _cache(to, a["v_cache"])
    if layer != other:
        raise Unplannable("its attention has caches of several layers")
    if a["start"].storage != to.roles.start:
        if a["softcap"] or a["sinks"] is not None:
            raise Unplannable("its attention over fixed caches has a soft cap or sinks")
        numbers = [layer, slot, values, a["window"]]
        to.step(Op.FIXED_ATTENTION, [a["q"], a["k"], a["v"], a["start"], *call.results], numbers, [a["scale"]])
        return
    if (slot, values) != (Slot.KEYS, Slot.VALUES):
        raise Unplannable("its attention does not use the cache of keys as keys and that of values as values")
    _held(to, layer)
    to.step(Op.ATTENTION, [a["q"], a["k"], a["v"], a["sinks"], *call.results], [layer, a["window"]], [a["scale"], a["softcap"]])


@_lowers(torch.ops.lowbit.short_conv.default)
def _short_conv(to: _Lowering, call: Call) -> None:
    a = call.arguments
    _check_start(to, a)
    to.step(Op.SHORT_CONV, [a["x"], a["weight"], a["bias"], *call.results], [*_cache(to, a["state"]), a["silu"]])


@_lowers(torch.ops.lowbit.linear_attention.default)
def _linear_attention(to: _Lowering, call: Call) -> None:
    a = call.arguments
    _check_start(to, a)
    tensors = [a["q"], a["k"], a["v"], a["decay"], a["beta"], *call.results]
    to.step(Op.LINEAR_ATTENTION, tensors, _cache(to, a["state"]), [a["scale"], a["norm_epsilon"]])


@_lowers(
    _ATEN.reshape.default, _ATEN.contiguous.default, _ATEN.clone.default, _ATEN.to.dtype, _ATEN.to.dtype_layout,
    _ATEN._to_copy.default, _ATEN.to.device, _ATEN.type_as.default, _ATEN.flatten.using_ints, _ATEN.dropout.default,
    _ATEN._reshape_copy.default,
)  # fmt: skip
def _copy(to: _Lowering, call: Call) -> None:
    source = next(view for view in call.arguments.values() if isinstance(view, View))
    target = to.operand(call.results[0])
    assert target is not None
    if product(source.size) != product(target.size):
        raise Unplannable(f"{call.operator} is not supported in plans if it repeats values")
    if target.stride != strides_of(target.size) and target.size != source.size:
        raise Unplannable(f"{call.operator} is not supported in plans if its result has gaps")
    same = target if target.size == source.size else replace(target, size=source.size, stride=strides_of(source.size))
    to.step(Op.COPY, [source, same])


@_lowers(_ATEN.copy_.default)
def _copy_into(to: _Lowering, call: Call) -> None:
    target, source = (to.operand(call.arguments[name]) for name in ("self", "src"))
    assert target is not None
    to.step(Op.COPY, [expanded(source, target.size), target])


@_lowers(_ATEN.repeat.default)
def _repeat(to: _Lowering, call: Call) -> None:
    source, target = to.operand(call.arguments["self"]), to.operand(call.results[0])
    assert source is not None and target is not None
    if any(was not in (Extent(1), now) for was, now in zip(source.size[::-1], target.size[::-1])):
        raise Unplannable("plans repeat only dimensions of size 1")
    to.step(Op.COPY, [expanded(source, target.size), target])


@_lowers(_ATEN.cat.default, _ATEN.concat.default, _ATEN.stack.default)
def _cat(to: _Lowering, call: Call) -> None:
    target = to.operand(call.results[0])
    assert target is not None
    dim, at = call.arguments["dim"] % len(target.size), Extent(0)
    for view in call.arguments["tensors"]:
        source = to.operand(view)
        assert source is not None
        size, stride = source.size, source.stride
        if call.operator is _ATEN.stack.default:
            source = replace(
                source, size=(*size[:dim], Extent(1), *size[dim:]), stride=(*stride[:dim], Extent(0), *stride[dim:])
            )
        if len(source.size) != len(target.size):
            continue  # an empty tensor
        offset = _sum(target.offset, product([at, target.stride[dim]]))
        to.step(Op.COPY, [source, replace(target, size=source.size, offset=offset)])
        at = _sum(at, source.size[dim])


def _sum(a: Extent, b: Extent) -> Extent:
    return Extent(*(x + y for x, y in zip(a, b)))


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _elementwise(
    to: _Lowering, out: Any, values: Sequence[Any], op: Compute, dtype: torch.dtype, compute_in: torch.dtype | None = None
) -> None:
    """out = op(values), where values are tensors or numbers; operands are converted to `compute_in`, or else the result's."""
    common = compute_in or dtype
    inputs = [value for value in values if isinstance(value, (View, Operand))]
    code: list[tuple[Compute, Sequence[Any], torch.dtype]] = []
    operands: list[Any] = []
    for value in values:
        if not isinstance(value, (View, Operand)):
            # A comparison rounds its numbers to the common type, arithmetic only its result.
            operands.append(_number(value) if compute_in is None else _number(torch.tensor(value, dtype=common).item()))
            continue
        register = next(i for i, each in enumerate(inputs) if each is value)
        if _is_float(common) != _is_float(value.dtype) or compute_in not in (None, value.dtype):
            code.append((Compute.CONVERT, [register], common))
            register = len(inputs) + len(code) - 1
        operands.append(register)
    to.compute([*code, (op, operands, dtype)], inputs, out)


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


def _pairs() -> None:
    simple = {
        "add": Compute.ADD, "sub": Compute.SUB, "mul": Compute.MUL, "div": Compute.DIV, "multiply": Compute.MUL,
        "min": Compute.MINIMUM, "max": Compute.MAXIMUM, "minimum": Compute.MINIMUM, "maximum": Compute.MAXIMUM,
        "__or__": Compute.OR, "__and__": Compute.AND,
        "bitwise_or": Compute.OR, "bitwise_and": Compute.AND, "logical_and": Compute.AND, "logical_or": Compute.OR,
        "eq": Compute.EQUAL, "ne": Compute.NOT_EQUAL, "lt": Compute.LESS, "le": Compute.LESS_EQUAL, "gt": Compute.GREATER,
        "ge": Compute.GREATER_EQUAL, "greater": Compute.GREATER, "less": Compute.LESS,
    }  # fmt: skip

    def lowering(op: Compute, in_place: bool) -> Callable[[_Lowering, Call], None]:
        def lower(to: _Lowering, call: Call) -> None:
            a = call.arguments
            if a.get("alpha", 1) != 1 or a.get("rounding_mode") is not None:
                raise Unplannable(f"{call.operator} with these arguments is not supported in plans")
            values = [a["self"], a["other"]]
            if any(isinstance(value, Extent) for value in values):
                raise Unplannable("a number depends on the length of a call")
            out = a["self"] if in_place else call.results[0]
            compares = Compute.EQUAL <= op <= Compute.GREATER_EQUAL
            _elementwise(to, out, values, op, out.dtype, _common(values) if compares else None)

        return lower

    for name, op in simple.items():
        for suffix in ("", "_"):
            packet = getattr(_ATEN, name + suffix, None)
            for overload in ("Tensor", "Scalar", "default", "other") if packet is not None else ():
                operator = getattr(packet, overload, None)
                if operator is not None and {"self", "other"} <= {argument.name for argument in operator._schema.arguments}:
                    _LOWERINGS[operator] = lowering(op, suffix == "_")


def _singles() -> None:
    simple = {
        "neg": Compute.NEG, "abs": Compute.ABS, "reciprocal": Compute.RECIPROCAL, "sqrt": Compute.SQRT, "rsqrt": Compute.RSQRT,
        "exp": Compute.EXP, "log": Compute.LOG, "tanh": Compute.TANH, "sigmoid": Compute.SIGMOID, "sin": Compute.SIN,
        "expm1": Compute.EXPM1, "cos": Compute.COS, "floor": Compute.FLOOR, "logical_not": Compute.NOT, "log1p": Compute.LOG1P,
    }  # fmt: skip

    def lowering(op: Compute) -> Callable[[_Lowering, Call], None]:
        def lower(to: _Lowering, call: Call) -> None:
            _elementwise(to, call.results[0], [call.arguments["self"]], op, call.results[0].dtype)

        return lower

    for name, op in simple.items():
        _LOWERINGS[getattr(_ATEN, name).default] = lowering(op)


@_lowers(_ATEN.bitwise_not.default)
def _not(to: _Lowering, call: Call) -> None:
    if call.results[0].dtype is not torch.bool:
        raise Unplannable("bitwise_not of integers is not supported in plans")
    _elementwise(to, call.results[0], [call.arguments["self"]], Compute.NOT, torch.bool)


@_lowers(_ATEN.relu.default)
def _relu(to: _Lowering, call: Call) -> None:
    _elementwise(to, call.results[0], [call.arguments["self"], 0.0], Compute.MAXIMUM, call.results[0].dtype)


@_lowers(_ATEN.square.default)
def _square(to: _Lowering, call: Call) -> None:
    x = call.arguments["self"]
    _elementwise(to, call.results[0], [x, x], Compute.MUL, x.dtype)


@_lowers(_ATEN.silu.default, _ATEN.gelu.default)
def _activation(to: _Lowering, call: Call) -> None:
    kind = "silu" if call.operator is _ATEN.silu.default else "gelu_tanh" if call.arguments["approximate"] == "tanh" else "gelu"
    out = to.operand(call.results[0])
    assert out is not None
    made = out if out.stride == strides_of(out.size) else to.temporary(out.dtype, out.size)
    to.step(Op.ACTIVATE, [to.contiguous(call.arguments["self"]), None, made], [ACTIVATIONS.index(kind)])
    if made is not out:
        to.step(Op.COPY, [made, out])


@_lowers(_ATEN.softplus.default)
def _softplus(to: _Lowering, call: Call) -> None:
    if (call.arguments["beta"], call.arguments["threshold"]) != (1, 20):
        raise Unplannable("plans support softplus only with beta 1 and threshold 20")
    _elementwise(to, call.results[0], [call.arguments["self"]], Compute.SOFTPLUS, call.results[0].dtype)


@_lowers(_ATEN.pow.Tensor_Scalar)
def _pow(to: _Lowering, call: Call) -> None:
    x, exponent, out = call.arguments["self"], float(call.arguments["exponent"]), call.results[0]
    if exponent == 2:
        _elementwise(to, out, [x, x], Compute.MUL, out.dtype)
    elif exponent == 0.5:
        _elementwise(to, out, [x], Compute.SQRT, out.dtype)
    elif exponent == -0.5:
        _elementwise(to, out, [x], Compute.RSQRT, out.dtype)
    else:
        raise Unplannable(f"the power {exponent:g} is not supported in plans")


@_lowers(_ATEN.clamp.default, _ATEN.clamp_.default, _ATEN.clamp_min.default, _ATEN.clamp.Tensor)
def _clamp(to: _Lowering, call: Call) -> None:
    a = call.arguments
    bounds = [(Compute.MAXIMUM, a.get("min")), (Compute.MINIMUM, a.get("max"))]
    x, out = a["self"], a["self"] if call.operator is _ATEN.clamp_.default else call.results[0]
    inputs = [x, *(bound for _, bound in bounds if isinstance(bound, View))]
    code: list[tuple[Compute, Sequence[Any], torch.dtype]] = [(Compute.CONVERT, [0], out.dtype)]
    for op, bound in bounds:
        if bound is not None:
            other = inputs.index(bound) if isinstance(bound, View) else _number(bound)
            code.append((op, [len(inputs) + len(code) - 1, other], out.dtype))
    to.compute(code, inputs, out)


@_lowers(_ATEN.where.self, _ATEN.where.ScalarOther, _ATEN.where.ScalarSelf, _ATEN.where.Scalar)
def _where(to: _Lowering, call: Call) -> None:
    a = call.arguments
    _select(to, call.results[0], a["condition"], a["self"], a["other"])


@_lowers(_ATEN.masked_fill.Scalar, _ATEN.masked_fill_.Scalar, _ATEN.masked_fill.Tensor)
def _masked_fill(to: _Lowering, call: Call) -> None:
    a = call.arguments
    out = a["self"] if call.operator is _ATEN.masked_fill_.Scalar else call.results[0]
    _select(to, out, a["mask"], a["value"], a["self"])


@_lowers(_ATEN.index_put_.default)
def _index_put(to: _Lowering, call: Call) -> None:
    """Lowers x[mask] = number."""
    a = call.arguments
    x, indices, values = a["self"], a["indices"], a["values"]
    if len(indices) != 1 or indices[0].dtype is not torch.bool or indices[0].size != x.size or values.size or a["accumulate"]:
        raise Unplannable("plans support only assignments of a number where a mask is true")
    _select(to, x, indices[0], values, x)


def _select(to: _Lowering, out: View, condition: View, yes: Any, no: Any) -> None:
    inputs = [condition, *(each for each in (yes, no) if isinstance(each, View))]
    code: list[tuple[Compute, Sequence[Any], torch.dtype]] = []
    operands: list[Any] = [0]
    for value in (yes, no):
        if not isinstance(value, View):
            operands.append(_number(value))
            continue
        register = next(i for i, each in enumerate(inputs) if each is value)
        if _is_float(value.dtype) != _is_float(out.dtype):
            code.append((Compute.CONVERT, [register], out.dtype))
            register = len(inputs) + len(code) - 1
        operands.append(register)
    to.compute([*code, (Compute.SELECT, operands, out.dtype)], inputs, out)


@_lowers(
    _ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default, _ATEN.ones.default, _ATEN.new_ones.default,
    _ATEN.ones_like.default, _ATEN.full.default, _ATEN.full_like.default, _ATEN.new_full.default,
)  # fmt: skip
def _fill(to: _Lowering, call: Call) -> None:
    out, name = call.results[0], str(call.operator)
    value = call.arguments["fill_value"] if "full" in name else float("ones" in name)
    to.compute([(Compute.CONVERT, [_number(value)], out.dtype)], [], out)


@_lowers(_ATEN.pad.default, _ATEN.constant_pad_nd.default)
def _pad(to: _Lowering, call: Call) -> None:
    a, target = call.arguments, to.operand(call.results[0])
    source, pad = to.operand(a["self"]), a["pad"]
    assert source is not None and target is not None
    if a.get("mode", "constant") != "constant" or any(isinstance(each, Extent) or each < 0 for each in pad):
        raise Unplannable("plans support only padding by a constant, of constant size")
    to.compute([(Compute.CONVERT, [float(a["value"] or 0)], target.dtype)], [], target)
    offset = target.offset
    for number, before in enumerate(pad[::2]):  # the last dimension comes first
        offset = _sum(offset, target.stride[-1 - number].times(before))
    to.step(Op.COPY, [source, replace(target, size=source.size, offset=offset)])


@_lowers(_ATEN.fill_.Scalar, _ATEN.zero_.default)
def _fill_in_place(to: _Lowering, call: Call) -> None:
    out = call.arguments["self"]
    to.compute([(Compute.CONVERT, [_number(call.arguments.get("value", 0))], out.dtype)], [], out)


@_lowers(_ATEN.empty.memory_format, _ATEN.new_empty.default, _ATEN.empty_like.default)
def _empty(to: _Lowering, call: Call) -> None:
    out = call.results[0]
    to.compute([(Compute.CONVERT, [0.0], out.dtype)], [], out)


@_lowers(_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step)
def _arange(to: _Lowering, call: Call) -> None:
    out, start, step = call.results[0], call.arguments.get("start", 0), call.arguments.get("step", 1)
    if any(type(value) is not int for value in (start, step)) or len(out.size) != 1:
        raise Unplannable("plans support arange only with constant integers")
    counted = out if out.dtype is torch.int64 else to.temporary(torch.int64, out.size)
    to.step(Op.COUNT_UP, [counted], [], [start, step])
    if counted is not out:
        to.step(Op.COPY, [counted, out])


@_lowers(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.mm.default, _ATEN.bmm.default)
def _float_linear(to: _Lowering, call: Call) -> None:
    a = call.arguments
    if _outer_product(to, call) or _short_product(to, call):
        return
    if call.operator is _ATEN.linear.default:
        weight = to.operand(a["weight"])
        x = a["input"]
    else:
        x, other = a["self"], to.operand(a["other" if "other" in a else "mat2"])
        assert other is not None
        if len(other.size) != 2:
            raise Unplannable("batched matrix products are not supported in plans")
        weight = replace(other, size=other.size[::-1], stride=other.stride[::-1])
    assert weight is not None
    if to.plan.buffers[weight.buffer].kind not in (Kind.WEIGHT, Kind.CONSTANT):
        raise Unplannable("products of activations are not supported in plans")
    rows = product(x.size[:-1])
    if (rows.per_row or rows.constant > 16) and product(weight.size).constant > _MOST_FLOATS:
        raise Unplannable("it has float layers, which torch multiplies faster")
    to.step(Op.FLOAT_LINEAR, [x, weight, a.get("bias"), *call.results])


@_lowers(
    _ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default,
    _ATEN.conv1d.padding, _ATEN.conv2d.padding, _ATEN.conv3d.padding,
)  # fmt: skip
def _convolution(to: _Lowering, call: Call) -> None:
    """Lowers to a product over the windows of the input (im2col)."""
    a = call.arguments
    x, weight, out = (to.operand(each) for each in (a["input"], a["weight"], call.results[0]))
    assert x is not None and weight is not None and out is not None
    axes = len(weight.size) - 2
    strides, padding = (a[name] if type(a[name]) is str else _per_axis(a[name], axes) for name in ("stride", "padding"))
    if a["groups"] != 1 or set(_per_axis(a["dilation"], axes)) != {1} or len(x.size) != axes + 2 or padding == "same":
        raise Unplannable("plans support only convolutions of batches, without groups, dilation and padding to the same size")
    texts, channels, *lengths = x.size
    if padding != "valid" and any(padding):
        lengths = [_sum(length, Extent(2 * each)) for length, each in zip(lengths, padding)]
        padded = to.temporary(x.dtype, (texts, channels, *lengths))
        to.compute([(Compute.CONVERT, [0.0], x.dtype)], [], padded)
        first = Extent(0)
        for stride, each in zip(padded.stride[2:], padding):
            first = _sum(first, stride.times(each))
        to.step(Op.COPY, [x, replace(padded, size=x.size, offset=first)])
        x = padded
    kernels, taps, places = weight.size[0], weight.size[2:], out.size[2:]
    windows = (texts, *places, channels, *taps)
    steps = [stride.times(each) for stride, each in zip(x.stride[2:], strides)]
    source = replace(x, size=windows, stride=(x.stride[0], *steps, x.stride[1], *x.stride[2:]))
    flat = replace(weight, size=(kernels, product(weight.size[1:])), stride=(product(weight.size[1:]), Extent(1)))
    rows = to.temporary(x.dtype, (texts, *places, flat.size[1]))
    to.step(Op.COPY, [source, replace(rows, size=windows, stride=strides_of(windows))])
    target = replace(out, size=(texts, *places, kernels), stride=(out.stride[0], *out.stride[2:], out.stride[1]))
    to.step(Op.FLOAT_LINEAR, [rows, flat, a["bias"], target])


def _per_axis(numbers: Any, axes: int) -> list[int]:
    values = list(numbers) if isinstance(numbers, (list, tuple)) else [numbers]
    return values * axes if len(values) == 1 else values


def _outer_product(to: _Lowering, call: Call) -> bool:
    """Lowers a product [..., n, 1] @ [..., 1, m], as of frequencies and positions."""
    if call.operator is _ATEN.linear.default:
        return False
    a, b = (call.arguments[name] for name in ("self", "other" if "other" in call.arguments else "mat2"))
    if len(a.size) < 2 or len(b.size) < 2 or a.size[-1] != Extent(1) or b.size[-2] != Extent(1):
        return False
    _elementwise(to, call.results[0], [a, b], Compute.MUL, call.results[0].dtype)
    return True


def _short_product(to: _Lowering, call: Call) -> bool:
    """Lowers a product of batches of matrices [..., n, k] @ [..., k, m] with a small k, number by number."""
    if call.operator is _ATEN.linear.default:
        return False
    a, b = (to.operand(call.arguments[name]) for name in ("self", "other" if "other" in call.arguments else "mat2"))
    out = call.results[0]
    assert a is not None and b is not None
    count = a.size[-1].constant
    if len(a.size) < 3 or len(b.size) < 3 or a.size[-1] != Extent(count) or count > _MOST_SHORT or not _is_float(out.dtype):
        return False
    columns = [replace(a, size=(*a.size[:-1], Extent(1)), offset=_sum(a.offset, a.stride[-1].times(i))) for i in range(count)]
    rows = [
        replace(b, size=(*b.size[:-2], Extent(1), b.size[-1]), offset=_sum(b.offset, b.stride[-2].times(i)))
        for i in range(count)
    ]
    code: list[tuple[Compute, Sequence[Any], torch.dtype]] = [
        (Compute.MUL, [i, count + i], torch.float32) for i in range(count)
    ]
    for i in range(1, count):
        code.append((Compute.ADD, [2 * count if i == 1 else 2 * count + len(code) - 1, 2 * count + i], torch.float32))
    to.compute([*code, (Compute.CONVERT, [2 * count + len(code) - 1], out.dtype)], [*columns, *rows], out)
    return True


@_lowers(_ATEN.sum.dim_IntList, _ATEN.mean.dim)
def _sums(to: _Lowering, call: Call) -> None:
    source, out = to.operand(call.arguments["self"]), to.operand(call.results[0])
    assert source is not None and out is not None
    moved, target = _reduced(call, source, out)
    if call.operator is _ATEN.sum.dim_IntList:
        to.step(Op.SUM, [moved, target])
    else:
        _mean(to, moved, target)


def _reduced(call: Call, source: Operand, out: Operand) -> tuple[Operand, Operand]:
    """The operands of a sum over one dimension, which becomes the last one."""
    dims = call.arguments["dim"]
    if not dims or len(dims) != 1 or not _is_float(out.dtype) or not _is_float(source.dtype):
        raise Unplannable("plans support only sums of floats over one dimension")
    dim = dims[0] % len(source.size)
    order = [d for d in range(len(source.size)) if d != dim]
    moved = replace(
        source,
        size=(*(source.size[d] for d in order), source.size[dim]),
        stride=(*(source.stride[d] for d in order), source.stride[dim]),
    )
    if call.arguments.get("keepdim"):
        out = replace(out, size=tuple(out.size[d] for d in order), stride=tuple(out.stride[d] for d in order))
    return moved, out


def _mean(to: _Lowering, x: Operand, out: Operand) -> None:
    count = x.size[-1]
    if count.per_row or count.per_kept:
        raise Unplannable("a mean over the tokens of a call is not supported in plans")
    total = to.temporary(torch.float32, out.size)
    to.step(Op.SUM, [x, total])
    to.compute([(Compute.DIV, [0, float(count.constant)], out.dtype)], [total], out)


@_lowers(_ATEN.std.dim)
def _std(to: _Lowering, call: Call) -> None:
    if call.arguments["unbiased"]:
        raise Unplannable("plans support std only with unbiased=False")
    source, out = to.operand(call.arguments["self"]), to.operand(call.results[0])
    assert source is not None and out is not None
    x, target = _reduced(call, source, out)
    mean, variance = (to.temporary(torch.float32, target.size) for _ in range(2))
    _mean(to, x, mean)
    means = replace(mean, size=(*mean.size, Extent(1)), stride=(*mean.stride, Extent(1)))
    squares = to.temporary(torch.float32, x.size)
    to.compute([(Compute.SUB, [0, 1], torch.float32), (Compute.MUL, [2, 2], torch.float32)], [x, means], squares)
    _mean(to, squares, variance)
    to.compute([(Compute.SQRT, [0], target.dtype)], [variance], target)


@_lowers(torch.ops.lowbit_plan.pool.default)
def _pool(to: _Lowering, call: Call) -> None:
    a = call.arguments
    to.step(Op.POOL, [a["x"], a["ranges"], *call.results], [a["mode"]])


@_lowers(_ATEN.linalg_vector_norm.default, _ATEN.norm.ScalarOpt_dim)
def _norm(to: _Lowering, call: Call) -> None:
    a = call.arguments
    x, out = to.operand(a["self"]), to.operand(call.results[0])
    assert x is not None and out is not None
    dims, order, last = list(a["dim"] or []), a.get("ord", a.get("p")), len(x.size) - 1
    if order != 2 or len(dims) != 1 or dims[0] % len(x.size) != last or x.dtype is not out.dtype or a.get("dtype") is not None:
        raise Unplannable("plans support only Euclidean norms over the last dimension")
    squares = to.temporary(torch.float32, x.size)
    to.compute([(Compute.MUL, [0, 0], torch.float32)], [x], squares)
    total = to.temporary(torch.float32, x.size[:-1])
    to.step(Op.SUM, [squares, total])
    target = replace(out, size=out.size[:last], stride=out.stride[:last])
    to.compute([(Compute.SQRT, [0], out.dtype)], [total], target)


@_lowers(_ATEN.softmax.int, _ATEN._softmax.default)
def _softmax(to: _Lowering, call: Call) -> None:
    x = call.arguments["self"]
    if call.arguments["dim"] % len(x.size) != len(x.size) - 1:
        raise Unplannable("plans support softmax only over the last dimension")
    to.step(Op.SOFTMAX, [x, *call.results])


@_lowers(_ATEN.topk.default)
def _topk(to: _Lowering, call: Call) -> None:
    a = call.arguments
    if a["dim"] % len(a["self"].size) != len(a["self"].size) - 1 or not a["largest"]:
        raise Unplannable("plans support topk only over the last dimension, for the largest numbers")
    to.step(Op.TOP, [a["self"], *call.results])


@_lowers(_ATEN.max.dim)
def _largest(to: _Lowering, call: Call) -> None:
    a = call.arguments
    x, outputs = a["self"], list(map(to.operand, call.results))
    if a["dim"] % len(x.size) != len(x.size) - 1 or not _is_float(x.dtype):
        raise Unplannable("plans support max only of floats over the last dimension")
    if not a["keepdim"]:
        outputs = [replace(out, size=(*out.size, Extent(1)), stride=(*out.stride, Extent(1))) for out in outputs if out]
    to.step(Op.TOP, [x, *outputs])


@_lowers(_ATEN.gather.default)
def _gather(to: _Lowering, call: Call) -> None:
    a = call.arguments
    x, index = a["self"], a["index"]
    if a["dim"] % len(x.size) != len(x.size) - 1 or x.size[:-1] != index.size[:-1]:
        raise Unplannable("plans support gather only over the last dimension")
    to.step(Op.GATHER, [x, index, *call.results])


@_lowers(_ATEN.scatter_.value, _ATEN.scatter.value)
def _scatter(to: _Lowering, call: Call) -> None:
    a = call.arguments
    x, index, out = a["self"], a["index"], a["self"]
    if a["dim"] % len(x.size) != len(x.size) - 1 or x.size[:-1] != index.size[:-1]:
        raise Unplannable("plans support scatter only over the last dimension")
    if call.operator is _ATEN.scatter.value:
        out = call.results[0]
        to.step(Op.COPY, [x, out])
    to.step(Op.SCATTER, [index, out], [], [a["value"]])


@_lowers(_ATEN.repeat_interleave.self_int)
def _repeat_interleave(to: _Lowering, call: Call) -> None:
    source, target = to.operand(call.arguments["self"]), to.operand(call.results[0])
    repeats, dim = call.arguments["repeats"], call.arguments["dim"]
    assert source is not None and target is not None
    if dim is None or isinstance(repeats, Extent):
        raise Unplannable("plans support repeat_interleave only in one dimension, a constant number of times")
    dim %= len(source.size)

    def split(sizes: tuple[Extent, ...], more: Extent) -> tuple[Extent, ...]:
        return (*sizes[: dim + 1], more, *sizes[dim + 1 :])

    size = split(source.size, Extent(repeats))
    source = replace(source, size=size, stride=split(source.stride, Extent(0)))
    outer = [stride.times(repeats) if d == dim else stride for d, stride in enumerate(target.stride)]
    to.step(Op.COPY, [source, replace(target, size=size, stride=split(tuple(outer), target.stride[dim]))])


@_lowers(_ATEN.layer_norm.default, _ATEN.native_layer_norm.default)
def _layer_norm(to: _Lowering, call: Call) -> None:
    a = call.arguments
    if len(a["normalized_shape"]) != 1:
        raise Unplannable("plans support layer_norm only over the last dimension")
    # native_layer_norm also returns means and deviations, for gradients.
    to.step(Op.LAYER_NORM, [to.contiguous(a["input"]), a["weight"], a["bias"], call.results[0]], [], [a["eps"]])


@_lowers(_ATEN.embedding.default)
def _embedding(to: _Lowering, call: Call) -> None:
    a = call.arguments
    to.step(Op.TAKE, [a["weight"], a["indices"], *call.results])


@_lowers(_ATEN.index_select.default)
def _index_select(to: _Lowering, call: Call) -> None:
    a = call.arguments
    _take(to, a["self"], a["index"], a["dim"], call.results[0])


@_lowers(_ATEN.index.Tensor)
def _index(to: _Lowering, call: Call) -> None:
    indices = call.arguments["indices"]
    places = [d for d, index in enumerate(indices) if index is not None]
    if len(places) != 1 or indices[places[0]].dtype not in (torch.int64, torch.int32):
        raise Unplannable("plans support indexing only by one tensor of integers")
    _take(to, call.arguments["self"], indices[places[0]], places[0], call.results[0])


def _take(to: _Lowering, x: View, index: View, dim: int, out: View) -> None:
    source, target = to.operand(x), to.operand(out)
    assert source is not None and target is not None
    dim %= len(source.size)

    def first(sizes: tuple[Extent, ...], begin: int, count: int) -> tuple[Extent, ...]:
        return (*sizes[begin : begin + count], *sizes[:begin], *sizes[begin + count :])

    source = replace(source, size=first(source.size, dim, 1), stride=first(source.stride, dim, 1))
    count = len(index.size)
    target = replace(target, size=first(target.size, dim, count), stride=first(target.stride, dim, count))
    to.step(Op.TAKE, [source, index, target])


_our_operators()
_pairs()
_singles()


@dataclass(frozen=True)
class Lowered:
    """A plan and the tensors of its weights."""

    plan: Plan
    weights: dict[int, Tensor]  # by buffer
    outputs: tuple[View, ...]


def lowered(recordings: Sequence[Recording], sizes: Sizes, roles: Roles, weights: Mapping[str, Tensor]) -> Lowered:
    """The plan of recorded calls.

    Args:
        weights: the state of the model by name.

    Raises:
        Unplannable: an operator has no counterpart, or depends on the length of a call.
    """
    lowering = _Lowering(recordings, sizes, roles, weights)
    lowering.run()
    return Lowered(shortened(lowering.plan), lowering.bound, tuple(lowering.whole.results))
