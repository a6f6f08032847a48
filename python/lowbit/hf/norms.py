"""Computes RMSNorms of transformers models in one pass with :func:`lowbit.rms_norm`.

transformers uses about six torch operators. Classes differ in the name of epsilon and in whether the weight is stored minus 1,
so a module is replaced only if it agrees with the formula on random inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .activations import DTYPES, is_computed

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_TRIAL = 32  # random rows to compare


def _forward(
    module: torch.nn.Module, epsilon: float, offset: float, decoding: bool, x: Tensor, *others: Any, **more: Any
) -> Tensor:
    weight = getattr(module, "weight", None)
    if decoding and torch.is_grad_enabled():  # has no gradients, so the result is the same whether they are enabled or not
        x, weight = x.detach(), None if weight is None else weight.detach()
    if others or more or not is_computed(x) or (weight is not None and (weight.dtype != x.dtype or not is_computed(weight))):
        return type(module).forward(module, x, *others, **more)
    return torch.ops.lowbit.rms_norm(x.contiguous(), weight, epsilon, offset)


def _parameters(module: torch.nn.Module) -> tuple[float, float] | None:
    """Epsilon and weight offset, if the module computes RMSNorm; else None."""
    if "RMSNorm" not in type(module).__name__ or "forward" in vars(module) or next(module.children(), None) is not None:
        return None
    weight = getattr(module, "weight", None)
    epsilon = next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    if epsilon is None or not 0 <= epsilon <= 1 or (weight is not None and (weight.ndim != 1 or weight.device.type != "cpu")):
        return None
    if weight is not None and weight.dtype not in DTYPES:
        return None
    width, dtype = (64, torch.float32) if weight is None else (len(weight), weight.dtype)
    x = torch.randn(_TRIAL, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    with torch.no_grad():
        try:
            expected = module(x)
        except Exception:  # it takes other arguments
            return None
        if not isinstance(expected, Tensor) or expected.shape != x.shape or expected.dtype != dtype:
            return None
        tolerance = 4 * torch.finfo(dtype).eps
        for offset in (0.0,) if weight is None else (0.0, 1.0):
            result = torch.ops.lowbit.rms_norm(x, weight, epsilon, offset)
            if torch.allclose(result.float(), expected.float(), rtol=tolerance, atol=tolerance):
                return epsilon, offset
    return None


def replace(model: torch.nn.Module, decoding: bool = False) -> list[torch.nn.Module]:
    """Makes lowbit compute all RMSNorms of a model by replacing their ``forward``; returns these modules.

    Args:
        decoding: never compute gradients.
    """
    replaced = []
    for module in model.modules():
        parameters = _parameters(module)
        if parameters is not None:
            module.forward = functools.partial(_forward, module, *parameters, decoding)
            replaced.append(module)
    return replaced
