"""Python functions for the main operators, with autograd and autocast."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from ..packed.header import PackedInfo
from ..packed.matrix import Unpacked, as_levels, check_format, describe, info, info_of_experts, pack, repack, unpack, verify
from . import fake_kernels
from .cache_layout import stored_width

__all__ = [
    "PackedInfo", "Unpacked", "as_levels", "attention", "cache_storage", "cache_width", "check_format", "describe", "embedding",
    "info", "info_of_experts", "linear", "linear_experts", "linears", "pack", "repack", "unpack", "verify",
]  # fmt: skip

# Looked up once, because calling torch.ops.lowbit.linear takes 0.4 us longer.
_linear = torch.ops.lowbit.linear.default
_dynamo_traces = torch.compiler.is_dynamo_compiling


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True  # for per-sample gradients: torch.vmap(torch.func.grad(...))

    @staticmethod
    def forward(x: Tensor, packed_weight: Tensor, out_features: int) -> Tensor:
        return _linear(x, packed_weight, out_features)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, packed_weight, _ = inputs
        ctx.save_for_backward(packed_weight)
        ctx.in_features = x.shape[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed_weight,) = ctx.saved_tensors
        rows = torch.arange(grad.shape[-1], device=grad.device)
        weight = torch.ops.lowbit.embedding(rows, packed_weight, ctx.in_features, dtype=grad.dtype)
        return grad @ weight, None, None


class _StraightThroughForward(_StraightThrough):
    """Adds forward-mode derivatives (torch.func.jvp, jacfwd); separate because torch.compile does not support jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _StraightThrough.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[1])
        ctx.out_features = inputs[2]

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        (packed_weight,) = ctx.saved_tensors
        rows = torch.arange(ctx.out_features, device=x.device)
        return x @ torch.ops.lowbit.embedding(rows, packed_weight, ctx.in_features, dtype=x.dtype).T


def _runs_here() -> bool:
    """Whether the traced program will run in this process. Exported programs contain the bare operators."""
    # Reading the level, which is always -1 or more, makes Dynamo guard it, so a call at another level is retraced.
    return forward_ad._current_level >= -1 and not torch.compiler.is_exporting()


def _has_tangent(operator: str, *arguments: Any) -> bool:
    """Whether one of the tensors has a tangent. The kernels of `_traced_*` operators call this.

    Raises:
        NotImplementedError: the derivatives cannot be compiled. torch.compile then falls back to Python, or reports the error
            with fullgraph=True.
    """
    # Only floats can have a tangent, and in inference mode unpack_dual refuses packed weights, which are normal tensors.
    tensors = [argument for argument in arguments if isinstance(argument, Tensor) and argument.is_floating_point()]
    has_tangent = any(forward_ad.unpack_dual(tensor, level=0).tangent is not None for tensor in tensors)
    # If a level was opened outside the compiled function, its inputs have no tangents while it is traced.
    if torch._C._are_functorch_transforms_active() or (forward_ad._current_level >= 0 and not has_tangent):
        raise NotImplementedError(
            f"derivatives of lowbit.{operator} by torch.func, and tangents from outside of the compiled function, are not "
            "compiled; leave fullgraph out"
        )
    return has_tangent


def _differentiated(x: Tensor) -> bool:
    """Whether derivatives with respect to x are requested. Exported programs contain the bare operator."""
    # requires_grad does not reveal a tangent, which would be lost without this check.
    if not (x.requires_grad and torch.is_grad_enabled()) and forward_ad._current_level < 0:
        return False
    return not torch.compiler.is_exporting() and not torch.jit.is_tracing()


def _explain(error: Exception, **arguments: Any) -> None:
    """Raises TypeError for an argument that is None or no dense tensor, of which torch's error does not say so."""
    for name, value in arguments.items():
        if value is None:
            raise TypeError(f"{name} is None; expected a tensor") from error
        if isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided):
            kind = "is a nested tensor" if value.is_nested else f"has the layout {value.layout}"
            raise TypeError(f"{name} {kind}; expected a dense tensor") from error


