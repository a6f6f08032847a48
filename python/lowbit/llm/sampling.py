"""From logits to a token: the likeliest one, or one drawn at random."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor

NOT_FINITE = "the model's logits are not finite: its weights are damaged, or not those of its config.json"


def token_ids(name: str, tokens: Iterable[Any]) -> list[int]:
    """Numbers of any kind as Python's: those of a tensor are equal to no other, and in no set.

    Raises:
        ValueError: something else than whole numbers.
    """
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        shape = f" of shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else ""
        raise ValueError(f"{name} is a {type(tokens).__name__}{shape}; expected token ids, whole numbers") from None


def without_mask(name: str, tokens: Any) -> Any:
    """Token ids of what tokenizers give: the ``input_ids`` of a dict.

    Raises:
        ValueError: a text is padded.
    """
    if not isinstance(tokens, Mapping) or "input_ids" not in tokens:
        return tokens
    if not all(torch.as_tensor(row).all() for row in tokens.get("attention_mask", ())):
        raise ValueError(f"{name} is padded; expected tokens without padding (padding=False)")
    return tokens["input_ids"]


def prompt_ids(name: str, tokens: Any) -> list[int]:
    """The token ids of one text, as tokenizers and chat templates give them: in a dict, or in a batch of one text, too.

    Raises:
        ValueError: several texts, padding, or something else than whole numbers.
    """
    tokens = without_mask(name, tokens)
    is_batch = getattr(tokens, "ndim", 1) == 2  # of torch or numpy
    if isinstance(tokens, list):
        is_batch = any(isinstance(each, list) for each in tokens)
    if is_batch and len(tokens) != 1:
        raise ValueError(f"{name} is a batch of {len(tokens)} texts; expected one (lowbit.llm.generate_batch takes several)")
    return token_ids(name, tokens[0] if is_batch else tokens)


def most_likely(logits: Tensor) -> int:
    """The first of the largest logits [vocabulary].

    Raises:
        ValueError: one is NaN, or the largest is infinite.
    """
    # numpy finds it several times faster than torch: 15 instead of 110 us among 128256 on Zen 4.
    values = (logits if logits.dtype == torch.float32 else logits.float()).detach().numpy()
    token = int(values.argmax())  # of a NaN, where there is one
    if not math.isfinite(values[token]):
        raise ValueError(NOT_FINITE)
    return token


def check_seed(seed: int) -> None:
    """Raises ValueError for what torch's generator does not take."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; expected a number of 64 bits")


def _ranges(name: str, value: Any, least: float, most: float, expected: str) -> None:
    if not least <= value <= most:  # false for NaN, too
        raise ValueError(f"{name} is {value}; expected {expected}")


_LARGE = 1e30  # far from what float32 ends at, so that sums of a few stay finite


