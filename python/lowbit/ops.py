"""The operators as functions, and their shapes for tracing (fake kernels)."""

import inspect
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import _C


@dataclass(frozen=True)
class PackedInfo:
    """What the header of a packed weight says."""

    bits: int  # of a code, 1 to 8
    mapping: str  # "symmetric", "affine" or "levels"
    group_size: int | None  # None: one group per row
    out_features: int  # rows, n
    in_features: int  # of a row, k
    groups: int  # per row
    has_bias: bool  # inside the packed weight
    total_bytes: int  # with the header
    version: int  # of the format: 2 with levels, else 1
    format: str = "panel16"  # of the bytes behind the header; or a vendor's
    levels: tuple[int, ...] | None = None  # of mapping "levels", by code; of experts: of the first
    experts: int | None = None  # so many matrices, of which everything above is said of each; None: one matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: (out_features, in_features), behind the number of experts if there are some."""
        one = (self.out_features, self.in_features)
        return one if self.experts is None else (self.experts, *one)

    @property
    def bits_per_weight(self) -> float:
        """All stored bits (codes, scales, sums, bias, padding, header) divided by the number of weights."""
        return 8 * self.total_bytes / (self.out_features * self.in_features)


class Unpacked(NamedTuple):
    """What :func:`pack` took: ``codes`` uint8 [n, k], ``scales`` and ``mins`` float32 [n, groups], ``bias`` float32 [n],
    ``levels`` int8 [2**bits]."""

    codes: Tensor
    scales: Tensor
    mins: Tensor | None
    bias: Tensor | None
    bits: int
    group_size: int | None
    mapping: str
    levels: Tensor | None = None


def _check_packed(packed: Tensor) -> None:
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
        ValueError: not a packed weight, of another version, truncated, or with an altered header.
    """
    _check_packed(packed)
    return PackedInfo(**_C.info(packed.data_ptr(), packed.numel(), False))


def info_of_experts(packed: Tensor, *, verified: bool = False) -> PackedInfo:
    """Describes the matrices of experts, uint8 [experts, bytes], after verifying the header of each.

    Args:
        verified: check every byte against the checksums, too.

    Raises:
        ValueError: as :func:`info`, of which expert; or they are not packed alike (their tables of levels may differ).
    """
    if isinstance(packed, Tensor) and (packed.dim() != 2 or packed.shape[0] < 1):
        raise ValueError(f"packed has shape {list(packed.shape)}; expected [experts, bytes]")
    first: PackedInfo | None = None
    for number, matrix in enumerate(packed):
        try:
            found = verify(matrix) if verified else info(matrix)
        except ValueError as error:
            raise ValueError(f"expert {number}: {error}") from error
        first = first or found
        if replace(found, levels=first.levels) != first:
            raise ValueError(f"expert {number} is packed as {found}; expected {first}, as expert 0")
    assert first is not None  # there is one at least
    return replace(first, experts=len(packed))


def verify(packed: Tensor) -> PackedInfo:
    """Like :func:`info`, after checking every byte against the checksum in the header.

    Raises:
        ValueError: as :func:`info`, or altered bytes behind the header.
    """
    _check_packed(packed)
    return PackedInfo(**_C.info(packed.data_ptr(), packed.numel(), True))


def describe(
    shape: tuple[int, int],
    bits: int,
    group_size: int | None,
    mapping: str,
    has_bias: bool,
    levels: Sequence[int] | None = None,
) -> PackedInfo:
    """What :func:`info` will say about a weight of ``shape`` [n, k] once it is packed. Mapping "levels" without its
    ``levels`` (they are not known before they are fitted): all of them zero.

    Raises:
        ValueError: as :func:`pack`.
    """
    check_format(bits, group_size, mapping)
    n, k = shape
    table = None if mapping != "levels" else struct.pack(f"{2**bits}b", *(levels or 2**bits * [0]))
    return PackedInfo(**_C.describe_packed(n, k, bits, group_size or 0, mapping == "affine", has_bias, table))


def check_format(bits: int, group_size: int | None, mapping: str) -> None:
    """Refuses what no packed weight can be.

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
            raise ValueError(
                f"group_size is {group_size}; expected a positive multiple of 16, or None for one group per row"
            )
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
) -> Tensor:
    """Packs quantised weights into lowbit's format (docs/format.md).

    A weight is ``scale * (code - 2**(bits - 1))`` when symmetric (``+-scale`` at 1 bit), ``scale * code + min`` when affine, and
    ``scale * levels[code]`` with a table of levels.
    Scales and mins are stored as float16 with a float32 factor per row: float16 values survive exactly (if a power of two
    brings the row into float16's range), others are rounded to 11 significant bits.

    Args:
        codes: uint8 [n, k], each below ``2**bits``.
        scales: float32 [n, groups], finite, any sign; ``groups = ceil(k / group_size)``, or 1.
        mins: float32 [n, groups], finite; only and always with ``mapping="affine"``.
        bias: float32 [n], finite, or None.
        bits: 1 to 8; 2 to 4 with levels.
        group_size: inputs per group, a multiple of 16; None for one group per row.
        mapping: "symmetric", "affine" or "levels"; None: "levels" if there are any, else "symmetric".
        levels: ``2**bits`` integers from -127 to 127, one for each code, for the whole matrix: int8, or a sequence of ints
            (:data:`lowbit.levels.TABLES` has the usual ones); only and always with ``mapping="levels"``.

    Returns:
        uint8 [bytes]: header, scales and codes; the same on every CPU.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
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
    if mapping is None:
        mapping = "symmetric" if levels is None else "levels"
    check_format(bits, group_size, mapping)
    if (mapping == "affine") != (mins is not None):
        raise ValueError(f"mapping is {mapping!r} {'without' if mins is None else 'with'} mins; affine weights have mins")
    if (mapping == "levels") != (levels is not None):
        raise ValueError(
            f"mapping is {mapping!r} {'without' if levels is None else 'with'} levels; they belong to mapping 'levels'"
        )
    if levels is not None:
        levels = as_levels(levels, bits)
    return torch.ops.lowbit.pack(
        codes.detach().contiguous(),
        scales.detach().contiguous(),
        None if mins is None else mins.detach().contiguous(),
        None if bias is None else bias.detach().contiguous(),
        bits,
        group_size or 0,
        levels,
    )


def as_levels(levels: Tensor | Sequence[int], bits: int) -> Tensor:
    """Levels of ``2**bits`` codes as int8.

    Raises:
        TypeError, ValueError: others than ``2**bits`` integers from -127 to 127.
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
    return torch.tensor(levels, dtype=torch.int8)


