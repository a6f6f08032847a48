"""Computes norms of transformers models in one pass with :func:`lowbit.rms_norm` and :func:`lowbit.layer_norm`.

transformers computes an RMSNorm with about six torch operators. Classes differ in the formula behind their name, in the name of
epsilon and in whether the weight is stored minus 1, so a module is replaced only if it agrees with a formula on random inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import DTYPES, is_computed

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
# Looked up once, because each norm of each token calls them.
_layer_norm, _rms_norm = torch.ops.lowbit.layer_norm.default, torch.ops.lowbit.rms_norm.default
_EPSILON = 1e-5  # for classes that do not store theirs (OLMo)


class _Norm(NamedTuple):
    """A formula: RMSNorm with an offset of its weight, or LayerNorm if there is no offset."""

    attribute: str | None  # of the module, which has its epsilon; None: it does not store it
    offset: float | None

    def __call__(self, module: torch.nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        epsilon = _EPSILON if self.attribute is None else getattr(module, self.attribute)  # it may have been changed
        if self.offset is None:
            return _layer_norm(x, weight, bias, epsilon)
        return _rms_norm(x, weight, epsilon, self.offset)


def _forward(module: torch.nn.Module, norm: _Norm, decoding: bool, x: Tensor, *others: Any, **more: Any) -> Tensor:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")  # attributes take 1 us each
    if decoding and torch.is_grad_enabled():  # has no gradients, so the result is the same whether they are enabled or not
        x, weight, bias = (each if each is None else each.detach() for each in (x, weight, bias))
    given = [each for each in (x, weight, bias) if each is not None]
    shape = getattr(module, "normalized_shape", x.shape[-1:]) if weight is None else weight.shape
    if others or more or shape != x.shape[-1:] or not is_computed(*given) or len({each.dtype for each in given}) > 1:
        return type(module).forward(module, x, *others, **more)
    return norm(module, x.contiguous(), weight, bias)


def _agreeing(norms: list[_Norm], module: torch.nn.Module, names: Iterable[str], width: int, dtype: torch.dtype) -> list[_Norm]:
    """The formulas that a module computes, up to rounding, on random rows with random parameters."""
    random = torch.Generator().manual_seed(0)
    # Four dimensions, because some classes normalize another one than the last. Means, and squares as small as epsilon.
    x = 1 + torch.randn(2, 2, 2, width, generator=random, dtype=torch.float32)
    x[1] /= 512
    x = x.to(dtype)
    values = {name: (0.5 + torch.rand(width, generator=random, dtype=torch.float32)).to(dtype) for name in names}
    with torch.no_grad():
        try:
            expected = torch.func.functional_call(module, values, x)
        except Exception:  # it takes other arguments
            return []
        if not isinstance(expected, Tensor) or expected.shape != x.shape or expected.dtype != dtype:
            return []
        used = [values[name] if module._parameters.get(name) is not None else None for name in ("weight", "bias")]
        results = [norm(module, x, *used) for norm in norms]
    tolerance = 8 * torch.finfo(dtype).eps
    same = functools.partial(torch.allclose, expected.float(), rtol=tolerance, atol=tolerance)
    return [norm for norm, result in zip(norms, results, strict=True) if same(result.float())]


def _norm_of(module: torch.nn.Module) -> _Norm | None:
    """The formula of a module; None if it computes something else."""
    kind = type(module).__name__
    if not ("RMSNorm" in kind or "LayerNorm" in kind) or "forward" in vars(module) or next(module.children(), None) is not None:
        return None
    tensors = {name: each for name in ("weight", "bias") if isinstance(each := getattr(module, name, None), Tensor)}
    shape = getattr(module, "normalized_shape", next((each.shape for each in tensors.values()), (64,)))
    attribute = next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)
    epsilon = _EPSILON if attribute is None else getattr(module, attribute)
    if not isinstance(shape, tuple) or len(shape) != 1 or not 0 <= epsilon <= 1:
        return None
    if any(each.device.type != "cpu" or each.dtype not in DTYPES or each.shape != shape for each in tensors.values()):
        return None
    norms = [_Norm(attribute, offset) for offset in (0.0, 1.0, None)]
    # float32 shows the formula, the parameters' type whether intermediate results are rounded.
    for dtype in {torch.float32, *(each.dtype for each in tensors.values())} if tensors else DTYPES:
        norms = _agreeing(norms, module, tensors, shape[0], dtype)
    return norms[0] if norms else None


def formula_of(module: torch.nn.Module) -> _Norm | None:
    """The formula of a module that :func:`replace` has changed; None for other modules."""
    forward = vars(module).get("forward")
    if not isinstance(forward, functools.partial) or forward.func is not _forward:
        return None
    formula: _Norm = forward.args[1]
    return formula


def replace(model: torch.nn.Module, decoding: bool = False) -> list[torch.nn.Module]:
    """Makes lowbit compute all norms of a model by replacing their ``forward``; returns these modules.

    Args:
        decoding: never compute gradients.
    """
    replaced = []
    for module in model.modules():
        norm = _norm_of(module)
        if norm is not None:
            module.forward = functools.partial(_forward, module, norm, decoding)
            replaced.append(module)
    return replaced
