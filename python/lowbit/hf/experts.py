"""Experts of a mixture as transformers keeps them: parameters of three dimensions in one module for all experts of a layer.

Most architectures have such a module in one form, and say by its attributes how its parameters lie. Where both of them are
packed, its forward is :func:`run_experts`; the module itself, its activation and its hooks stay.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import nn
from ..layers import EXPERTS_IN, Experts

# What transformers' decorator gives such a module; the first versions 5 know some of them only.
_FORM = ("is_transposed", "has_bias")


def _names(holder: torch.nn.Module) -> tuple[str, str]:
    """What the two matrices of each expert are called."""
    return ("gate_up_proj" if getattr(holder, "has_gate", True) else "up_proj"), "down_proj"


def _leaves(holder: torch.nn.Module) -> tuple[str, str] | None:
    """The parameters of the two matrices of each expert, or the packed layers in their place."""
    if not all(hasattr(holder, name) for name in _FORM) or getattr(holder, "has_post_expert_norm", False):
        return None
    leaves = _names(holder)
    found = [getattr(holder, leaf, None) for leaf in leaves]
    if all(isinstance(each, nn.LinearExperts) or (isinstance(each, Tensor) and each.dim() == 3) for each in found):
        return leaves
    return None


class _InHolder(Experts):
    def put(self, packed: torch.nn.Module) -> None:
        super().put(packed)
        self.holder.forward = partial(run_experts, self.holder)
        self.holder._is_hf_initialized = True  # it has no parameters left that a loader could initialize


def experts_in(holder: torch.nn.Module) -> dict[str, Experts]:
    """The float tensors of experts that can be packed, by the names of the parameters."""
    leaves = _leaves(holder) or ()
    parameters = holder._parameters
    return {
        leaf: _InHolder(
            holder, leaf, parameters[leaf], parameters.get(f"{leaf}_bias") if holder.has_bias else None, holder.is_transposed
        )
        for leaf in leaves
        if isinstance(parameters.get(leaf), Tensor)
    }


def between(holder: torch.nn.Module, inner: Tensor) -> Tensor:
    """What stands between the two matrices of each expert: [..., outputs of the first] -> [..., inputs of the second]."""
    return holder._apply_gate(inner) if getattr(holder, "has_gate", True) else holder.act_fn(inner)


def run_experts(
    holder: torch.nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor | None = None,
    top_k_weights: Tensor | None = None,
    *,
    router_indices: Tensor | None = None,
    routing_weights: Tensor | None = None,
) -> Tensor:
    """What a module of experts computes, with packed weights.

    Args:
        hidden_states: [tokens, hidden].
        top_k_index, or router_indices: [tokens, e] int64, the experts of each token.
        top_k_weights, or routing_weights: [tokens, e], what counts of each.

    Returns:
        [tokens, hidden].
    """
    index = router_indices if top_k_index is None else top_k_index
    weights = routing_weights if top_k_weights is None else top_k_weights
    assert index is not None and weights is not None  # each model passes one of either name
    first, second = (getattr(holder, leaf) for leaf in _names(holder))
    inner = first(hidden_states, index)
    inner = between(holder, inner)
    outputs = second(inner, index[..., None])[..., 0, :]
    return (outputs * weights[..., None]).sum(-2).to(hidden_states.dtype)


if experts_in not in EXPERTS_IN:
    EXPERTS_IN.append(experts_in)
