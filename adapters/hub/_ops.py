"""Loads the operators of this build, and tells torch.compile the shapes of their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_HERE = Path(__file__).parent
# The operators of each build have a namespace of their own, so a process can load several versions of lowbit.
NAMESPACE = json.loads((_HERE / "metadata.json").read_text(encoding="utf-8"))["id"]
ops = getattr(torch.ops, NAMESPACE)


def _shape_of(operator: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    return torch.library.register_fake(f"{NAMESPACE}::{operator}")


if not hasattr(ops, "linear"):  # otherwise a copy of this build was loaded from another path
    torch.ops.load_library(_HERE / f"{NAMESPACE}.abi3.so")

    @_shape_of("linear")
    def _(x: Tensor, packed_weight: Tensor, out_features: int) -> Tensor:
        return x.new_empty((*x.shape[:-1], out_features))

    @_shape_of("linears")
    def _(x: Tensor, packed_weights: list[Tensor], out_features: list[int]) -> Tensor:
        return x.new_empty((*x.shape[:-1], sum(out_features)))

    @_shape_of("embedding")
    def _(indices: Tensor, packed_weight: Tensor, embedding_dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        return indices.new_empty((*indices.shape, embedding_dim), dtype=dtype or torch.float32)

    @_shape_of("rms_norm")
    def _(x: Tensor, weight: Tensor | None, epsilon: float, weight_offset: float = 0.0) -> Tensor:
        return x.new_empty(x.shape)
