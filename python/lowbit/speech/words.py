"""The times of words: cross-attention weights aligned with the recording by dynamic time warping, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Languages that do not separate words by spaces: each character is a word.
_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
_OPENING = "\"'“¡¿([{-"  # belong to the word after them
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # belong to the word before them
_UNFINISHED = "\ufffd"  # in the text of tokens that end within a character


@dataclass(frozen=True)
class Word:
    """A word of a transcription, with the space before it; begin and end in the recording in seconds.

    Its probability is None with Parakeet's transducers.
    """

    word: str
    start: float
    end: float
    probability: float | None

    @property
    def text(self) -> str:
        return self.word


def boundaries(queries: np.ndarray, keys: np.ndarray, positions: int, scale: float, filter_width: int) -> np.ndarray:
    """The positions of the recording at which each token ends.

    Args:
        queries: [heads, tokens, width], each after the model has read the token.
        keys: [heads, all positions, width], the keys of a window.
        positions: the number of positions with sound; silence follows.
        scale: factor of the products of queries and keys.
        filter_width: the width of the median filter along positions.
    """
    scores = np.matmul(queries * np.float32(scale), keys.transpose(0, 2, 1))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :positions]
    deviations = weights.std(1, keepdims=True)
    # With a single token, all weights equal their mean.
    weights = (weights - weights.mean(1, keepdims=True)) / np.where(deviations > 0, deviations, np.float32(1))
    return _warped(-_median(weights, filter_width).mean(0).astype(np.float64))


def _median(weights: np.ndarray, width: int) -> np.ndarray:
    half = width // 2
    if weights.shape[-1] <= half:
        return weights
    padded = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(half, half)], mode="reflect")
    found: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1, -1), -1)
    return found


def _warped(costs: np.ndarray) -> np.ndarray:
    """The first column of each row on the cheapest path from the first to the last cell (dynamic time warping)."""
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    moves = np.full((rows + 1, columns + 1), 2, np.int8)  # 0: from the last row and column, 1: from the last row, 2: column
    moves[:, 0] = 1
    flat, choices, step = total.reshape(-1), moves.reshape(-1), columns  # the next cell of an antidiagonal
    for diagonal in range(2, rows + columns + 1):
        first, last = max(1, diagonal - columns), min(rows, diagonal - 1)
        count = last - first + 1
        cell = first * (columns + 1) + diagonal - first

        def along(begin: int, cells: np.ndarray, count: int = count) -> np.ndarray:
            return cells[begin : begin + (count - 1) * step + 1 : step]

        both, row, column = (along(cell - back, flat) for back in (columns + 2, columns + 1, 1))
        by_both, by_row = (both < row) & (both < column), (row < both) & (row < column)
        at = np.arange(first, last + 1)
        least = np.where(by_both, both, np.where(by_row, row, column))
        along(cell, flat)[:] = costs[at - 1, diagonal - at - 1] + least
        along(cell, choices)[:] = np.where(by_both, 0, np.where(by_row, 1, 2))
    starts = np.zeros(rows, np.int64)
    i, j = rows, columns
    while i > 0 or j > 0:
        if i > 0:
            starts[i - 1] = max(j - 1, 0)
        move = moves[i, j]
        i, j = i - (move != 2), j - (move != 1)
    return starts


def words(
    tokens: Sequence[int],
    times: Sequence[float],
    probabilities: Sequence[float],
    decode: Callable[[list[int]], str],
    language: str | None,
) -> list[Word]:
    """Joins tokens to words.

    Args:
        tokens: the tokens of text, without timestamps.
        times: the begin and end of each token, [2 * tokens], in seconds.
        probabilities: the probability of each token.
        decode: the text of tokens.
        language: code of the language of the text.
    """
    ends = _word_ends(tokens, decode, language in _WITHOUT_SPACES)
    found = []
    for begin, end in zip([0, *ends], ends):
        chance = float(np.mean(probabilities[begin:end]))
        found.append(Word(decode(list(tokens[begin:end])), times[2 * begin], times[2 * end - 1], round(chance, 4)))
    return found


def _word_ends(tokens: Sequence[int], decode: Callable[[list[int]], str], without_spaces: bool) -> list[int]:
    """The number of tokens up to the end of each word."""
    pieces: list[tuple[str, int]] = []  # whole characters, and the number of tokens up to their end
    begin = 0
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[begin:end]))
        if _UNFINISHED not in text or end == len(tokens):
            pieces.append((text, end))
            begin = end
    ends: list[int] = []
    opening = False  # the last piece belongs to the word after it
    for text, end in pieces:
        mark = text.strip()
        closing = set(mark) <= set(_CLOSING) and not text.startswith(" ")
        if ends and (opening or closing or not (without_spaces or text.startswith(" "))):
            ends[-1] = end
        else:
            ends.append(end)
        opening = set(mark) <= set(_OPENING) and (without_spaces or text.startswith(" "))
    return ends
