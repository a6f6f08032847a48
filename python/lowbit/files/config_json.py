"""Reads config.json of a checkpoint, and refuses checkpoints that name code to import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .untrusted import one_line, read_json

CONFIG = "config.json"
METHOD = "lowbit"  # quant_method of packed checkpoints
# Fields common to all models. transformers checks the fields of a model type when it builds the model.
_TYPES: dict[str, tuple[type, str]] = {
    "model_type": (str, "a text"),
    "transformers_version": (str, "a text"),
    "quant_method": (str, "a text"),
    "architectures": (list, "a list of texts"),
    "tie_word_embeddings": (bool, "true or false"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"), (int, "a positive whole number")
    ),
}
# Separate settings files of older writers, whose config.json has no quantization_config -> quantization method.
SETTINGS_FILES = {
    "quantize_config.json": "gptq", "quantization_config.json": "auto-round", "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}  # fmt: skip
SPEECH_TYPES = (
    "whisper",
    "moonshine",
    "parakeet_ctc",
    "parakeet_rnnt",
    "parakeet_tdt",
)  # model_type of the models that transcribe
MLX = "mlx"  # the method's name here; its settings have none
# Suffixes of the tensor names of quantized layers.
QUANTIZED_LEAVES = (
    ".qweight", ".weight_packed", ".W_q", ".quant_map", "._weight_qdata", ".weight_scale", ".weight_scale_inv",
)  # fmt: skip


def refuse_gguf(path: Path) -> None:
    """Raises NotADirectoryError for a GGUF file where a checkpoint directory is expected."""
    if path.suffix == ".gguf" and path.is_file():
        raise NotADirectoryError(f"{path} is a GGUF file; expected a checkpoint's directory: lowbit import converts it")


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a checkpoint's config.json.

    Raises:
        OSError: no such directory, or no config.json in it.
        ValueError: it is not a JSON object, or a field has a wrong type.
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
            f"{directory} has no config.json, which describes the model; expected a checkpoint of transformers"
        )
    config = read_json(file)
    _check_types(config, file)
    return config


def _check_types(config: dict[str, Any], file: Path, where: str = "") -> None:
    """Raises ValueError for a field of a wrong type, also in nested configs."""
    for name, value in config.items():
        if value is None:
            continue
        kind, expected = _TYPES.get(name, (dict, "an object") if name.endswith("_config") else (object, ""))
        right = isinstance(value, kind)
        if kind is int and isinstance(value, int):
            right = not isinstance(value, bool) and value > 0
        if name == "architectures":
            right = right and all(isinstance(each, str) for each in value)
        if not right:
            raise ValueError(f"{file} has {where}{name} {one_line(repr(value), 200)}; expected {expected}")
        if name.endswith("_config") and isinstance(value, dict):
            _check_types(value, file, f"{where}{name}.")


def refuse_code(directory: Path, config: dict[str, Any]) -> None:
    """Raises ValueError if a checkpoint names code that transformers or peft would import.

    ``trust_remote_code`` and ``auto_map`` are not checked, because transformers refuses them itself.
    """
    if (directory / "adapter_config.json").exists():  # peft imports the modules that it names
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
                # "owner/name" is a kernel that transformers downloads from the Hub and runs.
                raise ValueError(
                    f"{directory / CONFIG} has {name} {value!r:.200}; expected the name of an implementation in transformers"
                )


def _mlx_settings(config: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of MLX in a config.json: they name no method, and stand in ``quantization``."""
    settings = config.get("quantization")
    named = config.get("quantization_config")
    if isinstance(named, dict) and "quant_method" in named:
        return None
    return settings if isinstance(settings, dict) and {"bits", "group_size"} <= settings.keys() else None


def quantization_method(config: dict[str, Any]) -> Any:
    """The ``quant_method`` of a config.json; None if the weights are floats."""
    if _mlx_settings(config) is not None:
        return MLX
    quantization = config.get("quantization_config")
    return quantization.get("quant_method", "") if isinstance(quantization, dict) else quantization


def quantization_settings(directory: Path, config: dict[str, Any]) -> Any:
    """The ``quantization_config`` of a config.json or of a separate settings file; None: float weights.

    Raises:
        OSError, ValueError: the settings file cannot be read, or is not a JSON object.
    """
    if (settings := _mlx_settings(config)) is not None:
        return settings | {"quant_method": MLX}
    if config.get("quantization_config") is not None:
        return config["quantization_config"]
    for name, method in SETTINGS_FILES.items():
        if (directory / name).exists():
            settings = read_json(directory / name)
            if method == "modelopt":
                settings = settings.get("quantization", settings)
                if not isinstance(settings, dict):
                    raise ValueError(f"{directory / name} has quantization {settings!r:.200}; expected an object")
                if settings.get("quant_algo") is None:  # it may contain only settings of caches
                    continue
            return settings | {"quant_method": settings.get("quant_method") or method}
    return None
