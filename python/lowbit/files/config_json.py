"""config.json of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .untrusted import read_json

CONFIG = "config.json"


def refuse_gguf(path: Path) -> None:
    """Raises NotADirectoryError for a GGUF file, where a checkpoint's directory is expected."""
    if path.suffix == ".gguf" and path.is_file():
        raise NotADirectoryError(f"{path} is a GGUF file; expected a checkpoint's directory: lowbit import makes one of it")


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a checkpoint's config.json.

    Raises:
        OSError: no such directory, or no config.json in it.
        ValueError: it is not a JSON object.
    """
    directory = Path(directory)
    if not directory.is_dir():
        refuse_gguf(directory)
        problem = "is a file" if directory.exists() else "does not exist"
        raise NotADirectoryError(
            f"{directory} {problem}; expected a directory with config.json and model.safetensors. "
            "A model on the Hugging Face Hub is named hf:OWNER/NAME in commands"
        )
    file = directory / CONFIG
    if not file.exists():
        raise FileNotFoundError(
            f"{directory} has no config.json, which says what the tensors are for; expected a checkpoint of transformers"
        )
    return read_json(file)


def quantization_method(config: dict[str, Any]) -> Any:
    """The ``quant_method`` of a config.json; None if the weights are floats."""
    quantization = config.get("quantization_config")
    return quantization.get("quant_method", "") if isinstance(quantization, dict) else quantization
