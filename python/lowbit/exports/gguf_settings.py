"""GGUF metadata of a model's architecture and rotary embedding, the inverse of :mod:`lowbit.importing.gguf_models`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..files.config_json import CONFIG
from ..files.gguf_reader import read_gguf
from ..importing.gguf_models import ARCHITECTURES, gemmas_query_scale

# model_type -> architecture.
_WRITTEN = {name: name for name in ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2")}
_WRITTEN |= {"mistral": "llama", "gemma3_text": "gemma3"}
# The keys of the architecture with which the metadata of every file from lowbit begins, after general.architecture.
_FIRST = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
)  # fmt: skip


# Settings that transformers completes by sizes of a published model, if they are missing. They are refused instead.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def completed(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the values that transformers has for settings that are missing, sizes of the model excepted.

    Args:
        path: directory of the checkpoint, for errors.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers refuses the settings.
    """
    if config.get("model_type") not in _WRITTEN or any(key not in config for key in _SIZES):
        return config  # refused by architecture_metadata
    from ..hf.whole_config import whole_config  # imports transformers

    try:
        whole = whole_config(config)
    except ValueError as error:
        raise ValueError(f"{path} has a {CONFIG} that cannot be completed: {error}") from error
    found = {key: value for key, value in whole.items() if key not in config and not key.startswith("rope")}
    if "rope_theta" not in config | _rope(path, config) and not any(
        isinstance(part, dict) for part in _rope(path, config).values()
    ):
        found["rope_parameters"] = whole["rope_parameters"]
    return config | found


