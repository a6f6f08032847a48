"""transformers' linear layers that are no torch.nn.Linear: Conv1D (GPT-2 and its kin), whose weight is [in, out]; Falcon's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.pytorch_utils import Conv1D

from .. import nn, prepared
from ..layers import LINEAR_OF, TRANSPOSED

# The transposed weights of layers, by their own weights: layers that share one share the other.
_TRANSPOSED_OF = WeakTensorKeyDictionary()


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    """A view of a weight as torch.nn.Linear has it, the same one each time."""
    made = _TRANSPOSED_OF.get(weight)
    if made is None or _state_of(made) != _state_of(weight.T):  # to() gives a parameter other memory
        made = _TRANSPOSED_OF[weight] = torch.nn.Parameter(weight.detach().T, weight.requires_grad)
    return made


def _state_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _linear(layer: Any, weight: torch.Tensor) -> torch.nn.Linear:
    """The torch.nn.Linear with this weight, with the layer's hooks and mode."""
    with torch.device("meta"):
        linear = torch.nn.Linear(1, 1)
    linear.out_features, linear.in_features = weight.shape
    is_parameter = isinstance(weight, torch.nn.Parameter)
    linear.weight = weight if is_parameter else torch.nn.Parameter(weight.detach(), weight.requires_grad)
    linear.bias = layer.bias
    nn.take_place(linear, layer)
    return linear


def of_conv1d(layer: Any) -> torch.nn.Linear:
    """The torch.nn.Linear that computes the same, over the same memory."""
    linear = _linear(layer, _transposed(layer.weight))
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
