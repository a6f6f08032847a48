"""Checkpoints in Hugging Face's form: :func:`quantize_checkpoint` packs one without ever holding it in memory,
:func:`inspect_checkpoint` says what is in one.

A packed checkpoint is loaded by transformers (:mod:`lowbit.transformers`).
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import shutil
import struct
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from . import _C, ops
from .files.config_json import CONFIG, quantization_method, read_config
from .files.replace import PartialDirectory, resolve_new_directory, sync, sync_path
from .files.safetensors import (
    DTYPES,
    INDEX,
    WEIGHTS,
    Stored,
    Writer,
    chunks,
    files_of,
    header_of,
    packed_info,
    read_files,
    read_rows,
    same_bytes,
)
from .layers import Experts, named_layers, warn_of_floats
from .levels import FIT, sampled_rows
from .quantize import EmbeddingConfig, LinearConfig, quantize_tensor, table_of

if TYPE_CHECKING:
    from .hf.config import LowBitConfig

_BAND_WEIGHTS = 1 << 21  # quantised at a time: enough for many threads, little memory
_PANEL_ROWS = 16
_CHUNK = 8 << 20
MAX_SHARD_BYTES = 5_000_000_000
_EXTRA = "not in {}"

# Weights, in the form of any framework, and what indexes or describes such files.
_WEIGHTS_OF_ALL_FRAMEWORKS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.ckpt.*",
    "*.gguf", "*.ggml", "*.h5", "*.h5.index.json", "*.msgpack", "*.msgpack.index.json", "*.ot", "*.onnx", "*.onnx_data",
    "*.onnx.data", "*.pb", "*.tflite", "*.mlmodel", "*.npz", "*.pte", "*.pt2", "*.nemo", "*.pdparams",
    "openvino_*.xml",
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointEntry:
    """A tensor of a checkpoint."""

    name: str  # as the file has it
    kind: str  # "packed", or the dtype, as "bfloat16"
    shape: tuple[int, ...]  # of a packed weight: [out, in], or [experts, out, in]
    bits: int  # per code; of a tensor that is not packed: per element
    group_size: int | None  # None: one group per row, or not packed
    mapping: str | None  # "symmetric" or "affine"; None: not packed
    bytes: int  # in the file
    file: str  # its name, without the directory


@dataclass(frozen=True)
class CheckpointSummary:
    """What :func:`quantize_checkpoint` has written."""

    target: Path
    entries: list[CheckpointEntry]
    source_bytes: int  # of the tensors read
    target_bytes: int  # of the tensors written
    seconds: float  # that it took
    left: dict[str, str] = field(default_factory=dict)  # matrices (2 dimensions or more) that stay float -> why
    left_bytes: int = 0  # of these in the target


# What safetensors calls a dtype -> what torch calls it, and its bits.
_DTYPES = {
    "F64": ("float64", 64), "F32": ("float32", 32), "BF16": ("bfloat16", 16), "F16": ("float16", 16),
    "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16), "I8": ("int8", 8), "U8": ("uint8", 8),
    "BOOL": ("bool", 8), "U16": ("uint16", 16), "U32": ("uint32", 32), "U64": ("uint64", 64), "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6), "F4": ("float4_e2m1fn", 4),
}  # fmt: skip


def describe_entry(stored: Stored, info: ops.PackedInfo | None) -> CheckpointEntry:
    """What a tensor is; `info` of a packed one."""
    if info is not None:
        shape = info.shape
        kind, bits, group_size, mapping = "packed", info.bits, info.group_size, info.mapping
    else:
        shape, group_size, mapping = stored.shape, None, None
        elements = math.prod(shape)  # of a dtype that came later, their bits are what the file gives them
        kind, bits = _DTYPES.get(stored.dtype, (stored.dtype.lower(), 8 * stored.bytes // elements if elements else 0))
    return CheckpointEntry(stored.name, kind, shape, bits, group_size, mapping, stored.bytes, stored.path.name)


def inspect_checkpoint(path: str | os.PathLike) -> list[CheckpointEntry]:
    """What is in a checkpoint, packed or not, in the order of the files. Only headers are read.

    Args:
        path: a directory with model.safetensors or model.safetensors.index.json, or one .safetensors file.

    Raises:
        OSError: there is no such checkpoint, or a shard is missing.
        ValueError: a file is damaged, or disagrees with the index.
    """
    path = Path(path)
    files, weight_map = ([path], None) if path.is_file() else files_of(path)
    tensors = sorted(read_files(files, weight_map).values(), key=lambda stored: (stored.path, stored.offset))
    return [
        describe_entry(stored, packed_info(stored) if stored.name.endswith("packed_weight") else None)
        for stored in tensors
    ]


@dataclass(frozen=True)
class _Matrix:
    """A matrix to pack, in one or several tensors of the files that lie below each other."""

    parts: tuple[Stored, ...]
    transposed: bool = False  # in the files

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k]; all parts have the same columns."""
        rows, columns = sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def reader(self) -> Callable[[int, int], torch.Tensor]:
        """A function that reads rows [begin, end)."""
        if self.transposed:  # its rows lie all over the file
            whole = self._read(0, self.shape[1]).T
            return lambda begin, end: whole[begin:end]
        return self._read

    def _read(self, begin: int, end: int) -> torch.Tensor:
        found, at = [], 0
        for part in self.parts:
            first, last = max(begin - at, 0), min(end - at, part.shape[0])
            if first < last:
                found.append(read_rows(part, first, last))
            at += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)


