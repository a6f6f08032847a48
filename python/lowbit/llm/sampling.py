"""From logits to a token: the likeliest one, or one drawn at random."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NOT_FINITE = "the model's logits are not finite: its weights are damaged, or not those of its config.json"


def token_ids(name: str, tokens: Iterable) -> list[int]:
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


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, repetition_penalty: float = 1.0) -> None:
    """Raises ValueError for what :func:`sample` and :func:`penalize` cannot draw by."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; expected 0 or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; expected 1 or more")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p}; expected 0 to 1")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty is {repetition_penalty}; expected a number above 0")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the arguments of :func:`lowbit.llm.generate` of these names.

    Raises:
        ValueError: one is out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.repetition_penalty)


def penalize(logits: Tensor, tokens: set[int], penalty: float) -> Tensor:
    """Makes tokens that have come before less likely (Keskar et al. 2019, CTRL; as transformers does it).

    Args:
        logits: [vocabulary].
        tokens: that have come, prompt included, each once.
        penalty: divides their positive logits, multiplies the negative ones; 1 changes nothing.
    """
    if penalty == 1:
        return logits
    logits = logits.float().clone()
    came = torch.tensor(list(tokens))
    logits[came] = torch.where(logits[came] < 0, logits[came] * penalty, logits[came] / penalty)
    return logits


def sample(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator) -> int:
    """Draws a token from logits [vocabulary]; the most likely one at temperature 0.

    Args:
        logits: [vocabulary], of any floating-point dtype.
        temperature, top_k, top_p: as for :func:`generate`.
        generator: a torch.Generator of the CPU.

    Raises:
        ValueError: a temperature below 0 or not finite, a top_k below 1, a top_p that is not from 0 to 1.
    """
    check_sampling(temperature, top_k, top_p)
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
    if top_k is None and top_p is None:
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
