"""PyTorch models with 1- to 8-bit weights, fast on Arm and x86 CPUs.

>>> import torch, lowbit
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
>>> _ = lowbit.quantize_(model, lowbit.LinearConfig(bits=4, group_size=32))
>>> model(torch.randn(1, 64)).shape
torch.Size([1, 64])
"""

import logging
import sys
from typing import TYPE_CHECKING

from . import _library

# For CMAKE_PREFIX_PATH: where find_package(lowbit) finds what C++ needs of this installation.
cmake_prefix_path = _library.load()

from . import nn, qat  # noqa: E402  (they need the operators)
from ._library import isa, kernels, load_kernels, streams  # noqa: E402
from ._packed import PackedInfo, Unpacked, info, pack, repack, unpack, verify  # noqa: E402
from ._quantize_model import quantize_  # noqa: E402
from ._recurrence import linear_attention, short_conv  # noqa: E402
from ._rounding import EmbeddingConfig, LinearConfig, quantize_tensor  # noqa: E402
from ._slices import concat, slice_columns, slice_rows  # noqa: E402
from ._threads import ThreadTuning, tune_threads  # noqa: E402
from ._window import window_attention, window_length  # noqa: E402
from .exports.module import export_pt2, export_pte  # noqa: E402
from .nn import use_huge_pages  # noqa: E402
from .ops import attention, embedding, linear, linear_experts, linears  # noqa: E402

__version__ = "0.1.0"

# Modules log under their own names; without a handler here Python would print warnings of a program that configures none.
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from .calibration import assign_widths as assign_widths
    from .calibration import calibrate as calibrate
    from .calibration.checkpoint import calibrate_checkpoint as calibrate_checkpoint
    from .checkpoint import CheckpointEntry as CheckpointEntry
    from .checkpoint import CheckpointSummary as CheckpointSummary
    from .checkpoint import dequantize_checkpoint as dequantize_checkpoint
    from .checkpoint import inspect_checkpoint as inspect_checkpoint
    from .checkpoint import quantize_checkpoint as quantize_checkpoint
    from .importing import ImportSummary as ImportSummary
    from .importing import import_checkpoint as import_checkpoint
    from .transformers import LowBitConfig as LowBitConfig

# Imported when first used: every import of torch imports this file, and these need transformers or safetensors. Not in
# __all__, so that `from lowbit import *` needs neither.
_LAZY = {
    "CheckpointEntry": "checkpoint",
    "CheckpointSummary": "checkpoint",
    "LowBitConfig": "transformers",
    "ImportSummary": "importing",
    "assign_widths": "calibration",
    "calibrate": "calibration",
    "calibrate_checkpoint": "calibration.checkpoint",
    "dequantize_checkpoint": "checkpoint",
    "import_checkpoint": "importing",
    "inspect_checkpoint": "checkpoint",
    "quantize_checkpoint": "checkpoint",
}

if not TYPE_CHECKING:  # a type checker would take it to mean that every name exists

    def __getattr__(name: str):
        if name not in _LAZY:
            raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
        from importlib import import_module

        try:
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        except ImportError as error:
            # Python makes of an AttributeError here a "cannot import name" without the reason.
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":  # from lowbit import NAME
                raise
            raise AttributeError(f"lowbit.{name} needs a package that does not load: {error}") from error


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY)


__all__ = [
    "EmbeddingConfig",
    "LinearConfig",
    "PackedInfo",
    "ThreadTuning",
    "Unpacked",
    "attention",
    "cmake_prefix_path",
    "concat",
    "embedding",
    "export_pt2",
    "export_pte",
    "info",
    "isa",
    "kernels",
    "linear",
    "linear_attention",
    "linear_experts",
    "linears",
    "load_kernels",
    "nn",
    "pack",
    "qat",
    "quantize_",
    "quantize_tensor",
    "repack",
    "short_conv",
    "slice_columns",
    "slice_rows",
    "streams",
    "tune_threads",
    "unpack",
    "use_huge_pages",
    "verify",
    "window_attention",
    "window_length",
]
