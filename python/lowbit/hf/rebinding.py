"""Replaces functions that a Python function finds by their global names, for one caller only."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def with_globals(function: Any, replaced: dict[str, Any]) -> Any:
    """A copy of a Python function that finds other values at some of its global names."""
    own = FunctionType(
        function.__code__, function.__globals__ | replaced, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own