def _slices(stored: Stored) -> list[Stored]:
    """Each matrix of a tensor of three dimensions."""
    size = stored.bytes // max(1, stored.shape[0])
    return [
        replace(stored, shape=stored.shape[1:], offset=stored.offset + i * size, bytes=size)
        for i in range(stored.shape[0])
    ]


@dataclass(frozen=True)
class _Output:
    """A tensor to write: a copy of `source`, or with a config its packed form."""

    name: str
    source: Stored
    config: LinearConfig | EmbeddingConfig | None = None
    bias: Stored | None = None
    layer: str = ""  # that it is for, when packed
    experts: tuple[_Matrix, ...] | None = None  # instead of the source, which is the first tensor of the first one

    @property
    def matrices(self) -> tuple[_Matrix, ...]:
        return self.experts or (_Matrix((self.source,)),)

    @property
    def source_bytes(self) -> int:
        return self.source.bytes if self.experts is None else sum(matrix.bytes for matrix in self.experts)

    def info(self) -> ops.PackedInfo | None:
        return None if self.config is None else self.packed_info()

    def packed_info(self) -> ops.PackedInfo:
        config, shape = self.config, self.matrices[0].shape
        assert config is not None
        info = ops.describe(shape, config.bits, config.group_size, config.mapping, self.bias is not None)
        return info if self.experts is None else replace(info, experts=len(self.experts))

    def stored(self, path: Path) -> Stored:
        if self.config is None:
            return Stored(self.name, path, self.source.dtype, self.source.shape, 0, self.source.bytes)
        size = self.packed_info().total_bytes
        shape = (size,) if self.experts is None else (len(self.experts), size)
        return Stored(self.name, path, "U8", shape, 0, math.prod(shape))


