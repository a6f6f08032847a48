"""Packs and unpacks weight matrices, reads their headers, and converts them to other formats."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from .header import PackedInfo

PLANES_VERSION = 4  # the version of the format that has activations of 16 bits


class Unpacked(NamedTuple):
    """The arguments of :func:`pack` that reproduce a packed weight.

    ``codes`` uint8 [n, k], ``scales`` and ``mins`` float32 [n, groups], ``bias`` float32 [n], ``levels`` int8 [2**bits]. With
    ``rotated_inputs`` they describe the weights for rotated inputs.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None
    bias: Tensor | None
    bits: int
    group_size: int | None
    mapping: str
    levels: Tensor | None = None
    rotated_inputs: int = 0
    activation_bits: int = 8

    def factors(self) -> Tensor:
        """The factor of the scale for each code, float32 [2**bits]."""
        if self.levels is not None:
            return self.levels.float()
        codes = torch.arange(2**self.bits, dtype=torch.float32, device="cpu")
        if self.mins is not None:
            return codes
        return 2 * codes - 1 if self.bits == 1 else codes - 2 ** (self.bits - 1)


def check_packed(packed: Tensor) -> None:
    """Raises TypeError or ValueError unless ``packed`` is a contiguous uint8 tensor of one dimension on the CPU."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"packed is a {type(packed).__name__}; expected a uint8 tensor")
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ValueError(
            f"packed has dtype {packed.dtype} and shape {list(packed.shape)}; expected torch.uint8 and one dimension"
        )
    if packed.device.type != "cpu":
        raise ValueError(f"packed is on {packed.device}; expected the CPU")
    if not packed.is_contiguous():
        raise ValueError("packed is not contiguous")


def info(packed: Tensor) -> PackedInfo:
    """Describes a packed weight after verifying its header.

    Raises:
        ValueError: not a packed weight, an unsupported version, a truncated weight, or a modified header.
    """
    check_packed(packed)
    return PackedInfo(**_C.info(packed.data_ptr(), packed.numel(), False))


def info_of_experts(packed: Tensor, *, verified: bool = False) -> PackedInfo:
    """Describes the matrices of experts, uint8 [experts, bytes], after verifying the header of each.

    Args:
        verified: also check every byte against the checksums.

    Raises:
        ValueError: as :func:`info`, with the expert's number; or formats of experts differ (other than in their levels).
    """
    if isinstance(packed, Tensor) and (packed.dim() != 2 or packed.shape[0] < 1):
        raise ValueError(f"packed has shape {list(packed.shape)}; expected [experts, bytes]")
    first: PackedInfo | None = None
    for number, matrix in enumerate(packed):
        try:
            header = verify(matrix) if verified else info(matrix)
        except ValueError as error:
            raise ValueError(f"expert {number}: {error}") from error
        first = first or header
        if replace(header, levels=first.levels) != first:
            raise ValueError(f"expert {number} is packed as {header}; expected {first}, as expert 0")
    assert first is not None  # there is at least one
    return replace(first, experts=len(packed))


def verify(packed: Tensor) -> PackedInfo:
    """Like :func:`info`, after checking every byte against the checksum in the header.

    Raises:
        ValueError: as :func:`info`, or bytes after the header were modified.
    """
    check_packed(packed)
    return PackedInfo(**_C.info(packed.data_ptr(), packed.numel(), True))


def describe(
    shape: tuple[int, int],
    bits: int,
    group_size: int | None,
    mapping: str,
    has_bias: bool,
    levels: Sequence[int] | None = None,
    rotated_inputs: int = 0,
    activation_bits: int = 8,
) -> PackedInfo:
    """The :class:`PackedInfo` of a weight of ``shape`` [n, k] before it is packed.

    With mapping "levels" and no ``levels``, because they are not fitted yet, the table is all zeros.

    Raises:
        ValueError: as :func:`pack`.
    """
    check_format(bits, group_size, mapping)
    n, k = shape
    table = None if mapping != "levels" else struct.pack(f"{2**bits}b", *(levels or 2**bits * [0]))
    described = _C.describe_packed(
        n, k, bits, group_size or 0, mapping == "affine", has_bias, table, rotated_inputs, activation_bits
    )
    return PackedInfo(**described)


def check_activation_bits(activation_bits: int) -> None:
    """Raises TypeError or ValueError unless ``activation_bits`` is 8 or 16."""
    if isinstance(activation_bits, bool) or not isinstance(activation_bits, int):
        raise TypeError(f"activation_bits is {activation_bits!r}; expected 8 or 16")
    if activation_bits not in (8, 16):
        raise ValueError(f"activation_bits is {activation_bits}; expected 8 or 16")


def check_format(bits: int, group_size: int | None, mapping: str) -> None:
    """Checks bits, group size and mapping.

    Raises:
        TypeError, ValueError: bits are not an int from 1 to 8, the group size is neither a positive multiple of 16 nor
            None, or the mapping is not "symmetric", "affine" or, at 2, 3 or 4 bits, "levels".
    """
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"bits is {bits!r}; expected an int")
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}; expected 1 to 8")
    if group_size is not None:
        if isinstance(group_size, bool) or not isinstance(group_size, int):
            raise TypeError(f"group_size is {group_size!r}; expected an int or None")
        if group_size <= 0 or group_size % 16:
            raise ValueError(f"group_size is {group_size}; expected a positive multiple of 16, or None for one group per row")
    if mapping not in ("symmetric", "affine", "levels"):
        raise ValueError(f"mapping is {mapping!r}; expected 'symmetric', 'affine' or 'levels'")
    if mapping == "levels" and not 2 <= bits <= 4:
        raise ValueError(f"bits is {bits}; expected 2, 3 or 4 with a table of levels")


def pack(
    codes: Tensor,
    scales: Tensor,
    mins: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
    group_size: int | None,
    mapping: str | None = None,
    levels: Tensor | Sequence[int] | None = None,
    rotated_inputs: int = 0,
    activation_bits: int = 8,
) -> Tensor:
    """Packs quantized weights into lowbit's format (docs/format.md).

    A weight is ``scale * (code - 2**(bits - 1))`` when symmetric (``+-scale`` at 1 bit), ``scale * code + min`` when affine,
    and ``scale * levels[code]`` with a table of levels. Scales and mins are stored as float16 with a float32 factor per row.
    Float16 values are stored exactly, if a power of two brings the row into float16's range. In other rows, a value of at
    least 2**-29 of the row's largest is rounded to 11 significant bits, and a smaller one to a multiple of 2**-39 of the
    largest, which may be 0.

    Args:
        codes: uint8 [n, k], each below ``2**bits``.
        scales: float32 [n, groups], finite, any sign; ``groups = ceil(k / group_size)``, or 1.
        mins: float32 [n, groups], finite; required with ``mapping="affine"``, otherwise None.
        bias: float32 [n], finite, or None.
        bits: 1 to 8; 2 to 4 with levels.
        group_size: inputs per group, a multiple of 16; None for one group per row.
        mapping: "symmetric", "affine" or "levels"; None: "levels" if ``levels`` is given, else "symmetric".
        levels: ``2**bits`` integers from -127 to 127, one for each code, for the whole matrix: int8, or a sequence of ints
            (:data:`lowbit.levels.TABLES` has the usual ones); required with ``mapping="levels"``, otherwise None.
        rotated_inputs: block size of the rotation (16, 32, 64 or 128, a divisor of k) if the codes are those of weights for
            rotated inputs (docs/format.md): :func:`lowbit.linear` then rotates its inputs. 0: no rotation.
        activation_bits: 8: :func:`lowbit.linear` rounds its inputs to int8. 16: to two int8 planes, whose results it adds.

    Returns:
        uint8 [bytes]: header, scales and codes; the same on every CPU.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
    """
    _check_parts(codes, scales, mins, bias)
    if mapping is None:
        mapping = "symmetric" if levels is None else "levels"
    check_format(bits, group_size, mapping)
    check_activation_bits(activation_bits)
    if (mapping == "affine") != (mins is not None):
        raise ValueError(f"mapping is {mapping!r} {'without' if mins is None else 'with'} mins; affine weights have mins")
    if (mapping == "levels") != (levels is not None):
        raise ValueError(
            f"mapping is {mapping!r} {'without' if levels is None else 'with'} levels; they belong to mapping 'levels'"
        )
    if levels is not None:
        levels = as_levels(levels, bits)
    packed = torch.ops.lowbit.pack(
        codes.detach().contiguous(),
        scales.detach().contiguous(),
        None if mins is None else mins.detach().contiguous(),
        None if bias is None else bias.detach().contiguous(),
        bits,
        group_size or 0,
        levels,
        rotated_inputs,
    )
    if activation_bits != 8:
        _C.set_activation_bits(packed.data_ptr(), packed.numel(), activation_bits)
    return packed


def with_activation_bits(packed: Tensor, activation_bits: int) -> Tensor:
    """A copy of a packed weight with other activation bits. Codes and scales stay as they are.

    Args:
        packed: from :func:`pack`.
        activation_bits: 8 or 16, as in :func:`pack`.

    Returns:
        uint8 [bytes], of the same size.

    Raises:
        TypeError, ValueError: not a packed weight, another number of bits, or 16 bits with a vendor's packed format.
    """
    check_packed(packed)
    check_activation_bits(activation_bits)
    copy = packed.clone()
    _C.set_activation_bits(copy.data_ptr(), copy.numel(), activation_bits)
    return copy


def _check_parts(codes: Tensor, scales: Tensor, mins: Tensor | None, bias: Tensor | None) -> None:
    """Checks types, dtypes and devices; the operator checks shapes and values.

    Raises:
        TypeError, ValueError: not a tensor, or a dtype or device that :func:`pack` does not accept.
    """
    for name, tensor, dtype, optional in (
        ("codes", codes, torch.uint8, False),
        ("scales", scales, torch.float32, False),
        ("mins", mins, torch.float32, True),
        ("bias", bias, torch.float32, True),
    ):
        if tensor is None and optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; expected a tensor")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; expected the CPU")


def as_levels(levels: Tensor | Sequence[int], bits: int) -> Tensor:
    """The levels of ``2**bits`` codes as an int8 tensor.

    Raises:
        TypeError, ValueError: not ``2**bits`` integers from -127 to 127.
    """
    if isinstance(levels, Tensor):
        if levels.dtype != torch.int8:
            raise TypeError(f"levels have dtype {levels.dtype}; expected torch.int8")
        levels = levels.tolist() if levels.dim() == 1 else [levels.tolist()]
    levels = list(levels)
    if len(levels) != 2**bits:
        raise ValueError(f"there are {len(levels)} levels; expected {2**bits} at {bits} bits")
    for level in levels:
        if isinstance(level, bool) or not isinstance(level, int):
            raise TypeError(f"levels hold {level!r}; expected integers")
        if not -127 <= level <= 127:
            raise ValueError(f"levels hold {level}; expected -127 to 127")
    return torch.tensor(levels, dtype=torch.int8, device="cpu")


def unpack(packed: Tensor) -> Unpacked:
    """Returns the arguments of :func:`pack` that give ``packed``, after verifying every byte.

    Raises:
        ValueError: as :func:`verify`.
    """
    header = info(packed)
    codes, scales, mins, bias = torch.ops.lowbit.unpack(packed)
    return Unpacked(
        codes,
        scales,
        mins if header.mapping == "affine" else None,
        bias if header.has_bias else None,
        header.bits,
        header.group_size,
        header.mapping,
        None if header.levels is None else torch.tensor(header.levels, dtype=torch.int8, device="cpu"),
        header.rotated_inputs,
        header.activation_bits,
    )


def repack(packed: Tensor, format: str) -> Tensor:
    """Converts packed weights to a vendor's packed format.

    Args:
        packed: from :func:`pack`, or in a vendor's format.
        format: "panel16", or a format of a library that :func:`load_kernels` has loaded.

    Returns:
        uint8 [bytes]. The vendor documents which precision its format keeps and how its kernels round.

    Raises:
        TypeError, ValueError: not a packed weight, no such format, or a weight that the format cannot represent.
    """
    check_packed(packed)
    if not isinstance(format, str):
        raise TypeError(f"format is a {type(format).__name__}; expected a str")
    out = torch.empty(_C.repacked_bytes(packed.data_ptr(), packed.numel(), format), dtype=torch.uint8, device="cpu")
    _C.repack(packed.data_ptr(), packed.numel(), format, out.data_ptr(), out.numel())
    return out
