"""torch's entry point (the group "torch.backends"), which torch calls at the end of ``import torch``.

An error here would make ``import torch`` fail in every program. So this file needs nothing but Python's own modules. CMake
installs it beside the list of entry points, also for an editable installation, whose other files may be moved or broken.
"""

import contextlib
import warnings


def register() -> None:
    """Registers lowbit with torch and other libraries. Where that fails, a warning says why. Raises nothing."""
    try:
        from lowbit_autoload import register as run

        run()
    except (Exception, SystemExit) as error:
        with contextlib.suppress(Warning):  # a filter may turn the warning into an error
            warnings.warn(
                f"lowbit's operators are not registered: {type(error).__name__}: {error} (Install lowbit again, or "
                "set TORCH_DEVICE_BACKEND_AUTOLOAD=0.)",
                RuntimeWarning,
                stacklevel=2,
            )
