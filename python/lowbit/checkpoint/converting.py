"""Changes the activation bits of a packed checkpoint. Codes and scales stay as they are: only headers change."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable
from glob import escape
from pathlib import Path
from typing import Any

from .. import _C
from ..files.config_json import CONFIG, quantization_method, read_config
from ..files.entries import CheckpointEntry, inspect_checkpoint
from ..files.io import read_bytes
from ..files.replace import resolve_new_directory
from ..files.safetensors import INDEX, PACKED_SUFFIX, Stored, files_of, packed_info, read_files
from ..files.tensors import DTYPES, check_numbers, chunks
from ..layers.patterns import Patterns
from ..packed.matrix import check_activation_bits
from .writing import copy_files, new_checkpoint, write_json

_HEADER_BYTES = 128  # at most


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    activation_bits: int,
    *,
    only: Iterable[str] = ("*",),
    progress: Callable[[int, int, str], None] | None = None,
) -> list[CheckpointEntry]:
    """Writes a packed checkpoint with other activation bits, without its float weights.

    Args:
        source: a directory written by :func:`lowbit.quantize_checkpoint`, :func:`lowbit.import_checkpoint` or
            ``save_pretrained``.
        target: a directory that is empty or does not exist, as for :func:`lowbit.quantize_checkpoint`.
        activation_bits: 8 or 16, as in :class:`lowbit.LinearConfig`.
        only: shell-style patterns of names of packed layers, as ``lowbit inspect`` lists them without ``.packed_weight``;
            other layers keep their activation bits. For a head that shares the embedding table: the table's name.
        progress: called as ``progress(bytes copied, bytes to copy, name of the file)``.

    Returns:
        The tensors that were written.

    Raises:
        OSError: a file is missing or cannot be read; target is not empty or cannot be written; the disk is full.
        TypeError, ValueError: source is not packed, damaged, or has NaN values; no layer matches; another number of bits.
            The target is then removed.
    """
    from ..hf.config import METHOD

    source, target = Path(source), Path(target).absolute()
    check_activation_bits(activation_bits)
    resolve_new_directory(target)  # raises before the files are read
    config = read_config(source)
    method = quantization_method(config)
    if method != METHOD:
        state = "is float" if method is None else f"is quantized by the method {method!r}"
        raise ValueError(f"{source} {state}; expected a checkpoint with packed weights of lowbit")
    files, weight_map = files_of(source)
    tensors = read_files(files, weight_map).values()
    patterns = Patterns((pattern, True) for pattern in only)
    packed = {stored.name.removesuffix(PACKED_SUFFIX): stored for stored in tensors if stored.name.endswith(PACKED_SUFFIX)}
    chosen = {name: stored for name, stored in packed.items() if patterns.last(name) is not None}
    if not chosen:
        raise ValueError(f"no packed layer of {source} matches {', '.join(only)}; lowbit inspect lists their names")
    patterns.warn_unused(f"packed layer of {source}", stacklevel=2)
    for stored in chosen.values():
        packed_info(stored)  # raises for a damaged header
    for stored in tensors:
        for part in chunks(stored) if stored.dtype in DTYPES else ():
            check_numbers(stored.name, stored.dtype, part)

    total, copied = sum(os.path.getsize(file) for file in files), 0
    with new_checkpoint(target, total) as directory:
        for file in files:
            with open(directory / file.name, "xb") as copy, open(file, "rb") as original:
                shutil.copyfileobj(original, copy, 1 << 22)
                for stored in chosen.values():
                    if stored.path == file:
                        _write_headers(copy, stored, activation_bits)
            copied += os.path.getsize(file)
            if progress is not None:
                progress(copied, total, file.name)
        if weight_map is not None:
            shutil.copyfile(source / INDEX, directory / INDEX)
        copy_files(source, directory)
        settings = _changed(config["quantization_config"], packed, chosen, activation_bits)
        # Written last: without it nothing loads.
        write_json(directory / CONFIG, config | {"quantization_config": settings})
    return inspect_checkpoint(target)


def _write_headers(file: Any, stored: Stored, activation_bits: int) -> None:
    size = stored.shape[-1]
    for begin in range(0, math.prod(stored.shape), size):  # one for each expert
        header = read_bytes(stored, begin, begin + min(_HEADER_BYTES, size))
        try:
            _C.set_activation_bits(header.data_ptr(), size, activation_bits)
        except ValueError as error:
            raise ValueError(f"{stored.name} in {stored.path}: {error}") from error
        file.seek(stored.offset + begin)
        file.write(memoryview(header.numpy()))


def _changed(settings: dict[str, Any], packed: Iterable[str], chosen: Iterable[str], activation_bits: int) -> dict[str, Any]:
    """The ``quantization_config`` of the checkpoint with the chosen layers changed; the others keep what they have."""
    from ..hf.config import LowBitConfig

    config = LowBitConfig(**settings)
    if set(chosen) == set(packed):
        config.activation_bits = activation_bits
        for _, change in config.overrides:
            if change is not None:
                change.pop("activation_bits", None)
        return dict(config.to_dict())
    before = Patterns((pattern, change) for pattern, change in config.overrides)
    overrides = list(config.overrides)
    for name in chosen:
        found = before.last(name)
        # Only the last matching override applies, so this one repeats what the others say.
        overrides.append([escape(name), ((found and found[1]) or {}) | {"activation_bits": activation_bits}])
    return dict(LowBitConfig(**settings | {"overrides": overrides}).to_dict())
