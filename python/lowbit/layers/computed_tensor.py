"""The ``weight`` of a packed layer: a tensor without memory whose values are computed on every use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_FIXED = "the weight of a packed layer cannot be changed: it is computed from packed_weight"


class ComputedTensor(Tensor):
    """A tensor with a shape, dtype and device that computes its values when an operator needs them.

    It has no storage: writes to it or to a view of it raise, and so does ``data_ptr()``.
    """

    _is_hf_initialized = True  # otherwise transformers initializes it after loading, as it does Mamba's dt_proj
    _compute: Callable[[], Tensor]
    _device: torch.device

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **layout: Any
    ) -> ComputedTensor:
        # `other.data = tensor` copies a data pointer, which this tensor lacks. torch refuses that for meta tensors, so the
        # wrapper is on the meta device, and the `device` property returns the device that it stands for.
        tensor: ComputedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device="meta", dispatch_device=True, **layout
        )
        tensor._compute, tensor._device = compute, torch.device(device)
        return tensor

    @classmethod
    def _view(cls, result: Tensor) -> ComputedTensor:
        """A read-only view of the values: a write to it would not reach the weight."""
        layout = {"strides": result.stride(), "storage_offset": result.storage_offset()}
        return cls(lambda: result, result.shape, result.dtype, result.device, **layout)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0]._device
        kwargs = kwargs or {}
        for at, parameter in enumerate(func._schema.arguments):
            argument = args[at] if at < len(args) else kwargs.get(parameter.name)
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                if any(isinstance(value, cls) for value in (argument if isinstance(argument, list | tuple) else [argument])):
                    raise RuntimeError(_FIXED)
        if func is torch.ops.aten.detach.default:  # a weight is often assigned as a detached tensor
            return cls(args[0]._compute, args[0].shape, args[0].dtype, args[0]._device)
        computed = tree_map_only(cls, lambda tensor: tensor._compute(), (args, kwargs))
        result = func(*computed[0], **computed[1])
        # Views must be read-only too. An output that the operator wrote to is a plain tensor of the caller.
        if not torch.compiler.is_compiling() and any(
            value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns
        ):
            return tree_map_only(Tensor, cls._view, result)
        return result

    @property
    def device(self) -> torch.device:  # cheaper than dispatching
        return self._device

    @property
    def data(self) -> Tensor:
        # Returns a tensor with storage, as `other.data = weight.data` reads the storage directly.
        values = self._compute()
        data: ComputedTensor = torch.Tensor._make_subclass(type(self), values)
        data._compute, data._device = lambda: values, values.device
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(_FIXED)

    def data_ptr(self) -> int:
        raise RuntimeError("the weight of a packed layer has no storage; use weight.clone()")

    def untyped_storage(self) -> Any:
        raise RuntimeError("the weight of a packed layer has no storage; use weight.clone()")

    def share_memory_(self) -> Tensor:
        raise RuntimeError("the weight of a packed layer has no storage; share the module")

    def numpy(self, *, force: bool = False) -> Any:
        return self.clone().numpy()

    def tolist(self) -> Any:
        return self.clone().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.clone().__dlpack__(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self._compute())
