"""Loads the compiled part of the package and queries it."""

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

OLDEST_TORCH = (2, 10)


_LOG = logging.getLogger(__name__)


def load() -> str:
    """Registers the operators ``torch.ops.lowbit.*``; returns the directory of the compiled part.

    Raises:
        ImportError: the compiled part is missing, torch is too old, or ``LOWBIT_ISA`` is not a known name.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(f"lowbit needs torch >= {'.'.join(map(str, OLDEST_TORCH))}; found {torch.__version__}")
    try:
        # Not `from . import _C`: that raises a plain ImportError when the file is missing.
        _C = import_module("lowbit._C")
    except ModuleNotFoundError as error:
        foreign = sorted(path.name for path in Path(__file__).parents[1].glob("_C.*") if path.suffix in (".so", ".pyd"))
        if foreign:  # a wheel that was unpacked by hand, or copied from another machine
            import sysconfig  # takes a millisecond

            expected = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
            raise ImportError(
                f"this lowbit was built for another Python or processor: found {', '.join(foreign)}; expected {expected}. "
                "Install the wheel for that one, or build lowbit again with `pip install .`."
            ) from error
        raise ImportError(
            "lowbit's compiled part is missing. Build it with `pip install .` in a checkout of lowbit "
            "(torch must be installed first)."
        ) from error
    except ImportError as error:
        if error.path is None:  # not from the dynamic loader: LOWBIT_ISA is wrong
            raise
        raise ImportError(f"lowbit's compiled part does not load: {error}. Build it again with `pip install .`.") from error
    library = Path(str(_C.__file__)).parent / "lowbit_torch.so"
    if not library.exists():
        raise ImportError(f"lowbit's operator library is missing: {library}. Build it again with `pip install .`.")
    try:
        torch.ops.load_library(library)
    except OSError as error:
        reason = error.__cause__ or error
        raise ImportError(f"lowbit's operator library does not load: {reason}. Build it again with `pip install .`.") from error
    return str(library.parent)


def kernels() -> list[dict[str, Any]]:
    """The kernel table, one dict per row.

    Each family has the built-in rows, best ISA first, then those of :func:`load_kernels`.

    Keys: ``name``, ``family`` ("linear", "embedding", "quantize" or "attention"), ``isa``, ``format``, ``bits`` and
    ``tile`` (where they apply), ``supported`` (by this CPU), ``enabled`` (under ``LOWBIT_ISA``), ``active`` (some call
    runs it), ``vendor`` and ``library`` (whose it is and the path it came from; None when built in).

    "Some call" is one of up to 1024 rows of activations. If a loaded row limits the sizes that it takes, 34 sizes of
    layers in published models are looked at, from 64 x 64 to 128256 x 4096; a row for other sizes alone is not ``active``.
    """
    from .. import _C

    return _C.kernels()


def load_kernels(path: str | os.PathLike[str]) -> None:
    """Adds the kernels and packed formats of a vendor's shared library to the table, for the rest of the process.

    Rows that claim preference are used from the next call on, wherever they fit and this CPU and ``LOWBIT_ISA`` allow
    the instruction sets that they name. Every row is first tried on small matrices, against the portable kernels. Loading a
    library again does nothing. How to write one: CONTRIBUTING.md.

    Args:
        path: the library. A name without a directory is a file in the current one, or else, but not on Windows, what
            the system finds where it looks for libraries.

    Raises:
        OSError: there is no such file, or the system cannot load it.
        ValueError: it is no kernel library, or of another version of the interface, or a row is invalid or computes
            something else than the portable kernel. Nothing was added then.
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
    ``avx512vnni`` or ``amx``. lowbit's own kernels need no ``bf16`` or ``sve2``; kernel libraries may.
    """
    from .. import _C

    return _C.isa()


def streams(pin: str | None = None) -> str:
    """Returns, and with ``pin`` sets, how one row of activations reads its weights: "one" panel at a time or "several".

    The default depends on the CPU's maker: "several" is faster on Intel's CPUs, "one" on others. ``LOWBIT_STREAMS``, read
    once, changes it. Results do not depend on it. Only AVX-512 VNNI has interleaved kernels.

    Args:
        pin: the value from now on, for all threads; None changes nothing.

    Returns:
        The value in effect.

    Raises:
        ValueError: ``pin`` is neither "one" nor "several".
    """
    from .. import _C

    return _C.streams(pin)
