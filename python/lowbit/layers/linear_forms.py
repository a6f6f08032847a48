"""Equivalent torch.nn.Linear layers, sharing memory, for other layers whose weight is a matrix.

transformers' Conv1D (GPT-2 and relatives) stores its weight as [in, out]; some subclasses of torch.nn.Linear compute the same.
All are recognized by name, so their packages are not imported here. A convolution (layers/convolutions.py) is a linear layer
over the rows that its window cuts out of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import nn
from .convolutions import Window, window_of
from .replacing import LINEARS, class_name, take_place

TRANSPOSED = "_lowbit_transposed"  # attribute of an equivalent layer whose module stores its weight as [in, out]
CONV1D = "transformers.pytorch_utils.Conv1D"

# Weight of a layer -> its matrix, so that layers that share a weight share the matrix.
_MATRIX_OF = WeakTensorKeyDictionary()


def _matrix(weight: torch.Tensor, as_matrix: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A view of a weight as [out, in]; the same object on each call."""
    view = _MATRIX_OF.get(weight)
    if view is None or _memory_of(view) != _memory_of(as_matrix(weight)):  # to() moves a parameter to other memory
        view = _MATRIX_OF[weight] = torch.nn.Parameter(as_matrix(weight.detach()), weight.requires_grad)
    return view


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return tensor if is_parameter else torch.nn.Parameter(tensor.detach(), tensor.requires_grad)


def _linear(layer: Any, weight: torch.Tensor) -> torch.nn.Linear:
    """A torch.nn.Linear with this weight and the layer's hooks and mode."""
    with torch.device("meta"):
        linear = torch.nn.Linear(1, 1)
    linear.out_features, linear.in_features = weight.shape
    linear.weight, linear.bias = _parameter(weight), None if layer.bias is None else _parameter(layer.bias)
    for name in ("weight", "bias"):
        if isinstance(layer.__dict__.get(name), torch.Tensor):  # a hook computes it, which refuse_hooked_weights() finds
            linear.__dict__[name] = linear._parameters.pop(name)
    take_place(linear, layer)
    return linear


def of_conv1d(layer: Any) -> torch.nn.Linear:
    """A torch.nn.Linear equivalent to a Conv1D of transformers, sharing its memory."""
    linear = _linear(layer, _matrix(layer.weight, torch.t))
    setattr(linear, TRANSPOSED, True)
    return linear


def _of_convolution(layer: Any, window: Window) -> torch.nn.Linear:
    linear = _linear(layer, _matrix(layer.weight, flatten))
    setattr(linear, nn.WINDOW, window)
    return linear


def flatten(weight: torch.Tensor) -> torch.Tensor:
    """Reshapes a convolution's weight [out, in, *kernel] to a matrix."""
    return weight.flatten(1)


def equivalent_linear(module: torch.nn.Module) -> torch.nn.Linear | None:
    """A torch.nn.Linear equivalent to a layer of these classes, sharing its memory; None for other modules.

    For a convolution its input is the rows of the window, which is its attribute ``nn.WINDOW``.
    """
    window = window_of(module)
    if window is not None:
        return _of_convolution(module, window)
    name = class_name(module)
    return of_conv1d(module) if name == CONV1D else _linear(module, module.weight) if name in LINEARS else None
