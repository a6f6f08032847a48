"""Imports checkpoints quantized by other tools; one module per format turns them into a ``Source``."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..checkpoint.writing import MAX_SHARD_BYTES, check_shard_bytes
from .gguf_source import open_gguf
from .source import Source
from .write import READ, ImportSummary, Progress, begin_step, write_checkpoint

__all__ = ["ImportSummary", "import_checkpoint", "open_source"]


def open_source(
    path: str | os.PathLike[str], i2s_order: str | None = None, mmproj: str | os.PathLike[str] | None = None
) -> Source:
    """Opens a model in another format: describes and checks it without reading its weights.

    Args:
        i2s_order, mmproj: as for :func:`import_checkpoint`.

    Raises:
        OSError: there is no such file or directory, or it cannot be read.
        ValueError: it is damaged, in a format that lowbit does not import, or has weights that cannot be packed.
    """
    path = Path(path)
    if mmproj is not None and (path.is_dir() or not Path(mmproj).is_file()):
        what = f"{path} is a directory" if path.is_dir() else f"{mmproj} is not a file"
        raise ValueError(f"{what}; expected a .gguf file, and the .gguf file of its vision tower as mmproj")
    if path.is_dir():
        from .ctranslate2 import is_ctranslate2, open_ctranslate2
        from .directory import open_directory

        return open_ctranslate2(path) if is_ctranslate2(path) else open_directory(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a .gguf file, or the directory of a quantized checkpoint")
    return open_gguf(path, i2s_order, mmproj)


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    i2s_order: str | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    activation_bits: int | None = None,
    progress: Progress | None = None,
    opening: Progress | None = None,
) -> ImportSummary:
    """Imports a checkpoint quantized by another program as a packed one, without requantizing, some rows at a time.

    The codes are kept, so nothing is calibrated or searched. ``docs/import.md`` lists the formats and says which are
    imported exactly. The summary, and ``lowbit_import.json`` in the target, give the error of every tensor.

    Args:
        source: a .gguf file (any part of a split one), a directory with config.json and safetensors files, or a directory
            with a Whisper model of CTranslate2.
        target: a directory that is empty or does not exist, as for :func:`lowbit.quantize_checkpoint`. It appears atomically
            when everything is written.
        max_shard_bytes: a shard with this many bytes gets no further tensor.
        i2s_order: which weights share a byte in I2_S tensors of bitnet.cpp's GGUF files, which do not record it: "x86" or
            "arm" for the processor of the program that wrote the file, or "rows". Ignored for other sources.
        mmproj: the .gguf file with the vision tower of a .gguf language model; the result is a model of images and text.
        activation_bits: the activation bits of all packed layers, as in :class:`lowbit.LinearConfig`. None: 16 for the head of
            a language model and the table that it shares, 8 for all others. A prompt needs the head for one token only.
        progress: called as ``progress(bytes read, bytes to read, name of the tensor)`` after each band of rows.
        opening: called as ``opening(steps done, steps, next step)`` before the first weight is read.

    Raises:
        OSError: a file is missing or cannot be read; target is not empty or cannot be written; the disk is full.
        ValueError: a damaged file, an architecture or a format that lowbit does not import, tensors that are missing or
            have another shape than the model's, or weights that cannot be packed. The target is then removed.
    """
    check_shard_bytes(max_shard_bytes)
    begin = time.perf_counter()
    begin_step(opening, READ)
    return write_checkpoint(
        open_source(source, i2s_order, mmproj), Path(target).absolute(), max_shard_bytes=max_shard_bytes,
        activation_bits=activation_bits, progress=progress, opening=opening, begin=begin,
    )  # fmt: skip
