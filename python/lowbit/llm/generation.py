"""Generates text with a decoder, token by token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .lookup import Lookup


@dataclass
class Generation:
    """What :func:`generate` did."""

    tokens: list[int] = field(default_factory=list)  # the new ones
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, that were in the caches already
    prefill_seconds: float = 0.0  # until the first new token is known
    decode_seconds: float = 0.0  # for all further steps
    decode_steps: int = 0  # those: one for each new token behind the first, and for the stop token
    decode_calls: int = 0  # of the model for these: as many, and fewer where guesses were right
    guessed: int = 0  # tokens that were computed beside others, before it was known whether they come
    right: int = 0  # of these
    stopped: str = "max_new_tokens"  # what ended the text: that, "max_length" or "stop"

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second, of those that were computed."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """Steps per second behind the first; NaN when there are none."""
        return self.decode_steps / self.decode_seconds if self.decode_steps else math.nan


def most_likely(logits: Tensor) -> int:
    """The first of the largest logits [vocabulary]."""
    # numpy finds it several times faster than torch: 15 instead of 110 us among 128256 on Zen 4.
    return int((logits if logits.dtype == torch.float32 else logits.float()).detach().numpy().argmax())


def check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, repetition_penalty: float = 1.0
) -> None:
    """Raises ValueError for what :func:`sample` and :func:`penalise` cannot draw by."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; expected 0 or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; expected 1 or more")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p}; expected 0 to 1")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty is {repetition_penalty}; expected a number above 0")


def penalise(logits: Tensor, tokens: set[int], penalty: float) -> Tensor:
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
    if probabilities.isnan().any():
        raise ValueError("the model's logits are not finite: its weights are damaged, or not those of its config.json")
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # Keeps the smallest set of tokens that reaches top_p: the first one always.
        ordered[1:][ordered.cumsum(0)[:-1] >= top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.inference_mode()
def generate(
    step: Callable[[Tensor, Tensor], Tensor],
    prompt: Iterable[int],
    max_new_tokens: int,
    *,
    max_length: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Iterable[int] = (),
    cached: int = 0,
    guesses: int = 0,
    on_token: Callable[[int], None] | None = None,
) -> Generation:
    """Continues a prompt, token by token.

    Args:
        step: a :class:`Decoder`, compiled or not, or a loaded .pt2 of one.
        prompt: token ids, at least one.
        max_new_tokens: at most so many; fewer when max_length is reached or a stop token comes.
        max_length: of the decoder.
        temperature: 0 takes the most likely token; otherwise tokens are drawn with this temperature.
        top_k, top_p: draw only from the k most likely tokens, or the most likely ones that together reach p.
        repetition_penalty: above 1 makes tokens of the prompt and of the text less likely.
        seed: of the draws.
        stop: tokens that end the text; they are not part of the result.
        cached: so many tokens at the beginning of the prompt are in the step's caches already, and are not computed
            again.
        guesses: at most so many tokens are guessed from the text before, and computed in the same call as the token before
            them; the model draws each token all the same, and the first wrong guess ends the call's use. Where all linear
            layers are packed the text is the same, to the token: their results do not depend on how many rows a call has.
            Only with a :class:`Decoder` that is not compiled. 0: none.
        on_token: called with every new token as soon as it is known.

    Raises:
        ValueError: an empty prompt, one that leaves no room for a new token, or a token of it that is not in the
            vocabulary; or a number out of its range; or guesses with a step that has no ``all_logits``.
    """
    prompt = list(prompt)
    if not prompt:
        raise ValueError("the prompt has no tokens; expected at least one")
    if len(prompt) >= max_length:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; expected fewer than the decoder's max_length of {max_length}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected 1 or more")
    if not 0 <= cached < len(prompt):
        raise ValueError(f"cached is {cached}; expected 0 to {len(prompt) - 1}, fewer than the prompt has tokens")
    if guesses < 0:
        raise ValueError(f"guesses is {guesses}; expected 0 or more")
    all_logits = getattr(step, "all_logits", None)
    if guesses and all_logits is None:
        raise ValueError(f"a {type(step).__name__} gives no logits behind guessed tokens; expected a Decoder, not compiled")
    check_sampling(temperature, top_k, top_p, repetition_penalty)
    stop = frozenset(stop)
    generator = torch.Generator().manual_seed(seed)
    result, came = Generation(prompt_tokens=len(prompt), cached_tokens=cached), set(prompt)
    lookup = Lookup(prompt) if guesses else None
    tokens = prompt[cached:]
    guess: list[int] = []
    start = torch.tensor([cached])
    most = min(max_new_tokens, max_length - len(prompt))
    if len(prompt) + max_new_tokens > max_length:
        result.stopped = "max_length"
    begin = time.perf_counter()
    while True:
        # Behind the last token that is known, and behind each guessed one.
        call = torch.tensor([tokens + guess])
        behind = all_logits(call, start)[0] if guess and all_logits is not None else step(call, start)
        result.decode_calls += bool(result.tokens)
        result.guessed += len(guess)
        for row, guessed in zip(behind, [*guess, None], strict=True):
            token = sample(penalise(row, came, repetition_penalty), temperature, top_k, top_p, generator)
            now = time.perf_counter()
            if not result.prefill_seconds:
                result.prefill_seconds, decode_begin = now - begin, now
            else:
                result.decode_seconds = now - decode_begin
                result.decode_steps += 1
            if token in stop:
                result.stopped = "stop"
                return result
            result.tokens.append(token)
            came.add(token)
            if on_token is not None:
                on_token(token)
            if lookup is not None:
                lookup.append(token)
            if len(result.tokens) == most:
                return result
            start += len(tokens)
            tokens = [token]
            if token != guessed:
                break
            result.right += 1
        if lookup is not None:
            guess = lookup.guess(min(guesses, most - len(result.tokens) - 1))
