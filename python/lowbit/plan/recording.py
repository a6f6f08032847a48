"""Records the operators of a model's calls of several sizes, and finds how sizes depend on the rows of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .plan_file import Extent

# Rows and kept rows of the recorded calls: three determine how a size depends on them, the fourth one checks it. No call has
# one row, because torch treats dimensions of size 1 differently.
CALLS = ((4, 2), (6, 3), (9, 5), (12, 7))


class Unplannable(ValueError):
    """A model that has no plan; the message says why."""


def reason_of(error: Exception) -> str:
    """Why a model has no plan, from the error of making it."""
    return str(error) if isinstance(error, Unplannable) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class View:
    """A tensor of one recording, or with :class:`Extent` instead of numbers, of all."""

    storage: int
    dtype: torch.dtype
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any


@dataclass
class Call:
    """An operator that ran: its arguments, with a :class:`View` for each tensor, and its results."""

    operator: Any
    arguments: dict[str, Any]
    results: list[View]


@dataclass
class Recording:
    """The operators of one call."""

    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # one of each storage, which keeps it alive
    made_by: dict[int, int] = field(default_factory=dict)  # storage -> the call whose result it is
    changing: set[int] = field(default_factory=set)  # storages whose content depends on the inputs and caches
    results: list[View] = field(default_factory=list)

    def bytes_of(self, storage: int) -> int:
        return self.tensors[storage].untyped_storage().nbytes()

    def content(self, storage: int) -> bytes:
        """All bytes of a storage."""
        tensor = self.tensors[storage]
        return bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy())


class Recorder(TorchDispatchMode):
    """Records the operators that run while it is active."""

    def __init__(self, given: Sequence[Tensor], computing: bool = True) -> None:
        """
        Args:
            given: tensors that differ from call to call: inputs and caches. They are the first storages, in this order.
            computing: False: numbers that depend on the given tensors are not computed, which saves the time of a large call.
        """
        super().__init__()
        self._computing = computing
        self.recording = Recording()
        self._storages: dict[int, int] = {}
        for tensor in given:
            self.view(tensor)
        self.recording.changing.update(range(len(self.recording.tensors)))

    def view(self, tensor: Tensor) -> View:
        key = _storage(tensor)
        if key not in self._storages:
            self._storages[key] = len(self.recording.tensors)
            self.recording.tensors.append(tensor)
        return View(self._storages[key], tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def changes(self, tensor: Tensor) -> bool:
        """Whether a tensor's content depends on the call."""
        return self._storages.get(_storage(tensor)) in self.recording.changing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        arguments = {
            argument.name: argument.default_value for argument in func._schema.arguments if argument.has_default_value()
        }
        arguments |= dict(zip(names, args)) | (kwargs or {})
        tensors = [each for value in arguments.values() for each in flat(value) if isinstance(each, Tensor)]
        changes = any(map(self.changes, tensors))
        if changes and _shows_values(func, tensors):
            raise Unplannable(f"its Python code sees values that depend on the text, in {func}")
        written = {name: self._written(value) for name, value in arguments.items()}
        skips = changes and not self._computing and all(each.alias_info is None for each in func._schema.arguments)
        result = _uncomputed(func, args, kwargs) if skips else func(*args, **(kwargs or {}))
        recording = self.recording
        before = len(recording.tensors)
        results = [self.view(each) for each in flat(result) if isinstance(each, Tensor)]
        for storage in range(before, len(recording.tensors)):
            recording.made_by[storage] = len(recording.calls)
            if changes:
                recording.changing.add(storage)
        if changes and func._schema.is_mutable:
            recording.changing.update(view.storage for view in results)
        recording.calls.append(Call(func, written, results))
        return result

    def _written(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.view(value)
        return [self._written(each) for each in value] if isinstance(value, (list, tuple)) else value


def _uncomputed(func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros of the sizes of an operator's results."""

    def sizes_of(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    def zeros(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()

    args, kwargs = tree_map_only(Tensor, sizes_of, (args, kwargs or {}))
    return tree_map_only(Tensor, zeros, func(*args, **{name: "meta" if name == "device" else kwargs[name] for name in kwargs}))


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError as error:  # of a packed layer's weight, which is computed
        raise Unplannable("its Python code reads the weight of a packed layer") from error


class _Watch(TorchFunctionMode):
    """Detects reads of a tensor that do not go through an operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr") and self._recorder.changes(args[0]):
            raise Unplannable(f"its Python code calls {name}() of a tensor that depends on the text")
        return func(*args, **(kwargs or {}))


# Operators with such a result that torch does not tag.
_SHOWING = {
    torch.ops.aten.is_nonzero.default, torch.ops.aten.item.default, torch.ops.aten.where.default,
    torch.ops.aten.argwhere.default,
    torch.ops.aten.nonzero_numpy.default, torch.ops.aten.tensor_split.tensor_indices_or_sections,
}  # fmt: skip


def _shows_values(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether an operator's result is a number, or a tensor whose size depends on values."""
    if func is torch.ops.aten.index.Tensor:  # with a mask, the size depends on its values
        return any(each.dtype in (torch.bool, torch.uint8) for each in tensors[1:])
    return func in _SHOWING or not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)


def flat(value: Any) -> list[Any]:
    """The values in nested lists and tuples."""
    return [each for part in value for each in flat(part)] if isinstance(value, (list, tuple)) else [value]


def record(function: Callable[[], Any], given: Sequence[Tensor], computing: bool = True) -> Recording:
    """The operators of ``function()``, which uses the ``given`` tensors and returns one or several.

    Args:
        computing: as for :class:`Recorder`.

    Raises:
        Unplannable: Python code depends on the content of tensors.
    """
    recorder = Recorder(given, computing)
    with torch.inference_mode(), recorder, _Watch(recorder):
        results = function()
    recorder.recording.results = [recorder.view(tensor) for tensor in flat(results)]
    return recorder.recording


class Sizes:
    """Finds how numbers depend on the rows of calls, from their values in the recorded ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Extent] = {}

    def extent(self, values: tuple[int, ...]) -> Extent:
        """The extent that has these values in the recorded calls.

        Raises:
            Unplannable: a number is not a constant plus multiples of rows and kept rows.
        """
        if values not in self._known:
            self._known[values] = self._find(values)
        return self._known[values]

    def _find(self, values: tuple[int, ...]) -> Extent:
        if len(set(values)) == 1:
            return Extent(values[0])
        (r0, k0), (r1, k1), (r2, k2) = CALLS[:3]
        a, b, c, d = r1 - r0, k1 - k0, r2 - r0, k2 - k0
        x, y, determinant = values[1] - values[0], values[2] - values[0], a * d - b * c
        per_row, per_kept = Fraction(x * d - b * y, determinant), Fraction(a * y - x * c, determinant)
        if per_row.denominator == per_kept.denominator == 1:
            found = Extent(values[0] - int(per_row) * r0 - int(per_kept) * k0, int(per_row), int(per_kept))
            if all(found.at(*call) == value for call, value in zip(CALLS, values)):
                return found
        raise Unplannable(f"a size is {', '.join(map(str, values))} in calls of {', '.join(str(r) for r, _ in CALLS)} tokens")


def check_alike(recordings: Sequence[Recording]) -> None:
    """Raises Unplannable if calls ran other operators."""
    first = recordings[0]
    for other in recordings:
        if [call.operator for call in other.calls] != [call.operator for call in first.calls]:
            raise Unplannable("its operators depend on the length of a call")
        if len(other.tensors) != len(first.tensors) or other.made_by != first.made_by:
            raise Unplannable("its tensors depend on the length of a call")


def unified(recordings: Sequence[Recording], sizes: Sizes, needed: Sequence[int]) -> Recording:
    """One recording for calls of all sizes: its numbers in views are :class:`Extent`, and so are integers that differ.

    Args:
        needed: the numbers of the calls that it has.

    Raises:
        Unplannable: sizes or arguments depend on the length of a call in other ways.
    """
    first = recordings[0]

    def join(values: Sequence[Any]) -> Any:
        one = values[0]
        if isinstance(one, View):
            if not all(
                isinstance(v, View) and (v.storage, v.dtype, len(v.size)) == (one.storage, one.dtype, len(one.size))
                for v in values
            ):
                raise Unplannable("its tensors depend on the length of a call")
            size, stride = (tuple(map(sizes.extent, zip(*(getattr(v, name) for v in values)))) for name in ("size", "stride"))
            for each in size:
                if not each.is_possible():
                    raise Unplannable(f"a size is {each}, as of padding or slices, which other calls would not have")
            return View(one.storage, one.dtype, size, stride, sizes.extent(tuple(v.offset for v in values)))
        if isinstance(one, list):
            if len({len(value) for value in values}) != 1:
                raise Unplannable("arguments of its operators depend on the length of a call")
            return [join(each) for each in zip(*values)]
        if type(one) is int and any(value != one for value in values):
            return sizes.extent(tuple(values))
        if any(value is not one and value != one for value in values):
            raise Unplannable("arguments of its operators depend on the length of a call")
        return one

    calls = [
        Call(
            same[0].operator,
            {name: join([call.arguments[name] for call in same]) for name in same[0].arguments},
            [join(results) for results in zip(*(call.results for call in same), strict=True)],
        )
        for same in ([recording.calls[number] for recording in recordings] for number in needed)
    ]
    results = [join(views) for views in zip(*(recording.results for recording in recordings), strict=True)]
    return Recording(calls, first.tensors, first.made_by, first.changing, results)
