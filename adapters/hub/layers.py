"""Layers for `kernels.kernelize`, which replaces the forward function of a model's own layers. For inference only."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import ops


class PackedLinear(torch.nn.Module):
    """Replaces a layer that has a packed weight (`pack_linear`) and its number of outputs."""

    packed_weight: Tensor
    out_features: int
    has_backward = False
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.packed_weight, self.out_features)


class RMSNorm(torch.nn.Module):
    """Replaces the RMSNorm of Llama, Qwen and other models of transformers. Computes in float32, and rounds once."""

    weight: Tensor
    variance_epsilon: float
    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight.to(hidden_states.dtype), self.variance_epsilon)
