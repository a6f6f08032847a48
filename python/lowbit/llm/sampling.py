"""Chooses a token from logits: the most likely one, or a random draw."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy

from ..machine.numbers import check_number, check_whole

NOT_FINITE = "the model's logits are not finite: its weights are damaged, or not those of its config.json"


def token_ids(name: str, tokens: Iterable[Any]) -> list[int]:
    """Token ids as Python ints, because elements of a tensor would not be found in sets.

    Raises:
        ValueError: the ids are not whole numbers.
    """
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        shape = f" of shape {list(tokens.shape)}" if hasattr(tokens, "shape") else ""
        raise ValueError(f"{name} is a {type(tokens).__name__}{shape}; expected token ids, whole numbers") from None


def without_mask(name: str, tokens: Any) -> Any:
    """The ``input_ids`` of a tokenizer's dict; other values unchanged.

    Raises:
        ValueError: a text is padded.
    """
    if not isinstance(tokens, Mapping) or "input_ids" not in tokens:
        return tokens
    if not all(numpy.asarray(row).all() for row in tokens.get("attention_mask", ())):
        raise ValueError(f"{name} is padded; expected tokens without padding (padding=False)")
    return tokens["input_ids"]


def prompt_ids(name: str, tokens: Any) -> list[int]:
    """Token ids of one text from a list, a tensor, a tokenizer's dict or a batch of one text.

    Raises:
        ValueError: several texts, padding, or ids that are not whole numbers.
    """
    tokens = without_mask(name, tokens)
    is_batch = getattr(tokens, "ndim", 1) == 2  # of torch or numpy
    if isinstance(tokens, list):
        is_batch = any(isinstance(row, list) for row in tokens)
    if is_batch and len(tokens) != 1:
        raise ValueError(f"{name} is a batch of {len(tokens)} texts; expected one (lowbit.llm.generate_batch takes several)")
    return token_ids(name, tokens[0] if is_batch else tokens)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def floats(logits: Any) -> numpy.ndarray:
    """Logits of numpy or torch as float32 of numpy. It may be the same memory, so that the caller must not write to it."""
    if not isinstance(logits, numpy.ndarray):
        logits = logits.detach().float().numpy()  # torch converts types that numpy does not have, such as bfloat16
    return logits.astype(numpy.float32, copy=False)


def most_likely(logits: Any) -> int:
    """The first token with the largest logit, from [vocabulary].

    Raises:
        ValueError: one is NaN, or the largest is infinite.
    """
    values = floats(logits)
    token = int(values.argmax())  # finds a NaN if there is one
    if not math.isfinite(values[token]):
        raise ValueError(NOT_FINITE)
    return token


def check_max_length(max_length: int, limit: int | None, step: int = 1) -> int:
    """``max_length`` as a Python int.

    Raises:
        ValueError: it is not a positive multiple of ``step``, or more than ``limit``, the model's positions.
    """
    expected = f"a positive {'number' if step == 1 else f'multiple of {step}'}"
    max_length = check_whole("max_length", max_length, 1, expected=expected)
    if max_length % step:
        raise ValueError(f"max_length is {max_length}; expected {expected}")
    if limit is not None and max_length > limit:
        raise ValueError(f"max_length is {max_length}; expected at most the model's {limit} positions")
    return max_length


def check_seed(seed: Any) -> int:
    """The seed as a Python int; raises ValueError for one of more than 64 bits."""
    return check_whole("seed", seed, -(2**63), 2**64 - 1, "a number of 64 bits")


_LARGE, _SMALL = 1e30, 1e-30  # far from the ends of float32, so that sums, products and quotients stay finite


class SamplingArguments(TypedDict, total=False):
    """Fields of :class:`Sampling` as keyword arguments."""

    temperature: float
    top_k: int | None
    top_p: float | None
    repetition_penalty: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_breakers: Iterable[int]
    logit_bias: Mapping[int, float]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    First the bias and the penalties are applied to logits, in the order of this list. Then temperature, top_k, top_p and
    min_p apply, in this order, as in transformers.

    Args:
        temperature: 0 takes the most likely token; otherwise tokens are drawn with this temperature.
        top_k, top_p: draw only from the k most likely tokens, or the most likely ones that together reach p.
        min_p: draw only from tokens with at least this fraction of the largest probability (Nguyen et al. 2024).
        logit_bias: numbers added to logits, by token id, as in OpenAI's API.
        repetition_penalty: above 1 makes tokens of the prompt and of the text less likely (Keskar et al. 2019, CTRL).
        presence_penalty: subtracted from the logits of tokens in the new text, as in OpenAI's API.
        frequency_penalty: subtracted once for each occurrence of the token in the new text.
        dry_multiplier: above 0 subtracts ``dry_multiplier * dry_base ** (n - dry_allowed_length)`` from the logit of a token
            that would continue a repetition of n >= ``dry_allowed_length`` tokens: the last n tokens of prompt and text also
            occur earlier, followed by this token (DRY, text-generation-webui#5677; llama.cpp).
        dry_breakers: tokens that end a repetition and get no DRY penalty; :func:`breakers` finds them.

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: Iterable[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0, sys.float_info.max, "0 or more")
        if self.top_k is not None:
            object.__setattr__(self, "top_k", check_whole("top_k", self.top_k, 1))
        if self.top_p is not None:
            check_number("top_p", self.top_p, 0, 1, "0 to 1")
        check_number("repetition_penalty", self.repetition_penalty, _SMALL, _LARGE, f"a number from {_SMALL} to {_LARGE}")
        check_number("min_p", self.min_p, 0, 1, "0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -_LARGE, _LARGE, f"a number from {-_LARGE} to {_LARGE}")
        check_number("dry_multiplier", self.dry_multiplier, 0, _LARGE, f"a number from 0 to {_LARGE}")
        check_number("dry_base", self.dry_base, 1, _LARGE, f"a number from 1 to {_LARGE}")
        object.__setattr__(self, "dry_allowed_length", check_whole("dry_allowed_length", self.dry_allowed_length, 1))
        object.__setattr__(self, "dry_breakers", tuple(token_ids("dry_breakers", self.dry_breakers)))
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is a {type(self.logit_bias).__name__}; expected token ids and their numbers")
        tokens = token_ids("logit_bias", self.logit_bias)
        for token, bias in zip(tokens, self.logit_bias.values(), strict=True):
            check_number(f"logit_bias of token {token}", bias, -_LARGE, _LARGE, f"a number from {-_LARGE} to {_LARGE}")
        object.__setattr__(self, "logit_bias", dict(zip(tokens, map(float, self.logit_bias.values()), strict=True)))

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raises ValueError for a bias of a token that is not in the vocabulary."""
        for token in self.logit_bias:
            if not 0 <= token < vocabulary:
                raise ValueError(f"logit_bias has token {token}; expected 0 to {vocabulary - 1}")


