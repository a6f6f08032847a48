"""Calls of decoding steps, of torch and without it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy


class ListStep(Protocol):
    """A step of :func:`lowbit.llm.generate` that needs no torch: it takes a list of tokens, and returns an array of numpy."""

    max_length: int

    def feed(self, tokens: list[int], start: int) -> numpy.ndarray:
        """Logits [vocabulary], float32, after tokens that follow the first ``start`` ones of the text."""


def rows_after(step: Any, tokens: Sequence[int], start: int, guess: Sequence[int] = ()) -> Iterable[Any]:
    """Logits [vocabulary] of a step after the last of these tokens, which follow ``start`` others, and each draft token."""
    if hasattr(step, "feed"):
        return step.feed_all([*tokens, *guess], start)[len(tokens) - 1 :] if guess else [step.feed(list(tokens), start)]
    torch = import_module("torch")
    call = torch.tensor([[*tokens, *guess]]), torch.tensor([start])
    rows: Iterable[Any] = step.all_logits(*call)[0][len(tokens) - 1 :] if guess else step(*call)
    return rows


def gives_rows(step: Any) -> bool:
    """Whether a step gives the logits after several tokens of a call."""
    return callable(getattr(step, "all_logits", None)) or hasattr(step, "feed_all")


def inference() -> AbstractContextManager[Any]:
    """A context without gradients, in a program that has loaded torch."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.inference_mode()
