"""Registers lowbit with other libraries when they are imported, so that programs need no import of lowbit.

A finder on ``sys.meta_path`` waits for the import of a few modules, and runs a function after each. It imports none of them,
and the functions import no more of lowbit than ``import torch`` does; the rest is imported on use. Functions of other
libraries are replaced only after the import of ``lowbit.nn``, without which no layer is packed. ``LOWBIT_AUTOLOAD=0`` turns
all of this off.
"""

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class _Later:
    """A placeholder in a table of transformers or diffusers for a class of a module of lowbit.

    On its first use that module is imported, which puts the class itself into the table.
    """

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def _class(self) -> Any:
        return getattr(import_module(self._module), self._name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._class()(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._class(), name)


def _into_transformers(_: ModuleType) -> None:
    """Registers the quantization method.

    Runs again after ``modeling_utils``: if ``transformers.quantizers.auto`` is the module that imports torch, its own import
    has begun before it could be watched, and the tables do not exist yet.
    """
    auto = sys.modules.get("transformers.quantizers.auto")
    for table, name in (("AUTO_QUANTIZATION_CONFIG_MAPPING", "LowBitConfig"), ("AUTO_QUANTIZER_MAPPING", "LowBitQuantizer")):
        # lowbit.transformers may have been imported first. One step, as other threads may be loading models.
        getattr(auto, table, {}).setdefault("lowbit", _Later("lowbit.transformers", name))


def _into_diffusers(auto: ModuleType) -> None:
    """Registers the quantization method. ``auto`` is ``diffusers.quantizers.auto``; its package has imported torch before."""
    names = {"AUTO_QUANTIZATION_CONFIG_MAPPING": "LowBitConfig", "AUTO_QUANTIZER_MAPPING": "LowBitDiffusersQuantizer"}
    for table, name in names.items():
        getattr(auto, table).setdefault("lowbit", _Later("lowbit.hf.diffusion", name))


def _into_trainer(callbacks: ModuleType) -> None:
    """Makes transformers' Trainer warn before it trains a packed model, by a callback that every Trainer has."""

    def on_train_begin(self: Any, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        layers = sys.modules.get("lowbit.layers.packable")  # without it, no layer is packed
        if layers is not None:
            layers.warn_of_training(model)

    if "on_train_begin" not in vars(callbacks.DefaultFlowCallback):
        callbacks.DefaultFlowCallback.on_train_begin = on_train_begin


def _into_peft(_: ModuleType) -> None:
    """Lets LoRA know packed layers."""
    import_module("lowbit.peft")


def _into_executorch(runtime: ModuleType) -> None:
    """Registers the operators with ExecuTorch's runtime: ``runtime`` is its compiled part."""
    # lowbit.executorch.register() says why it failed; a program without packed layers does not need to know.
    with contextlib.suppress(ImportError):
        import_module("lowbit.executorch").register_with(runtime)


def _into_executorchs_runner(_: ModuleType) -> None:
    """The same for ExecuTorch's runner of language models, which does not import the runtime's Python part."""
    with contextlib.suppress(ImportError):
        import_module("lowbit.executorch").register()


def _into_packed_programs(_: ModuleType) -> None:
    """Changes the libraries that were imported before ``lowbit.nn``."""
    for name in _CHANGES:
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _step(module)


_LAYERS = "lowbit.nn"
_CHANGES: dict[str, Callable[[ModuleType], None]] = {"transformers.trainer_callback": _into_trainer, "peft": _into_peft}
_STEPS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.quantizers.auto": _into_transformers,
    "transformers.modeling_utils": _into_transformers,
    "diffusers.quantizers.auto": _into_diffusers,
    "executorch.extension.pybindings._C": _into_executorch,
    "executorch.extension.llm.runner._llm_runner": _into_executorchs_runner,
    _LAYERS: _into_packed_programs,
    **_CHANGES,
}


def _step(module: ModuleType) -> None:
    name = module.__name__
    if name in _CHANGES and _LAYERS not in sys.modules:
        return
    try:
        _STEPS[name](module)
    except (AttributeError, ImportError, KeyError):
        pass  # another version of the library, without a name: its own error says so where a packed model needs it
    except Exception as error:  # the library works all the same
        with contextlib.suppress(Warning):  # a filter may turn the warning into an error
            warnings.warn(
                f"lowbit cannot extend {name}: {type(error).__name__}: {error} (LOWBIT_AUTOLOAD=0 stops the attempt.)",
                RuntimeWarning,
                stacklevel=2,
            )


class _Finder:
    """A finder that asks the other finders, and adds the step to what they find."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in _STEPS or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec: Any = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asking.others = False
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is not None:

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__name__ in _STEPS:  # a loader may be that of other modules too
                    _step(module)

            with contextlib.suppress(AttributeError, TypeError):  # a loader in C may take no attribute
                spec.loader.exec_module = exec_module
        return spec


def watch() -> None:
    """Begins to wait for the libraries; runs the steps of imported ones at once.

    The finder is never removed: that would make a thread that imports something at that moment skip another finder. It costs
    a dictionary lookup per import.
    """
    if os.environ.get("LOWBIT_AUTOLOAD", "1") != "1" or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in _STEPS:
        if name in sys.modules:
            _step(sys.modules[name])
