"""The common interface of all import formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.codes import SourceTensor


@dataclass(frozen=True)
class Source:
    """A model in another format, described and checked, whose weights have not been read yet."""

    path: Path
    format: str  # name shown to users, such as "GGUF"
    config: dict[str, Any]  # config.json, without quantization_config
    tensors: list[SourceTensor]
    write_files: Callable[[Path], None]  # writes the other files, such as the tokenizer
    files: list[dict[str, str | int]]  # the files read, from gguf_cache.file_states
