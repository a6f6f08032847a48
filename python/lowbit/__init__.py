"""PyTorch models with 1- to 8-bit weights, fast on Arm and x86 CPUs.

>>> import torch, lowbit
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
>>> _ = lowbit.quantize_(model, lowbit.LinearConfig(bits=4, group_size=32))
>>> model(torch.randn(1, 64)).shape
torch.Size([1, 64])
"""

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .operators import library
from .operators.library import isa, kernels, load_kernels, streams

__version__ = "0.1.0"

# Modules log under their own names. Without this handler Python prints warnings in programs that configure no logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from . import levels as levels
    from . import nn as nn
    from . import qat as qat
    from .calibration import assign_widths as assign_widths
    from .calibration import calibrate as calibrate
    from .calibration.checkpoint import calibrate_checkpoint as calibrate_checkpoint
    from .checkpoint import CheckpointSummary as CheckpointSummary
    from .checkpoint import convert_checkpoint as convert_checkpoint
    from .checkpoint import dequantize_checkpoint as dequantize_checkpoint
    from .checkpoint import quantize_checkpoint as quantize_checkpoint
    from .exports.module import export_pt2 as export_pt2
    from .exports.module import export_pte as export_pte
    from .files.entries import CheckpointEntry as CheckpointEntry
    from .files.entries import inspect_checkpoint as inspect_checkpoint
    from .hf.fusing import FuseSummary as FuseSummary
    from .hf.fusing import fuse_ as fuse_
    from .importing import ImportSummary as ImportSummary
    from .importing import import_checkpoint as import_checkpoint
    from .machine.facts import keep_freed_memory as keep_freed_memory
    from .machine.threads import ThreadTuning as ThreadTuning
    from .machine.threads import tune_threads as tune_threads
    from .nn import use_huge_pages as use_huge_pages
    from .operators.elementwise import activate as activate
    from .operators.elementwise import layer_norm as layer_norm
    from .operators.elementwise import masked_attention as masked_attention
    from .operators.elementwise import rms_norm as rms_norm
    from .operators.elementwise import rotary as rotary
    from .operators.ops import attention as attention
    from .operators.ops import embedding as embedding
    from .operators.ops import linear as linear
    from .operators.ops import linear_experts as linear_experts
    from .operators.ops import linears as linears
    from .operators.recurrence import linear_attention as linear_attention
    from .operators.recurrence import short_conv as short_conv
    from .operators.window import window_attention as window_attention
    from .operators.window import window_length as window_length
    from .packed.header import PackedInfo as PackedInfo
    from .packed.matrix import Unpacked as Unpacked
    from .packed.matrix import info as info
    from .packed.matrix import pack as pack
    from .packed.matrix import repack as repack
    from .packed.matrix import unpack as unpack
    from .packed.matrix import verify as verify
    from .packed.matrix import with_activation_bits as with_activation_bits
    from .packed.rounding import ConvConfig as ConvConfig
    from .packed.rounding import EmbeddingConfig as EmbeddingConfig
    from .packed.rounding import LinearConfig as LinearConfig
    from .packed.rounding import quantize_tensor as quantize_tensor
    from .packed.slices import concat as concat
    from .packed.slices import slice_columns as slice_columns
    from .packed.slices import slice_rows as slice_rows
    from .quantizing.quantize_model import quantize_ as quantize_
    from .transformers import LowBitConfig as LowBitConfig

