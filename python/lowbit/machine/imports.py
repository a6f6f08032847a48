"""A quick import of numpy, and causes of failed imports, which libraries with lazy imports hide behind several exceptions."""

import os
import sys
from importlib import import_module
from types import FrameType

_BETWEEN = {"lowbit", "lowbit_autoload", "torch", "__main__", *sys.stdlib_module_names}


def import_numpy() -> None:
    """Imports numpy with one thread of OpenBLAS: the others, which lowbit does not need, spin for 70 ms when they start."""
    setting = "OPENBLAS_NUM_THREADS"
    if "numpy" in sys.modules or setting in os.environ:
        return
    os.environ[setting] = "1"
    try:
        import_module("numpy")
    finally:
        del os.environ[setting]


def why_not(package: str, error: ImportError, install: str) -> str:
    """Why `package` cannot be imported, and what to do: `install` it, unless another package is the cause."""
    culprit = package
    root: BaseException = error
    cause: BaseException | None = error
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None:  # the innermost package that was being imported
            name = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
            culprit = culprit if name in _BETWEEN else name
            trace = trace.tb_next
        root, cause = cause, cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if isinstance(root, ModuleNotFoundError) and root.name:
        culprit = root.name.partition(".")[0]
    if culprit == package:
        return f"{package} is not installed, or not a version for lowbit: {root}. Install it with `{install}`."
    return (
        f"{package} does not load, and the cause is {culprit}: {type(root).__name__}: {root}. Install a {culprit} that fits "
        "the other packages, or uninstall it."
    )


def not_available(name: str, error: ImportError, extra: str, caller: FrameType) -> Exception:
    """The exception for a public name whose module does not load because of ``error``.

    Args:
        extra: adds torch and transformers.
        caller: the frame that looks up the name.
    """
    # In `from lowbit import NAME`, Python replaces an AttributeError by "cannot import name", without the reason.
    is_import = caller.f_code.co_name == "_handle_fromlist"
    if error.name in ("torch", "transformers"):
        reason = f"{name} needs {error.name}: pip install '{extra}'"
        return ImportError(reason) if is_import else AttributeError(reason)
    if is_import:
        raise error
    return AttributeError(f"{name} needs a package that does not load: {error}")
