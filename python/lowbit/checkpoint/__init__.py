"""Checkpoints in Hugging Face's form: :func:`quantize_checkpoint` packs one without ever holding it in memory,
:func:`inspect_checkpoint` says what is in one.

A packed checkpoint is loaded by transformers (:mod:`lowbit.transformers`).
"""

from .dequantizing import dequantize_checkpoint
from .entries import CheckpointEntry, inspect_checkpoint
from .plan import PlannedSize, planned_size
from .quantizing import CheckpointSummary, quantize_checkpoint
from .writing import MAX_SHARD_BYTES, copy_files, counted, new_checkpoint, write_json, write_tensors

__all__ = [
    "MAX_SHARD_BYTES",
    "CheckpointEntry",
    "CheckpointSummary",
    "PlannedSize",
    "copy_files",
    "counted",
    "dequantize_checkpoint",
    "inspect_checkpoint",
    "new_checkpoint",
    "planned_size",
    "quantize_checkpoint",
    "write_json",
    "write_tensors",
]