def unpack(packed: Tensor) -> Unpacked:
    """The inverse of :func:`pack`; verifies every byte first.

    Raises:
        ValueError: as :func:`verify`.
    """
    described = info(packed)
    codes, scales, mins, bias = torch.ops.lowbit.unpack(packed)
    return Unpacked(
        codes,
        scales,
        mins if described.mapping == "affine" else None,
        bias if described.has_bias else None,
        described.bits,
        described.group_size,
        described.mapping,
        None if described.levels is None else torch.tensor(described.levels, dtype=torch.int8),
    )


def repack(packed: Tensor, format: str) -> Tensor:
    """The same weights in another packed format, for kernels that read no other.

    Args:
        packed: from :func:`pack`, or of a vendor's format.
        format: "panel16", or a format of a library that :func:`load_kernels` has loaded.

    Returns:
        uint8 [bytes]. What a vendor's format keeps of the weights, and how its kernels round, is the vendor's to say.

    Raises:
        TypeError, ValueError: not a packed weight, no such format, or a weight that the format does not hold.
    """
    _check_packed(packed)
    if not isinstance(format, str):
        raise TypeError(f"format is a {type(format).__name__}; expected a str")
    out = torch.empty(_C.repacked_bytes(packed.data_ptr(), packed.numel(), format), dtype=torch.uint8)
    _C.repack(packed.data_ptr(), packed.numel(), format, out.data_ptr(), out.numel())
    return out


# Looked up once: torch.ops.lowbit.linear takes 0.4 us more to call.
_linear = torch.ops.lowbit.linear.default


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x, packed_weight, out_features):
        return _linear(x, packed_weight, out_features)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, packed_weight, _ = inputs
        ctx.save_for_backward(packed_weight)
        ctx.in_features = x.shape[-1]

    @staticmethod
    def backward(ctx, grad):
        (packed_weight,) = ctx.saved_tensors
        rows = torch.arange(grad.shape[-1])
        weight = torch.ops.lowbit.embedding(rows, packed_weight, ctx.in_features, dtype=grad.dtype)
        return grad @ weight, None, None


