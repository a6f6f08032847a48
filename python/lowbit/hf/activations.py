"""Batch-invariant activation functions for models of transformers: a row's result does not depend on the other rows.

torch computes whole SIMD vectors, and the elements that are left at the end of a tensor, or of a thread's share, one by one.
The two differ in the last bit for SiLU, sigmoid and tanh GELU in float32. So results would depend on the number of rows and
of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..operators.elementwise import ACTIVATIONS, is_fused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LANES = 64  # a multiple of the step of torch's loops (two vectors) on every CPU
_GRAIN = 32768  # torch gives each thread at least this many elements
_ALONE = 16384  # up to this many elements are always computed by one thread
# Class in torch or transformers -> name of the function in lowbit.activate.
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
    """Whether a module is an elementwise activation function."""
    kind = type(module)
    return kind in _TORCH or kind.__module__ == "transformers.activations" or kind.__name__ == "BloomGelu"


def kind_of(module: torch.nn.Module) -> str | None:
    """The name of a module's function in :func:`lowbit.activate`; None if there is none."""
    if type(module) is torch.nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return _KINDS.get(type(module).__name__) if is_activation(module) else None


def is_computed(*tensors: Tensor, compiled: bool = False) -> bool:
    """Whether lowbit computes an operation between linear layers: on the CPU and without gradients.

    False in code of a compiler that would fuse torch's operation with its neighbors, unless ``compiled`` is set.
    """
    if is_fused() and not compiled:
        return False
    gradients = torch.is_grad_enabled()
    return all(x.is_cpu and x.dtype in DTYPES and not (gradients and x.requires_grad) for x in tensors)


class Activation(torch.nn.Module):
    """An activation function computed in one pass by :func:`lowbit.activate`, which is batch-invariant."""

    def __init__(self, function: torch.nn.Module, kind: str):
        super().__init__()
        self.function, self.kind = function, ACTIVATIONS.index(kind)

    def forward(self, x: Tensor) -> Tensor:
        if not is_computed(x):
            return self.function(x)
        return torch.ops.lowbit.activate(x.contiguous(), None, self.kind)


class RowWise(torch.nn.Module):
    """Makes another activation function batch-invariant, for decoders (no gradients).

    Compiled code has its own loops and uses the function unchanged, unless it runs each operator alone.
    """

    def __init__(self, function: torch.nn.Module):
        super().__init__()
        self.function = function
        kind = kind_of(function)
        self.kind = None if kind is None else ACTIVATIONS.index(kind)

    def forward(self, x: Tensor) -> Tensor:
        if (torch.compiler.is_compiling() if self.kind is None else is_fused()) or not x.numel():
            return self.function(x)
        if torch.is_grad_enabled():
            x = x.detach()
        if self.kind is not None and is_computed(x):
            return torch.ops.lowbit.activate(x.contiguous(), None, self.kind)
        width = x.shape[-1]
        if width % _LANES:  # pad each row to whole vectors
            return self(torch.nn.functional.pad(x, (0, -width % _LANES)))[..., :width].contiguous()
        flat = x.reshape(-1)
        pieces = _pieces(flat.numel(), torch.get_num_threads())
        if len(pieces) == 1:
            return self.function(flat).view(x.shape)
        return torch.cat([self.function(piece) for piece in flat.split(pieces)]).view(x.shape)


def _pieces(count: int, threads: int) -> list[int]:
    """Divides ``count`` elements into pieces in which every thread's share consists of whole vectors; returns their sizes."""
    pieces = []
    while count:
        size = count
        while size > _ALONE:
            # Most functions use only as many threads as get _GRAIN elements each; GELU uses all threads.
            step = _LANES * math.lcm(threads, min(threads, -(-size // _GRAIN)))
            if size % step == 0:
                break
            size = max(size - size % step, _ALONE)
        pieces.append(size)
        count -= size
    return pieces
