"""The input of an import: a model in another format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .codes import SourceTensor


@dataclass(frozen=True)
class Source:
    """A model in another format, described and checked; its weights are not read yet."""

    path: Path
    format: str  # for users, "GGUF"
    config: dict[str, Any]  # config.json, without quantization_config
    tensors: list[SourceTensor]
    write_files: Callable[[Path], None]  # writes the files beside the weights, such as the tokenizer
    files: list[dict[str, str | int]]  # the files read, from report.file_states