class SamplingArguments(TypedDict, total=False):
    """The fields of :class:`Sampling`, as keywords of functions that draw tokens."""

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

    A token's logit first gets its bias and the penalties, in the order of this list; then the rest is drawn from, with
    temperature, top_k, top_p and min_p in this order, as transformers does it.

    Args:
        temperature: 0 takes the most likely token; otherwise tokens are drawn with this temperature.
        top_k, top_p: draw only from the k most likely tokens, or the most likely ones that together reach p.
        min_p: draw only from tokens that are at least so many times as likely as the most likely one (Nguyen et al. 2024).
        logit_bias: token ids to numbers that are added to their logits, as in OpenAI's API.
        repetition_penalty: above 1 makes tokens of the prompt and of the text less likely (Keskar et al. 2019, CTRL).
        presence_penalty: subtracted from the logits of tokens that the text has; the prompt does not count, as in OpenAI's API.
        frequency_penalty: subtracted as many times as the text has the token, likewise.
        dry_multiplier: above 0 subtracts ``dry_multiplier * dry_base ** (n - dry_allowed_length)`` from the logit of a token
            that would go on with a repetition of n tokens, where n is at least ``dry_allowed_length``: the last n tokens of
            prompt and text stand earlier, too, and this token follows there (DRY, text-generation-webui#5677; llama.cpp).
        dry_breakers: tokens that no repetition goes beyond, and that get no penalty of DRY: :func:`breakers` finds them.

    Raises:
        ValueError: one is out of its range.
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
        _ranges("temperature", self.temperature, 0, sys.float_info.max, "0 or more")
        if self.top_k is not None:
            _ranges("top_k", self.top_k, 1, math.inf, "1 or more")
        if self.top_p is not None:
            _ranges("top_p", self.top_p, 0, 1, "0 to 1")
        _ranges("repetition_penalty", self.repetition_penalty, 5e-324, sys.float_info.max, "a number above 0")
        _ranges("min_p", self.min_p, 0, 1, "0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _ranges(name, getattr(self, name), -_LARGE, _LARGE, f"a number from {-_LARGE} to {_LARGE}")
        _ranges("dry_multiplier", self.dry_multiplier, 0, _LARGE, f"a number from 0 to {_LARGE}")
        _ranges("dry_base", self.dry_base, 1, _LARGE, f"a number from 1 to {_LARGE}")
        _ranges("dry_allowed_length", self.dry_allowed_length, 1, math.inf, "1 or more")
        object.__setattr__(self, "dry_breakers", tuple(token_ids("dry_breakers", self.dry_breakers)))
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is a {type(self.logit_bias).__name__}; expected token ids and their numbers")
        tokens = token_ids("logit_bias", self.logit_bias)
        for token, bias in zip(tokens, self.logit_bias.values(), strict=True):
            _ranges(f"logit_bias of token {token}", bias, -_LARGE, _LARGE, f"a number from {-_LARGE} to {_LARGE}")
        object.__setattr__(self, "logit_bias", dict(zip(tokens, map(float, self.logit_bias.values()), strict=True)))

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raises ValueError if a bias is of a token that a model does not have."""
        for token in self.logit_bias:
            if not 0 <= token < vocabulary:
                raise ValueError(f"logit_bias has token {token}; expected 0 to {vocabulary - 1}")


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: Any, min_p: float = 0.0
) -> int:
    """Draws a token from logits [vocabulary]; the most likely one at temperature 0.

    Args:
        logits: [vocabulary], of any floating-point dtype.
        temperature, top_k, top_p, min_p: as for :class:`Sampling`.
        generator: a torch.Generator of the CPU.

    Raises:
        ValueError: a temperature below 0 or not finite, a top_k below 1, a top_p or min_p that is not from 0 to 1.
    """
    Sampling(temperature, top_k, top_p, min_p=min_p)
    return draw(logits, temperature, top_k, top_p, generator, min_p)


def draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: Any, min_p: float) -> int:
    """:func:`sample` by numbers that are known to be in their ranges."""
    if temperature == 0:
        return most_likely(logits)
    # The largest becomes 0, which no temperature makes infinite. Below 1e-30 only tokens as likely as it are left.
    logits = logits.float()
    logits = (logits - logits.max()) / max(temperature, 1e-30)
    if top_k is not None and top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -math.inf
    probabilities = logits.softmax(0)
    if probabilities[:1].isnan():  # then all are: one logit that is not finite is in everybody's sum
        raise ValueError(NOT_FINITE)
    if top_p is not None and top_p < 1:
        probabilities = nucleus(probabilities, top_p)
    if min_p:
        # Of logits, whose difference is exact where two are alike: the likeliest one always stays.
        probabilities[logits < math.log(min_p)] = 0
    if top_k is None and top_p is None and not min_p:
        return int(torch.multinomial(probabilities, 1, generator=generator))
    # Torch makes noise for every token that it is given, 3 ms for a vocabulary: only those that are left.
    tokens = probabilities.nonzero()[:, 0]
    return int(tokens[torch.multinomial(probabilities[tokens], 1, generator=generator)])


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keeps the smallest set of the likeliest tokens that reaches top_p, and at least one (Holtzman et al. 2020).

    Of tokens that are as likely as each other the first ones are kept.

    Args:
        probabilities: [vocabulary], float32.
        top_p: from 0 to 1.

    Returns:
        [vocabulary], float32: the probabilities of the tokens that are kept, zero for all others.
    """
    # To sort a whole vocabulary takes a third as long as the rest of a token: 10 ms for 128256 on Zen 4. The tokens
    # above some probability are its beginning, and mostly enough.
    for least in (1e-3, 1e-4, 1e-5, 1e-6, -1.0):
        tokens = (probabilities > least).nonzero()[:, 0]
        likely = probabilities[tokens]
        if least > 0 and likely.sum() < top_p:
            continue  # before anything is sorted
        ordered, order = likely.sort(descending=True, stable=True)
        sums = ordered.cumsum(0)
        if (sums >= top_p).any():
            break
    kept = tokens[order[: 1 + int((sums[:-1] < top_p).sum())]]
    return torch.zeros_like(probabilities).index_copy_(0, kept, probabilities[kept])
