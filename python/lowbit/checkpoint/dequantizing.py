"""Converts packed checkpoints to float ones."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..files.config_json import quantization_method, read_config
from ..files.replace import resolve_new_directory
from ..files.safetensors import files_of, read_files
from .card import remove_note
from .entries import CheckpointEntry, inspect_checkpoint
from .writing import MAX_SHARD_BYTES, check_shard_bytes, copy_files, new_checkpoint

_REPORT = "lowbit_import.json"  # of the packed tensors


def dequantize_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[CheckpointEntry]:
    """Writes a packed checkpoint as a float one with the dequantized weights.

    What quantization has lost stays lost. The model is in memory meanwhile, as floats.

    Args:
        source: a directory that :func:`lowbit.quantize_checkpoint`, :func:`lowbit.import_checkpoint` or ``save_pretrained``
            has written.
        target: a directory that is empty or not there yet, as for :func:`lowbit.quantize_checkpoint`.
        dtype: of the weights that were packed: torch.float32, bfloat16 or float16; None: as config.json says.
        max_shard_bytes: a file gets no second tensor beyond this many bytes.
        progress: called as ``progress(layers done, layers, name)``.

    Returns:
        the tensors that were written.

    Raises:
        OSError: a file is missing or cannot be read; target is not empty or cannot be written; the disk is full.
        ValueError: source is not packed, or damaged. Nothing is left of target then.
    """
    from ..hf.dequantizing import dequantize
    from ..hf.loading import counting, mapped_model
    from ..hf.quantizer import METHOD

    source, target = Path(source), Path(target).absolute()
    check_shard_bytes(max_shard_bytes)
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype}; expected torch.float32, torch.bfloat16 or torch.float16")
    resolve_new_directory(target)  # refused before the files are read
    method = quantization_method(read_config(source))
    if method != METHOD:
        found = "is float" if method is None else f"is quantized by the method {method!r}"
        raise ValueError(f"{source} {found}; expected a checkpoint with packed weights of lowbit")
    model = mapped_model(source, len(read_files(*files_of(source))))
    each = dtype or model.config.dtype or torch.float32
    needed = sum(
        math.prod(entry.shape) * each.itemsize if entry.kind == "packed" else entry.bytes
        for entry in inspect_checkpoint(source)
    )
    with new_checkpoint(target, needed) as directory:
        dequantize(model, dtype, progress)
        model.hf_quantizer.remove_quantization_config(model)
        model.config.dtype = each
        copy_files(source, directory)
        remove_note(directory)
        (directory / _REPORT).unlink(missing_ok=True)
        with counting(None):
            model.save_pretrained(directory, max_shard_size=max_shard_bytes)
    return inspect_checkpoint(target)