def _number(path: Path, settings: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number in config.json or in its rotary settings.

    Raises:
        ValueError: it is missing, or not a finite number.
    """
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e38:
        raise ValueError(f"{path} has {key} {value!r} in {CONFIG}; expected a number")
    return float(value)


def _settings(path: Path, within: dict[str, Any], key: str) -> dict[str, Any]:
    """An object in config.json; empty if it is missing.

    Raises:
        ValueError: it is not an object.
    """
    value = within.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} has {key} {value!r} in {CONFIG}; expected an object")
    return value


def _rope(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    return _settings(path, config, "rope_parameters") or _settings(path, config, "rope_scaling")


class _Model:
    """Settings of config.json, checked against GGUF's architecture ``name``."""

    def __init__(self, path: Path, config: dict[str, Any], name: str):
        self.path, self.config, self.name = path, config, name
        self.heads, self.width = self.whole("num_attention_heads"), self.whole("hidden_size")
        self.layers = self.whole("num_hidden_layers")
        self.head = self.whole("head_dim", None if name.startswith("gemma") else self.width // self.heads)

    def expect(self, key: str, *allowed: Any) -> None:
        if self.config.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{self.path} has {key} {self.config[key]!r} in {CONFIG}; GGUF's {self.name} has {allowed[0]!r}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ValueError(f"{self.path} has {key} {value!r} in {CONFIG}; expected a number above 0")
        return value


def is_of_lowbit(path: Path) -> bool:
    """Whether lowbit wrote a file: its first keys are those of a GGUF file from lowbit, and no other key is a general one.

    Other programs also write general.name, general.file_type or the like.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        metadata = read_gguf(path).metadata
    except ValueError:  # not a complete GGUF file
        return False
    begin = ["general.architecture", *(f"{metadata.get('general.architecture')}.{key}" for key in _FIRST)]
    return list(metadata)[: len(begin)] == begin and sum(key.startswith("general.") for key in metadata) == 1


def architecture_metadata(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """``general.architecture`` and its keys, as :func:`lowbit.importing.gguf_models.config_of` reads them.

    Args:
        path: directory of the checkpoint, for errors.
        config: content of its config.json.

    Raises:
        ValueError: a setting that GGUF cannot represent.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _WRITTEN:
        raise ValueError(f"{path} has a model of the type {kind!r}; lowbit writes {', '.join(_WRITTEN)} to GGUF")
    name = _WRITTEN[kind]
    model, architecture = _Model(path, config, name), ARCHITECTURES[name]
    for key, value in architecture.constants.items():
        model.expect(key, value, None)
    model.expect("use_bidirectional_attention", False, None)
    metadata: dict[str, Any] = {
        "context_length": model.whole("max_position_embeddings"),
        "embedding_length": model.width,
        "block_count": model.layers,
        "feed_forward_length": model.whole("intermediate_size"),
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.whole("num_key_value_heads", model.heads),
        "attention.layer_norm_rms_epsilon": _number(path, config, "rms_norm_eps", 1e-6),
        "attention.key_length": model.head,
        "attention.value_length": model.head,
        "vocab_size": model.whole("vocab_size"),
    }
    for field, (key, default) in architecture.keys.items():
        metadata[key] = _number(path, config, field) if isinstance(default, float) else model.whole(field)
    metadata |= _attention(model) | _rotation(model)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in metadata.items()}


def _attention(model: _Model) -> dict[str, Any]:
    """Settings of sliding windows and soft caps."""
    path, config, name = model.path, model.config, model.name
    metadata: dict[str, Any] = {}
    if name in ("gemma2", "gemma3"):
        pattern = 2 if name == "gemma2" else 6
        kinds = ("sliding_attention", "full_attention")
        model.expect("layer_types", [kinds[(layer + 1) % pattern == 0] for layer in range(model.layers)])
        model.expect("sliding_window_pattern", pattern, None)
        model.expect("query_pre_attn_scalar", gemmas_query_scale(name, config))
    else:
        model.expect("sliding_window_pattern", None)
    if name == "gemma3":
        model.expect("final_logit_softcapping", None)
    elif name == "llama" and config.get("sliding_window") is not None:
        raise ValueError(f"{path} has sliding_window {config['sliding_window']!r} in {CONFIG}; GGUF's llama has none")
    elif name == "phi3" and config.get("sliding_window") is not None:
        metadata["attention.sliding_window"] = model.whole("sliding_window")
    return metadata


def _rotation(model: _Model) -> dict[str, Any]:
    """Settings of the rotary embedding, without the factors that are tensors."""
    path, config, name, head = model.path, model.config, model.name, model.head
    metadata: dict[str, Any] = {}
    rope, rotated = _rope(path, config), head
    known = ("default", "linear", "llama3") if name == "llama" else ("default", "linear")
    if name == "gemma3":
        local = _settings(path, rope, "sliding_attention")
        if local.get("rope_type", "default") != "default" or local.get("rope_theta") != 10000.0:
            raise ValueError(f"{path} has the rotation {local} in windows in {CONFIG}; GGUF's gemma3 has a theta of 10000")
        rope = _settings(path, rope, "full_attention")
    if name == "phi3":
        if head != model.width // model.heads:
            raise ValueError(f"{path} has head_dim {head} in {CONFIG}; GGUF's phi3 has {model.width // model.heads}")
        known = ("default", "longrope")
        rotated = int(head * _number(path, config | rope, "partial_rotary_factor", 1.0))
        key = "original_max_position_embeddings"
        if (original := rope.get(key)) is not None or config.get(key) is not None:
            metadata["rope.scaling.original_context_length"] = model.whole(key, original)
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path} rotates a part of each head in {CONFIG}; GGUF's {name} rotates all of it")
    metadata["rope.dimension_count"] = rotated
    metadata["rope.freq_base"] = _number(path, config | rope, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in known:
        raise ValueError(f"{path} has the rope_type {kind!r} in {CONFIG}; lowbit writes {', '.join(known)} for {name}")
    if kind == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": _number(path, rope, "factor")}
    if kind == "longrope" and rope.get("attention_factor") is not None:
        metadata["rope.scaling.attn_factor"] = _number(path, rope, "attention_factor")
    return metadata


def rotation_factors(path: Path, config: dict[str, Any], rotated: int) -> dict[str, np.ndarray]:
    """Divisors of the rotary frequencies as tensors by name, float32 [rotated / 2]; empty for plain rotary embeddings.

    Args:
        rotated: number of rotated inputs of a head.

    Raises:
        ValueError: a rotary setting is missing or wrong.
    """
    rope = _rope(path, config)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "longrope":
        return _long_factors(path, rope, rotated)
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(path, rope, _number(path, config | rope, "rope_theta", 10000.0), rotated)}
    return {}


def _long_factors(path: Path, rope: dict[str, Any], rotated: int) -> dict[str, np.ndarray]:
    """Factors of Phi 3, for short texts and for long texts."""
    tensors = {}
    for which in ("short", "long"):
        key = f"{which}_factor"
        values = rope.get(key)
        if not isinstance(values, list) or len(values) != rotated // 2:
            shown = len(values) if isinstance(values, list) else repr(values)
            raise ValueError(f"{path} has {key} {shown} in {CONFIG}; expected a list of {rotated // 2} numbers")
        factors = np.array([_number(path, {key: value}, key) for value in values], np.float32)
        tensors[f"rope_factors_{which}.weight"] = factors
    return tensors


def _llama3_factors(path: Path, rope: dict[str, Any], theta: float, rotated: int) -> np.ndarray:
    """Factors of Llama 3: the factor for long waves, 1 for short waves, interpolated in between."""
    factor, low, high = (_number(path, rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length = _number(path, rope, "original_max_position_embeddings")
    if min(factor, theta, length) <= 0 or low >= high:
        raise ValueError(
            f"{path} has the rotation {rope} in {CONFIG}; expected positive numbers, the low factor below the high one"
        )
    waves = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
