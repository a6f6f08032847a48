"""Fake kernels of the operators, which compute only the shapes of results, for tracing."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C

# register_fake finds this module through inspect, which would otherwise search the files of all modules for 3 ms.
getattr(inspect, "modulesbyfile", {})[os.path.abspath(__file__)] = __name__


def _register_fake(operator: str) -> Callable[[Callable[..., Any]], None]:
    """Like torch.library.register_fake, but refuses calls with tensors on different devices.

    If one tensor is on the meta device, torch runs the fake kernel, whose result would be uninitialized CPU memory.
    """

    def register(function: Callable[..., Any]) -> None:
        parameters = getattr(torch.ops.lowbit, operator).default._schema.arguments

        def checked(*arguments: Any, **options: Any) -> Any:
            tensors = [
                (parameter.name, tensor)
                for at, parameter in enumerate(parameters)
                for value in [arguments[at] if at < len(arguments) else options.get(parameter.name)]
                for tensor in (value if isinstance(value, list | tuple) else [value])
                if isinstance(tensor, Tensor)
            ]
            (first, of_first), *_ = tensors
            for name, tensor in tensors:
                if tensor.device != of_first.device:
                    raise ValueError(
                        f"lowbit.{operator}: {first} is on {of_first.device} and {name} on {tensor.device}; expected one device"
                    )
            return function(*arguments, **options)

        torch.library.register_fake(f"lowbit::{operator}", checked)

    return register


@_register_fake("linear")
def _(x: Tensor, packed_weight: Tensor, out_features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@_register_fake("linears")
def _(x: Tensor, packed_weights: list[Tensor], out_features: list[int]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(out_features)))


@_register_fake("linear_experts")
def _(x: Tensor, packed_weights: Tensor, experts: Tensor, out_features: int) -> Tensor:
    return x.new_empty((*experts.shape, out_features))


@_register_fake("embedding")
def _(indices: Tensor, packed_weight: Tensor, embedding_dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return indices.new_empty((*indices.shape, embedding_dim), dtype=dtype or torch.float32)


def _attended(q: Tensor, v: Tensor) -> Tensor:
    batch, heads, positions, _ = q.shape
    return q.new_empty((batch, positions, heads, v.shape[-1]))


@_register_fake("attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scale: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _attended(q, v)


@_register_fake("window_attention")
def _(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, held: Tensor, start: Tensor, *_: Any) -> Tensor:
    return _attended(q, v)


@_register_fake("linear_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(v.shape)


@_register_fake("short_conv")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@_register_fake("masked_attention")
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, scale: float, softcap: float = 0.0) -> Tensor:
    return _attended(q, v)


@_register_fake("activate")
def _(x: Tensor, gate: Tensor | None, activation: int) -> Tensor:
    return x.new_empty(x.shape)


@_register_fake("rms_norm")
def _(x: Tensor, weight: Tensor | None, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    return x.new_empty(x.shape)


@_register_fake("layer_norm")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)


@_register_fake("rotary")
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@_register_fake("pack")
def _(
    codes: Tensor, scales: Tensor, mins: Tensor | None, bias: Tensor | None, bits: int, group_size: int,
    levels: Tensor | None = None, rotated_inputs: int = 0,
) -> Tensor:  # fmt: skip
    n, k = codes.shape
    table = None if levels is None else bytes(len(levels))  # the values do not affect the size
    size = _C.packed_bytes(int(n), int(k), bits, group_size, mins is not None, bias is not None, table)
    return codes.new_empty((size,))


@_register_fake("search_groups")
def _(weights: Tensor, importance: Tensor | None, bits: int, affine: bool) -> tuple[Tensor, Tensor]:
    groups = weights.shape[0]
    return weights.new_empty(groups), weights.new_empty(groups if affine else 0)


@_register_fake("error_feedback")
def _(weights: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(weights) for _ in range(3))


@_register_fake("quantize")
def _(weight: Tensor, bits: int, group_size: int, affine: bool, search: bool) -> tuple[Tensor, Tensor, Tensor]:
    n, k = weight.shape
    groups = -(-k // group_size) if group_size else 1
    new = weight.new_empty
    return (
        new((n, k), dtype=torch.uint8),
        new((n, groups), dtype=torch.float32),
        new((n, groups) if affine else (0, 0), dtype=torch.float32),
    )


@_register_fake("unpack")
def _(packed_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # The sizes are stored in the header's bytes, which tracing cannot read.
    context = torch.library.get_ctx()
    n, k, groups, mins_n, mins_groups, bias_n = (context.new_dynamic_size(min=0) for _ in range(6))
    new = packed_weight.new_empty
    return (
        new((n, k)),
        new((n, groups), dtype=torch.float32),
        new((mins_n, mins_groups), dtype=torch.float32),
        new((bias_n,), dtype=torch.float32),
    )
