"""config.json of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .untrusted import read_json

CONFIG = "config.json"
# Files of quantization settings, which older writers put beside a config.json without quantization_config -> their method.
SETTINGS_FILES = {
    "quantize_config.json": "gptq", "quantization_config.json": "auto-round", "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}  # fmt: skip
# What the names of tensors of quantized layers end in.
QUANTIZED_LEAVES = (
    ".qweight", ".weight_packed", ".W_q", ".quant_map", "._weight_qdata", ".weight_scale", ".weight_scale_inv",
)  # fmt: skip


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


def quantization_method(config: dict[str, Any]) -> Any:
    """The ``quant_method`` of a config.json; None if the weights are floats."""
    quantization = config.get("quantization_config")
    return quantization.get("quant_method", "") if isinstance(quantization, dict) else quantization


def quantization_settings(directory: Path, config: dict[str, Any]) -> Any:
    """The ``quantization_config`` of a config.json; without one, that of another file of settings; None: float weights.

    Raises:
        OSError, ValueError: such a file cannot be read, or is not a JSON object.
    """
    if config.get("quantization_config") is not None:
        return config["quantization_config"]
    for name, method in SETTINGS_FILES.items():
        if (directory / name).exists():
            settings = read_json(directory / name)
            if method == "modelopt":
                settings = settings.get("quantization", settings)
                if not isinstance(settings, dict):
                    raise ValueError(f"{directory / name} has quantization {settings!r:.200}; expected an object")
                if settings.get("quant_algo") is None:  # it may be the settings of caches alone
                    continue
            return {"quant_method": method} | settings
    return None
