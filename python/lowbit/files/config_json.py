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
            "From the Hugging Face Hub: hf download OWNER/NAME --local-dir DIRECTORY"
        )
    file = directory / CONFIG
    if not file.exists():
        raise FileNotFoundError(
            f"{directory} has no config.json, which says what the tensors are for; expected a checkpoint of transformers"
        )
    return read_json(file)


def refuse_code(directory: Path, config: dict[str, Any]) -> None:
    """Raises ValueError for what lets a checkpoint name code that transformers or peft imports.

    ``trust_remote_code`` and ``auto_map`` are not among it: transformers refuses them itself.
    """
    if (directory / "adapter_config.json").exists():  # peft imports modules that it names
        raise ValueError(
            f"{directory} has adapter_config.json: weights of an adapter belong to this model; merge them into it first, or "
            "move the adapter away"
        )
    names = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
    for part in [config, *(value for value in config.values() if isinstance(value, dict))]:
        for name in names:
            value = part.get(name)
            each = list(value.values()) if isinstance(value, dict) else [value]
            if any(kind is not None and not (isinstance(kind, str) and kind.isidentifier()) for kind in each):
                # "owner/name" is a kernel that transformers gets from the Hub, and runs
                raise ValueError(
                    f"{directory / CONFIG} has {name} {value!r:.200}; expected the name of one of transformers' own"
                )


def quantization_method(config: dict[str, Any]) -> Any:
    """The ``quant_method`` of a config.json; None if the weights are floats."""
    quantization = config.get("quantization_config")
    return quantization.get("quant_method", "") if isinstance(quantization, dict) else quantization