def linear(x: Tensor, packed_weight: Tensor, out_features: int) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight; the activations are quantised to int8 per row on the fly.

    Args:
        x: [..., in_features] float32, bfloat16 or float16, any strides.
        packed_weight: from :func:`pack`.
        out_features: the rows of the packed weight.

    Returns:
        [..., out_features] of x's dtype. A row with a NaN or an infinity gives a row of NaN.

    The gradient with respect to x is that of a float layer with the dequantised weight: it passes straight through the
    rounding of the activations. The packed weight has none.

    Raises:
        ValueError: a wrong dtype, shape or device, or an invalid packed weight.
    """
    # An autograd kernel would do the same, but in Python it would cost every call several microseconds.
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        # Programs for other places hold the operator.
        if not torch.compiler.is_exporting() and not torch.jit.is_tracing():
            return _StraightThrough.apply(x, packed_weight, out_features)
    return _linear(x, packed_weight, out_features)


def linears(x: Tensor, packed_weights: Sequence[Tensor], out_features: Sequence[int]) -> tuple[Tensor, ...]:
    """Several :func:`linear` of the same input, which is quantised once; the results have the same bits.

    Args:
        x: [..., in_features] float32, bfloat16 or float16, any strides.
        packed_weights: 1 to 16 weights from :func:`pack`, all of ``in_features`` inputs, of any widths and group sizes.
        out_features: the rows of each.

    Returns:
        One tensor [..., out_features] of x's dtype for each weight: views of one tensor [..., sum of out_features].

    The gradient with respect to x is that of :func:`linear`.

    Raises:
        ValueError: as :func:`linear`, or not as many weights as ``out_features``.
    """
    packed_weights, out_features = list(packed_weights), list(out_features)
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        if not torch.compiler.is_exporting() and not torch.jit.is_tracing():
            return tuple(linear(x, packed, n) for packed, n in zip(packed_weights, out_features, strict=True))
    return torch.ops.lowbit.linears(x, packed_weights, out_features).split(out_features, -1)


class _StraightThroughExperts(torch.autograd.Function):
    @staticmethod
    def forward(x, packed_weights, experts, out_features):
        return torch.ops.lowbit.linear_experts(x, packed_weights, experts, out_features)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, packed_weights, experts, _ = inputs
        ctx.save_for_backward(packed_weights, experts)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx, grad):
        packed_weights, experts = ctx.saved_tensors
        rows, result = torch.arange(grad.shape[-1]), grad.new_zeros(ctx.shape)
        for expert in experts.unique().tolist():
            weight = torch.ops.lowbit.embedding(rows, packed_weights[expert], ctx.shape[-1], dtype=grad.dtype)
            # A row that goes to an expert twice takes part twice.
            result += torch.where((experts == expert)[..., None], grad, 0).sum(-2) @ weight
        return result, None, None, None


def linear_experts(x: Tensor, packed_weights: Tensor, experts: Tensor, out_features: int) -> Tensor:
    """:func:`linear` of each row of x with the matrices of some experts, as layers of mixtures of experts choose them.

    Only the matrices of chosen experts are read, all rows of one at once, and a row of x is quantised once for all of its
    experts. The results have the bits of :func:`linear`.

    Args:
        x: [..., in_features] float32, bfloat16 or float16, any strides.
        packed_weights: uint8 [experts, bytes], contiguous: in each row a weight from :func:`pack` of ``out_features`` rows
            and ``in_features`` inputs, all with groups of the same size. ``torch.stack`` makes it of several.
        experts: int64 [..., e], any strides: the e experts that each row of x goes to, 0 for the first.
        out_features: the rows of each packed weight.

    Returns:
        [..., e, out_features] of x's dtype.

    The gradient with respect to x is that of float layers with the dequantised weights, as that of :func:`linear`.

    Raises:
        IndexError: there is no such expert.
        ValueError: a wrong dtype, shape or device, or an invalid packed weight.
    """
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        if not torch.compiler.is_exporting() and not torch.jit.is_tracing():
            return _StraightThroughExperts.apply(x, packed_weights, experts, out_features)
    return torch.ops.lowbit.linear_experts(x, packed_weights, experts, out_features)


def embedding(
    indices: Tensor, packed_weight: Tensor, embedding_dim: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows of a packed table, dequantised.

    Args:
        indices: [...] int32 or int64, any strides.
        packed_weight: from :func:`pack`; [num_embeddings, embedding_dim] weights.
        embedding_dim: the inputs of the packed weight.
        dtype: of the result: float32, bfloat16 or float16.

    Returns:
        [..., embedding_dim] of ``dtype``.

    Raises:
        IndexError: an index is out of range.
        ValueError: a wrong dtype, shape or device, or an invalid packed weight.
    """
    return torch.ops.lowbit.embedding(indices, packed_weight, embedding_dim, dtype=dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention over static caches: writes ``k`` and ``v`` behind what the caches hold, then attends.

    Time grows with the positions that the caches hold, not with ``max_length``. The result of a position has the same
    bits however a text was cut into calls.

    Args:
        q: [batch, heads, positions, width] float32, bfloat16 or float16, any strides; width a multiple of 16 up to 512.
        k: [batch, kv_heads, positions, width] of q's dtype, any strides; heads is a multiple of kv_heads, and head h of
            q belongs to head ``h // (heads // kv_heads)``.
        v: [batch, kv_heads, positions, value_width], as k; value_width is that of the cache.
        k_cache, v_cache: [batch, kv_heads, max_length, width] and [..., value_width], contiguous; max_length and
            value_width multiples of 16, as width. Both float32, bfloat16 or float16, whatever q is, or int8. Changed in
            place. The order of values within a head is this operator's: start with any content (``torch.zeros``, for
            example), and leave the rest to it. :func:`cache_width` has the size of the last dimension: int8 caches have
            4 bytes more, for a float32 scale for each position of a head. What goes into a smaller type is rounded to
            nearest; docs/design.md has the formula. A position with a key or value that is not finite is NaN in an int8
            cache.
        start: int64, one element: how many positions the caches hold. 0 starts a new text. Position i of q is position
            ``start + i`` of the text and sees all up to itself.
        scale: of the products of q and k; None: ``width ** -0.5``.
        window: a query sees its own position and ``window - 1`` before it (sliding window); None: all before it.
        softcap: scores become ``softcap * tanh(score / softcap)``, as in Gemma 2; None: they stay.
        sinks: [heads] of q's dtype: a score more for each head that takes part in the softmax and has no value, as in
            gpt-oss; None: there is none.

    Returns:
        [batch, positions, heads, value_width] of q's dtype, contiguous. NaN where a visible product is NaN. No gradients.

    Raises:
        IndexError: ``start`` is negative, or the caches are too short for all positions. They are unchanged.
        ValueError: a wrong dtype, shape, stride or device. The caches are unchanged.
    """
    if scale is None:
        scale = max(1, *q.shape[-1:]) ** -0.5  # a width of 0, or none, is for the operator to refuse
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected 1 or more, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected a positive number, or None")
    return torch.ops.lowbit.attention(q, k, v, k_cache, v_cache, start, scale, window or 0, softcap or 0.0, sinks)


def cache_width(width: int, dtype: torch.dtype) -> int:
    """The last dimension of a cache of :func:`attention` for keys or values of that width."""
    return width + _scale_bytes(dtype)


def _scale_bytes(dtype: torch.dtype) -> int:
    return 4 if dtype is torch.int8 else 0


# register_fake asks inspect for the module of this file; unless it knows, it looks at the files of all modules: 3 ms.
getattr(inspect, "modulesbyfile", {})[os.path.abspath(__file__)] = __name__


@torch.library.register_fake("lowbit::linear")
def _(x, packed_weight, out_features):
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("lowbit::linears")
def _(x, packed_weights, out_features):
    return x.new_empty((*x.shape[:-1], sum(out_features)))


@torch.library.register_fake("lowbit::linear_experts")
def _(x, packed_weights, experts, out_features):
    return x.new_empty((*experts.shape, out_features))


@torch.library.register_fake("lowbit::embedding")
def _(indices, packed_weight, embedding_dim, *, dtype=None):
    return indices.new_empty((*indices.shape, embedding_dim), dtype=dtype or torch.float32)


@torch.library.register_fake("lowbit::attention")
def _(q, k, v, k_cache, v_cache, start, scale, window=0, softcap=0.0, sinks=None):
    batch, heads, positions, _ = q.shape
    return q.new_empty((batch, positions, heads, v_cache.shape[-1] - _scale_bytes(v_cache.dtype)))


@torch.library.register_fake("lowbit::pack")
def _(codes, scales, mins, bias, bits, group_size, levels=None):
    n, k = codes.shape
    table = None if levels is None else bytes(len(levels))  # their values do not change the size
    size = _C.packed_bytes(int(n), int(k), bits, group_size, mins is not None, bias is not None, table)
    return codes.new_empty((size,))


@torch.library.register_fake("lowbit::quantize")
def _(weight, bits, group_size, affine, search):
    n, k = weight.shape
    groups = -(-k // group_size) if group_size else 1
    new = weight.new_empty
    return (
        new((n, k), dtype=torch.uint8),
        new((n, groups), dtype=torch.float32),
        new((n, groups) if affine else (0, 0), dtype=torch.float32),
    )


@torch.library.register_fake("lowbit::unpack")
def _(packed_weight):
    # The sizes are in the header's bytes, which tracing cannot read.
    context = torch.library.get_ctx()
    n, k, groups, mins_n, mins_groups, bias_n = (context.new_dynamic_size(min=0) for _ in range(6))
    new = packed_weight.new_empty
    return (
        new((n, k)),
        new((n, groups), dtype=torch.float32),
        new((mins_n, mins_groups), dtype=torch.float32),
        new((bias_n,), dtype=torch.float32),
    )
