"""Registers lowbit's operators while torch is imported.

Files that use them then load without importing lowbit, and other libraries know packed layers
(:mod:`lowbit_autoload.imports`). torch calls :func:`register` through ``lowbit_entry``, unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
"""

import sys

from .imports import watch

in_program = False  # whether the program lowbit runs, which imports torch only for what needs it


def register() -> None:
    """Imports lowbit, unless lowbit is what imports torch: it registers its operators next."""
    watch()
    if "lowbit" not in sys.modules:
        import lowbit  # noqa: F401
