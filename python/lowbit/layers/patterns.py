"""Shell-style name patterns with values, such as configs by layer name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any


class Patterns:
    """Shell-style patterns of qualified names (``"*embed*"``), each with a value. The last matching pattern wins."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]):
        self._pairs = list(pairs)
        self._used: set[int] = set()

    def last(self, name: str, applies: Callable[[Any], bool] = lambda value: True) -> tuple[str, Any] | None:
        """The last matching pattern whose value ``applies``, and the value; None if there is none."""
        matching = [at for at, (pattern, value) in enumerate(self._pairs) if fnmatchcase(name, pattern) and applies(value)]
        self._used.update(matching)
        return self._pairs[matching[-1]] if matching else None

    def warn_unused(self, what: str, stacklevel: int = 2) -> None:
        """Warns of each pattern that has matched no name, which is probably a typo."""
        for at, (pattern, _) in enumerate(self._pairs):
            if at not in self._used:
                warnings.warn(f"the pattern {pattern!r} matches no {what}", stacklevel=stacklevel + 1)
