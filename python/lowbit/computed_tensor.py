"""The ``weight`` of a packed layer: a tensor without memory whose values are computed when they are used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_FIXED = "the weight of a packed layer cannot be changed: it is computed from packed_weight"


class ComputedTensor(Tensor):
    """A tensor that knows its shape, dtype and device, and computes its values when an operator needs them.

    It has no memory: writes to it or to a view of it raise, and so does ``data_ptr()``.
    """

    _is_hf_initialized = True  # transformers asks: what has not been loaded it initializes, as Mamba's dt_proj

    @staticmethod
    def __new__(cls, compute: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **layout):
        # `other.data = made` takes over an address without asking this class, and there is none. But torch refuses to do it
        # with a tensor of the meta device, which this one is inside; the device that it says it is on is asked for below.
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="meta", dispatch_device=True, **layout)
        made._compute, made._device = compute, torch.device(device)
        return made

    @classmethod
    def _view(cls, result: Tensor) -> ComputedTensor:
        """A read-only view of the values: a write to it would mean the weight."""
        layout = {"strides": result.stride(), "storage_offset": result.storage_offset()}
        return cls(lambda: result, result.shape, result.dtype, result.device, **layout)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0]._device
        kwargs = kwargs or {}
        for at, argument in enumerate(func._schema.arguments):
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                if any(isinstance(each, cls) for each in (given if isinstance(given, list | tuple) else [given])):
                    raise RuntimeError(_FIXED)
        if func is torch.ops.aten.detach.default:  # through which weights are often set
            return cls(args[0]._compute, args[0].shape, args[0].dtype, args[0]._device)
        computed = tree_map_only(cls, lambda tensor: tensor._compute(), (args, kwargs))
        result = func(*computed[0], **computed[1])
        # Views; what is written to was a tensor of others.
        if not torch.compiler.is_compiling() and any(
            each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
        ):
            return tree_map_only(Tensor, cls._view, result)
        return result

    @property
    def device(self) -> torch.device:  # what __torch_dispatch__ says, sooner
        return self._device

    @property
    def data(self) -> Tensor:
        # With memory: who takes it for the data of another tensor reads there, past this class.
        values = self._compute()
        made = torch.Tensor._make_subclass(type(self), values)
        made._compute, made._device = lambda: values, values.device
        return made

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(_FIXED)

    def data_ptr(self) -> int:
        raise RuntimeError("the weight of a packed layer has no memory of its own; weight.clone() has")

    def untyped_storage(self):
        raise RuntimeError("the weight of a packed layer has no memory of its own; weight.clone() has")

    def share_memory_(self) -> Tensor:
        raise RuntimeError("the weight of a packed layer has no memory of its own; share the module")

    def numpy(self, *, force: bool = False):
        return self.clone().numpy()

    def tolist(self) -> list:
        return self.clone().tolist()

    def __dlpack__(self, **options):
        return self.clone().__dlpack__(**options)

    def __deepcopy__(self, memo) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol):
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self, **kwargs):
        return repr(self._compute())
