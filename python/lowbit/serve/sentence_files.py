"""Checks the settings of a sentence-transformers model, which name classes to import, before it is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from ..files.config_json import CONFIG, read_config, refuse_code
from ..files.untrusted import check_regular, printable, read_json

_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout", "WeightedLayerPooling", "StaticEmbedding",
            "CNN", "LSTM", "LogitScore")  # fmt: skip
# Names in versions of the library: sentence_transformers.models.Dense, sentence_transformers.base.modules.dense.Dense
_MODULE = re.compile(
    rf"sentence_transformers\.(models|(base|sentence_transformer|cross_encoder)\.modules)(\.[a-z_]+)?\.({'|'.join(_MODULES)})"
)
_FUNCTION = re.compile(r"torch\.nn\.(modules\.[a-z]+\.)?[A-Z]\w*")
_FUNCTIONS = ("activation_fn", "activation_function", "sbert_ce_default_activation_function")
_OPTIONS = tuple(f"{what}_{how}" for what in ("model", "tokenizer", "processor", "config") for how in ("args", "kwargs"))


def check_files(path: Path) -> None:
    """Refuses settings that name code outside sentence-transformers and torch.nn, and pickled weights.

    Raises:
        OSError, ValueError: with the file, what was found, and what was expected.
    """
    for folder in (path, *(path / folder for folder in folders_of(path))):
        for found in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            if re.fullmatch(r"config.*|sentence_.*_config", found.stem):
                _check_settings(found, read_json(found))
        pickles = [each.name for each in sorted(folder.glob("pytorch_model*.bin"))] if folder.is_dir() else []
        if pickles and not any(folder.glob("*.safetensors")):
            raise ValueError(f"{folder} has weights in {pickles[0]}, a pickle; expected model.safetensors")
    refuse_code(path, read_config(path) if (path / CONFIG).exists() else {})


def folders_of(path: Path) -> list[str]:
    """The folders of a model's modules, as modules.json names them, other than its own.

    Raises:
        OSError, ValueError: it names code that is not known, or folders outside of the model's.
    """
    folders, file = dict[str, None](), path / "modules.json"
    for number, module in enumerate(_modules(file) if file.is_file() else ()):
        kind, folder = (module.get(name) for name in ("type", "path"))
        if not isinstance(kind, str) or not _MODULE.fullmatch(kind):
            raise ValueError(
                f"{file}: module {number} is of type {printable(repr(kind))[:200]}, which is not known and would run code of "
                f"its own; expected {', '.join(_MODULES)} of sentence_transformers"
            )
        if not isinstance(folder, str) or PurePosixPath(folder).is_absolute() or ".." in re.split(r"[/\\]", folder):
            raise ValueError(f"{file}: module {number} has the path {folder!r}; expected a folder of this directory")
        if PurePosixPath(folder).parts:
            folders[folder] = None
    return list(folders)


def _modules(file: Path) -> list[dict[str, Any]]:
    """The list in modules.json; :func:`read_json` only accepts objects."""
    check_regular(file)
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{file} is not a list of modules; expected objects with type and path")
    return found


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    inner = settings.get("sentence_transformers")
    for name in _FUNCTIONS:
        for each in (settings, inner if isinstance(inner, dict) else {}):
            function = each.get(name)
            if function is not None and not (isinstance(function, str) and _FUNCTION.fullmatch(function)):
                raise ValueError(
                    f"{file} has {name} {printable(repr(function))[:200]}; expected an activation function of torch.nn"
                )
    for name in _OPTIONS:
        if settings.get(name):
            raise ValueError(f"{file} has {name}, options of transformers; expected none, because they could load code")
