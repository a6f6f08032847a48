"""Mixture-of-experts layers whose weights are parameters [experts, ..., ...] of one module, as in transformers.

Attributes of this module (the holder) describe the layout of its parameters, so its class need not be known. When both
parameters are packed, :func:`run_experts` becomes its forward; the holder, its activation and its hooks remain.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import nn

# Attributes that identify a holder. The first releases of transformers 5 set no others.
_FORM = ("is_transposed", "has_bias")


class Experts:
    """One linear layer per expert, stored in one parameter of a module. Not a module itself.

    Attributes:
        holder: the module.
        leaf: the name of the parameter; the bias is called ``leaf_bias``.
        transposed: whether the parameter is [experts, in, out].
        weight: [experts, out, in].
        bias: [experts, out], or None.
    """

    def __init__(self, holder: torch.nn.Module, leaf: str):
        self.holder, self.leaf, self.transposed = holder, leaf, bool(holder.is_transposed)
        self.weight = self.oriented(holder._parameters[leaf])
        self.bias: Tensor | None = holder._parameters.get(f"{leaf}_bias") if holder.has_bias else None

    def oriented(self, weight: Tensor) -> Tensor:
        """Converts a tensor from the parameter's layout to [experts, out, in]."""
        return weight.transpose(1, 2) if self.transposed else weight

    @property
    def num_experts(self) -> int:
        return int(self.weight.shape[0])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[2])

    def put(self, packed: torch.nn.Module) -> None:
        """Replaces the parameter and its bias by a packed layer."""
        for name in (self.leaf, f"{self.leaf}_bias"):
            self.holder._parameters.pop(name, None)
        setattr(self.holder, self.leaf, packed)
        self.holder.forward = partial(run_experts, self.holder)
        self.holder._is_hf_initialized = True  # no parameters are left for a loader to initialize


def _names(holder: torch.nn.Module) -> tuple[str, str]:
    """The names of a holder's two parameters: gate and up in one, or only up; and down."""
    return ("gate_up_proj" if getattr(holder, "has_gate", True) else "up_proj"), "down_proj"


def experts_of(module: torch.nn.Module) -> dict[str, Experts]:
    """The float experts of a module, by parameter name; empty if it has none that can be packed."""
    if not all(hasattr(module, name) for name in _FORM) or getattr(module, "has_post_expert_norm", False):
        return {}
    weights = {leaf: getattr(module, leaf, None) for leaf in _names(module)}
    for weight in weights.values():
        if not isinstance(weight, nn.LinearExperts) and not (isinstance(weight, Tensor) and weight.dim() == 3):
            return {}
    return {leaf: Experts(module, leaf) for leaf in weights if isinstance(module._parameters.get(leaf), Tensor)}


def between(holder: Any, inner: Tensor) -> Tensor:
    """Applies an expert's activation: [..., outputs of the first matrix] -> [..., inputs of the second]."""
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
    """The ``forward`` of a holder with packed weights.

    Args:
        hidden_states: [tokens, hidden].
        top_k_index or router_indices: [tokens, e] int64, the experts of each token.
        top_k_weights or routing_weights: [tokens, e], the weights of their outputs in the sum.

    Returns:
        [tokens, hidden].
    """
    index = router_indices if top_k_index is None else top_k_index
    weights = routing_weights if top_k_weights is None else top_k_weights
    assert index is not None and weights is not None  # each model uses one of the two names
    first, second = (getattr(holder, leaf) for leaf in _names(holder))
    inner = between(holder, first(hidden_states, index))
    outputs = second(inner, index[..., None])[..., 0, :]
    return (outputs * weights[..., None]).sum(-2).to(hidden_states.dtype)
