"""Linear layers of transformers that are of other classes than torch.nn.Linear, as an equivalent torch.nn.Linear.

Conv1D (GPT-2 and its relatives) keeps its weight as [in, out]; FalconLinear rounds a product before it adds the bias. Classes
are known by their names, so transformers is not imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import nn

TRANSPOSED = "_lowbit_transposed"  # the attribute of an equivalent layer whose module keeps its weight as [in, out]
CONV1D = "transformers.pytorch_utils.Conv1D"
FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"

# The transposed weights of layers, by their own weights: layers that share one share the other.
_TRANSPOSED_OF = WeakTensorKeyDictionary()


def class_name(module: torch.nn.Module) -> str:
    """The qualified name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    """A view of a weight as torch.nn.Linear has it, the same one each time."""
    view = _TRANSPOSED_OF.get(weight)
    if view is None or _memory_of(view) != _memory_of(weight.T):  # to() gives a parameter other memory
        view = _TRANSPOSED_OF[weight] = torch.nn.Parameter(weight.detach().T, weight.requires_grad)
    return view


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
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
    """The torch.nn.Linear that computes what a Conv1D does, over the same memory."""
    linear = _linear(layer, _transposed(layer.weight))
    setattr(linear, TRANSPOSED, True)
    return linear


def equivalent_linear(module: torch.nn.Module) -> torch.nn.Linear | None:
    """The torch.nn.Linear, over the same memory, that is equivalent to a layer of these classes; None for other modules."""
    name = class_name(module)
    return of_conv1d(module) if name == CONV1D else _linear(module, module.weight) if name == FALCON else None
