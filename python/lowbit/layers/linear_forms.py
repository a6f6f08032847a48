"""Layers of other classes than torch.nn.Linear with a matrix as their weight, as a torch.nn.Linear over the same memory.

Conv1D of transformers (GPT-2 and its relatives) keeps its weight as [in, out]; FalconLinear rounds a product before it adds the
bias. Both are known by their names, so transformers is not imported here. A convolution (layers/convolutions.py) multiplies
the rows that its window cuts out of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import nn
from .convolutions import Window, window_of

TRANSPOSED = "_lowbit_transposed"  # the attribute of an equivalent layer whose module keeps its weight as [in, out]
CONV1D = "transformers.pytorch_utils.Conv1D"
FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"

# The matrices of layers, by their own weights: layers that share one share the other.
_MATRIX_OF = WeakTensorKeyDictionary()


def class_name(module: torch.nn.Module) -> str:
    """The qualified name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _matrix(weight: torch.Tensor, as_matrix: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A view of a weight as torch.nn.Linear has it, the same one each time."""
    view = _MATRIX_OF.get(weight)
    if view is None or _memory_of(view) != _memory_of(as_matrix(weight)):  # to() gives a parameter other memory
        view = _MATRIX_OF[weight] = torch.nn.Parameter(as_matrix(weight.detach()), weight.requires_grad)
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
    linear = _linear(layer, _matrix(layer.weight, torch.t))
    setattr(linear, TRANSPOSED, True)
    return linear


def _of_convolution(layer: Any, window: Window) -> torch.nn.Linear:
    linear = _linear(layer, _matrix(layer.weight, flatten))
    setattr(linear, nn.WINDOW, window)
    return linear


def flatten(weight: torch.Tensor) -> torch.Tensor:
    """The weight of a convolution, [out, in, *kernel], as a matrix."""
    return weight.flatten(1)


def equivalent_linear(module: torch.nn.Module) -> torch.nn.Linear | None:
    """The torch.nn.Linear, over the same memory, that is equivalent to a layer of these classes; None for other modules.

    That of a convolution takes the rows of its window, and has the window as its attribute ``nn.WINDOW``.
    """
    window = window_of(module)
    if window is not None:
        return _of_convolution(module, window)
    name = class_name(module)
    return of_conv1d(module) if name == CONV1D else _linear(module, module.weight) if name == FALCON else None
