"""What an import reads: a model in some other format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .codes import Float, Matrix, Stacked, Weights


@dataclass(frozen=True)
class Source:
    """A model in another format, all of it described and checked, none of its weights read."""

    path: Path
    format: str  # as users call it
    config: dict[str, Any]  # config.json, without what described the quantization
    tensors: list[Matrix | Stacked | Weights | Float]
    write_files: Callable[[Path], None]  # writes what belongs beside the weights, such as the tokenizer
    files: list[dict[str, str | int]]  # that were read, from report.file_states
