"""Registers lowbit's operators with the ExecuTorch runtime of this process.

>>> import lowbit.executorch
>>> lowbit.executorch.register()
>>> from executorch.runtime import Runtime
>>> method = Runtime.get().load_program("model.pte").load_method("forward")  # doctest: +SKIP
>>> y, = method.execute([x])  # doctest: +SKIP
"""

import ctypes
from importlib import import_module
from pathlib import Path
from types import ModuleType

from . import _C

_OPERATORS = {
    f"lowbit::{name}.out"
    for name in (
        *("linear", "linears", "linear_experts", "embedding"),
        *("attention", "window_attention", "masked_attention", "linear_attention", "short_conv"),
        *("activate", "rms_norm", "layer_norm", "rotary"),
    )
}
_BUILT = _C.executorch_version.partition("+")[0]
INSTALL = (
    f"Install it with `pip install executorch=={_BUILT}`."
    if _BUILT
    else "Install it with `pip install executorch==1.5.1`, then build lowbit again with `pip install .`."
)


def register() -> None:
    """Registers lowbit's operators with the ExecuTorch runtime of this process.

    Call it before loading a program that uses these operators. It does nothing if they are already registered.

    Raises:
        ImportError: executorch is not installed, or lowbit was built without it or for another version of it.
    """
    try:
        # Must come first: it loads the runtime's libraries, which the operator library links against.
        runtime = import_module("executorch.extension.pybindings.portable_lib")
    except ImportError as error:
        raise ImportError(f"executorch is not installed, or does not load: {error}. {INSTALL}") from error
    register_with(runtime)


def register_with(runtime: ModuleType) -> None:
    """Registers the operators with ``runtime``, ExecuTorch's compiled module."""
    # The runtime ends the process when an operator is registered twice.
    present = _OPERATORS.intersection(runtime._get_operator_names())
    if present == _OPERATORS:
        return
    if present:
        raise ImportError(f"another library has registered {', '.join(present)}, but not all of lowbit's operators")
    library = Path(_C.__file__).parent / "lowbit_executorch.so"
    if not _C.executorch_version or not library.exists():
        raise ImportError(f"lowbit was built without executorch: there is no {library}. {INSTALL}")
    # ExecuTorch's C++ ABI may change between minor versions, and loading a library for another version reports no error.
    installed = import_module("executorch.version").__version__
    if installed.split(".")[:2] != _C.executorch_version.split(".")[:2]:
        raise ImportError(
            f"lowbit was built with executorch {_C.executorch_version}; found {installed}. "
            f"Install that one with `pip install executorch=={_BUILT}`, or build lowbit again with `pip install .`."
        )
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise ImportError(
            f"lowbit's ExecuTorch library does not load: {error}. Build lowbit again with `pip install .`."
        ) from error
    if not _OPERATORS.issubset(runtime._get_operator_names()):
        raise ImportError(f"{library} has registered its operators with another ExecuTorch runtime than Python's")
