"""Continues several texts at once: weights are read once for the tokens of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .caches import Caches, common
from .decoder import Decoder
from .generation import Generation, Writer, check_lengths
from .proof import check_texts
from .sampling import Sampling, check_seed, prompt_ids, token_ids, without_mask

# Fewer tokens than these are computed rather than copied, which has its cost, too.
_LEAST = 16


@dataclass
class _Running:
    number: int
    caches: Caches
    prompt: list[int]
    pending: list[int]  # tokens that are to be computed next
    source: tuple[Caches, int] | None  # where the prompt's beginning is copied from, and how much
    writer: Writer

    @property
    def known(self) -> list[int]:
        """Tokens that are in the caches, or certainly will be: a prompt is computed before the text can end."""
        return self.caches.tokens if self.writer.result.tokens else self.prompt


@torch.inference_mode()
def generate_batch(
    decoder: Decoder,
    prompts: Iterable[Iterable[int]],
    max_new_tokens: int | Sequence[int],
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop: Iterable[int] = (),
    prefixes: Iterable[Caches] = (),
    at_once: int = 16,
    rows: int = 512,
    on_token: Callable[[int, int], None] | None = None,
    on_end: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """Continues several prompts of any lengths, each as :func:`generate` does alone.

    A call of the model has the next token of every text, and those of prompts that have begun; only attention goes text by
    text. Where all linear layers are packed each text is the one that it is alone, to the token: their results do not depend
    on how many rows a call has. A text that ends makes room for the next prompt. Prompts that begin alike compute the
    beginning once.

    Args:
        decoder: not compiled. Its own caches stay as they are: each text has caches of the length that it needs.
        prompts: token ids of each, at least one; or a dict of a tokenizer, without padding.
        max_new_tokens: at most so many of each text; or a number for each.
        temperature, top_k, top_p, repetition_penalty, stop: as for :func:`generate`, for all texts.
        seed: of the draws of the first text, each further one has the next number; or one for each.
        prefixes: of :meth:`Decoder.read`: beginnings that are there already.
        at_once: so many texts are in memory and in a call; the others wait.
        rows: so many tokens of prompts are in a call; longer prompts come in several.
        on_token: called with the number of the text, from 0, and its new token as soon as it is known.
        on_end: called with the number of the text and what was done as soon as it ends.

    Returns:
        Of each prompt, in their order. ``cached_tokens`` are those that were copied; ``prefill_seconds`` and
        ``decode_seconds`` are what this text had to wait, while others were computed, too.

    Raises:
        ValueError: no prompts, an empty one, one that leaves no room for a new token, or a token of it that is not in the
            vocabulary; or a number out of its range; or logits that are not finite; or prefixes of another model or
            kind of cache; or a decoder that is none, or whose model cannot take several texts.
        RuntimeError: the decoder was released.
    """
    if not isinstance(decoder, Decoder):
        raise ValueError(f"a {type(decoder).__name__} takes one text at a time; expected a Decoder, not compiled")
    decoder.check()
    check_texts(decoder)
    given, counts = _checked_prompts(decoder, prompts, max_new_tokens)
    seeds = _each("seed", seed, len(given), 1)
    for each in seeds:
        check_seed(each)
    for name, value in (("at_once", at_once), ("rows", rows)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more")
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    stop, prefixes = frozenset(token_ids("stop", stop)), list(prefixes)
    for prefix in prefixes:
        decoder.check_caches(prefix)

    def begin(number: int, others: Iterable[tuple[Caches, list[int]]]) -> _Running:
        prompt = given[number]
        source, same = None, 0
        for caches, tokens in others:
            found = min(common(tokens, prompt), len(prompt) - 1)
            if found >= max(_LEAST, same + 1):
                source, same = caches, found
        told = None if on_token is None else lambda token: on_token(number, token)
        length = min(len(prompt) + counts[number], decoder.max_length)
        return _Running(
            number=number,
            caches=decoder.new_caches(-(-length // 16) * 16),
            prompt=prompt,
            pending=prompt[same:],
            source=None if source is None else (source, same),
            writer=Writer(
                prompt, counts[number], decoder.max_length, sampling, seeds[number], stop=stop, cached=same, on_token=told
            ),
        )

    results: dict[int, Generation] = {}
    waiting = iter(range(len(given)))
    running: list[_Running] = []  # those that began earlier come first
    while True:
        still = [text for text in running if not text.writer.ended]
        for number in waiting if len(still) < at_once else ():
            # Also from those that have just ended.
            others = [(each, each.tokens) for each in prefixes] + [(text.caches, text.known) for text in running]
            still.append(begin(number, others))
            running.append(still[-1])
            if len(still) == at_once:
                break
        running = still
        if not running:
            return [results[number] for number in range(len(given))]
        calls = _plan(running, rows)
        logits = decoder.run_texts([call for _, call in calls])
        for (text, (_, tokens, *_)), row in zip(calls, logits, strict=True):
            text.source = None
            text.pending = text.pending[len(tokens) :]
            if text.pending:
                continue
            writer = text.writer
            writer.result.decode_calls += bool(writer.result.tokens)
            token = writer.take(row)
            text.pending = [] if token is None else [token]
            if writer.ended:
                results[text.number] = writer.result
                if on_end is not None:
                    on_end(text.number, writer.result)


def _checked_prompts(
    decoder: Decoder, prompts: Iterable[Iterable[int]], max_new_tokens: int | Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt, and how many may follow.

    Raises:
        ValueError: no prompts, or one that is empty, leaves no room, or has a token that is not in the vocabulary.
    """
    prompts = without_mask("a prompt", prompts)
    given = [prompt_ids(f"prompt {number}", prompt) for number, prompt in enumerate(prompts)]
    if not given:
        raise ValueError("there are no prompts; expected at least one")
    counts = _each("max_new_tokens", max_new_tokens, len(given), 0)
    for number, (prompt, count) in enumerate(zip(given, counts, strict=True)):
        name = f"prompt {number}"
        check_lengths(name, prompt, count, decoder.max_length)
        bad = next((token for token in prompt if not 0 <= token < decoder.vocabulary), None)
        if bad is not None:
            raise ValueError(f"{name} has a token {bad}; expected 0 to {decoder.vocabulary - 1}")
    return given, counts


def _plan(running: Iterable[_Running], rows: int) -> list[tuple[_Running, tuple]]:
    """What the next call computes: the next token of each text, and prompts as far as `rows` reach."""
    plan: list[tuple[_Running, tuple]] = []
    there: dict[int, int] = {}  # tokens that caches will have by then
    for text in running:
        if text.source is not None:
            caches, count = text.source
            if there.get(id(caches), len(caches.tokens)) < count:
                continue  # it is being computed
        tokens = text.pending
        if len(tokens) > 1 or not text.writer.result.tokens:
            tokens = tokens[:rows]
            rows -= len(tokens)
        if not tokens:
            continue
        there[id(text.caches)] = len(tokens) + (len(text.caches.tokens) if text.source is None else text.source[1])
        plan.append((text, (text.caches, tokens) if text.source is None else (text.caches, tokens, text.source)))
    return plan


def _each(name: str, value: int | Sequence[int], count: int, step: int) -> list[int]:
    """A number for each prompt."""
    if isinstance(value, int):
        return [value + step * i for i in range(count)]
    found = list(value)
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} numbers; expected {count}, one for each prompt")
    return found
