"""Continues several texts at once: weights are read once for the tokens of all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor

from .caches import Caches, common, copy_layer
from .decoder import Decoder
from .generation import Generation, Writer, check_lengths
from .penalties import Constraint, TokenLogprobs, token_logprobs
from .prefixes import PrefixCache
from .sampling import Sampling, SamplingArguments, check_seed, prompt_ids, token_ids, without_mask

# Fewer tokens than these are computed rather than copied, which has its cost, too.
_LEAST = 16
# Of prompts whose logits are all asked for, so many tokens at a time: a vocabulary of floats each.
_SCORED = 64
# Caches have room for so many new tokens first, and for twice as many whenever that is not enough: most texts end long before
# they have all tokens that they may have.
_ROOM = 256


@dataclass(eq=False)
class Text:
    """A text that :class:`Batch` is to write, as :func:`generate` writes it alone."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: frozenset[int] = frozenset()
    until: Callable[[int], bool] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # also of the prompt's tokens but the first, with so many of the likeliest
    constraint: Constraint | None = None
    on_token: Callable[[int], None] | None = None
    on_end: Callable[[Generation], None] | None = None
    on_error: Callable[[Exception], None] | None = None  # what ends this text alone; None: it is raised
    result: Generation | None = None  # what there is of it, from when it begins


@dataclass(eq=False)
class _Running:
    text: Text
    caches: Caches
    pending: list[int]  # tokens that are to be computed next
    source: tuple[Caches, int] | None  # where the prompt's beginning is copied from, and how much
    writer: Writer
    scores: list[TokenLogprobs] = field(default_factory=list)  # of the prompt, as far as it is computed

    @property
    def known(self) -> list[int]:
        """Tokens that are in the caches, or certainly will be: a prompt is computed before the text can end."""
        return self.caches.tokens if self.writer.result.tokens else self.text.prompt


