"""transformers' linear layers that are no torch.nn.Linear: Conv1D (GPT-2 and its kin), whose weight is [in, out]; Falcon's."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from .. import nn, prepared
from ..layers import LINEAR_OF, TRANSPOSED


def _linear(layer: Any, weight: torch.Tensor) -> torch.nn.Linear:
    """The torch.nn.Linear with this weight, with the layer's hooks and mode."""
    with torch.device("meta"):
        linear = torch.nn.Linear(1, 1)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = torch.nn.Parameter(weight.detach(), layer.weight.requires_grad)
    linear.bias = layer.bias
    nn.take_place(linear, layer)
    return linear


def of_conv1d(layer: Any) -> torch.nn.Linear:
    """The torch.nn.Linear that computes the same, over the same memory."""
    linear = _linear(layer, layer.weight.T)
    setattr(linear, TRANSPOSED, True)
    return linear


def of_falcon(layer: Any) -> torch.nn.Linear:
    """Likewise: FalconLinear rounds a product to the dtype before it adds the bias, and is a torch.nn.Linear else."""
    return _linear(layer, layer.weight)


class TrainedConv1D(prepared.LinearLayer, Conv1D):
    """What :func:`lowbit.qat.prepare_` makes of a Conv1D: its weight stays [in, out], as checkpoints have it."""

    def matrix(self) -> torch.Tensor:
        return self.weight.T


def _as_prepared(layer: TrainedConv1D) -> prepared.Linear:
    linear = of_conv1d(layer)
    linear.__class__ = prepared.Linear
    linear.follow(layer)
    return linear


LINEAR_OF["transformers.pytorch_utils.Conv1D"] = of_conv1d
LINEAR_OF["transformers.models.falcon.modeling_falcon.FalconLinear"] = of_falcon
LINEAR_OF[f"{TrainedConv1D.__module__}.{TrainedConv1D.__qualname__}"] = _as_prepared
prepared.KINDS[Conv1D] = TrainedConv1D
