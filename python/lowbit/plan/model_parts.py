"""The parts of a model that its plan depends on."""

from __future__ import annotations

from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from .recording import Unplannable

_FREE = ("training", "use_cache")  # settings that the user of a plan reads in each call
_version_of = Tensor._version.__get__  # takes a tenth of the time of a Python function


def state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model by name."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def check_hooks(model: torch.nn.Module) -> None:
    """Refuses hooks that a plan would not call.

    Raises:
        Unplannable: a module has a hook, other than lowbit's and transformers' own, which a plan would not call.
    """
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not getattr(hook, "__module__", "").startswith(("lowbit.", "transformers.")):
                raise Unplannable(f"its module {name!r} has a hook, which a plan would not call")


def _settings(part: Any) -> list[str]:
    """The attributes of a module or config that a plan has as constants: numbers, names, flags and functions."""
    return [
        name
        for name, value in vars(part).items()
        if not name.startswith("_")
        and name not in _FREE
        and (isinstance(value, (int, float, str, NoneType)) or callable(value))
    ]


def _same(a: Any, b: Any) -> bool:
    """Whether an attribute is what it was: the same object, or an equal number or name."""
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b)


class ModelParts:
    """The modules, parameters, buffers, hooks, configs and plain attributes of a model at one time."""

    def __init__(self, model: torch.nn.Module):
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._hooks: list[Any] = []
        configs: dict[int, Any] = {}
        for module in model.modules():
            for part in (module._modules, module._parameters, module._buffers):
                self._add(part, *part)
            self._add(vars(module), "forward", *([] if module.training else ["training"]))  # eval() changes no plan
            self._add(vars(module), *_settings(module))
            own = {name: value for name, value in vars(module).items() if hasattr(value, "get_text_config")}
            self._add(vars(module), *own)
            configs |= {id(value): value for value in own.values()}
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]  # hooks that may change or read results
        for config in configs.values():
            self._add(vars(config), *_settings(config))
        self._hooked = list(map(tuple, self._hooks))
        self._tensors = list(state_of(model).values())
        # `parameter.data = other` and Module.to() replace the memory. Aliases keep it, so that no other tensor gets its
        # address.
        self._memory = [tensor.detach() for tensor in self._tensors]
        self._addresses = list(map(Tensor.data_ptr, self._memory))
        # A plan has constants that it computed from weights, so they must not change in place.
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions = list(map(_version_of, self._versioned))

    def _add(self, part: dict[str, Any], *keys: str) -> None:
        for key in keys:
            self._dicts.append(part)
            self._keys.append(key)
            self._values.append(part.get(key))

    def are_unchanged(self) -> bool:
        """Whether the model's modules, parameters, buffers, hooks, memory and plain attributes are those of construction."""
        return (
            any(all(map(same, map(dict.get, self._dicts, self._keys), self._values)) for same in (is_, _same))  # fast first
            and list(map(tuple, self._hooks)) == self._hooked
            and self.have_their_memory()
            and list(map(_version_of, self._versioned)) == self._versions
        )

    def have_their_memory(self) -> bool:
        """Whether the parameters and buffers are still where they were."""
        return list(map(Tensor.data_ptr, self._tensors)) == self._addresses


class ModelPlan:
    """Base class of plans that belong to a model."""

    _parts: ModelParts

    def fits(self) -> bool:
        """Whether the model still has the modules, parameters, hooks and plain attributes that it had."""
        return self._parts.are_unchanged()
