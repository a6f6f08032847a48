"""The pooling operator, which reduces the rows of each text to one row; torch runs it while a plan is recorded."""

from __future__ import annotations

import torch
from torch import Tensor

MODES = ("mean", "max", "mean_sqrt_len_tokens", "weightedmean")  # names of sentence-transformers, in the order of Pooling

_LIBRARY = torch.library.Library("lowbit_plan", "DEF")
_LIBRARY.define("pool(Tensor x, Tensor ranges, int mode) -> Tensor")


@torch.library.impl(_LIBRARY, "pool", "CPU")
def _pool(x: Tensor, ranges: Tensor, mode: int) -> Tensor:
    rows = torch.arange(x.shape[1])
    inside = (rows >= ranges[:, :1]) & (rows < ranges[:, 1:])
    if MODES[mode] == "max":
        return torch.where(inside[..., None], x, -torch.inf).amax(1)
    weights = inside.double()
    if MODES[mode] == "weightedmean":
        weights *= rows - ranges[:, :1] + 1
    sums, total = weights @ x[0].double(), weights.sum(1, keepdim=True)
    return (sums / (total.sqrt() if MODES[mode] == "mean_sqrt_len_tokens" else total)).to(x.dtype)


def pool(x: Tensor, ranges: Tensor, mode: str) -> Tensor:
    """[texts, width] from hidden states [1, rows, width] and ``ranges`` [texts, 2], the begin and end of each text's rows.

    Args:
        mode: one of :data:`MODES`, or "cls" or "lasttoken", a row of each text.
    """
    if mode in ("cls", "lasttoken"):
        return x[0, ranges[:, 0] if mode == "cls" else ranges[:, 1] - 1]
    result: Tensor = torch.ops.lowbit_plan.pool(x, ranges, MODES.index(mode))
    return result
