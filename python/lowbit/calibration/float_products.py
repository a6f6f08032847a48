"""Products of float32 matrices by oneDNN, which torch contains beside MKL.

torch multiplies float32 matrices by MKL, which uses AVX2 on the CPUs of other makers than Intel; oneDNN uses AVX-512 on all:
2.2 times as fast on an AMD EPYC (Zen 5).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_ROWS = 256  # rows of a result that are computed together
_FEW = 8  # rows of x below which MKL is as fast


@cache
def _by_onednn() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _usable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = [x, weight] if bias is None else [x, weight, bias]
    plain = all(type(each) in (Tensor, Parameter) and each.dtype == torch.float32 and each.is_cpu for each in given)
    # oneDNN is very slow for other strides.
    if not plain or not all(each.is_contiguous() for each in given) or x.dim() < 2 or weight.dim() != 2:
        return False
    return weight.numel() > 0 and x.numel() >= _FEW * weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])


class _Outputs(torch.autograd.Function):
    """:func:`outputs` with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return outputs(x, weight, bias)  # without gradients, as all of a forward

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = outputs(grad.contiguous(), weight.T.contiguous()).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = outputs(grad.T.contiguous(), x.reshape(-1, x.shape[-1]).T.contiguous())
        if ctx.needs_input_grad[2]:
            to_bias = grad.sum(0)
        return to_x, to_weight, to_bias


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as :func:`torch.nn.functional.linear`, but for the order of the sums: x [..., k], weight [n, k] -> [..., n]."""
    if _by_onednn() and _usable(x, weight, bias):
        if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias)):
            differentiable: Tensor = _Outputs.apply(x, weight, bias)
            return differentiable
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return result
    return linear(x, weight, bias)


class FloatLinears(TorchFunctionMode):
    """A context in which float32 linear layers compute by :func:`outputs`."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and not kwargs and all(isinstance(each, Tensor) for each in args[:2]):
            return outputs(*args)
        return func(*args, **(kwargs or {}))


def add_products(sums: Tensor, a: Tensor, b: Tensor, triangle: bool = False) -> None:
    """Adds ``a @ b.T`` to ``sums``.

    Args:
        sums: float32 [m, n].
        a: float32 [m, k], contiguous.
        b: float32 [n, k], contiguous.
        triangle: only the upper triangle, and little more, is needed.
    """
    for begin in range(0, len(sums), _ROWS):
        rows, columns = slice(begin, begin + _ROWS), slice(begin if triangle else 0, None)
        sums[rows, columns] += outputs(a[rows], b[columns])
