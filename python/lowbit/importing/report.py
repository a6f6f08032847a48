"""lowbit_import.json of an imported checkpoint: how near its tensors are to those of the source."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..files.untrusted import read_json

REPORT = "lowbit_import.json"
VERSION = 4  # grows when the same file would be imported otherwise
_KINDS = ("exact", "rounded", "requantized", "dequantized", "float")


@dataclass(frozen=True)
class ImportedTensor:
    """How a tensor came from its source.

    ``kind``: "exact": the weights are those of the source; "rounded": its codes with scales rounded to float16, by
    which no weight moved more than ``steps`` of its group's step; "requantized": quantized anew, with ``error`` the
    root mean square of what the weights moved over that of the weights; "dequantized": written as floats, the same
    weights, because lowbit packs no layer of its kind; "float": copied.
    """

    name: str
    source: str  # what it was, such as "Q4_K"
    kind: str
    steps: float = 0.0
    error: float = 0.0

    @property
    def came_over(self) -> str:
        """In words: "exact", "rounded, within 0.011 steps"."""
        detail = {"rounded": f", within {self.steps:.2g} steps", "requantized": f", error {100 * self.error:.2g} %"}
        return self.kind + detail.get(self.kind, "")


def file_states(paths: Iterable[Path]) -> list[dict[str, str | int]]:
    """What tells whether files were changed: their names, sizes and times."""
    return [{"name": path.name, "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns} for path in paths]


def read_report(directory: Path) -> dict[str, ImportedTensor]:
    """What lowbit_import.json says, by the name of the tensor; empty where there is none.

    Raises:
        OSError, ValueError: it cannot be read, or is no such report.
    """
    file = directory / REPORT
    if not file.exists():
        return {}
    content = read_json(file)
    try:
        tensors = [ImportedTensor(**each) for each in content["tensors"]]
        for tensor in tensors:
            if not isinstance(tensor.name, str) or not isinstance(tensor.source, str) or tensor.kind not in _KINDS:
                raise TypeError(f"an entry is {tensor!r:.200}")
            for number in (tensor.steps, tensor.error):
                if type(number) not in (int, float) or (type(number) is int and abs(number) > sys.float_info.max):
                    raise TypeError(f"an entry has the distance {number!r:.200}; expected a number")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a report of an import: {error}") from error
    return {tensor.name: tensor for tensor in tensors}
