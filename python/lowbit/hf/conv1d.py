"""Quantization-aware training of transformers' Conv1D."""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from ..layers import prepared
from ..layers.linear_forms import of_conv1d


class TrainedConv1D(prepared.LinearLayer, Conv1D):
    """The prepared form of a Conv1D (:func:`lowbit.qat.prepare_`); its weight stays [in, out], as in checkpoints."""

    def matrix(self) -> torch.Tensor:
        return self.weight.T

    def as_linear(self) -> Any:
        linear = of_conv1d(self)
        linear.__class__ = prepared.Linear
        linear.follow(self)
        return linear
