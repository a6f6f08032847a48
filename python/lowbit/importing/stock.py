"""The tensors of a quantized checkpoint in safetensors files. Each format's reader takes every tensor exactly once."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.codes import Float, LastRead, order_of, stored_float
from ..files.io import read_bytes
from ..files.safetensors import Stored
from ..files.tensors import DTYPES
from ..files.untrusted import printable

_DTYPES = DTYPES | {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Stock:
    """The tensors of a checkpoint that have not been taken yet.

    Raises:
        ValueError: a name has control characters, which messages would send to a terminal.
    """

    def __init__(self, path: Path, tensors: dict[str, Stored], settings: dict[str, Any]):
        for name in tensors:
            if not name.isprintable():
                raise ValueError(f"{path} has a tensor of the name '{printable(name)}'; expected printable characters")
        self.path, self.settings, self._tensors = path, settings, dict(tensors)
        self.load_kept = LastRead(load)

    def layers(self, leaf: str) -> list[str]:
        """The layers that have a tensor LAYER.leaf."""
        return [name.removesuffix(f".{leaf}") for name in self._tensors if name.endswith(f".{leaf}")]

    def paths(self) -> list[Path]:
        """The files of the tensors that have not been taken yet."""
        return list(dict.fromkeys(stored.path for stored in self._tensors.values()))

    def has(self, name: str) -> bool:
        return name in self._tensors

    def dtype(self, name: str) -> str:
        return self._tensors[name].dtype

    def take(self, name: str, *dtypes: str, shape: tuple[int | None, ...] | None = None) -> Stored:
        """Removes and returns a tensor.

        Args:
            name: the name of the tensor.
            dtypes: allowed dtypes, as safetensors names them ("F16", "I32").
            shape: expected shape; None, for the whole shape or a single size, allows any.

        Raises:
            ValueError: the tensor is missing or empty, or has another dtype or shape.
        """
        stored = self._tensors.pop(name, None)
        if stored is None:
            raise ValueError(f"{self.path} has no {name}; expected {' or '.join(dtypes)}")
        fits = shape is None or len(shape) == len(stored.shape)
        fits = fits and all(size in (None, actual) for size, actual in zip(shape or (), stored.shape, strict=False))
        if stored.dtype not in dtypes or not fits or 0 in stored.shape:
            wanted = "" if shape is None else f" {['any' if size is None else size for size in shape]}"
            raise ValueError(
                f"{name} in {stored.path} is {stored.dtype} {list(stored.shape)}; expected {' or '.join(dtypes)}{wanted}"
            )
        return stored

    def number(self, name: str, *dtypes: str) -> Tensor:
        """A tensor with one element and any number of dimensions, as float32 [1]; ``dtypes`` as for :meth:`take`."""
        stored = self.take(name, *(dtypes or ("F32", "F16", "BF16")))
        if math.prod(stored.shape) != 1:
            raise ValueError(f"{name} in {stored.path} has shape {list(stored.shape)}; expected one number")
        return load(stored).float().reshape(1)

    def order(self, name: str, k: int, size: int, none: Collection[int] = ()) -> Tensor | None:
        """The act-order permutation from a tensor [k] with the group of each input (:func:`.codes.order_of`), or None.

        Args:
            none: if all inputs have one of these values, or the tensor is empty, there is no permutation.

        Raises:
            ValueError: the tensor has another dtype or shape, or a group does not have ``size`` inputs.
        """
        if not self.has(name):
            return None
        if self._tensors[name].shape == (0,):
            del self._tensors[name]
            return None
        groups = load(self.take(name, "I32", "I64", shape=(k,))).long()
        if any(bool((groups == value).all()) for value in none):
            return None
        try:
            return order_of(groups, size)
        except ValueError as error:
            raise ValueError(f"{name} in {self.path}: {error}") from error

    def rest(self) -> list[Float]:
        """The tensors that have not been taken, unchanged: floats, and masks and positions of early checkpoints.

        Raises:
            ValueError: a tensor has a dtype of quantized weights, so the reader missed a quantized layer.
        """
        floats = []
        for name, stored in self._tensors.items():
            if stored.dtype not in _DTYPES or stored.dtype == "F8_E8M0":
                raise ValueError(
                    f"{name} in {stored.path} is {stored.dtype} {list(stored.shape)}, which is neither a float tensor "
                    "nor a part of a quantized layer that lowbit knows"
                )
            floats.append(stored_float(stored))
        return floats

    def setting(self, name: str, allowed: tuple[Any, ...], default: Any) -> Any:
        """A setting of quantization_config.

        Raises:
            ValueError: the value is not in ``allowed``, or has another type.
        """
        value = self.settings.get(name, default)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise ValueError(
                f"{self.path} has quantization_config.{name} {value!r}; lowbit imports {', '.join(map(repr, allowed))}"
            )
        return value


def load(stored: Stored) -> Tensor:
    """Loads a whole tensor."""
    return read_bytes(stored).view(_DTYPES[stored.dtype]).view(stored.shape)