def linear(x: Tensor, packed_weight: Tensor, out_features: int) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight; the activations are quantized to int8 on the fly.

    Args:
        x: [..., in_features] float32, bfloat16 or float16, any strides.
        packed_weight: from :func:`pack`.
        out_features: number of rows of the packed weight.

    Returns:
        [..., out_features] of x's dtype. A row with a NaN or an infinity gives a row of NaN.

    The gradient with respect to x is that of a float layer with the dequantized weight: a straight-through estimator for
    the rounding of activations, also in forward mode (torch.func.jvp). The packed weight has no gradient.

    Raises:
        TypeError: None, or a sparse or nested tensor.
        ValueError: a wrong dtype, shape or device, or an invalid packed weight.
    """
    # An autograd kernel registered from Python would do all of this, but would add several microseconds to every call.
    if _dynamo_traces() and _runs_here():
        return torch.ops.lowbit._traced_linear(x, packed_weight, out_features)
    try:
        if isinstance(x, Tensor):
            # This condition avoids the function call, which takes 150 ns.
            if (x.requires_grad or forward_ad._current_level >= 0) and _differentiated(x):
                function = _StraightThrough if forward_ad._current_level < 0 else _StraightThroughForward
                return function.apply(x, packed_weight, out_features)
        elif has_torch_function((x,)):  # torch.fx is tracing: the recorded graph may be run with gradients
            return handle_torch_function(linear, (x,), x, packed_weight, out_features)
        return _linear(x, packed_weight, out_features)
    except (RuntimeError, ValueError) as error:
        _explain(error, x=x, packed_weight=packed_weight)
        raise


def linears(x: Tensor, packed_weights: Sequence[Tensor], out_features: Sequence[int]) -> tuple[Tensor, ...]:
    """Applies several packed weights to the same input, which is quantized once; bitwise equal to :func:`linear`.

    Args:
        x: [..., in_features] float32, bfloat16 or float16, any strides.
        packed_weights: 1 to 16 weights from :func:`pack`, all with ``in_features`` inputs, of any bit widths and group sizes.
        out_features: number of rows of each weight.

    Returns:
        One tensor [..., out_features] of x's dtype for each weight: views of one tensor [..., sum of out_features].

    The gradient with respect to x is that of :func:`linear`.

    Raises:
        TypeError, ValueError: as :func:`linear`, or the numbers of weights and of ``out_features`` differ.
    """
    packed_weights, out_features = list(packed_weights), list(out_features)
    if _dynamo_traces() and _runs_here():
        outputs: tuple[Tensor, ...] = torch.ops.lowbit._traced_linears(x, packed_weights, out_features).split(out_features, -1)
        return outputs
    if not isinstance(x, Tensor) and has_torch_function((x,)):
        outputs = handle_torch_function(linears, (x,), x, packed_weights, out_features)
        return outputs
    fits = len(packed_weights) == len(out_features) > 0  # otherwise the operator reports what is wrong
    if fits and isinstance(x, Tensor) and _differentiated(x):
        return tuple(linear(x, packed, n) for packed, n in zip(packed_weights, out_features, strict=True))
    try:
        outputs = torch.ops.lowbit.linears(x, packed_weights, out_features).split(out_features, -1)
    except (RuntimeError, ValueError) as error:
        _explain(error, x=x, **{f"packed_weights[{number}]": packed for number, packed in enumerate(packed_weights)})
        raise
    return outputs


class _StraightThroughExperts(torch.autograd.Function):
    # Without a vmap rule, as vmap cannot loop over the experts of a batch, and without a jvp: torch refuses both.
    @staticmethod
    def forward(x: Tensor, packed_weights: Tensor, experts: Tensor, out_features: int) -> Tensor:
        return torch.ops.lowbit.linear_experts(x, packed_weights, experts, out_features)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, packed_weights, experts, _ = inputs
        ctx.save_for_backward(packed_weights, experts)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed_weights, experts = ctx.saved_tensors
        rows, result = torch.arange(grad.shape[-1], device=grad.device), grad.new_zeros(ctx.shape)
        for expert in experts.unique().tolist():
            weight = torch.ops.lowbit.embedding(rows, packed_weights[expert], ctx.shape[-1], dtype=grad.dtype)
            # A row that is routed to an expert twice counts twice.
            result += torch.where((experts == expert)[..., None], grad, 0).sum(-2) @ weight
        return result, None, None, None


def linear_experts(x: Tensor, packed_weights: Tensor, experts: Tensor, out_features: int) -> Tensor:
    """Applies to each row of x the packed weights of its experts, as in a mixture-of-experts layer.

    Each chosen expert is read once for all of its rows, and each row of x is quantized once for all of its experts. Results
    are bitwise equal to :func:`linear`.

    Args:
        x: [..., in_features] float32, bfloat16 or float16, any strides.
        packed_weights: uint8 [experts, bytes], contiguous, such as from ``torch.stack``. Each is a weight from :func:`pack`
            with ``out_features`` rows and ``in_features`` inputs, all with the same group size.
        experts: int64 [..., e], any strides: the indices of the e experts of each row of x.
        out_features: number of rows of each packed weight.

    Returns:
        [..., e, out_features] of x's dtype.

    The gradient with respect to x is that of float layers with the dequantized weights, as for :func:`linear`.

    Raises:
        IndexError: an expert's index is out of range.
        TypeError: None, or a sparse or nested tensor.
        ValueError: a wrong dtype, shape or device, or an invalid packed weight.
    """
    # The backward pass reads the values of `experts`, which torch.compile leaves to Python.
    if _dynamo_traces() and _runs_here() and not (x.requires_grad and torch.is_grad_enabled()):
        return torch.ops.lowbit._traced_linear_experts(x, packed_weights, experts, out_features)
    if not isinstance(x, Tensor) and has_torch_function((x,)):
        return handle_torch_function(linear_experts, (x,), x, packed_weights, experts, out_features)
    try:
        if isinstance(x, Tensor) and _differentiated(x):
            return _StraightThroughExperts.apply(x, packed_weights, experts, out_features)
        return torch.ops.lowbit.linear_experts(x, packed_weights, experts, out_features)
    except (RuntimeError, ValueError) as error:
        _explain(error, x=x, packed_weights=packed_weights, experts=experts)
        raise


def embedding(indices: Tensor, packed_weight: Tensor, embedding_dim: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Looks up and dequantizes rows of a packed embedding table.

    Args:
        indices: [...] int32 or int64, any strides.
        packed_weight: from :func:`pack`; [num_embeddings, embedding_dim] weights.
        embedding_dim: number of inputs of the packed weight.
        dtype: the dtype of the result: float32, bfloat16 or float16.

    Returns:
        [..., embedding_dim] of ``dtype``.

    Raises:
        IndexError: an index is out of range.
        TypeError: None, or a sparse or nested tensor.
        ValueError: a wrong dtype, shape or device, or an invalid packed weight.
    """
    try:
        return torch.ops.lowbit.embedding(indices, packed_weight, embedding_dim, dtype=dtype)
    except (RuntimeError, ValueError) as error:
        _explain(error, indices=indices, packed_weight=packed_weight)
        raise


