"""lowbit_import.json of an imported checkpoint: the error of each tensor against the source."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .gguf_cache import REPORT
from .untrusted import read_json

_KINDS = ("exact", "rounded", "requantized", "dequantized", "float")


@dataclass(frozen=True)
class ImportedTensor:
    """How a tensor was imported.

    ``kind``: "exact": the weights are those of the source. "rounded": the codes are kept and scales rounded to float16; no
    weight changed by more than ``steps`` of its group's quantization steps. "requantized": ``error`` is the root mean square
    of the changes, relative to that of the weights. "dequantized": the same weights as floats, because lowbit does not pack
    this kind of layer. "float": copied.
    """

    name: str
    source: str  # type in the source, such as "Q4_K"
    kind: str
    steps: float = 0.0
    error: float = 0.0

    @property
    def came_over(self) -> str:
        """The conversion in words, such as "exact" or "rounded, within 0.011 steps"."""
        detail = {"rounded": f", within {self.steps:.2g} steps", "requantized": f", error {100 * self.error:.2g} %"}
        return self.kind + detail.get(self.kind, "")


def read_report(directory: Path) -> dict[str, ImportedTensor]:
    """The entries of lowbit_import.json, by the name of the tensor; empty without such a file.

    Raises:
        OSError, ValueError: the file cannot be read, or is not an import report.
    """
    file = directory / REPORT
    if not file.exists():
        return {}
    content = read_json(file)
    try:
        tensors = [ImportedTensor(**entry) for entry in content["tensors"]]
        for tensor in tensors:
            if not isinstance(tensor.name, str) or not isinstance(tensor.source, str) or tensor.kind not in _KINDS:
                raise TypeError(f"an entry is {tensor!r:.200}")
            for number in (tensor.steps, tensor.error):
                if type(number) not in (int, float) or (type(number) is int and abs(number) > sys.float_info.max):
                    raise TypeError(f"an entry has the distance {number!r:.200}; expected a number")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a report of an import: {error}") from error
    return {tensor.name: tensor for tensor in tensors}
