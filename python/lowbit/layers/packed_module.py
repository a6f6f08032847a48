"""The base class of modules with packed weights: the buffer, its header, its dequantized weight, and state dicts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operators import ops
from ..packed.header import PackedInfo
from ..packed.matrix import with_activation_bits
from .computed_tensor import ComputedTensor

# Allowed dtypes of inputs, outputs and dequantized weights. Float64 layers compute in float32: more would gain nothing.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_SHAPE = "weight_shape"  # key in the metadata that torch keeps for each module of a state dict


@dataclass
class _Seen:
    """Which packed weight a header was read from: its id and version. By default none."""

    identity: int = 0
    version: int | None = None


class _Parameters(dict[str, Any]):
    """The parameters of a packed layer, where torch.nn.utils.weight_norm and spectral_norm look for its weight."""

    def __missing__(self, name: str) -> Any:
        raise _fixed(name) if name in ("weight", "bias") else KeyError(name)

    def __delitem__(self, name: str) -> None:
        self[name]
        super().__delitem__(name)


def _fixed(name: str) -> ValueError:
    return ValueError(
        f"a packed layer cannot be pruned or normalized: its {name} is fixed; change the float model, and quantize that"
    )


class Packed(torch.nn.Module):
    """A module whose weight is one packed buffer, ``packed_weight`` (uint8)."""

    packed_weight: Tensor
    _info: PackedInfo  # the last header read; its shape never changes

    def __init__(self, packed_weight: Tensor | PackedInfo, dtype: torch.dtype):
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype}; expected torch.float32, torch.bfloat16, torch.float16 or torch.float64")
        super().__init__()
        self._parameters = _Parameters()
        self._dtype = dtype  # not a buffer, which would be in every exported program
        if isinstance(packed_weight, PackedInfo):
            self._info = packed_weight
            shape = [count for count in (packed_weight.experts, packed_weight.total_bytes) if count is not None]
            packed_weight = torch.empty(shape, dtype=torch.uint8, device="meta")
        else:
            self._describe(packed_weight)
        self.register_buffer("packed_weight", packed_weight)
        self._seen = _state_of(packed_weight)

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"_parameters": dict(self._parameters)}
        del state["_seen"]  # an id of this process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "info" in state:  # pickled by an earlier version, in which it was an attribute
            state = {name: value for name, value in state.items() if name != "info"} | {"_info": state["info"]}
        super().__setstate__(state | {"_seen": _Seen(), "_parameters": _Parameters(state["_parameters"])})

    @property
    def info(self) -> PackedInfo:
        """The header of ``packed_weight``."""
        # A module that shares the buffer may have loaded a weight of another format into it.
        if not torch.compiler.is_compiling() and self._seen != (seen := _state_of(self.packed_weight)):
            self._seen = seen
            with suppress(ValueError, RuntimeError):  # on the meta device, or damaged, which the operators report
                self._describe(self.packed_weight)
        return self._info

    def _describe(self, packed_weight: Tensor) -> None:
        self._info = ops.info(packed_weight)

    def _verified(self, packed_weight: Tensor) -> PackedInfo:
        return ops.verify(packed_weight)

    def verify(self) -> None:
        """Checks every byte against the checksums and rereads the header.

        Raises:
            ValueError: not a packed weight, or the packed bytes were modified.
        """
        self._info = self._verified(self.packed_weight)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantized weight, [out, in], in ``dtype`` (float32, bfloat16, float16 or float64).

        Raises:
            ValueError: the packed bytes were modified.
        """
        self._verified(self.packed_weight)
        return self._dequantized(dtype)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, [out, in], in the layer's dtype, which ``module.to(dtype)`` changes.

        Reading its shape, dtype or device is free; every use of its values dequantizes again. It is read-only, not a
        parameter, and not in the state dict.
        """
        return self._computed(lambda: self._dequantized(self._dtype), self._shape())

    def _computed(self, compute: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
        if torch.compiler.is_compiling():  # traced; the compiler removes it where only the dtype is used
            return compute()
        return ComputedTensor(compute, shape, self._dtype, self.packed_weight.device)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        rows = torch.arange(self.info.out_features, device=self.packed_weight.device)
        return dequantized_rows(rows, self.packed_weight, self.info.in_features, dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias") and hasattr(type(self), name):
            raise AttributeError(
                f"the {name} of a packed layer cannot be set; make a new layer, with {type(self).__name__}.from_float"
            )
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if isinstance(param, ComputedTensor):  # by torch.nn.utils.prune
            raise _fixed(name.removesuffix("_orig"))
        super().register_parameter(name, param)

    def requires_grad_(self, requires_grad: bool = True) -> Packed:
        """Does nothing if False: packed weights have no gradients.

        Raises:
            ValueError: called with True on this layer. On a model it is allowed and affects only the float parameters.
        """
        if requires_grad and not any(True for _ in self.parameters()):
            raise ValueError(
                f"a packed {type(self).__name__} cannot be trained: its weight is fixed. To train a layer, leave it float "
                "(config None), or put adapters beside it"
            )
        super().requires_grad_(requires_grad)
        return self

    def __prepare_scriptable__(self) -> None:
        raise ValueError(
            "torch.jit.script does not compile packed layers; use torch.compile, torch.export.export, or torch.jit.trace"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packed:
        def applied(tensor: Tensor) -> Tensor:  # module.type(float16) would convert the packed bytes
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype or tensor.is_floating_point() else tensor.to(moved.device)

        super()._apply(applied, recurse)
        # As for a float layer, to(bfloat16), half() and the like change the dtype.
        dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        if dtype in _DTYPES:
            self._dtype = dtype
        return self

    def to_format(self, format: str) -> Packed:
        """Converts the packed weight to another format (:func:`lowbit.repack`) in place; returns the module.

        A buffer shared with another module is no longer shared.

        Raises:
            TypeError, ValueError: as :func:`lowbit.repack`.
        """
        self.packed_weight = ops.repack(self.packed_weight, format)
        self._describe(self.packed_weight)
        return self

    def to_activation_bits(self, activation_bits: int) -> Packed:
        """Changes the activation bits (:func:`lowbit.with_activation_bits`) in place; returns the module.

        A buffer shared with another module is no longer shared.

        Raises:
            TypeError, ValueError: as :func:`lowbit.with_activation_bits`.
        """
        matrices = self.packed_weight.view(-1, self.packed_weight.shape[-1])
        changed = torch.stack([with_activation_bits(matrix, activation_bits) for matrix in matrices])
        self.packed_weight = changed.view(self.packed_weight.shape)
        self._describe(self.packed_weight)
        return self

    def _shape(self) -> tuple[int, ...]:
        """The shape of ``weight``."""
        return self.info.shape

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # The header has the shape of a matrix. This distinguishes a convolution from another with as many inputs per row.
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][_SHAPE] = self._shape()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *arguments: Any) -> None:
        error_msgs: list[str] = arguments[-1]
        # The header describes the packed bytes, so a checkpoint may differ from this module in width and group size. Only
        # the shape of the weight must agree. All bytes are verified before any is used.
        key = prefix + "packed_weight"
        loaded = state_dict.get(key)
        floats = state_dict.get(prefix + "weight")
        if loaded is None and floats is not None and floats.numel():
            # With strict=False, which peft uses, this weight would be ignored silently.
            error_msgs.append(f"{prefix}weight: it is a float weight, and the layer is packed; load it before quantizing")
        if loaded is not None:
            try:
                shape, expected = self._verified(loaded).shape, self.info.shape
                if shape == expected:  # files of safetensors have no metadata
                    shape, expected = tuple(metadata.get(_SHAPE, self._shape())), self._shape()
                if shape != expected:
                    raise ValueError(f"the weight has shape {list(shape)}; expected {list(expected)}")
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{key}: {error}")
                return
            if loaded.numel() != self.packed_weight.numel():
                if metadata.get("assign_to_params_buffers"):
                    self.packed_weight = loaded
                else:
                    # In place, so that a module that shares this buffer (a tied head) sees the change.
                    with torch.no_grad():
                        self.packed_weight.set_(torch.empty_like(loaded))
        super()._load_from_state_dict(state_dict, prefix, metadata, *arguments)
        if loaded is not None and not self.packed_weight.is_meta:  # copying to a meta tensor does nothing but warn
            self._describe(self.packed_weight)


def _state_of(packed_weight: Tensor) -> _Seen:
    """A value that changes when the tensor is replaced or changed in place."""
    return _Seen(id(packed_weight), None if packed_weight.is_inference() else packed_weight._version)


def dequantized_rows(indices: Tensor, packed_weight: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """The same as :func:`lowbit.embedding`, but ``dtype`` may also be float64."""
    if dtype is torch.float64:
        return dequantized_rows(indices, packed_weight, inputs, torch.float32).double()
    return torch.ops.lowbit.embedding(indices, packed_weight, inputs, dtype=dtype)