# Public name -> its module, imported together with torch and the operators.
_OPERATORS = {
    "PackedInfo": "packed.header",
    "Unpacked": "packed.matrix",
    "attention": "operators.ops",
    "embedding": "operators.ops",
    "info": "packed.matrix",
    "linear": "operators.ops",
    "linear_attention": "operators.recurrence",
    "linear_experts": "operators.ops",
    "linears": "operators.ops",
    "pack": "packed.matrix",
    "repack": "packed.matrix",
    "short_conv": "operators.recurrence",
    "unpack": "packed.matrix",
    "verify": "packed.matrix",
    "window_attention": "operators.window",
    "window_length": "operators.window",
    "with_activation_bits": "packed.matrix",
}
# Public name -> its module, imported on first use: every `import torch` imports this file, so it must be quick.
_LAZY = {
    # In __all__: these need no optional package.
    "ConvConfig": "packed.rounding",
    "EmbeddingConfig": "packed.rounding",
    "LinearConfig": "packed.rounding",
    "ThreadTuning": "machine.threads",
    "activate": "operators.elementwise",
    "concat": "packed.slices",
    "export_pt2": "exports.module",
    "export_pte": "exports.module",
    "keep_freed_memory": "machine.facts",
    "layer_norm": "operators.elementwise",
    "masked_attention": "operators.elementwise",
    "quantize_": "quantizing.quantize_model",
    "quantize_tensor": "packed.rounding",
    "rms_norm": "operators.elementwise",
    "rotary": "operators.elementwise",
    "slice_columns": "packed.slices",
    "slice_rows": "packed.slices",
    "tune_threads": "machine.threads",
    "use_huge_pages": "nn",
    # Not in __all__, so that `from lowbit import *` works without transformers and safetensors, which these need.
    "CheckpointEntry": "files.entries",
    "CheckpointSummary": "checkpoint",
    "FuseSummary": "hf.fusing",
    "LowBitConfig": "transformers",
    "ImportSummary": "importing",
    "assign_widths": "calibration",
    "calibrate": "calibration",
    "calibrate_checkpoint": "calibration.checkpoint",
    "convert_checkpoint": "checkpoint",
    "dequantize_checkpoint": "checkpoint",
    "fuse_": "hf.fusing",
    "import_checkpoint": "importing",
    "inspect_checkpoint": "files.entries",
    "quantize_checkpoint": "checkpoint",
}
_LAZY_MODULES = ("levels", "nn", "qat")


def load_torch() -> None:
    """Imports torch and registers the operators, as ``import lowbit`` does where torch is, except in the program ``lowbit``."""
    if "linear" not in globals():
        library.load()
        for name, module in _OPERATORS.items():
            globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)


# Without torch, only the parts that need none are available. A module that is being imported has no other place to be found.
_HAS_TORCH = sys.modules.get("torch") is not None or find_spec("torch") is not None
if _HAS_TORCH and not getattr(sys.modules.get("lowbit_autoload"), "in_program", False):
    load_torch()

# Add this directory to CMAKE_PREFIX_PATH so that find_package(lowbit) finds this installation.
cmake_prefix_path = str(library.core())

if not TYPE_CHECKING:  # a type checker would conclude that every name exists

    def __getattr__(name: str):
        if name not in _OPERATORS and name not in _LAZY and name not in _LAZY_MODULES:
            raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
        try:
            if _HAS_TORCH or name in _OPERATORS:
                load_torch()
            if name in _OPERATORS:
                return globals()[name]
            if name in _LAZY_MODULES:
                return import_module(f"{__name__}.{name}")
            value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
            globals()[name] = value  # later uses skip __getattr__
            return value
        except ImportError as error:
            from .machine.imports import not_available

            raise not_available(f"lowbit.{name}", error, "lowbit[torch]", sys._getframe(1)) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_OPERATORS, *_LAZY, *_LAZY_MODULES})


__all__ = [
    "ConvConfig",
    "EmbeddingConfig",
    "LinearConfig",
    "PackedInfo",
    "ThreadTuning",
    "Unpacked",
    "activate",
    "attention",
    "cmake_prefix_path",
    "concat",
    "embedding",
    "export_pt2",
    "export_pte",
    "info",
    "isa",
    "keep_freed_memory",
    "kernels",
    "layer_norm",
    "linear",
    "linear_attention",
    "linear_experts",
    "linears",
    "load_kernels",
    "masked_attention",
    "nn",
    "pack",
    "qat",
    "quantize_",
    "quantize_tensor",
    "repack",
    "rms_norm",
    "rotary",
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
    "with_activation_bits",
]
