"""Replaces functions that a Python function finds by their global names, for one caller only."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def with_globals(function: Any, replaced: dict[str, Any]) -> Any:
    """A copy of a Python function that finds other values at some of its global names.

    If ``functools.wraps`` put it around another function, the copy calls such a copy of that function, and only the innermost
    function finds the other values.

    Raises:
        ValueError: it is not a Python function, or holds the function that it wraps not in exactly one cell of its closure.
    """
    if not isinstance(function, FunctionType):
        raise ValueError(f"{function!r} is a {type(function).__name__}; expected a Python function")
    values, closure, attributes = function.__globals__, function.__closure__ or (), dict(vars(function))
    if "__wrapped__" in attributes:
        inner = attributes["__wrapped__"]
        places = [place for place, cell in enumerate(closure) if _holds(cell, inner)]
        if len(places) != 1:
            raise ValueError(f"{function!r} holds {inner!r} in {len(places)} cells of its closure; expected 1")
        attributes["__wrapped__"] = own_inner = with_globals(inner, replaced)
        closure = (*closure[: places[0]], CellType(own_inner), *closure[places[0] + 1 :])
    else:
        values = values | replaced
    own = FunctionType(function.__code__, values, function.__name__, function.__defaults__, closure)
    own.__kwdefaults__, own.__qualname__ = function.__kwdefaults__, function.__qualname__
    own.__dict__.update(attributes)
    return own
