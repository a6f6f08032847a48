"""Activation functions of transformers' models, with the same bits for a row whatever else is in the call.

torch computes a tensor in vectors, and what is left over at the end, or at the end of a thread's share, one by one. The two
differ in the last bit for SiLU, the sigmoid and GELU with tanh in float32. So where a row's elements fall would depend on how
many rows there are, and on the number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..operators.elementwise import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LANES = 64  # a multiple of what torch's loops take in a step, on every CPU: two vectors
_GRAIN = 32768  # elements that torch gives a thread at least
_ALONE = 16384  # elements that one thread computes always
# Functions that lowbit.activate has, by the class in torch or transformers.
_KINDS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "BloomGelu": "gelu_tanh",
    "QuickGELUActivation": "gelu_quick",
}
_TORCH = (torch.nn.SiLU, torch.nn.GELU, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.Mish, torch.nn.Softplus)


def is_activation(module: torch.nn.Module) -> bool:
    """Whether a module is a function of each element."""
    kind = type(module)
    return kind in _TORCH or kind.__module__ == "transformers.activations" or kind.__name__ == "BloomGelu"


def kind_of(module: torch.nn.Module) -> str | None:
    """What :func:`lowbit.activate` calls the function of a module; None if it does not have it."""
    if type(module) is torch.nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return _KINDS.get(type(module).__name__) if is_activation(module) else None


def is_computed(*tensors: Tensor, compiled: bool = False) -> bool:
    """Whether lowbit computes what stands between linear layers: on the CPU, without gradients, and in compiled code only what
    is not fused there with what is beside it (``compiled``)."""
    return (compiled or not torch.compiler.is_compiling()) and all(
        x.device.type == "cpu" and x.dtype in DTYPES and not (torch.is_grad_enabled() and x.requires_grad) for x in tensors
    )


class Activation(torch.nn.Module):
    """An activation function in one pass, by :func:`lowbit.activate`: a row has the same bits whatever rows are beside it."""

    def __init__(self, function: torch.nn.Module, kind: str):
        super().__init__()
        self.function, self.kind = function, ACTIVATIONS.index(kind)

    def forward(self, x: Tensor) -> Tensor:
        if not is_computed(x):
            return self.function(x)
        return torch.ops.lowbit.activate(x.contiguous(), None, self.kind)


class RowWise(torch.nn.Module):
    """An activation function whose results do not depend on what rows are beside a row, in a decoder: without gradients.

    Compiled code has loops of its own, and gets the function as it is.
    """

    def __init__(self, function: torch.nn.Module):
        super().__init__()
        self.function = function
        kind = kind_of(function)
        self.kind = None if kind is None else ACTIVATIONS.index(kind)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not x.numel():
            return self.function(x)
        x = x.detach()
        if self.kind is not None and is_computed(x):
            return torch.ops.lowbit.activate(x.contiguous(), None, self.kind)
        width = x.shape[-1]
        if width % _LANES:  # each row ends at a full vector
            return self(torch.nn.functional.pad(x, (0, -width % _LANES)))[..., :width].contiguous()
        flat = x.reshape(-1)
        pieces = _pieces(flat.numel(), torch.get_num_threads())
        if len(pieces) == 1:
            return self.function(flat).view(x.shape)
        return torch.cat([self.function(piece) for piece in flat.split(pieces)]).view(x.shape)


def _pieces(count: int, threads: int) -> list[int]:
    """Sizes of pieces, of each of which every thread's share is whole vectors."""
    pieces = []
    while count:
        size = count
        while size > _ALONE:
            # Most functions use as many threads as have _GRAIN elements each, GELU uses all.
            step = _LANES * math.lcm(threads, min(threads, -(-size // _GRAIN)))
            if size % step == 0:
                break
            size = max(size - size % step, _ALONE)
        pieces.append(size)
        count -= size
    return pieces