class Batch:
    """Texts that are written in the same calls of the model. They come and go between the calls.

    A call has the next token of every text, and those of prompts that have begun; only attention goes text by text. Where all
    linear layers are packed each text is the one that it is alone, to the token.
    """

    def __init__(self, decoder: Decoder, at_once: int = 16, rows: int = 512):
        """
        Args:
            decoder: not compiled. Its own caches stay as they are.
            at_once: so many texts are in memory and in a call; the others wait.
            rows: so many tokens of prompts are in a call; longer prompts come in several.

        Raises:
            ValueError: a decoder that is none, or whose model cannot take several texts; or a number out of its range.
            RuntimeError: the decoder was released.
        """
        if not isinstance(decoder, Decoder):
            raise ValueError(f"a {type(decoder).__name__} takes one text at a time; expected a Decoder, not compiled")
        decoder.check()
        decoder.check_texts()
        for name, value in (("at_once", at_once), ("rows", rows)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more")
        self.decoder, self.at_once, self.rows = decoder, at_once, rows
        self.prefix_cache: PrefixCache | None = (
            None  # on disk: what prompts begin with is read from it, and texts that end stay
        )
        self.waiting: deque[Text] = deque()
        self._running: list[_Running] = []  # those that began earlier come first

    @property
    def running(self) -> list[Text]:
        """The texts that have begun."""
        return [each.text for each in self._running if not each.writer.ended]

    def check(self, text: Text, name: str = "the prompt") -> None:
        """Raises ValueError for a text that cannot be written: see :func:`generate`."""
        check_lengths(name, text.prompt, text.max_new_tokens, self.decoder.max_length)
        bad = next((token for token in text.prompt if not 0 <= token < self.decoder.vocabulary), None)
        if bad is not None:
            raise ValueError(f"{name} has a token {bad}; expected 0 to {self.decoder.vocabulary - 1}")
        text.sampling.check_vocabulary(self.decoder.vocabulary)
        check_seed(text.seed)

    def add(self, text: Text) -> None:
        """A text that :meth:`check` has let pass waits for its place."""
        self.waiting.append(text)

    def remove(self, text: Text) -> None:
        """Ends a text, wherever it is; its place is free for the next one. ``on_end`` is not called."""
        if text in self.waiting:
            self.waiting.remove(text)
        gone = [each for each in self._running if each.text is text]
        self._running = [each for each in self._running if each.text is not text]
        for each in self._running:
            if each.source is not None and any(each.source[0] is other.caches for other in gone):
                # No more of that beginning comes.
                same = min(each.source[1], len(each.source[0].tokens))
                each.source = (each.source[0], same) if same else None
                each.pending = each.text.prompt[same:]
                each.writer.result.cached_tokens = same

    def beginnings(self) -> Iterator[tuple[Caches, list[int]]]:
        """Caches that a prompt's beginning can be copied from, and the tokens that they have, or will have before it."""
        return ((each.caches, each.known) for each in self._running)

    def ending(self, text: Text, caches: Caches) -> None:
        """Called when a text has ended, with its caches, which no longer change."""

    def step(self) -> bool:
        """Computes the next call. The result says whether there was one: nothing is left to do where there was none.

        Raises:
            ValueError: logits that are not finite, or what a text's functions raise, where it has no ``on_error``. The text is
                removed; the others have their tokens of this call.
        """
        still = [each for each in self._running if not each.writer.ended]
        failed: list[tuple[Text, Exception]] = []
        with torch.inference_mode():
            while self.waiting and len(still) < self.at_once:
                text = self.waiting.popleft()
                try:
                    still.append(self._begin(text))  # also from those that have just ended
                    self._running.append(still[-1])
                except Exception as error:  # no memory for its caches
                    failed.append((text, error))
            self._running = still
            for each in still:
                if each.writer.result.tokens and len(each.caches.tokens) == each.caches.length:
                    self._grow(each)
            for each, behind in self._compute(_plan(still, self.rows)):
                try:
                    self._take(each, behind)
                except Exception as error:
                    self.remove(each.text)
                    failed.append((each.text, error))
        for text, why in failed:
            if text.on_error is None:
                raise why
            text.on_error(why)
        return bool(still or failed)

    def _take(self, each: _Running, logits: Tensor) -> None:
        result = each.writer.result
        result.decode_calls += bool(result.tokens)
        result.prompt_logprobs = each.scores
        token = each.writer.take(logits)
        each.pending = [] if token is None else [token]
        if each.writer.ended:
            self.ending(each.text, each.caches)
            if self.prefix_cache is not None:
                self.prefix_cache.write(each.caches.tokens, each.caches.layers)
            if each.text.on_end is not None:
                each.text.on_end(result)

    def _begin(self, text: Text) -> _Running:
        prompt, source, same = text.prompt, None, 0
        for caches, tokens in self.beginnings() if text.prompt_logprobs is None else ():
            found = min(common(tokens, prompt), len(prompt) - 1)
            if self.decoder.recurrent and (found != len(caches.tokens) or any(each.caches is caches for each in self._running)):
                continue  # states cannot be cut back, and those of a text that runs do not stay
            if found >= max(_LEAST, same + 1):
                source, same = caches, found
        caches = self._caches(text, _ROOM)
        kept = self.prefix_cache if text.prompt_logprobs is None else None
        if kept is not None and kept.count(prompt) > same and (found := kept.read(prompt, caches.layers)) > same:
            source, same, caches.tokens = None, found, prompt[:found]
        writer = Writer(
            prompt, text.max_new_tokens, self.decoder.max_length, text.sampling, text.seed, stop=text.stop,
            until=text.until, logprobs=text.logprobs, constraint=text.constraint, cached=same, on_token=text.on_token,
        )  # fmt: skip
        text.result = writer.result
        return _Running(text, caches, prompt[same:], None if source is None else (source, same), writer)

    def _caches(self, text: Text, new: int) -> Caches:
        """Caches for a text with so many new tokens, or fewer where it cannot have as many."""
        length = min(len(text.prompt) + min(new, text.max_new_tokens), self.decoder.max_length)
        return self.decoder.new_caches(-(-length // 16) * 16)

    def _grow(self, each: _Running) -> None:
        before = each.caches
        each.caches = self._caches(each.text, 2 * (before.length - len(each.text.prompt)))
        for source, target in zip(before.layers, each.caches.layers, strict=True):
            copy_layer(source, target, len(before.tokens))
        each.caches.tokens = before.tokens

    def _compute(self, plan: list[tuple[_Running, list[int]]]) -> Iterator[tuple[_Running, Tensor]]:
        """The logits behind the last token of each text whose pending tokens are computed with these."""
        together = []
        for each, tokens in plan:
            if each.text.prompt_logprobs is not None and not each.writer.result.tokens:
                tokens = tokens[:_SCORED]
                (logits,) = self.decoder.run_texts([(each.caches, tokens)], everywhere=True)
                each.scores += _scores(each, logits)
                each.pending = each.pending[len(tokens) :]
                if not each.pending:
                    yield each, logits[-1]
            else:
                call = (each.caches, tokens) if each.source is None else (each.caches, tokens, each.source)
                together.append((each, call))
        if not together:
            return
        rows = self.decoder.run_texts([call for _, call in together])
        for (each, (_, tokens, *_)), row in zip(together, rows, strict=True):
            each.source = None
            each.pending = each.pending[len(tokens) :]
            if not each.pending:
                yield each, row


def _scores(each: _Running, logits: Tensor) -> list[TokenLogprobs]:
    """The log-probabilities of a prompt's tokens that these logits, of the last tokens in its caches, say."""
    end = len(each.caches.tokens)
    following = each.text.prompt[end - len(logits) + 1 : end + 1]
    count = each.text.prompt_logprobs or 0
    return [token_logprobs(row, token, count) for row, token in zip(logits, following)]


def _plan(running: Sequence[_Running], rows: int) -> list[tuple[_Running, list[int]]]:
    """What the next call computes: the next token of each text, and prompts as far as `rows` reach.

    Half of the rows are the prompt's that came first, so that a long one goes on always; all others are those of the shortest
    prompts, which do not wait for the long ones.
    """
    prompts = [each for each in running if not each.writer.result.tokens]
    there: dict[int, int] = {}  # tokens that caches will have by then
    share: dict[int, int] = {}

    def later(each: _Running) -> tuple[bool, int]:
        # What has to wait for another prompt's beginning takes no rows from that one.
        waits = each.source is not None and len(each.source[0].tokens) < each.source[1]
        return waits, len(each.pending)

    for each in sorted(prompts, key=later):
        others = 0 if each is prompts[0] or id(prompts[0]) in share else min(len(prompts[0].pending), -(-rows // 2))
        share[id(each)] = min(len(each.pending), max(0, rows - others - sum(share.values())))
    plan: list[tuple[_Running, list[int]]] = []
    for each in running:
        if each.source is not None:
            caches, count = each.source
            if there.get(id(caches), len(caches.tokens)) < count:
                continue  # it is being computed
        tokens = each.pending[: share.get(id(each), len(each.pending))]
        if tokens:
            there[id(each.caches)] = len(tokens) + (len(each.caches.tokens) if each.source is None else each.source[1])
            plan.append((each, tokens))
    return plan


def generate_batch(
    decoder: Decoder,
    prompts: Iterable[Iterable[int]],
    max_new_tokens: int | Sequence[int],
    *,
    seed: int | Sequence[int] = 0,
    stop: Iterable[int] = (),
    until: Sequence[Callable[[int], bool] | None] | None = None,
    logprobs: int | None = None,
    prefixes: Iterable[Caches] = (),
    prefix_cache: PrefixCache | None = None,
    at_once: int = 16,
    rows: int = 512,
    on_token: Callable[[int, int], None] | None = None,
    on_end: Callable[[int, Generation], None] | None = None,
    **sampling: Unpack[SamplingArguments],
) -> list[Generation]:
    """Continues several prompts of any lengths, each as :func:`generate` does alone.

    A call of the model has the next token of every text, and those of prompts that have begun; only attention goes text by
    text. Where all linear layers are packed each text is the one that it is alone, to the token: their results do not depend
    on how many rows a call has. A text that ends makes room for the next prompt. Prompts that begin alike compute the
    beginning once. :class:`Batch` takes texts while others are written.

    Args:
        decoder: not compiled. Its own caches stay as they are: each text has caches of the length that it needs.
        prompts: token ids of each, at least one; or a dict of a tokenizer, without padding.
        max_new_tokens: at most so many of each text; or a number for each.
        stop, logprobs, sampling: as for :func:`generate`, for all texts.
        until: of each text; as for :func:`generate`.
        seed: of the draws of the first text, each further one has the next number; or one for each.
        prefixes: of :meth:`Decoder.read`: beginnings that are there already.
        prefix_cache: of the decoder's model, on disk: beginnings are read from it, and texts that end are written to it.
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
    batch = _WithPrefixes(decoder, at_once, rows)
    given = [prompt_ids(f"prompt {number}", each) for number, each in enumerate(without_mask("a prompt", prompts))]
    if not given:
        raise ValueError("there are no prompts; expected at least one")
    counts = _each("max_new_tokens", max_new_tokens, len(given), 0)
    seeds = _each("seed", seed, len(given), 1)
    ends = [None] * len(given) if until is None else list(until)
    if len(ends) != len(given):
        raise ValueError(f"until has {len(ends)} functions; expected {len(given)}, one for each prompt")
    drawn, ids = Sampling(**sampling), frozenset(token_ids("stop", stop))
    batch.prefixes, batch.prefix_cache = list(prefixes), prefix_cache
    for prefix in batch.prefixes:
        decoder.check_caches(prefix)
    results: dict[int, Generation] = {}

    def text(number: int) -> Text:
        def end(result: Generation) -> None:
            results[number] = result
            if on_end is not None:
                on_end(number, result)

        told = None if on_token is None else lambda token: on_token(number, token)
        return Text(given[number], counts[number], drawn, seeds[number], ids, ends[number], logprobs, on_token=told, on_end=end)

    texts = [text(number) for number in range(len(given))]
    for number, each in enumerate(texts):
        batch.check(each, f"prompt {number}")
    for each in texts:
        batch.add(each)
    while batch.step():
        pass
    return [results[number] for number in range(len(given))]


class _WithPrefixes(Batch):
    prefixes: Sequence[Caches] = ()

    def beginnings(self) -> Iterator[tuple[Caches, list[int]]]:
        yield from ((each, each.tokens) for each in self.prefixes)
        yield from super().beginnings()


def _each(name: str, value: int | Sequence[int], count: int, step: int) -> list[int]:
    """A number for each prompt."""
    if isinstance(value, int):
        return [value + step * i for i in range(count)]
    found = list(value)
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} numbers; expected {count}, one for each prompt")
    return found
