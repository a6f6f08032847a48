"""Quantizes, converts and dequantizes checkpoints in Hugging Face's format from file to file.

:func:`quantize_checkpoint` packs a checkpoint without holding it in memory. transformers loads packed checkpoints
(:mod:`lowbit.transformers`), and :mod:`lowbit.files.entries` lists their tensors.
"""

from .card import write_note
from .converting import convert_checkpoint
from .dequantizing import dequantize_checkpoint
from .plan import PlannedSize, planned_size
from .quantizing import CheckpointSummary, quantize_checkpoint
from .writing import MAX_SHARD_BYTES, copy_files, counted, new_checkpoint, write_json, write_tensors

__all__ = [
    "MAX_SHARD_BYTES",
    "CheckpointSummary",
    "PlannedSize",
    "convert_checkpoint",
    "copy_files",
    "counted",
    "dequantize_checkpoint",
    "new_checkpoint",
    "planned_size",
    "quantize_checkpoint",
    "write_json",
    "write_note",
    "write_tensors",
]