def _called_in_model(model, names: dict, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors of a checkpoint that become tensors of the model as they are, by their name in the model."""
    state = model.state_dict()
    by_name: dict[str, Stored] = {}
    for key, (name, targets) in names.items():
        if targets is not None or name not in state:
            continue
        stored, expected = tensors[key], list(state[name].shape)
        if name in by_name:
            raise ValueError(f"{by_name[name].name} and {key} are both the {name} of the model; expected one of them")
        if list(stored.shape) != expected:
            raise ValueError(
                f"{key} in {stored.path} has shape {list(stored.shape)}; expected {expected}, as config.json says"
            )
        by_name[name] = stored
    for target, source in model.all_tied_weights_keys.items():
        if target in by_name and source in by_name and same_bytes(by_name[target], by_name[source]):
            del by_name[target]  # the file has it twice
    return by_name


def _experts(
    model,
    selected: Collection[str],
    by_name: Mapping[str, Stored],
    tensors: Mapping[str, Stored],
    parts: Mapping[str, list[list[str]]],
) -> dict[str, tuple[_Matrix, ...]]:
    """The matrices of selected experts, where they can be read one by one; all of a module's, or none."""
    found: dict[str, tuple[_Matrix, ...]] = {}
    layers = {name: layer for name, layer in named_layers(model) if isinstance(layer, Experts) and name in selected}
    for name, layer in layers.items():
        if name in by_name:
            found[name] = tuple(_Matrix((each,), layer.transposed) for each in _slices(by_name[name]))
        elif name in parts and not layer.transposed:
            found[name] = tuple(_Matrix(tuple(tensors[key] for key in keys)) for keys in parts[name])
            for matrix in found[name]:
                shapes = [list(part.shape) for part in matrix.parts]
                expected, same = list(layer.weight.shape[1:]), {len(shape) for shape in shapes} == {2}
                if not same or {shape[1] for shape in shapes} != {expected[1]} or list(matrix.shape) != expected:
                    part = matrix.parts[0]
                    raise ValueError(
                        f"{part.name} in {part.path} has shape {shapes[0]}; expected a part of {expected}, as "
                        "config.json says"
                    )
            if len(found[name]) != layer.num_experts:
                raise ValueError(
                    f"the files have {len(found[name])} experts of {name}; expected {layer.num_experts}, as config.json says"
                )
        for part in (part for matrix in found.get(name, ()) for part in matrix.parts):
            if part.dtype not in DTYPES:
                raise ValueError(f"{part.name} in {part.path} has dtype {part.dtype}; expected {', '.join(DTYPES)}")
        if layer.bias is not None and f"{name}_bias" not in by_name:
            found.pop(name, None)
    return {
        name: matrices
        for name, matrices in found.items()
        if all(other in found for other in layers if layers[other].holder is layers[name].holder)
    }


def _plan(
    model, config: LowBitConfig, tensors: dict[str, Stored], source: Path
) -> tuple[list[_Output], dict[str, str]]:
    """What to write, and which matrices stay float, and why."""
    from .hf.config import BY_OVERRIDES
    from .hf.names import check_complete, given_by, names_in_model, parts_of_experts

    names, layers = names_in_model(model, tensors), dict(named_layers(model))
    state = model.state_dict()
    check_complete(model, given_by(names), source)
    by_name = _called_in_model(model, names, tensors)
    selected, unselected = config.choose(model)
    experts = _experts(model, selected, by_name, {key: tensors[key] for key in names}, parts_of_experts(model, names))
    for name in [name for name in selected if isinstance(layers.get(name), Experts) and name not in experts]:
        del selected[name]
        unselected[name] = "transformers makes it of the files in a way that lowbit does not follow"
    if not selected:
        raise ValueError(f"config selects no layer of {type(model).__name__}")
    warn_of_floats(model, selected, {name for name, why in unselected.items() if why == BY_OVERRIDES}, stacklevel=3)

    # By tensor, whatever in the model it becomes, its own name first.
    ties = model.all_tied_weights_keys
    users = {name: [name] for name in by_name}
    for target, tied in ties.items():
        if target not in by_name and tied in by_name:
            users[tied].append(target)
        elif tied not in by_name and target in by_name:
            users[target].append(tied)

    outputs: list[_Output] = []
    packed_biases = {f"{name}_bias" for name in experts}
    written: set[str] = set()
    for key in tensors:
        name, targets = names[key]
        of = name if targets is None else targets[0]
        if of in experts:
            if of not in written:
                matrices = experts[of]
                output = _Output(f"{of}.packed_weight", matrices[0].parts[0], selected[of], by_name.get(f"{of}_bias"), of)
                outputs.append(replace(output, experts=matrices))
                written.add(of)
            continue
        if by_name.get(name) is not tensors[key]:
            if names[key][1] is not None or name not in state:
                outputs.append(_Output(key, tensors[key]))
            continue
        weights = [user.removesuffix(".weight") for user in users[name] if user.endswith(".weight")]
        chosen = [layer for layer in weights if layer in selected]
        if not chosen:
            outputs.append(_Output(key, tensors[key]))
            continue
        if len({tuple(vars(selected[layer]).items()) for layer in chosen}) > 1:
            raise ValueError(
                f"{' and '.join(chosen)} share one weight but have different configs, "
                f"{' and '.join(str(selected[layer]) for layer in chosen)}; give all the same, or None to all but one"
            )
        biases: dict[str, Stored | None] = {}
        for layer in chosen:
            called_bias = f"{layer}.bias"
            if isinstance(selected[layer], LinearConfig):
                in_state = called_bias in state
                biases[layer] = (by_name.get(called_bias) or by_name[ties[called_bias]]) if in_state else None
                packed_biases.add(called_bias)
        for stored in (tensors[key], *biases.values()):
            if stored is not None and stored.dtype not in DTYPES:
                raise ValueError(
                    f"{stored.name} in {stored.path} has dtype {stored.dtype}; expected {', '.join(DTYPES)}"
                )

        def called(user: str, leaf: str, key: str = key, name: str = name) -> str:
            own = key.removesuffix("weight") if f"{user}.weight" == name else f"{user}."
            return own + leaf

        # As quantize_ does: one buffer holds one bias.
        together = len({id(bias) for bias in biases.values()}) <= 1
        for layer in chosen[:1] if together else chosen:
            bias = next(iter(biases.values()), None) if together else biases.get(layer)
            outputs.append(_Output(called(layer, "packed_weight"), tensors[key], selected[layer], bias, layer))
        floats = [layer for layer in weights if layer not in selected]
        if floats:
            outputs.append(_Output(called(floats[0], "weight"), tensors[key]))
    dropped = {by_name[name].name for name in packed_biases if name in by_name}
    outputs = [output for output in outputs if output.config is not None or output.name not in dropped]

    left = {}
    for output in outputs:
        if output.config is not None or len(output.source.shape) < 2:
            continue
        name, targets = names[output.source.name]
        if targets is None and name in state:
            layer = name.rpartition(".")[0]
            kind = type(model.get_submodule(layer)).__name__
            why = unselected.get(layer) or unselected.get(name)
            left[output.name] = why or f"in a layer of the kind {kind}, which lowbit does not pack"
        elif targets is not None and targets[0] in state:
            kind = type(model.get_submodule(targets[0].rpartition(".")[0])).__name__
            why = unselected.get(targets[0])
            left[output.name] = why or f"transformers makes it a part of {kind}, which lowbit does not pack"
        else:
            left[output.name] = _EXTRA.format(type(model).__name__)
    extra = {name for name, why in left.items() if why == _EXTRA.format(type(model).__name__)}
    if extra:
        size = sum(output.source.bytes for output in outputs if output.name in extra)
        warnings.warn(
            f"{len(extra)} matrices of the files ({size / 1e6:.1f} MB) are not in {type(model).__name__}, {min(extra)} for "
            "example: they are copied as they are",
            stacklevel=3,
        )
    return outputs, left


def _pack(output: _Output, writer: Writer, done: Callable[[int], None]) -> None:
    """Quantises a matrix, or those of experts one after the other."""
    bias, (n, _) = output.bias, output.matrices[0].shape
    for number, matrix in enumerate(output.matrices):
        own = None
        if bias is not None:
            own = read_rows(bias, 0, n) if output.experts is None else read_rows(bias, number, number + 1)[0]
        _pack_matrix(output, matrix, own, writer, done)


def _pack_matrix(
    output: _Output, matrix: _Matrix, bias: torch.Tensor | None, writer: Writer, done: Callable[[int], None]
) -> None:
    """Quantises in bands of rows; each is packed as a matrix of its own, whose panels are the whole one's."""
    config, info, source = output.config, output.packed_info(), matrix.parts[0]
    assert config is not None
    n, k = matrix.shape
    read = matrix.reader()
    rows = max(1, _BAND_WEIGHTS // k // _PANEL_ROWS) * _PANEL_ROWS
    levels = None
    if config.mapping == "levels":  # one table for all bands
        rows_to_fit = sampled_rows(n, k) if config.levels == FIT else range(1)
        sample = torch.cat([read(row, row + 1) for row in rows_to_fit])
        table = table_of(config, sample)
        config = replace(config, levels=table)
        levels = struct.pack(f"{len(table)}b", *table)
    header_bytes = 64 if levels is None else 128
    start = writer.write(bytes(header_bytes))
    folded = 0
    for begin in range(0, n, rows):
        end = min(begin + rows, n)
        weight = read(begin, end)
        try:
            packed = quantize_tensor(weight, config, None if bias is None else bias[begin:end])
        except ValueError as error:
            raise ValueError(f"{source.name} in {source.path}, rows {begin} to {end - 1}: {error}") from error
        folded = _C.fold_panels(packed.data_ptr(), packed.numel(), folded)
        writer.write(packed[header_bytes:].numpy())
        done(weight.nbytes)
        del weight, packed  # before the next are there
    affine = info.mapping == "affine"
    header = _C.packed_header(n, k, info.bits, info.group_size or 0, affine, info.has_bias, folded, levels)
    writer.write_at(start, header)


def _write_packed(output: _Output, packed: torch.Tensor, writer: Writer, done: Callable[[int], None]) -> None:
    """Writes a layer that is packed already."""
    found, expected = ops.info(packed) if packed.dim() == 1 else ops.info_of_experts(packed), output.packed_info()
    if found != replace(expected, levels=found.levels):  # a table that was fitted is not known before
        raise ValueError(f"{output.layer} is packed as {found}; expected {expected}")
    packed = packed.flatten()
    for begin in range(0, packed.numel(), _CHUNK):
        writer.write(packed[begin : begin + _CHUNK].numpy())
    done(output.source_bytes)


class Planned(Protocol):
    """A tensor that will be written."""

    def info(self) -> ops.PackedInfo | None:
        """None: it is not packed."""

    def stored(self, path: Path) -> Stored:
        """What it will be in this file."""


T = TypeVar("T", bound=Planned)


def _shards(outputs: Iterable[T], most: int) -> Iterator[list[T]]:
    """Cuts the outputs, in their order, into files. In a file packed tensors come first, at multiples of 64 bytes."""

    def place(output: T) -> int:  # packed first, then the wider elements, so that all are aligned
        return -512 if output.info() is not None else -_DTYPES.get(output.stored(Path()).dtype, ("", 8))[1]

    shard: list[T] = []
    size = 0
    for output in outputs:
        count = output.stored(Path()).bytes
        if shard and size + count > most:
            yield sorted(shard, key=place)
            shard, size = [], 0
        shard.append(output)
        size += count
    yield sorted(shard, key=place)


def _check_space(directory: Path, needed: int) -> None:
    """Raises OSError where the disk has fewer bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{directory} has {free / 1e9:.2f} GB free; the packed checkpoint takes {needed / 1e9:.2f} GB",
        )


@contextmanager
def new_checkpoint(target: Path, needed: int) -> Iterator[Path]:
    """A hidden directory to write a checkpoint into, which takes the place of `target` when all went well.

    Args:
        target: an absolute path, empty or not there yet.
        needed: bytes of the weights.

    Raises:
        OSError: target is not empty, or cannot be replaced, which is tried first; or the disk is too small, or full: the
            message says what was written, and how much it takes.
    """
    with PartialDirectory(resolve_new_directory(target)) as partial:
        partial.rehearse()
        _check_space(partial.path, needed)
        try:
            yield partial.path
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"{error.strerror} while {target} was written, which takes {needed / 1e9:.2f} GB; nothing of it was "
                "kept. Make room, or choose another place",
            ) from error
        partial.finish()


def write_tensors(
    directory: Path, outputs: Iterable[T], max_shard_bytes: int, write: Callable[[T, Writer], None]
) -> list[CheckpointEntry]:
    """Writes files of weights, and their index where there are several; `write` writes the bytes of each tensor."""
    entries = []
    shards = list(_shards(outputs, max_shard_bytes))
    for number, shard in enumerate(shards, 1):
        file = directory / (WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors")
        stored = [output.stored(file) for output in shard]
        entries += [describe_entry(each, output.info()) for each, output in zip(stored, shard, strict=True)]
        with Writer(file, list(map(_described, stored))) as writer:
            for output in shard:
                write(output, writer)
    if len(shards) > 1:
        weight_map = {entry.name: entry.file for entry in entries}
        size = sum(entry.bytes for entry in entries)
        write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return entries


def check_shard_bytes(count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"max_shard_bytes is {count!r}; expected an int of 1 or more")


def _read_and_plan(source: Path, config: LowBitConfig) -> tuple[list[_Output], dict[str, str], dict]:
    """What to write, which matrices stay float and why, and config.json; from the headers of the files alone."""
    from .hf.loading import meta_model
    from .hf.names import names_in_model
    from .hf.placing import place_packed
    from .transformers import LowBitConfig

    if not isinstance(config, LowBitConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected a lowbit.LowBitConfig")
    files, weight_map = files_of(source)
    description = read_config(source)
    method = quantization_method(description)
    if method is not None:
        raise ValueError(f"{source} is quantised already, by the method {method!r}; expected float weights")
    if (source / "adapter_config.json").exists():
        raise ValueError(
            f"{source} has adapter_config.json: weights of an adapter belong to this model; merge them into it first, or "
            "move the adapter away"
        )
    tensors = read_files(files, weight_map)
    model = meta_model(source, len(tensors))
    outputs, left = _plan(model, config, tensors, source)

    # What transformers will take the new names for.
    placed = {output.layer: (output.name, output.packed_info()) for output in outputs if output.config is not None}
    floats = {output.name for output in outputs if output.config is None}
    place_packed(model, placed, floats, torch.float32)
    found = names_in_model(model, [output.name for output in outputs])
    for output in outputs:
        expected = f"{output.layer}.packed_weight"
        if output.config is not None and found[output.name] != (expected, None):
            raise ValueError(
                f"{output.source.name} would be packed as {output.name}, which transformers takes for "
                f"{found[output.name][0]}; expected {expected}. "
                f"Leave the layer float: overrides={{{output.layer!r}: None}}"
            )
    return outputs, left, description


@dataclass(frozen=True)
class PlannedSize:
    """What a quantised checkpoint would take."""

    bytes: int  # of its files of weights, headers included
    packed_bytes: int
    packed_weights: int


def planned_size(
    source: str | os.PathLike, config: LowBitConfig, max_shard_bytes: int = MAX_SHARD_BYTES
) -> PlannedSize:
    """The bytes that :func:`quantize_checkpoint` would write, to the byte; only headers are read.

    Raises:
        OSError, ValueError: as :func:`quantize_checkpoint`.
    """
    outputs = _read_and_plan(Path(source), config)[0]
    total = 0
    for shard in _shards(outputs, max_shard_bytes):
        header, size = header_of([_described(output.stored(Path())) for output in shard])
        total += len(header) + size
    packed = [output for output in outputs if output.config is not None]
    return PlannedSize(
        total,
        sum(output.stored(Path()).bytes for output in packed),
        sum(math.prod(output.packed_info().shape) for output in packed),
    )


def _described(stored: Stored) -> tuple[str, str, tuple[int, ...], int]:
    return stored.name, stored.dtype, stored.shape, stored.bytes


def quantize_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    config: LowBitConfig,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    packed: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> CheckpointSummary:
    """Quantises a checkpoint of transformers, a band of rows at a time: memory stays at some tens of megabytes.

    The result has the same bytes as ``from_pretrained(source, quantization_config=config)``, and is loaded by
    ``from_pretrained(target)`` after ``import lowbit.transformers``.

    Args:
        source: a directory with config.json and safetensors files, of any architecture that transformers knows.
        target: a directory that is empty or not there yet; symbolic links are followed. It appears when all is written,
            in one step, which is tried before the work begins; a run that is killed leaves at most a hidden
            ``.NAME-*.partial`` beside it, which does not load, and which the next run to the same target removes.
        config: what to quantise, and how.
        max_shard_bytes: a file gets no second tensor beyond this many bytes.
        packed: called once, when all is checked and before anything is written, for layers that are packed already:
            each by its name, uint8 [bytes] of the config's width; the others are rounded to nearest.
        progress: called as ``progress(bytes read, bytes to read, name of the tensor)`` after each band.

    Raises:
        OSError: a file is missing or cannot be read; target is not empty, a mount point, or cannot be written; the disk
            is full. Only if the last step fails, although it had worked before, all is kept: the message says where.
        ValueError: an unknown architecture, a damaged file, tensors that are missing, not finite or of another shape or
            dtype than the model's, or different configs for layers that share a weight. Nothing is left of target then.
    """
    begin = time.perf_counter()
    source, target = Path(source), Path(target).absolute()
    check_shard_bytes(max_shard_bytes)
    resolve_new_directory(target)  # refused before the files are read
    outputs, left, description = _read_and_plan(source, config)
    total = sum(output.source_bytes for output in outputs)
    target_bytes = sum(output.stored(Path()).bytes for output in outputs)
    read = 0

    def done(count: int, name: str) -> None:
        nonlocal read
        read += count
        if progress is not None:
            progress(read, total, name)

    with new_checkpoint(target, target_bytes) as directory:
        ready = packed() if packed else {}

        def write(output: _Output, writer: Writer) -> None:
            advance = functools.partial(done, name=output.name)
            if output.layer in ready:
                _write_packed(output, ready[output.layer], writer, advance)
            elif output.config is not None:
                _pack(output, writer, advance)
            else:
                for chunk in chunks(output.source):
                    writer.write(chunk.numpy())
                    advance(chunk.numel())

        entries = write_tensors(directory, outputs, max_shard_bytes, write)
        copy_files(source, directory)
        # Last: without it nothing loads.
        write_json(directory / CONFIG, description | {"quantization_config": config.to_dict()})
    left_bytes = sum(output.source.bytes for output in outputs if output.config is None and output.name in left)
    return CheckpointSummary(target, entries, total, target_bytes, time.perf_counter() - begin, left, left_bytes)


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _WEIGHTS_OF_ALL_FRAMEWORKS)


def copy_files(source: Path, target: Path) -> None:
    """Copies what belongs to a checkpoint beside its weights: the tokenizer, settings, templates, a licence."""
    modules = _modules(source)
    for entry in sorted(source.iterdir()):
        if entry.is_file():
            if entry.name != CONFIG and not _is_weights(entry.name):
                _copy(entry, target / entry.name)
        elif entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            files = [Path(parent) / name for parent, _, names in os.walk(entry) for name in names]
            # A directory with weights in it holds another model or the same one for another framework (original/, onnx/).
            if entry.name not in modules and any(_is_weights(file.name) for file in files):
                continue
            for file in filter(Path.is_file, files):
                copied = target / file.relative_to(source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                _copy(file, copied)
                sync_path(copied.parent)


def _modules(source: Path) -> set[str]:
    """The directories that a model of sentence-transformers names; they may have small weights of their own."""
    try:
        listed = json.loads((source / "modules.json").read_text(encoding="utf-8"))
        return {Path(module["path"]).parts[0] for module in listed if module["path"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def write_json(path: Path, content: dict) -> None:
    """Writes a file that is not there yet, and sees that it is on the disk."""
    with open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        sync(file)


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reader, open(target, "xb") as writer:
        shutil.copyfileobj(reader, writer)
        sync(writer)
