"""Imports checkpoints that other tools have quantized; a module per format turns it into a ``Source``."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .gguf_source import open_gguf
from .source import Source
from .write import READ, ImportSummary, Progress, begin_step, write_checkpoint

__all__ = ["ImportSummary", "import_checkpoint", "open_source"]


def open_source(path: str | os.PathLike[str], i2s_order: str | None = None) -> Source:
    """A model in another format, described and checked; its weights are not read.

    Args:
        i2s_order: as for :func:`import_checkpoint`.

    Raises:
        OSError: there is no such file or directory, or it cannot be read.
        ValueError: it is damaged, in a format that lowbit does not import, or no packed weight can hold its weights.
    """
    path = Path(path)
    if path.is_dir():
        from .ctranslate2 import is_ctranslate2, open_ctranslate2
        from .directory import open_directory

        return open_ctranslate2(path) if is_ctranslate2(path) else open_directory(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a .gguf file, or the directory of a quantized checkpoint")
    return open_gguf(path, i2s_order)


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    i2s_order: str | None = None,
    progress: Progress | None = None,
    opening: Progress | None = None,
) -> ImportSummary:
    """Writes a checkpoint that another program has quantized as a packed one, some rows of one matrix at a time.

    The codes are not changed, so nothing is calibrated or searched. ``docs/import.md`` lists the formats, and which are
    imported exactly; the summary, and ``lowbit_import.json`` in the target, give the error of every tensor.

    Args:
        source: a .gguf file (of a split one any part), or a directory with config.json and safetensors files, or
            with a Whisper model of CTranslate2.
        target: a directory that is empty or does not exist, as for :func:`lowbit.quantize_checkpoint`: it appears in one
            step when all is written.
        max_shard_bytes: a shard with this many bytes gets no further tensor.
        i2s_order: which weights share a byte in the type I2_S of bitnet.cpp's GGUF files, which do not record it: "x86" or
            "arm" for the processor of the program that wrote the file, or "rows". Ignored for other sources.
        progress: called as ``progress(bytes read, bytes to read, name of the tensor)`` after each band of rows.
        opening: called as ``opening(steps done, steps, what begins)`` before the first weight is read.

    Raises:
        OSError: a file is missing or cannot be read; target is not empty or cannot be written; the disk is full.
        ValueError: a damaged file, an architecture or a format that lowbit does not import, tensors that are missing
            or of another shape than the model's, or weights that the packed format cannot hold. The target is then
            removed.
    """
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes!r}; expected an int of 1 or more")
    begin = time.perf_counter()
    begin_step(opening, READ)
    return write_checkpoint(
        open_source(source, i2s_order), Path(target).absolute(), max_shard_bytes=max_shard_bytes, progress=progress,
        opening=opening, begin=begin,
    )  # fmt: skip
