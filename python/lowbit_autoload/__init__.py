"""Registers lowbit's operators while torch is imported.

Files that use them then load without importing lowbit, and other libraries know packed layers
(:mod:`lowbit_autoload.imports`). torch calls :func:`register` (an entry point of the group "torch.backends") at the end of
``import torch``, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. It is not part of the package ``lowbit``, because an error here
would make ``import torch`` fail.
"""

import sys
import warnings

from .imports import watch


def register() -> None:
    """Imports lowbit. Where that fails, a warning says why."""
    watch()
    if "lowbit" in sys.modules:
        return  # it is what imports torch, and registers its operators next
    try:
        import lowbit  # noqa: F401
    except Exception as error:
        warnings.warn(
            f"lowbit's operators are not registered: {error} (TORCH_DEVICE_BACKEND_AUTOLOAD=0 stops the attempt.)",
            RuntimeWarning,
            stacklevel=2,
        )
