"""Keys, values and states of a layer as arrays of torch or numpy: their layout, and copies between caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

PANEL = 16  # positions whose keys are interleaved in memory, see docs/internals/operators.md
SPAN = 512  # positions by which caches of a window advance; the kernels sum in spans of the same length


class Slot(IntEnum):
    """The caches of a layer; its states follow."""

    KEYS, VALUES, HELD, STATE = range(4)


def stored_width(width: int, kind: str) -> int:
    """The last dimension of a cache with keys or values of this width, stored as ``kind``: "int4", "int8" or a float type.

    Raises:
        ValueError: 4-bit caches do not support this width.
    """
    if kind == "int4":
        if width % 32:
            raise ValueError(f"keys or values have a width of {width}; expected a multiple of 32 for a 4-bit cache")
        return width // 2 + 4
    return width + (4 if kind == "int8" else 0)


def is_held(array: Any) -> bool:
    """Whether an array among a layer's caches is ``held`` of :func:`lowbit.window_attention`."""
    return bool(array.ndim == 1)


def window_length(window: int, positions: int = 256) -> int:
    """A ``max_length`` of caches for :func:`window_attention` that does not split calls of up to ``positions``.

    Raises:
        ValueError: ``window`` is not a whole number of 1 or more, or ``positions`` one of 0 or more.
    """
    from ..machine.numbers import check_whole  # not needed by a program that only imports torch

    window, positions = check_whole("window", window, 1), check_whole("positions", positions, 0)
    return -(-(window + SPAN + max(positions, 16)) // 16) * 16


def first_kept(window: int, count: int) -> int:
    """The first position that a layer with a window must hold after ``count`` tokens: 0, or a whole span before the window."""
    return 0 if count <= window + SPAN else (count - window + 1) // SPAN * SPAN


def first_held(layer: Iterable[Any]) -> int:
    """The first position that the caches of a layer hold; above 0 only if they hold a window."""
    return next((int(array[0]) for array in layer if is_held(array)), 0)


def can_continue(layers: Sequence[Iterable[Any]], windows: Mapping[int, int], count: int) -> bool:
    """Whether caches, with the ``windows`` of some layers, hold what continues their text after its first ``count`` tokens."""
    return all(first_held(layers[layer]) <= first_kept(window, count) for layer, window in windows.items())


def is_state(array: Any) -> bool:
    """Whether an array among a layer's caches is a state of fixed size; keys and values have 4 dimensions."""
    return array.ndim not in (1, 4)


def states_of(layers: Iterable[Sequence[Any]]) -> list[Any]:
    """The states of all layers."""
    return [array for layer in layers for array in layer if is_state(array)]


def slots(layer: Sequence[Any]) -> list[int]:
    """The slot of each array among the caches of a layer."""
    found, states = [], 0
    for array in layer:
        if is_held(array):
            found.append(int(Slot.HELD))
        elif array.ndim == 4:
            found.append(int(Slot.VALUES if Slot.KEYS in found else Slot.KEYS))
        else:
            found.append(Slot.STATE + states)
            states += 1
    return found


def by_slot(layers: Sequence[Sequence[Any]]) -> dict[tuple[int, int], Any]:
    """The caches of all layers by layer and slot: keys and values, ``held`` if they hold a window, states."""
    return {
        (number, slot): array for number, layer in enumerate(layers) for slot, array in zip(slots(layer), layer, strict=True)
    }


def copied(array: Any) -> Any:
    """A copy of an array in memory of its own."""
    return array.clone() if hasattr(array, "clone") else array.copy()


def bytes_of(array: Any) -> numpy.ndarray:
    """The bytes of an array whose last dimension has no gaps, in the same memory."""
    if hasattr(array, "data_ptr"):  # numpy does not have all types of torch
        array = array.view(import_module("torch").uint8).numpy()
    found: numpy.ndarray = array.view("uint8")
    return found


def stretches(cache: Any, begin: int, end: int) -> list[Any]:
    """The slices [heads, n] of a layer's keys or values that hold these positions, in whole panels.

    For each head the values of all positions come first, then, in int8 and 4-bit caches, their scales.
    """
    _, heads, length, width = cache.shape
    bytes_of_scale = 4 if cache.dtype.itemsize == 1 else 0
    flat, width = cache.reshape(heads, -1), width - bytes_of_scale  # of 4-bit codes in bytes
    found = [flat[:, begin * width : end * width]]
    if bytes_of_scale:
        found.append(flat[:, length * width + begin * bytes_of_scale : length * width + end * bytes_of_scale])
    return found


def copy_layer(source: Sequence[Any], target: Sequence[Any], count: int) -> None:
    """Copies keys and values of a layer for the first ``count`` positions, and states; the caches may differ in length.

    The states of ``source`` must be those after ``count`` tokens, and its window that before them (:func:`can_continue`).

    Whole panels are copied; positions after ``count`` in the last one are overwritten before they are read. A target of
    :func:`lowbit.window_attention` gets as many positions as it has room for.

    Raises:
        ValueError: ``source`` holds only a window, and ``target`` a whole text.
    """
    begin, base = first_held(source), 0
    sources, targets = ([array for array in layer if not is_held(array)] for layer in (source, target))
    for array in target:
        if is_held(array):
            base = max(begin, -(-(count - targets[0].shape[2]) // SPAN) * SPAN)
            array[0], array[1] = base, count
    if begin > base:
        raise ValueError(f"the caches of a layer hold positions from {begin} on; expected those of the whole text")
    count = -(-count // PANEL) * PANEL
    for read, write in zip(sources, targets, strict=True):
        if is_state(read):
            write[...] = read
            continue
        for from_, to in zip(stretches(read, base - begin, count - begin), stretches(write, 0, count - base), strict=True):
            to[...] = from_
