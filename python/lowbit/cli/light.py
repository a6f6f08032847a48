"""A quick start: what transformers imports before it loads a model, and running a text model does not need.

Of the CPU time from the command to the first token that is a third.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

# Losses of object detection, a quantizer, trainers: transformers asks whether these are installed.
_LEFT_OUT = ("accelerate", "scipy", "sklearn", "torchao")
# torch's compiler; the part of it with which some masks are made; what its symbols are made of.
_COMPILER, _MASKS, _SYMBOLS = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op", "sympy"


def _decorate(fn: Any = None, *args: Any, **options: Any) -> Any:
    """A decorator that says what the compiler shall do with a function: nothing where nothing is compiled."""
    return fn if fn is not None else lambda each: each


class _Lazy(ModuleType):
    """In the place of a module until something of it is used, but for ``ready``."""

    def __init__(self, name: str, **ready: Any):
        super().__init__(name)
        vars(self).update(ready)

    def __getattr__(self, name: str) -> Any:
        # The import of a part of a package asks for the package's path.
        if name.startswith("__") and (name != "__path__" or self.__name__ == _MASKS):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _real(name: str) -> Any:
    if isinstance(sys.modules.get(name), _Lazy):
        del sys.modules[name]
    return import_module(name)


class _Loaded(Loader, MetaPathFinder):
    """Parts of these packages that were imported with them, while an import of such a part asked for the path: not twice."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_part = name.startswith((f"{_COMPILER}.", f"{_SYMBOLS}."))
        return ModuleSpec(name, self) if is_part and name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


def leave_out_extras() -> None:
    """Keeps these packages out of this process. Only for a program of its own that compiles nothing: it is not undone."""
    if {"transformers", _COMPILER, _SYMBOLS} & sys.modules.keys():
        return
    for name in _LEFT_OUT:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # what importlib takes for "not installed"
    torch.distributed.is_available = lambda: False  # asked before torch.distributed.tensor is imported
    decorators = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _decorate)
    for name, decorator in decorators.items():
        setattr(torch.compiler, name, decorator)
    sys.meta_path.insert(0, _Loaded())
    sys.modules[_SYMBOLS] = _Lazy(_SYMBOLS, Basic=type("Basic", (), {}))  # torch asks whether a number is one
    sys.modules[_COMPILER] = _Lazy(_COMPILER, **decorators)
    sys.modules[_MASKS] = _Lazy(_MASKS, TransformGetItemToIndex=lambda: _real(_MASKS).TransformGetItemToIndex())
