"""Converts packed checkpoints to float ones."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..files.config_json import quantization_method, read_config
from ..files.entries import CheckpointEntry, inspect_checkpoint
from ..files.replace import resolve_new_directory
from ..files.safetensors import files_of, read_files
from .card import remove_note
from .writing import MAX_SHARD_BYTES, check_shard_bytes, copy_files, new_checkpoint

_REPORT = "lowbit_import.json"  # report about the packed tensors, which the float checkpoint does not have


def dequantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[CheckpointEntry]:
    """Writes a float checkpoint with the dequantized weights of a packed one.

    The quantization error remains. Needs memory for the whole float model.

    Args:
        source: a directory written by :func:`lowbit.quantize_checkpoint`, :func:`lowbit.import_checkpoint` or
            ``save_pretrained``.
        target: a directory that is empty or does not exist, as for :func:`lowbit.quantize_checkpoint`.
        dtype: the dtype of the dequantized weights: torch.float32, bfloat16 or float16; None: the dtype in config.json.
        max_shard_bytes: a shard with this many bytes gets no further tensor.
        progress: called as ``progress(layers done, layers, name)``.

    Returns:
        The tensors that were written.

    Raises:
        OSError: a file is missing or cannot be read; target is not empty or cannot be written; the disk is full.
        ValueError: source is not packed, or damaged. The target is then removed.
    """
    from ..hf.config import METHOD
    from ..hf.dequantized import dequantize
    from ..hf.from_pretrained import counting, mapped_model
    from ..hf.mtp_layers import load_head

    source, target = Path(source), Path(target).absolute()
    check_shard_bytes(max_shard_bytes)
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype}; expected torch.float32, torch.bfloat16 or torch.float16")
    resolve_new_directory(target)  # raises before the files are read
    method = quantization_method(read_config(source))
    if method != METHOD:
        state = "is float" if method is None else f"is quantized by the method {method!r}"
        raise ValueError(f"{source} {state}; expected a checkpoint with packed weights of lowbit")
    tensors = read_files(*files_of(source))
    model = mapped_model(source, len(tensors))
    head = load_head(model, source, tensors)
    float_dtype = dtype or model.config.dtype or torch.float32
    needed = sum(
        math.prod(entry.shape) * float_dtype.itemsize if entry.kind == "packed" else entry.bytes
        for entry in inspect_checkpoint(source)
    )
    with new_checkpoint(target, needed) as directory:
        dequantize(model, dtype, progress)
        model.hf_quantizer.remove_quantization_config(model)
        model.config.dtype = float_dtype
        state = model.state_dict()
        if head is not None:
            dequantize(head, dtype)
            state |= head.state_dict()
        copy_files(source, directory)
        remove_note(directory)
        (directory / _REPORT).unlink(missing_ok=True)
        with counting(None):
            model.save_pretrained(directory, max_shard_size=max_shard_bytes, state_dict=state)
    return inspect_checkpoint(target)
