"""Calls of a step with tokens of one text: checks of its arguments, and pieces of long ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import texts_call


def pieces(tokens: Tensor, start: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Splits a call [1, s] into pieces of at most PIECE tokens and nearly equal length; yields each with its start."""
    for piece in tokens.tensor_split(max(1, -(-tokens.shape[1] // texts_call.PIECE)), dim=1):
        yield piece, start
        start = start + piece.shape[1]


def check_call(tokens: Tensor, start: Tensor, vocabulary: int, max_length: int, count: int) -> None:
    """Checks the arguments of a call, because machine code would ignore invalid ones or crash.

    Args:
        count: the number of tokens of the text so far.

    Raises:
        ValueError: tokens are not int64 [1, s], start is not int64 [1], or a token is not in the vocabulary.
        IndexError: the text is longer than max_length, or start is negative or more than ``count``.
    """
    for name, tensor, shape in (("tokens", tokens, "[1, s]"), ("start", start, "[1]")):
        if tensor.dtype != torch.int64 or tensor.dim() != shape.count(",") + 1 or tensor.shape[0] != 1:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected torch.int64 {shape}")
    if not tokens.numel():
        raise ValueError("tokens is torch.int64 [1, 0]; expected at least one token")
    least, most = (tokens.item(),) * 2 if tokens.numel() == 1 else (int(end) for end in tokens.aminmax())
    if least < 0 or most >= vocabulary:
        raise ValueError(f"there is no token {least if least < 0 else most}; expected 0 to {vocabulary - 1}")
    begin = start.item()
    if begin < 0 or begin + tokens.shape[1] > max_length:
        raise IndexError(
            f"start is {begin} and there are {tokens.shape[1]} tokens; expected a start from 0 and no more than the "
            f"max_length of {max_length} tokens altogether"
        )
    if begin > count:
        raise IndexError(f"start is {begin}; expected at most {count}, the tokens that came before")
