"""Lists the tensors of a checkpoint, packed or not."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ..packed.header import PackedInfo
from .gguf_reader import StoredBlocks, read_gguf
from .safetensors import Stored, files_of, packed_info, read_files


@dataclass(frozen=True)
class CheckpointEntry:
    """A tensor of a checkpoint, packed or not."""

    name: str  # in the file
    kind: str  # "packed", the dtype, such as "bfloat16", or GGUF's type, such as "Q4_K"
    shape: tuple[int, ...]  # packed: [out, in], or [experts, out, in]
    bits: float  # per code if packed, else per element; a block's scales count
    group_size: int | None  # None: one group per row, or not packed
    mapping: str | None  # "symmetric" or "affine"; None: not packed
    bytes: int  # in the file
    file: str  # its name, without the directory
    rotated_inputs: int | None = None  # of a block; 0: not rotated; None: not packed
    activation_bits: int | None = None  # 8 or 16; None: not packed


# Name of a dtype in safetensors -> its name in torch, and its bits.
DTYPES_OF_TORCH = {
    "F64": ("float64", 64), "F32": ("float32", 32), "BF16": ("bfloat16", 16), "F16": ("float16", 16),
    "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16), "I8": ("int8", 8), "U8": ("uint8", 8),
    "BOOL": ("bool", 8), "U16": ("uint16", 16), "U32": ("uint32", 32), "U64": ("uint64", 64), "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6), "F4": ("float4_e2m1fn", 4),
}  # fmt: skip


def describe_entry(stored: Stored, info: PackedInfo | None) -> CheckpointEntry:
    """Describes a tensor; `info` is the header of a packed one."""
    if info is not None:
        shape, rotated, activation_bits = info.shape, info.rotated_inputs, info.activation_bits
        kind, bits, group_size, mapping = "packed", info.bits, info.group_size, info.mapping
    else:
        shape, group_size, mapping, rotated, activation_bits = stored.shape, None, None, None, None
        elements = math.prod(shape)  # for an unknown dtype, derive the bits from the size in the file
        kind, bits = DTYPES_OF_TORCH.get(stored.dtype, (stored.dtype.lower(), 8 * stored.bytes // elements if elements else 0))
    return CheckpointEntry(
        stored.name, kind, shape, bits, group_size, mapping, stored.bytes, stored.path.name, rotated, activation_bits
    )


def _describe_blocks(stored: StoredBlocks) -> CheckpointEntry:
    """Describes a tensor of a GGUF file."""
    kind, bits = DTYPES_OF_TORCH.get(stored.type.name, (stored.type.name, 8 * stored.type.bytes / stored.type.block))
    size = stored.bytes + stored.type.tail
    return CheckpointEntry(stored.name, kind, stored.shape, bits, None, None, size, stored.path.name)


def inspect_checkpoint(path: str | os.PathLike[str]) -> list[CheckpointEntry]:
    """The tensors of a checkpoint, packed or not, in the order of the files. Only headers are read.

    Args:
        path: a directory with model.safetensors or model.safetensors.index.json, one .safetensors file, or a .gguf file (any
            part of a split one).

    Raises:
        OSError: there is no such checkpoint, or a shard is missing.
        ValueError: not a safetensors or GGUF file, a damaged file, or one that disagrees with the index.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return [_describe_blocks(stored) for stored in read_gguf(path).tensors.values()]
    if path.is_file() and path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is a file; expected .safetensors or .gguf at the end of its name, or a checkpoint's directory"
        )
    files, weight_map = ([path], None) if path.is_file() else files_of(path)
    tensors = sorted(read_files(files, weight_map).values(), key=lambda stored: (stored.path, stored.offset))
    return [
        describe_entry(stored, packed_info(stored) if stored.name.endswith("packed_weight") else None) for stored in tensors
    ]
