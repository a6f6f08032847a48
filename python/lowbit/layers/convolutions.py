"""Convolutions as matrix products (im2col): which ones are packed, and the rows that their windows cut out of the input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .replacing import class_of

CLASSES = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)  # not their subclasses, which may use the weight differently
_TRANSPOSED = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
# The largest 1-dimensional kernel that is packed: im2col copies each input value kernel / stride times.
_MOST_TAPS = 4
_FEWEST_INPUTS = 16  # inputs of a row; fewer would be padded to 16


@dataclass(frozen=True)
class Window:
    """Kernel, stride and padding of a convolution in one to three dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def rows(self, x: Tensor) -> Tensor:
        """im2col: [batch, channels, *sizes] -> [batch, *places, channels * kernel], in the order of the weight's inputs.

        Raises:
            ValueError: the input is smaller than the kernel.
        """
        dims = len(self.kernel)
        if any(self.padding):
            x = functional.pad(x, [ends for padding in reversed(self.padding) for ends in (padding, padding)])
        for size, kernel in zip(x.shape[2:], self.kernel, strict=True):
            if size < kernel:
                raise ValueError(f"the input has the sizes {list(x.shape[2:])}; expected at least {list(self.kernel)}, padded")
        # All steps before the last line are views. Patches use reshape, because ExecuTorch copies the result of unfold().
        patches = self.kernel == self.stride
        for dim, (kernel, stride) in enumerate(zip(self.kernel, self.stride, strict=True)):
            at = 2 + (2 * dim if patches else dim)
            if patches:
                count = x.shape[at] // kernel
                x = x.narrow(at, 0, count * kernel).unflatten(at, (count, kernel))
            else:
                x = x.unfold(at, kernel, stride)
        if patches:
            x = x.permute(0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2))
        else:
            x = x.movedim(1, dims + 1)
        return x.flatten(dims + 1)


def _padding(layer: torch.nn.modules.conv._ConvNd) -> tuple[int, ...] | None:
    """Zeros on each side of the input, per dimension; None for padding with other values or uneven padding."""
    padding, dims = layer.padding, len(layer.kernel_size)
    if isinstance(padding, str):
        is_none = padding == "valid" or math.prod(layer.kernel_size) == 1
        return (0,) * dims if is_none else None
    zeros = layer.padding_mode == "zeros" or not any(padding)
    return tuple(padding) if zeros else None


def why_float(layer: object) -> str | None:
    """Why a convolution is not packed; None if it is packed, and for any other module."""
    if isinstance(layer, _TRANSPOSED):
        return "a transposed convolution"
    if not isinstance(layer, CLASSES):
        return None
    if class_of(layer) not in CLASSES:
        return f"a {type(layer).__name__}, which may use its weight in its own way"
    if isinstance(layer.__dict__.get("weight"), Tensor):
        return "a convolution whose weight a hook computes before each call"
    kernel, padding = tuple(layer.kernel_size), _padding(layer)
    taps = math.prod(kernel)
    sizes = "x".join(map(str, kernel))
    if layer.groups != 1:
        alone = layer.groups == layer.in_channels  # no sizes in the message, because a model has such layers of many widths
        return "a depthwise convolution" if alone else f"a convolution in {layer.groups} groups of channels"
    if taps > 1 and any(step != 1 for step in layer.dilation):
        return f"a convolution of {sizes} with dilation"
    if padding is None:
        return f"a convolution of {sizes} with padding {layer.padding!r}, {layer.padding_mode}"
    patches = kernel == tuple(layer.stride) and not any(padding)
    if not (taps == 1 or patches or (len(kernel) == 1 and taps <= _MOST_TAPS)):
        return f"a convolution of {sizes}, which uses each input at many positions"
    if layer.in_channels * taps < _FEWEST_INPUTS:
        return f"a convolution of {layer.in_channels * taps} inputs; expected at least {_FEWEST_INPUTS}"
    return None


def window_of(layer: object) -> Window | None:
    """The window of a convolution that can be packed; None for any other module."""
    if not isinstance(layer, CLASSES) or why_float(layer) is not None:
        return None
    return Window(tuple(layer.kernel_size), tuple(layer.stride), _padding(layer) or ())
