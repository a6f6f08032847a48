"""Writes a checkpoint directory in Hugging Face's format atomically: weights, index and other files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..files.config_json import CONFIG, SETTINGS_FILES
from ..files.entries import DTYPES_OF_TORCH, CheckpointEntry, describe_entry
from ..files.replace import PartialDirectory, naming_full_disk, resolve_new_directory, sync
from ..files.safetensors import INDEX, WEIGHTS, Stored, Writer, header_of
from ..machine.sizes import size
from .outputs import Output

MAX_SHARD_BYTES = 5_000_000_000

# Weights of all frameworks, and their index or description files.
_WEIGHTS_OF_ALL_FRAMEWORKS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.ckpt.*",
    "*.gguf", "*.ggml", "*.h5", "*.h5.index.json", "*.msgpack", "*.msgpack.index.json", "*.ot", "*.onnx", "*.onnx_data",
    "*.onnx.data", "*.pb", "*.tflite", "*.mlmodel", "*.npz", "*.pte", "*.pt2", "*.nemo", "*.pdparams",
    "openvino_*.xml",
)  # fmt: skip


def _shards(outputs: Iterable[Output], most: int) -> Iterator[list[Output]]:
    """Divides the outputs, in order, into files. In each file packed tensors come first, at multiples of 64 bytes."""

    def place(output: Output) -> int:  # packed first, then wider elements first, so that all are aligned
        return -512 if output.info() is not None else -DTYPES_OF_TORCH.get(output.stored(Path()).dtype, ("", 8))[1]

    shard: list[Output] = []
    size = 0
    for output in outputs:
        count = output.stored(Path()).bytes
        if shard and size + count > most:
            yield sorted(shard, key=place)
            shard, size = [], 0
        shard.append(output)
        size += count
    yield sorted(shard, key=place)


@contextmanager
def new_checkpoint(target: Path, needed: int) -> Iterator[Path]:
    """A context with a hidden directory for a checkpoint, which replaces `target` on success.

    Args:
        target: an absolute path of an empty directory, or of none.
        needed: bytes of the weights.

    Raises:
        OSError: target is not empty, or cannot be replaced, which is tested first; or the disk is too small or full: the
            message says how much is needed.
    """
    with naming_full_disk(target, size(needed)), PartialDirectory(resolve_new_directory(target)) as partial:
        partial.rehearse()
        free = shutil.disk_usage(partial.path).free
        if free < needed:
            raise OSError(
                errno.ENOSPC, f"the disk of {target} has {size(free)} free; the packed checkpoint takes {size(needed)}"
            )
        yield partial.path
        partial.finish()


def counted(progress: Callable[[int, int, str], None] | None, total: int) -> Callable[[int, str], None]:
    """A function of (bytes, tensor name) that sums the bytes and calls ``progress(bytes so far, total, name)``."""
    read = 0

    def done(count: int, name: str) -> None:
        nonlocal read
        read += count
        if progress is not None:
            progress(read, total, name)

    return done


def write_tensors(
    directory: Path, outputs: Iterable[Output], max_shard_bytes: int, write: Callable[[Output, Writer], None]
) -> list[CheckpointEntry]:
    """Writes weight files, and an index if there are several; `write` writes the bytes of each tensor."""
    entries = []
    shards = list(_shards(outputs, max_shard_bytes))
    for number, shard in enumerate(shards, 1):
        file = directory / (WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors")
        stored = [output.stored(file) for output in shard]
        entries += [describe_entry(tensor, output.info()) for tensor, output in zip(stored, shard, strict=True)]
        with Writer(file, list(map(_described, stored))) as writer:
            for output in shard:
                write(output, writer)
    if len(shards) > 1:
        weight_map = {entry.name: entry.file for entry in entries}
        size = sum(entry.bytes for entry in entries)
        write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return entries


def size_of_files(outputs: Iterable[Output], max_shard_bytes: int) -> int:
    """The total size of the weight files that :func:`write_tensors` would write, headers included."""
    total = 0
    for shard in _shards(outputs, max_shard_bytes):
        header, size = header_of([_described(output.stored(Path())) for output in shard])
        total += len(header) + size
    return total


def check_shard_bytes(count: Any) -> None:
    """Raises ValueError unless ``count`` is a positive int."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"max_shard_bytes is {count!r}; expected an int of 1 or more")


def _described(stored: Stored) -> tuple[str, str, tuple[int, ...], int]:
    return stored.name, stored.dtype, stored.shape, stored.bytes


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _WEIGHTS_OF_ALL_FRAMEWORKS)


def copy_files(source: Path, target: Path) -> None:
    """Copies a checkpoint's other files (tokenizer, settings, templates, license) except quantization settings."""
    modules = _modules(source)
    for entry in sorted(source.iterdir()):
        if entry.is_file():
            if entry.name not in (CONFIG, *SETTINGS_FILES) and not _is_weights(entry.name):
                _copy(entry, target / entry.name)
        elif entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            files = [Path(parent) / name for parent, _, names in os.walk(entry) for name in names]
            # A subdirectory with weights is another model, or this model for another framework (original/, onnx/).
            if entry.name not in modules and any(_is_weights(file.name) for file in files):
                continue
            for file in filter(Path.is_file, files):
                copied = target / file.relative_to(source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                _copy(file, copied)


def _modules(source: Path) -> set[str]:
    """The module directories of a sentence-transformers model, which may contain small weights."""
    try:
        listed = json.loads((source / "modules.json").read_text(encoding="utf-8"))
        return {Path(module["path"]).parts[0] for module in listed if module["path"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a new file and syncs it to the disk."""
    with open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        sync(file)


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reader, open(target, "xb") as writer:
        shutil.copyfileobj(reader, writer)
