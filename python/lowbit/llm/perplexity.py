"""Computes the perplexity of a language model on a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor

from ..hf.decoding import Unsupported, position_limit
from .decoder import Decoder
from .proof import sees_what_follows
from .sampling import NOT_FINITE


@dataclass(frozen=True)
class Perplexity:
    """Result of :func:`perplexity`."""

    tokens: int  # number of predicted tokens: all but the first
    nats: float  # the sum of -log(probability) over them

    @property
    def perplexity(self) -> float:
        """exp of the mean over the predicted tokens."""
        return math.exp(self.nats / self.tokens) if self.nats / self.tokens < 709 else math.inf

    def bits_per_byte(self, size: int) -> float:
        """Bits per byte of a text of ``size`` bytes, which is comparable between models with different tokenizers."""
        return self.nats / math.log(2) / size


class _Window(Decoder):
    """A decoder with any number of positions, because a window may be as long as the model allows."""

    _STEP = 1


@torch.inference_mode()
def perplexity(
    model: torch.nn.Module,
    tokens: Sequence[int],
    *,
    window: int = 512,
    stride: int | None = None,
    cache: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of a text, with strided windows.

    The first window is the first ``window`` tokens. Each further window begins ``stride`` tokens later and predicts the
    tokens that the previous one did not reach, which are its last ``stride``. So every token except the first is predicted
    once, with at least ``window - stride`` tokens of context where available.

    Args:
        model: a causal language model of transformers, quantized or not, in eval mode.
        tokens: ids of the text, at least two.
        window: tokens per call of the model; from 2 to the model's number of positions.
        stride: 1 to window - 1; None: half the window. Smaller strides give every token more context and take longer.
        cache: evaluate with a :class:`Decoder` and a KV cache of this type; None: with the model's own attention, without a
            cache.
        progress: called as ``progress(tokens predicted, tokens to predict)`` after each window.

    Raises:
        ValueError: fewer than two tokens, an id beyond the vocabulary, a window or stride out of range, NaN logits, or a
            model that is not causal, so that it would see the tokens to predict; or, with a cache, a model that the decoder
            refuses.
    """
    if cache is None:  # a decoder makes this check itself
        check_causal(model)
    with closing(predictions(model, tokens, window, stride_of(window, stride), cache, progress)) as windows:
        nats = sum(torch.nn.functional.cross_entropy(logits, expected, reduction="sum").item() for logits, expected in windows)
    return Perplexity(len(tokens) - 1, nats)


def check_causal(model: torch.nn.Module) -> None:
    """Raises ValueError for a model whose logits after a token depend on later tokens."""
    try:
        reason = sees_what_follows(model)
    except Unsupported as error:
        reason = str(error)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} (model_type {model.config.model_type}) predicts no text: {reason}")


def stride_of(window: int, stride: int | None) -> int:
    """A stride; None: half the window."""
    return window // 2 if stride is None else stride


def windows_of(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """The strided windows of a text of ``length`` tokens: begin, end, and the first token that each window predicts."""
    done = 1
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        yield begin, end, done
        done = end
        if end == length:
            break


def predictions(
    model: torch.nn.Module,
    tokens: Sequence[int],
    window: int,
    stride: int,
    cache: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yields for each window the logits, float32 [new tokens, vocabulary], and the ids of the new tokens, int64.

    Arguments and errors are those of :func:`perplexity`, without the check of :func:`check_causal`. Close the generator: with
    a cache, a decoder owns the model until then.
    """
    config = model.config.get_text_config()
    limit = position_limit(config)
    if window < 2 or (limit is not None and window > limit):
        raise ValueError(f"window is {window}; expected 2 to {limit or 'any number'}, the model's positions")
    if not 1 <= stride < window:
        raise ValueError(f"stride is {stride}; expected 1 to {window - 1}: the first token of a window is not predicted in it")
    ids = torch.tensor(tokens, dtype=torch.int64)
    if ids.numel() < 2:
        raise ValueError(f"the text has {ids.numel()} tokens; expected 2 or more")
    if int(ids.max()) >= config.vocab_size or int(ids.min()) < 0:
        raise ValueError(
            f"the text has token ids from {int(ids.min())} to {int(ids.max())}; expected 0 to {config.vocab_size - 1}: "
            "the tokenizer is another model's"
        )
    decoder = None if cache is None else _Window(model, window, cache)
    try:
        for begin, end, done in windows_of(len(ids), window, stride):
            # Logits after token i predict token i + 1: keep one row more than there are new tokens, and drop the last.
            keep = end - done + 1
            if decoder is not None:
                logits = decoder.run(
                    ids[None, begin:end], torch.arange(end - begin), torch.tensor([0]), decoder.caches(), keep=keep
                )[0, :-1].float()
            else:
                more = {"logits_to_keep": keep} if "logits_to_keep" in signature(model.forward).parameters else {}
                logits = model(ids[None, begin:end], use_cache=False, **more).logits[0, -keep:-1].float()
            if logits.isnan().any():
                raise ValueError(NOT_FINITE)
            yield logits, ids[done:end]
            if progress is not None:
                progress(end - 1, len(ids) - 1)
    finally:
        if decoder is not None:
            decoder.release()
