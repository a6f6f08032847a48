"""Checks of numbers that callers give."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any


def check_whole(name: str, value: Any, least: float = -math.inf, most: float = math.inf, expected: str = "") -> int:
    """The value as a Python int.

    Args:
        expected: describes the range; empty: "``least`` or more".

    Raises:
        ValueError: the value is not a whole number, or not from ``least`` to ``most``.
    """
    expected = expected or f"{least:.0f} or more"
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; expected a whole number, {expected}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; expected {expected}")
    return number


def check_number(name: str, value: Any, least: float, most: float, expected: str) -> None:
    """Raises ValueError unless the value is a number from ``least`` to ``most``; NaN is not."""
    is_number = isinstance(value, Real)
    if not is_number:
        raise ValueError(f"{name} is {value!r}; expected {expected if 'number' in expected else f'a number, {expected}'}")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; expected {expected}")
