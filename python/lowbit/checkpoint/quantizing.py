"""Quantizes checkpoints by round-to-nearest, or writes already packed layers, without loading the whole checkpoint."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..files.config_json import CONFIG
from ..files.entries import CheckpointEntry
from ..files.replace import resolve_new_directory
from ..files.safetensors import Writer
from ..operators import ops
from .card import write_note
from .outputs import Output, write_output
from .plan import read_and_plan
from .writing import MAX_SHARD_BYTES, check_shard_bytes, copy_files, counted, new_checkpoint, write_json, write_tensors

if TYPE_CHECKING:
    from ..hf.config import LowBitConfig

_LOG = logging.getLogger(__name__)
_CHUNK = 8 << 20


@dataclass(frozen=True)
class CheckpointSummary:
    """The result of :func:`quantize_checkpoint`."""

    target: Path
    entries: list[CheckpointEntry]
    source_bytes: int  # of the tensors read
    target_bytes: int  # of the tensors written
    seconds: float  # elapsed time
    unquantized: dict[str, str] = field(default_factory=dict)  # tensors of 2 or more dimensions that stay float -> why
    unquantized_bytes: int = 0  # their size in the target


def _write_packed(output: Output, packed: torch.Tensor, writer: Writer, done: Callable[[int], None]) -> None:
    """Writes an already packed layer."""
    header, expected = ops.info(packed) if packed.dim() == 1 else ops.info_of_experts(packed), output.info()
    assert expected is not None
    if header != replace(expected, levels=header.levels):  # a fitted table is not known in advance
        raise ValueError(f"{output.layer} is packed as {header}; expected {expected}")
    packed = packed.flatten()
    for begin in range(0, packed.numel(), _CHUNK):
        writer.write(packed[begin : begin + _CHUNK].numpy())
    done(output.tensor.bytes)


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    config: LowBitConfig,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    packed: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> CheckpointSummary:
    """Quantizes a checkpoint of transformers a band of rows at a time, in tens of megabytes of memory.

    The packed bytes equal those of ``from_pretrained(source, quantization_config=config)``. ``from_pretrained(target)`` loads
    the result wherever lowbit is installed.

    Args:
        source: a directory with config.json and safetensors files, of any architecture that transformers knows.
        target: a directory that is empty or does not exist; symbolic links are followed. It appears atomically when
            everything is written; whether that is possible is tested first. A killed run leaves at most a hidden
            ``.NAME-*.partial`` next to it, which does not load and which the next run with the same target removes.
        config: what to quantize, and how.
        max_shard_bytes: a shard with this many bytes gets no further tensor.
        packed: called once after all checks, before anything is written; returns already packed layers: name -> uint8
            [bytes] in the config's format. All other layers are rounded to nearest.
        progress: called as ``progress(bytes read, bytes to read, name of the tensor)`` after each band.

    Raises:
        OSError: a file is missing or cannot be read; target is not empty, a mount point, or cannot be written; the disk
            is full. If only the final rename fails, all files are kept, and the message says where.
        ValueError: an unknown architecture, a damaged file, tensors that are missing, not finite or of another shape or
            dtype than the model's, or different configs for layers that share a weight. The target is then removed.
    """
    begin = time.perf_counter()
    source, target = Path(source), Path(target).absolute()
    check_shard_bytes(max_shard_bytes)
    resolve_new_directory(target)  # raises before the files are read
    outputs, unquantized, description = read_and_plan(source, config)
    total = sum(output.tensor.bytes for output in outputs)
    target_bytes = sum(output.stored(Path()).bytes for output in outputs)
    done = counted(progress, total)

    with new_checkpoint(target, target_bytes) as directory:
        ready = packed() if packed else {}

        def write(output: Output, writer: Writer) -> None:
            def advance(count: int) -> None:
                done(count, output.name)

            if output.layer in ready:
                _write_packed(output, ready[output.layer], writer, advance)
            else:
                write_output(output, writer, advance)

        entries = write_tensors(directory, outputs, max_shard_bytes, write)
        copy_files(source, directory)
        write_note(directory)
        # Written last: without it nothing loads.
        write_json(directory / CONFIG, description | {"quantization_config": config.to_dict()})
    floats = sum(output.tensor.bytes for output in outputs if not output.packed and output.name in unquantized)
    seconds = time.perf_counter() - begin
    _LOG.info(
        "%s: %d tensors written to %s in %.1f s; %d matrices stay float",
        source, len(entries), target, seconds, len(unquantized),
    )  # fmt: skip
    return CheckpointSummary(target, entries, total, target_bytes, seconds, unquantized, floats)
