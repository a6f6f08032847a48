"""Converts calibration texts to batches of a model's inputs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..hf.decoding import position_limit
from .float_products import FloatLinears

Inputs = dict[str, Any]

HELD_OUT_TOKENS = 1024  # largest number of held-out tokens
HELD_OUT_PART = 4  # at most one of this many batches is held out
LEAST_TOKENS = 128
MOST_TOKENS = 32768
_BATCH = 2048  # tokens of a batch, unless a window is longer
_SHORTEST = 8  # tokens of a window


class Sample:
    """A calibration text as batches, some of which are held out to evaluate what was learned from the others.

    Attributes:
        masks: for each batch, which tokens count, bool [batch, tokens], or None for all.
        tokens: the number of tokens that count.
        held_out: indices of the held-out batches.
    """

    def __init__(self, batches: list[Inputs]):
        self.batches = batches
        self.masks = [mask_of(batch) for batch in batches]
        self.tokens = sum(map(tokens_of, batches))
        # Hold out whole batches, because other tokens of the same text would be data leakage.
        step = max(HELD_OUT_PART, -(-self.tokens // HELD_OUT_TOKENS))
        self.held_out = {i for i in range(len(batches)) if i % step == step - 1} or {len(batches) - 1}

    def part_held_out(self, i: int) -> float:
        """The fraction of the tokens of batch i that is held out; of a single batch, the end is held out."""
        if i not in self.held_out:
            return 0.0
        return 1.0 if len(self.batches) > 1 else 1 / HELD_OUT_PART

    def run(self, model: torch.nn.Module, i: int) -> Any:
        """The model's output for batch i."""
        with FloatLinears():
            return model(**self.batches[i])


def batches(model: Any, data: Iterable[Any], tokenizer: Any, window: int, most: int = MOST_TOKENS) -> tuple[list[Inputs], int]:
    """Batches of a model's inputs, and the total number of tokens of the texts.

    Batches of texts have no padding. If texts have more than ``most`` tokens, evenly spread windows are used (or texts, for
    models that take each text separately).

    Raises:
        TypeError, ValueError: data are neither texts nor inputs, texts without a tokenizer, or too few tokens.
    """
    if isinstance(data, str):
        data = [data]
    items = list(data)
    if isinstance(most, bool) or not isinstance(most, int) or most < LEAST_TOKENS:
        raise ValueError(f"max_tokens is {most!r}; expected an int of at least {LEAST_TOKENS}")
    if not items:
        raise ValueError("the calibration text is empty; expected some thousand tokens")
    if all(isinstance(item, str) for item in items):
        if tokenizer is None:
            raise TypeError("data are texts, but there is no tokenizer; give the model's with tokenizer=")
        result, text_tokens = _of_texts(model, items, tokenizer, window, most)
    else:
        result = [_as_batch(item) for item in items]
        text_tokens = sum(map(tokens_of, result))
    count = sum(tokens_of(batch) for batch in result)
    if count < LEAST_TOKENS:
        raise ValueError(
            f"the calibration text has {count} tokens; expected at least {LEAST_TOKENS}, and ten thousand for a good result"
        )
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    for batch in result:
        ids = batch["input_ids"]
        if vocabulary is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"the calibration text has token ids from {int(ids.min())} to {int(ids.max())}; expected 0 to "
                f"{vocabulary - 1}: the tokenizer is another model's"
            )
    return result, text_tokens


def mask_of(batch: Inputs) -> Tensor | None:
    """Which tokens of a batch are not padding, bool [batch, tokens]; None: all."""
    mask = batch.get("attention_mask")
    return None if mask is None else mask != 0


def tokens_of(batch: Inputs) -> int:
    """Number of tokens of a batch, without padding."""
    mask = mask_of(batch)
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def rows_in_parts(batch: Inputs, most: int) -> list[Inputs]:
    """Splits a batch into parts of at most ``most`` rows; tensors with another first dimension are passed to each part."""
    rows = batch["input_ids"].shape[0]
    return [
        {
            key: value[at : at + most] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
            for key, value in batch.items()
        }
        for at in range(0, rows, most)
    ]


def _as_batch(item: Any) -> Inputs:
    batch: Inputs = {}
    if isinstance(item, Tensor):
        batch = {"input_ids": item}
    elif not isinstance(item, str):
        with suppress(TypeError, ValueError):
            batch = dict(item)
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        problem = f"a {type(item).__name__}" if ids is None else "input_ids that are "
        if ids is not None:
            problem += f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise TypeError(f"data has {problem}; expected texts, int64 tensors [batch, tokens], or dicts with such input_ids")
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; expected {list(ids.shape)}, that of input_ids")
    return batch


def _of_texts(model: Any, texts: list[str], tokenizer: Any, window: int, most: int) -> tuple[list[Inputs], int]:
    config = model.config.get_text_config()
    limit = position_limit(config) or window
    if window < _SHORTEST:
        raise ValueError(f"window is {window}; expected at least {_SHORTEST}")
    window = min(window, limit)
    if getattr(model, "can_generate", lambda: False)():
        ids = [token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]]
        rows = [ids[begin : begin + window] for begin in range(0, len(ids), window)]
        if len(rows) > 1 and len(rows[-1]) < _SHORTEST:
            rows.pop()
    else:
        # Learned positions often start after the index of the padding token.
        longest = min(window, limit - 2 if limit > 2 else limit)
        rows = [tokenizer(text, truncation=True, max_length=longest, verbose=False)["input_ids"] for text in texts]
    rows = [row for row in rows if row]
    text_tokens = sum(map(len, rows))
    if text_tokens > most:
        count = max(1, len(rows) * most // text_tokens)
        rows = [rows[i * len(rows) // count] for i in range(count)]
    by_length: dict[int, list[list[int]]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    result = []
    for length, alike in sorted(by_length.items(), reverse=True):
        size = max(1, _BATCH // length)
        result += [{"input_ids": torch.tensor(alike[begin : begin + size])} for begin in range(0, len(alike), size)]
    return result, text_tokens