class _WithoutGradient(torch.autograd.Function):
    """Attention in a program with gradients: the result has no gradient, and backward raises."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return torch.ops.lowbit.attention(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError("lowbit.attention has no gradients; train with the model's own attention, without caches")


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
    """Causal attention over static caches: appends ``k`` and ``v`` to the caches, then attends.

    Time grows with the number of cached positions, not with ``max_length``. The result of a position is bitwise independent
    of how the text was split into calls.

    Args:
        q: [batch, heads, positions, width] float32, bfloat16 or float16, any strides; width a multiple of 16 up to 512.
        k: [batch, kv_heads, positions, width] of q's dtype, any strides; heads is a multiple of kv_heads, and head h of
            q belongs to head ``h // (heads // kv_heads)``.
        v: [batch, kv_heads, positions, value_width], as k.
        k_cache, v_cache: [batch, kv_heads, max_length, width] and [..., value_width], contiguous, updated in place;
            max_length, width and value_width are multiples of 16. The dtype is float32, bfloat16 or float16, whatever q's is,
            or int8. Start with any content, such as ``torch.zeros``. Only this operator may read or write the caches, because
            it chooses the order of values within a head. :func:`cache_width` returns the last dimension: int8 caches have
            4 more bytes for a float32 scale per position and head. 4-bit caches are int8 tensors with half as many bytes plus
            these 4; their widths are multiples of 32. Values may be 4-bit with int8 keys, but not vice versa. Keys and values
            are rounded to nearest, in 4 bits after a rotation (docs/internals/operators.md). In int8 and 4-bit caches a
            position with a key or value that is not finite is NaN.
        start: int64, one element: number of positions in the caches; 0 starts a new text. Position i of q is position
            ``start + i`` of the text and attends to all positions up to itself.
        scale: factor of the products of q and k; None: ``width ** -0.5``.
        window: sliding window: a query attends to its position and the ``window - 1`` before it; None: to all before it.
        softcap: scores become ``softcap * tanh(score / softcap)``, as in Gemma 2; None: no soft cap.
        sinks: [heads] of q's dtype: attention sinks, an extra score per head in the softmax, without a value, as in
            gpt-oss; None: no sinks.

    Returns:
        [batch, positions, heads, value_width] of q's dtype, contiguous. NaN where a visible product is NaN. It has no
        gradients: backward raises RuntimeError, or warns in compiled programs.

    Raises:
        IndexError: ``start`` is negative, or the caches are too short for all positions. They are unchanged.
        ValueError: a wrong dtype, shape, stride or device, a scale beyond 1e30 or a softcap outside of 1e-6 to 1e30. The
            caches are unchanged.
    """
    if scale is None:
        scale = max(1, *q.shape[-1:]) ** -0.5  # the operator refuses a width of 0 and a q without dimensions
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected 1 or more, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected a positive number, or None")
    arguments = (q, k, v, k_cache, v_cache, start, scale, window or 0, softcap or 0.0, sinks)
    if _dynamo_traces() and _runs_here():
        return torch.ops.lowbit._traced_attention(*arguments)
    # A call without gradients, the usual case, evaluates only this condition.
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        tensors = (argument for argument in arguments if isinstance(argument, Tensor))
        if any(map(_differentiated, tensors)):
            return _WithoutGradient.apply(*arguments)
    return torch.ops.lowbit.attention(*arguments)


def cache_width(width: int, dtype: torch.dtype) -> int:
    """The last dimension of a cache for :func:`attention` with keys or values of this width.

    ``torch.int4`` stands for 4-bit caches, whose tensors are int8.

    Raises:
        ValueError: 4-bit caches do not support this width.
    """
    return stored_width(width, str(dtype).removeprefix("torch."))


def cache_storage(dtype: torch.dtype) -> torch.dtype:
    """The tensor dtype of a cache: int8 for ``torch.int4``, otherwise ``dtype``."""
    return torch.int8 if dtype is torch.int4 else dtype


# While torch.compile traces Python, derivatives of torch.func are invisible: an input of torch.func.grad does not require
# gradients, and no tensor has a tangent. Only execution sees functorch's state, beginning with Dynamo's run with fake
# tensors. So the graph contains `_traced_*` operators that check it; AOTAutograd decomposes them to the bare operators.
for _schema in (
    "linear(Tensor x, Tensor packed_weight, int out_features) -> Tensor",
    "linears(Tensor x, Tensor[] packed_weights, int[] out_features) -> Tensor",
    "linear_experts(Tensor x, Tensor packed_weights, Tensor experts, int out_features) -> Tensor",
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor start, float scale, "
    "int window=0, float softcap=0., Tensor? sinks=None) -> Tensor",
):
    torch.library.define(f"lowbit::_traced_{_schema.partition('(')[0]}", "(" + _schema.partition("(")[2])


@torch.library.impl("lowbit::_traced_linear", "CompositeImplicitAutograd")
def _(x: Tensor, packed_weight: Tensor, out_features: int) -> Tensor:
    _has_tangent("linear", x)
    return _StraightThroughForward.apply(x, packed_weight, out_features)


@torch.library.impl("lowbit::_traced_linears", "CompositeImplicitAutograd")
def _(x: Tensor, packed_weights: list[Tensor], out_features: list[int]) -> Tensor:
    if _has_tangent("linears", x) or (x.requires_grad and torch.is_grad_enabled()):
        parts = zip(packed_weights, out_features, strict=True)
        return torch.cat([_StraightThroughForward.apply(x, packed, n) for packed, n in parts], -1)
    return torch.ops.lowbit.linears(x, packed_weights, out_features)


def _without_tangents(operator: str, *arguments: Any) -> Tensor:
    if _has_tangent(operator, *arguments):
        raise NotImplementedError(f"lowbit.{operator} has no derivatives in forward mode")
    return getattr(torch.ops.lowbit, operator)(*arguments)


@torch.library.impl("lowbit::_traced_linear_experts", "CompositeImplicitAutograd")
def _(*arguments: Any) -> Tensor:
    return _without_tangents("linear_experts", *arguments)


@torch.library.impl("lowbit::_traced_attention", "CompositeImplicitAutograd")
def _(*arguments: Any) -> Tensor:
    # Forward and backward are traced together, so an error in backward would break forward. torch warns instead.
    return _without_tangents("attention", *arguments)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _follow_autocast(operator: str, *names: str, float32: tuple[str, ...] = (), state: str | None = None) -> None:
    """Makes an operator follow torch.autocast, as torch's linear layers and attention do.

    Args:
        names: the tensors to cast to autocast's dtype.
        float32: the tensors to cast to float32.
        state: a tensor that the operator updates in place: ``names`` are cast to its dtype instead.
    """
    overload = getattr(torch.ops.lowbit, operator).default
    parameters = [parameter.name for parameter in overload._schema.arguments]

    def cast(*arguments: Any) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if state is None else arguments[parameters.index(state)].dtype
        dtypes = dict.fromkeys(names, dtype) | dict.fromkeys(float32, torch.float32)
        cast_arguments = (
            x.to(dtypes[name])
            if name in dtypes and isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
            else x
            for name, x in zip(parameters, arguments, strict=False)
        )
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return overload(*cast_arguments)

    torch.library.impl(f"lowbit::{operator}", "AutocastCPU", cast)


for _operator in ("linear", "linears", "linear_experts"):
    _follow_autocast(_operator, "x")
_follow_autocast("masked_attention", "q", "k", "v")
for _operator in ("attention", "window_attention"):  # their caches have any dtype
    _follow_autocast(_operator, "q", "k", "v", "sinks")
_follow_autocast("linear_attention", "q", "k", "v", float32=("decay", "beta"))
_follow_autocast("short_conv", "x", "weight", "bias", state="state")
