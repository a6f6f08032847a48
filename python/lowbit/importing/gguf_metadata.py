"""Reads the metadata of a GGUF file: the keys of its architecture, special tokens, and the generation config.

An architecture key that was never read is an error, because it could change results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..files.gguf_reader import Gguf
from ..files.untrusted import printable

REQUIRED = object()

# Keys that do not affect results, or only repeat what the tensors show.
_SILENT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
# Tokens that end a turn in some model. ggml's programs also stop at each of them.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
# Token types that stay whole: control and user-defined. Some files give the tokens that end a turn the type user-defined.
_WHOLE = (3, 4)


class Metadata:
    """The keys of one architecture. Every key must be read or explicitly ignored."""

    def __init__(self, gguf: Gguf):
        self.path, self.all, self.tensors = gguf.paths[0], gguf.metadata, len(gguf.tensors)
        architecture = self.all.get("general.architecture")
        if not isinstance(architecture, str):
            raise ValueError(f"{self.path} has no general.architecture; expected the name of one")
        self.architecture = architecture
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.all

    def _get(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        key = f"{self.architecture}.{name}"
        if key in self.all:
            return self.all[key]
        if default is REQUIRED:
            raise ValueError(f"{self.path} has no {key}, which the architecture needs")
        return default

    def _refusal(self, name: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.path} has {self.architecture}.{name} {_shown(value)}; expected {expected}")

    def whole(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._get(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31):
            raise self._refusal(name, value, "one whole number")
        return value

    def wholes(self, name: str, default: Any = REQUIRED) -> Any:
        """A list of integers."""
        value = self._get(name, default)
        if value is default:
            return value
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(value, list) or not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in value):
            raise self._refusal(name, value, "whole numbers")
        return [int(one) for one in value]

    def of_layers(self, name: str, default: Any = REQUIRED, *, zeros: bool = False) -> int:
        """An integer that must be the same in all layers if the file lists it per layer; ``zeros``: some layers may have 0."""
        if not isinstance(self._get(name, default), list | np.ndarray):
            return int(self.whole(name, default))
        values = set(self.wholes(name)) - ({0} if zeros else set())
        if len(values) > 1:
            raise ValueError(f"{self.path} has {self.architecture}.{name} of {len(values)} values; expected one for all layers")
        return values.pop() if values else 0

    def of_each_layer(self, name: str, layers: int, default: Any = REQUIRED) -> list[int]:
        """An integer for each layer; the file has a list, or one number for all layers."""
        if not isinstance(self._get(name, default), list | np.ndarray):
            return [int(self.whole(name, default))] * layers
        return list(self.wholes(name))

    def ignore(self, *names: str) -> None:
        """Ignores keys that only repeat other keys or what the tensors show."""
        self._asked.update(names)

    def real(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._refusal(name, value, "a finite number")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        value = float(self.real(name, default))
        if value <= 0:
            raise ValueError(f"{self.path} has {self.architecture}.{name} {value:g}; expected a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._refusal(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self._refusal(name, value, "a text")
        return value

    def like(self, name: str, default: Any) -> Any:
        """A value of its default's type: :meth:`flag`, :meth:`real`, or else :meth:`whole`."""
        if isinstance(default, bool):
            return self.flag(name, default)
        return (self.real if isinstance(default, float) else self.whole)(name, default)

    def expect(self, name: str, *allowed: Any) -> None:
        """Raises ValueError unless the key is absent or has one of these values."""
        value = self._get(name, allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self._refusal(name, value, " or ".join(map(str, allowed)))

    def check_all_asked(self) -> None:
        prefix = f"{self.architecture}."
        names = {key.removeprefix(prefix) for key in self.all if key.startswith(prefix)}
        unknown = sorted(names - self._asked - _SILENT)
        if unknown:
            raise ValueError(
                f"{self.path} has {prefix}{printable(unknown[0])}, which lowbit does not know for this architecture: "
                "the imported model could compute something else"
            )


def _shown(value: Any) -> str:
    return f"of {len(value)} values" if isinstance(value, list | np.ndarray) else repr(value)


def special_tokens(metadata: Metadata, vocabulary: int) -> dict[str, int | None]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``; None (not the config's default) where the file has none."""
    ids: dict[str, int | None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    for ours, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = metadata.all.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            ids[f"{ours}_token_id"] = _token(metadata.path, key, value, vocabulary)
    return ids


def _token(path: Path, key: str, value: Any, vocabulary: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise ValueError(f"{path} has tokenizer.ggml.{key}_token_id {_shown(value)}; expected 0 to {vocabulary - 1}, a token")
    return value


def generation_config(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json with the tokens that end a text. A file names one or two, but a chat model may have more."""
    vocabulary = config["vocab_size"]
    ends = [config["eos_token_id"]] if config["eos_token_id"] is not None else []
    for key in ("eot", "eom"):
        value = metadata.all.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            ends.append(_token(metadata.path, key, value, vocabulary))
    tokens, types = metadata.all.get("tokenizer.ggml.tokens"), metadata.all.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens) <= vocabulary:
        ends += [index for index in np.flatnonzero(np.isin(types, _WHOLE)).tolist() if tokens[index] in _ENDS]
    content: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config[key] is not None}
    return content | ({"eos_token_id": list(dict.fromkeys(ends))} if ends else {})
