"""Loads the compiled part of the package and queries it."""

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 10)


_LOG = logging.getLogger(__name__)


def core() -> Path:
    """Loads the compiled part, which needs no torch; returns its directory.

    Raises:
        ImportError: it is missing, or ``LOWBIT_ISA`` is not a known name.
    """
    try:
        # `from . import _C` would raise a plain ImportError, not ModuleNotFoundError, when the file is missing.
        _C = import_module("lowbit._C")
    except ModuleNotFoundError as error:
        foreign = sorted(path.name for path in Path(__file__).parents[1].glob("_C.*") if path.suffix in (".so", ".pyd"))
        if foreign:  # a wheel unpacked by hand, or an installation copied from another machine
            import sysconfig  # takes a millisecond

            expected = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
            raise ImportError(
                f"this lowbit was built for another Python or processor: found {', '.join(foreign)}; expected {expected}. "
                "Install the wheel for that one, or build lowbit again with `pip install .`."
            ) from error
        raise ImportError(
            "lowbit's compiled part is missing. Build it with `pip install .` in a checkout of lowbit."
        ) from error
    except ImportError as error:
        if error.path is None:  # not raised by the dynamic loader, so LOWBIT_ISA is invalid
            raise
        raise ImportError(f"lowbit's compiled part does not load: {error}. Build it again with `pip install .`.") from error
    return Path(str(_C.__file__)).parent


def load() -> None:
    """Registers the operators ``torch.ops.lowbit.*``.

    Raises:
        ImportError: the compiled part is missing, torch is missing or too old, or ``LOWBIT_ISA`` is not a known name.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError("this needs torch: pip install 'lowbit[torch]'", name="torch") from None

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(f"lowbit needs torch >= {'.'.join(map(str, OLDEST_TORCH))}; found {torch.__version__}")
    library = core() / "lowbit_torch.so"
    if not library.exists():
        raise ImportError(
            f"lowbit's operator library is missing: {library}, as after a build without torch. Build it again, with torch "
            "installed, with `pip install .`."
        )
    try:
        torch.ops.load_library(library)
    except OSError as error:
        reason = error.__cause__ or error
        raise ImportError(f"lowbit's operator library does not load: {reason}. Build it again with `pip install .`.") from error


def kernels() -> list[dict[str, Any]]:
    """The table of kernels, one dict per kernel.

    Each family lists the built-in kernels, best ISA first, then those of :func:`load_kernels`.

    Keys: ``name``, ``family`` ("linear", "embedding", "quantize" or "attention"), ``isa``, ``format``, ``bits`` and
    ``tile`` (where they apply), ``supported`` (by this CPU), ``enabled`` (under ``LOWBIT_ISA``), ``active`` (some call
    runs it), ``vendor`` and ``library`` (the path that it was loaded from); both are None for built-in kernels.

    "Some call" means up to 1024 rows of activations. For loaded kernels that limit the layer sizes, 34 layer sizes of
    published models are tried, from 64 x 64 to 128256 x 4096; a kernel for other sizes only is not ``active``.
    """
    from .. import _C

    return _C.kernels()


def load_kernels(path: str | os.PathLike[str]) -> None:
    """Loads a vendor's shared library and adds its kernels and packed formats to the table of this process.

    Preferred kernels are used from the next call on, wherever they apply and this CPU and ``LOWBIT_ISA`` allow the
    instruction sets that they name. Every kernel is first compared with the portable kernels on small matrices. Loading a
    library again does nothing. CONTRIBUTING.md says how to write one.

    Args:
        path: the library. A name without a directory is a file in the current directory or else, except on Windows, in the
            system's library search path.

    Raises:
        OSError: there is no such file, or the system cannot load it.
        ValueError: it is not a kernel library, it has another version of the interface, or a kernel is invalid or differs
            from the portable kernel. Nothing is added then.
    """
    from .. import _C

    try:
        name = os.fsdecode(path).encode()
    except UnicodeEncodeError as error:
        raise OSError(f"kernel library does not load: the path {os.fsdecode(path)!a} is not UTF-8") from error
    before = len(kernels())
    _C.load_kernels(name)
    _LOG.info("%s: %d kernels loaded", os.fsdecode(path), len(kernels()) - before)


def isa() -> dict[str, Any]:
    """The instruction sets: ``cpu`` (what this CPU has), ``cap`` (``LOWBIT_ISA`` or None), ``active`` (what is used).

    ``LOWBIT_ISA`` is read once, when the package is imported, and caps the ISA: on Arm at ``portable``, ``neon``,
    ``neondot``, ``i8mm``, ``bf16``, ``sve2`` or ``sme2``; on x86 at ``portable``, ``avx2``, ``avxvnni``, ``avxvnniint8``,
    ``avx512vnni`` or ``amx``. Built-in kernels do not use ``bf16`` or ``sve2``; kernel libraries may.
    """
    from .. import _C

    return _C.isa()


def streams(pin: str | None = None) -> str:
    """Returns, or with ``pin`` sets, how one row or a few rows of activations read weights: "one", "ahead" or "several".

    "one" panel at a time; the same with prefetch far "ahead"; or "several" interleaved panels. The default is what is faster
    on the CPU: "several" on Intel, "ahead" on AMD from Zen 5 on, "one" elsewhere. ``LOWBIT_STREAMS``, read once, overrides it.
    Results do not depend on it. Only the kernels for AVX-512 VNNI differ.

    Args:
        pin: the new value for all threads; None changes nothing.

    Returns:
        The value in effect.

    Raises:
        ValueError: ``pin`` is not one of these names.
    """
    from .. import _C

    return _C.streams(pin)
