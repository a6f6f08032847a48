"""transformers' Conv1D, of GPT-2 and its kin: a linear layer whose weight is [in, out]."""

from __future__ import annotations

import torch
from transformers.pytorch_utils import Conv1D

from .. import nn, prepared
from ..layers import LINEAR_OF, TRANSPOSED


def as_linear(layer: Conv1D) -> torch.nn.Linear:
    """The torch.nn.Linear that computes the same, over the same memory, with the layer's hooks and mode."""
    with torch.device("meta"):
        linear = torch.nn.Linear(1, 1)
    linear.out_features, linear.in_features = layer.nf, layer.weight.shape[0]
    linear.weight = torch.nn.Parameter(layer.weight.detach().T, layer.weight.requires_grad)
    linear.bias = layer.bias
    nn.take_place(linear, layer)
    setattr(linear, TRANSPOSED, True)
    return linear


class TrainedConv1D(prepared.LinearLayer, Conv1D):
    """What :func:`lowbit.qat.prepare_` makes of a Conv1D: its weight stays [in, out], as checkpoints have it."""

    def matrix(self) -> torch.Tensor:
        return self.weight.T


def _as_prepared(layer: TrainedConv1D) -> prepared.Linear:
    linear = as_linear(layer)
    linear.__class__ = prepared.Linear
    linear.follow(layer)
    return linear


LINEAR_OF |= {Conv1D: as_linear, TrainedConv1D: _as_prepared}
prepared.KINDS[Conv1D] = TrainedConv1D