def random_generator(seed: int) -> numpy.random.Generator:
    """The random generator of a text; negative seeds are those of the same 64 bits."""
    return numpy.random.Generator(numpy.random.PCG64(seed % 2**64))


def sample(
    logits: Any,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: numpy.random.Generator,
    min_p: float = 0.0,
) -> int:
    """Draws a token from logits [vocabulary]; the most likely one at temperature 0.

    Args:
        logits: [vocabulary], of torch or numpy, of any floating-point dtype.
        temperature, top_k, top_p, min_p: as for :class:`Sampling`.
        generator: a random generator of numpy.

    Raises:
        ValueError: logits have another shape or are not finite, a temperature below 0 or not finite, a top_k below 1, a top_p
            or min_p that is not from 0 to 1.
    """
    if logits.ndim != 1:
        raise ValueError(f"logits are {list(logits.shape)}; expected [vocabulary]")
    Sampling(temperature, top_k, top_p, min_p=min_p)
    return draw(logits, temperature, top_k, top_p, generator, min_p)


def draw(
    logits: Any, temperature: float, top_k: int | None, top_p: float | None, generator: numpy.random.Generator, min_p: float
) -> int:
    """The same as :func:`sample`, without checking the arguments."""
    if temperature == 0:
        return most_likely(logits)
    values = floats(logits)
    largest = values.max()  # NaN if there is one
    if not math.isfinite(largest):
        raise ValueError(NOT_FINITE)
    tokens: numpy.ndarray | None = None  # the remaining ones; None: all
    if top_k is not None and top_k < len(values):
        tokens = likeliest(values, top_k)
        values = values[tokens]
    # Shift the largest logit to 0, which stays finite at any temperature. Below 1e-30 only equal logits remain, above 1e38 all.
    with numpy.errstate(over="ignore"):
        values = (values - largest) / numpy.float32(min(max(temperature, 1e-30), 1e38))
    probabilities = numpy.exp(values)
    probabilities /= probabilities.sum()
    if top_p is not None and top_p < 1:
        kept = nucleus(probabilities, top_p)
        values, probabilities, tokens = values[kept], probabilities[kept], kept if tokens is None else tokens[kept]
    if min_p:
        # Compare logits rather than probabilities, so that rounding never removes the most likely token. At a high temperature
        # all are equally likely, and top_p may have removed the one with the largest logit.
        probabilities[values < values.max() + numpy.float32(math.log(min_p))] = 0
    sums = probabilities.cumsum(dtype=numpy.float64)
    drawn = int(sums.searchsorted(generator.random() * sums[-1], side="right"))  # never a token of probability 0
    return drawn if tokens is None else int(tokens[drawn])


def likeliest(values: numpy.ndarray, count: int) -> numpy.ndarray:
    """The indices of the ``count`` largest values, and of those equal to the least of them, in ascending order.

    A partition of a whole vocabulary is slow: most values are below the least of ``count`` maxima of its parts.
    """
    width = len(values) // (2 * count)
    if width > 1:
        parts = values[: 2 * count * width].reshape(2 * count, width).max(1)
        likely = numpy.flatnonzero(values >= numpy.partition(parts, count)[count])  # at least `count` of them
    else:
        likely = numpy.arange(len(values))
    part = values[likely]
    return likely[part >= numpy.partition(part, len(part) - count)[len(part) - count]]


def nucleus(probabilities: numpy.ndarray, top_p: float) -> numpy.ndarray:
    """The smallest set of most likely tokens that reaches top_p, and at least one (Holtzman et al. 2020).

    Among equally likely tokens the first ones are kept.

    Args:
        probabilities: [vocabulary], float32.
        top_p: from 0 to 1.

    Returns:
        The tokens, in ascending order.
    """
    # Sorting a whole vocabulary is slow: 10 ms for 128256 tokens on Zen 4. Sorting only the tokens above some probability is
    # usually enough.
    for least in (1e-3, 1e-4, 1e-5, 1e-6, -1.0):
        tokens = numpy.flatnonzero(probabilities > least)
        likely = probabilities[tokens]
        if least > 0 and likely.sum(dtype=numpy.float64) < top_p:
            continue  # not enough, so do not sort
        order = numpy.argsort(-likely, kind="stable")
        sums = likely[order].cumsum(dtype=numpy.float64)
        if sums.size and sums[-1] >= top_p:
            break
    return numpy.sort(tokens[order[: 1 + int((sums[:-1] < top_p).sum())]])
