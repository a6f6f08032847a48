"""Continuous batching: several texts are decoded in the same calls of the model, which read the weights once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Unpack

from ..files.untrusted import one_line, raised_by_reader
from ..machine.numbers import check_whole
from ..operators.cache_layout import copied, is_state, states_of
from .caches import Caches
from .generation import AGAIN, Generation, Text, TextWriter, check_lengths
from .guessing import MOST, Guesser, check_draft, make_guesser
from .penalties import TokenLogprobs, token_logprobs
from .prefixes import BLOCK, PrefixCache
from .sampling import Sampling, SamplingArguments, check_seed, common, prompt_ids, token_ids, without_mask
from .steps import inference
from .texts_call import TextsDecoder

# Shorter common prefixes are computed rather than copied, because copying has a cost too.
_LEAST = 16
# Prompt tokens per call if log-probabilities are requested, because each needs a row of logits for the whole vocabulary.
_SCORED = 64
# Initial room for new tokens in caches. It doubles when it is full, because most texts end long before their largest number of
# tokens.
_ROOM = 256


@dataclass(eq=False)
class _Active:
    text: Text
    caches: Caches
    pending: list[int]  # known tokens that are not in the caches
    source: tuple[Caches, int] | None  # caches to copy a common prefix from, and its number of tokens
    writer: TextWriter
    scores: list[TokenLogprobs] = field(default_factory=list)  # of the computed tokens of the prompt
    guesser: Guesser | None = None  # created when the text first runs alone
    # Numbers of tokens after which calls of the prompt end, because caches with states or windows are copied or stored there:
    ends: frozenset[int] = frozenset()  # on disk
    branch: int = 0  # in memory, after a prefix that an earlier text has lost
    snapshot: dict[int, list[Any]] = field(default_factory=dict)  # states where the last whole block ended, by its end

    @property
    def known(self) -> list[int]:
        """Tokens that are or will be in the caches: a prompt is computed before the text can end."""
        return self.caches.tokens if self.writer.result.tokens else self.text.prompt


_Layers: TypeAlias = list[tuple[Any, ...]]
_Computed: TypeAlias = tuple[_Active, Any, _Layers | None]  # a text, logits, and states that include all draft tokens


class Batch:
    """Continuous batching: texts are decoded in the same calls of the model, and can be added and removed between calls.

    A call computes the next token of every text and tokens of prompts; only attention runs text by text. If all linear layers
    are packed, each text is the same as if it were decoded alone. A text copies the prefix that it shares with another one
    between two calls. If that depends on states or on windows, the other text's call ends where the prefix does.
    """

    def __init__(self, decoder: TextsDecoder, at_once: int = 16, rows: int = 512):
        """
        Args:
            decoder: a :class:`lowbit.llm.Decoder`, or one that runs a plan without torch. Its caches are unchanged.
            at_once: largest number of texts in memory and in a call; further ones wait.
            rows: largest number of prompt tokens in a call; longer prompts take several calls.

        Raises:
            ValueError: not a decoder, or its model does not support several texts; or a number out of its range.
            RuntimeError: the decoder was released.
        """
        if not isinstance(decoder, TextsDecoder):
            raise ValueError(f"a {type(decoder).__name__} takes one text at a time; expected a Decoder, not compiled")
        decoder.check()
        decoder.check_texts()
        self.decoder, self.at_once, self.rows = decoder, check_whole("at_once", at_once, 1), check_whole("rows", rows, 1)
        self.prefix_cache: PrefixCache | None = None  # on disk; read for new prompts, written when texts end
        self._guesses = 0
        self._draft: Any = None
        self.waiting: deque[Text] = deque()
        self._active: list[_Active] = []  # in the order in which they began

    def speculate(self, guesses: int, draft: Any = None) -> None:
        """Enables speculative decoding whenever only one text is running; the text is the same.

        Several texts are decoded without it: their tokens fill a call as draft tokens would, and none of them is rejected.

        Args:
            guesses, draft: as for :func:`generate`.

        Raises:
            ValueError: a number out of its range, a draft with fewer positions than the decoder, or one of another model.
        """
        guesses = check_whole("guesses", guesses, 1)
        check_draft(self.decoder, draft, self.decoder.max_length)
        self._guesses, self._draft = min(guesses, MOST), draft

    @property
    def running(self) -> list[Text]:
        """The texts that have begun."""
        return [active.text for active in self._active if not active.writer.ended]

    def check(self, text: Text, name: str = "the prompt") -> None:
        """Raises ValueError for a text with wrong arguments, as :func:`generate`."""
        check_lengths(name, text.prompt, text.max_new_tokens, self.decoder.max_length)
        bad = next((token for token in text.prompt if not self.decoder.takes(token)), None)
        if bad is not None:
            raise ValueError(f"{name} has a token {bad}; expected 0 to {self.decoder.vocabulary - 1}")
        text.sampling.check_vocabulary(self.decoder.vocabulary)
        check_seed(text.seed)

    def add(self, text: Text) -> None:
        """Queues a text that :meth:`check` accepts."""
        self.waiting.append(text)

    def remove(self, text: Text) -> None:
        """Removes a text without calling ``on_end`` and makes room for the next text."""
        if text in self.waiting:
            self.waiting.remove(text)
        gone = [active for active in self._active if active.text is text]
        self._active = [active for active in self._active if active.text is not text]
        for active in self._active:
            if active.source is not None and any(active.source[0] is other.caches for other in gone):
                # Keep the part of the prefix that was computed.
                same = min(active.source[1], len(active.source[0].tokens))
                active.source = (active.source[0], same) if same else None
                active.pending = active.text.prompt[same:]
                active.writer.result.cached_tokens = same

    def beginnings(self) -> Iterator[tuple[Caches, list[int]]]:
        """Yields caches from which a prompt's prefix can be copied, and the tokens that they have or will have."""
        return ((active.caches, active.known) for active in self._active)

    def ending(self, text: Text, caches: Caches) -> None:
        """Called with the caches of a text that has ended; they no longer change."""

    def branching(self, caches: Caches) -> None:
        """Called with the caches of a prompt after the prefix of an earlier text that can be copied from nowhere."""

    def step(self) -> bool:
        """Computes the next call; returns False if no texts remain.

        Raises:
            ValueError: logits are not finite, and the text has no ``on_error``. The text is removed; other texts have got
                their tokens of this call.
            Exception: whatever the functions of a text without ``on_error`` raise.
        """
        still = [active for active in self._active if not active.writer.ended]
        failed: list[tuple[Text, Exception]] = []
        with inference():
            while self.waiting and len(still) < self.at_once:
                text = self.waiting.popleft()
                try:
                    still.append(self._begin(text))  # also copies from texts that have just ended
                    self._active.append(still[-1])
                except Exception as error:  # no memory for its caches
                    failed.append((text, error))
            self._active = still
            for active in still:
                self._copy(active)
                if active.writer.result.tokens and active.caches.length - len(active.caches.tokens) < len(active.pending):
                    self._grow(active)
            guess = self._guess(still)
            computed = self._verify(still[0], guess) if guess else self._compute(_plan(still, self.rows, self.decoder))
            for active, rows, after in computed:
                try:
                    self._take(active, rows, guess, after)
                except BaseException as error:
                    if not isinstance(error, Exception) and not raised_by_reader(error):  # Ctrl-C
                        raise
                    self.remove(active.text)
                    kept = error if isinstance(error, Exception) else RuntimeError(one_line(error))  # a panic in Rust
                    failed.append((active.text, kept))
        for text, failure in failed:
            if text.on_error is None:
                raise failure
            text.on_error(failure)
        return bool(still or failed)

    def _take(self, active: _Active, rows: Iterable[Any], guess: list[int], after: _Layers | None) -> None:
        """Adds tokens to a text, from logits after its last token and after draft tokens, and sets what its caches hold.

        Args:
            after: states that include all draft tokens; None: nothing in the caches depends on rejected ones.
        """
        result, caches, before = active.writer.result, active.caches, active.writer.result.accepted
        result.prompt_logprobs = active.scores
        new = active.writer.accept(rows, guess)
        accepted = guess[: result.accepted - before]
        if after is None:
            caches.tokens += accepted
            active.pending = new[-1:]
        elif len(accepted) == len(guess):
            caches.layers = after
            caches.tokens += active.pending + guess
            active.pending = new[-1:]
            self._snap(active)
        else:  # accepted tokens that the states lack are computed again, with the next one
            active.pending = active.pending + new
        if active.writer.ended:
            self.ending(active.text, active.caches)
            if self.prefix_cache is not None:
                self.prefix_cache.write(active.caches.tokens, active.caches.layers, active.snapshot)
            if active.text.on_end is not None:
                active.text.on_end(result)

    def _begin(self, text: Text) -> _Active:
        prompt, source, same, lost = text.prompt, None, 0, 0
        for caches, tokens in self.beginnings() if text.prompt_logprobs is None else ():
            count = min(common(tokens, prompt), len(prompt) - 1)
            if count <= len(caches.tokens) and not caches.usable(count):  # a text that has fewer tokens stops there
                lost = max(lost, count)
            elif count >= max(_LEAST, same + 1):
                source, same = caches, count
        caches = self._caches(text, _ROOM)
        disk = self.prefix_cache if text.prompt_logprobs is None else None
        if disk is not None and disk.count(prompt) > same and (count := disk.read(prompt, caches.layers)) > same:
            source, same, caches.tokens = None, count, prompt[:count]
        writer = TextWriter(text, self.decoder.max_length, same)
        active = _Active(text, caches, prompt[same:], None if source is None else (source, same), writer)
        if lost >= same + BLOCK:
            active.branch = lost
        if self.prefix_cache is not None and _moves(self.decoder):
            active.ends = frozenset(((len(prompt) - 1) // BLOCK * BLOCK, self.prefix_cache.stored(prompt)))
        return active

    def _copy(self, active: _Active) -> None:
        """Copies the common prefix of a text as soon as it is computed."""
        if active.source is None or len(active.source[0].tokens) < active.source[1]:
            return
        (caches, count), active.source = active.source, None
        if caches.usable(count):
            active.caches.copy_from(caches, count)
        else:  # a call could not end there
            active.pending, active.writer.result.cached_tokens = active.text.prompt, 0

    def _snap(self, active: _Active) -> None:
        """Stores states and windows where a prefix or a block of the prefix cache ends: later they are lost."""
        caches, count = active.caches, len(active.caches.tokens)
        if count == active.branch:
            self.branching(caches)
        if self.prefix_cache is not None and count in active.ends:
            self.prefix_cache.write(caches.tokens, caches.layers, {count: states_of(caches.layers)})
        elif self.prefix_cache is not None and count % BLOCK == 0 and self.decoder.recurrent:
            active.snapshot = {count: [copied(state) for state in states_of(caches.layers)]}

    def _caches(self, text: Text, new: int) -> Caches:
        """Caches with room for ``new`` new tokens of a text, or for its largest number."""
        length = min(len(text.prompt) + min(new, text.max_new_tokens), self.decoder.max_length)
        return self.decoder.new_caches(-(-length // 16) * 16)

    def _grow(self, active: _Active) -> None:
        before = active.caches
        active.caches = self._caches(active.text, 2 * (before.length - len(active.text.prompt)))
        active.caches.copy_from(before, len(before.tokens))

    def _compute(self, plan: list[tuple[_Active, list[int]]]) -> Iterator[_Computed]:
        """Computes tokens of texts; yields the logits after the last known token of texts without pending tokens."""
        together = []
        for active, tokens in plan:
            if active.text.prompt_logprobs is not None and not active.writer.result.tokens:
                tokens = tokens[:_SCORED]
                (logits,) = self.decoder.run_texts([(active.caches, tokens)], everywhere=True)
                active.scores += _scores(active, logits)
                active.pending = active.pending[len(tokens) :]
                if not active.pending:
                    yield active, logits[-1:], None
            else:
                together.append((active, tokens))
        if not together:
            return
        rows = self.decoder.run_texts([(active.caches, tokens) for active, tokens in together])
        for (active, tokens), row in zip(together, rows, strict=True):
            active.pending = active.pending[len(tokens) :]
            self._snap(active)
            if not active.pending:
                active.writer.result.decode_calls += bool(active.writer.result.tokens)
                yield active, row[None], None

    def _guess(self, running: Sequence[_Active]) -> list[int]:
        """Draft tokens for a text that runs alone and whose prompt is computed."""
        if not self._guesses or len(running) != 1:
            return []
        (active,) = running
        if len(active.pending) > AGAIN:
            return []
        room = min(active.writer.room - 1, active.caches.length - len(active.caches.tokens) - len(active.pending))
        if not active.writer.result.tokens or room < 1:
            return []
        if active.guesser is None:
            # The draft's caches belong to the last text that ran alone; an earlier one has ended.
            active.guesser = make_guesser(self.decoder, self._draft)
        return active.guesser.guess(active.writer.tokens, min(self._guesses, room))

    def _verify(self, active: _Active, guess: list[int]) -> Iterator[_Computed]:
        """Computes the last token and the draft tokens in one call."""
        caches, pending, recurrent = active.caches, active.pending, self.decoder.recurrent
        before = list(caches.layers)
        if recurrent:  # states cannot undo a rejected token, so the call updates copies
            caches.layers = [tuple(copied(part) if is_state(part) else part for part in layer) for layer in before]
        (logits,) = self.decoder.run_texts([(caches, pending + guess)], everywhere=True)
        after, caches.layers = caches.layers, before
        active.writer.result.decode_calls += 1
        del caches.tokens[len(caches.tokens) - len(guess) - (len(pending) if recurrent else 0) :]
        yield active, logits[len(pending) - 1 :], after if recurrent else None


def _scores(active: _Active, logits: Any) -> list[TokenLogprobs]:
    """Log-probabilities of a prompt's tokens, from the logits after the last tokens in its caches."""
    end = len(active.caches.tokens)
    following = active.text.prompt[end - len(logits) + 1 : end + 1]
    count = active.text.prompt_logprobs or 0
    return [token_logprobs(row, token, count) for row, token in zip(logits, following)]


def _moves(decoder: TextsDecoder) -> bool:
    """Whether a text's caches lose what its beginning needs: they have states or windows."""
    return decoder.recurrent or decoder.windowed


def _plan(running: Sequence[_Active], rows: int, decoder: TextsDecoder) -> list[tuple[_Active, list[int]]]:
    """The tokens of the next call: the next token of each text, and ``rows`` tokens of prompts.

    Half of the rows go to the first prompt, so that a long prompt always progresses. The other half goes to the shortest
    prompts, so that they do not wait for long ones.
    """
    ready = [active for active in running if active.source is None]  # others wait for a common prefix
    prompts = [active for active in ready if not active.writer.result.tokens]
    share: dict[int, int] = {}

    def wanted(active: _Active) -> int:
        """The number of pending tokens up to the first place where its caches are stored or copied."""
        sources = [other.source for other in running if other.source is not None and _moves(decoder)]
        ends = [*active.ends, active.branch, *(count for caches, count in sources if caches is active.caches)]
        before = len(active.caches.tokens)
        return min([len(active.pending), *(end - before for end in ends if end > before)])

    for active in sorted(prompts, key=lambda active: len(active.pending)):
        others = 0 if active is prompts[0] or id(prompts[0]) in share else min(wanted(prompts[0]), -(-rows // 2))
        share[id(active)] = min(wanted(active), max(0, rows - others - sum(share.values())))
    plan: list[tuple[_Active, list[int]]] = []
    for active in ready:
        count = share.get(id(active), len(active.pending))
        tokens = active.pending[: decoder.whole(active.pending, count)]
        if tokens:
            plan.append((active, tokens))
    return plan


def generate_batch(
    decoder: TextsDecoder,
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
    """Continues several prompts of any lengths, each as :func:`generate`, with continuous batching.

    A call of the model computes the next token of every text and tokens of prompts; only attention runs text by text. If all
    linear layers are packed, each text is the same as if it were decoded alone, because their results do not depend on the
    number of rows. A text that ends makes room for the next prompt. Common prefixes of prompts are computed once. To add texts
    while others are decoded, use :class:`Batch`.

    Args:
        decoder: not compiled. Its own caches are unchanged: each text has caches of the length that it needs.
        prompts: token ids of each text, at least one; or a dict of a tokenizer, without padding.
        max_new_tokens: largest number of new tokens, for all texts or for each.
        stop, logprobs, sampling: as for :func:`generate`, for all texts.
        until: a function for each text, as for :func:`generate`.
        seed: text i uses seed + i; or a seed for each text.
        prefixes: caches from :meth:`Decoder.read`, from which common prefixes are copied.
        prefix_cache: on disk, for the decoder's model: prefixes are read from it, and finished texts are written to it.
        at_once: largest number of texts in memory and in a call; further ones wait.
        rows: largest number of prompt tokens in a call; longer prompts take several calls.
        on_token: called with the index of the text and each new token.
        on_end: called with the index of the text and its result when it ends.

    Returns:
        The result for each prompt. ``cached_tokens`` were copied from other texts; ``prefill_seconds`` and ``decode_seconds``
        include the time of other texts.

    Raises:
        ValueError: no prompts, an empty one, one that leaves no room for a new token, or has a token that is not in the
            vocabulary; a number out of its range; logits that are not finite; prefixes of another model or dtype; not a
            decoder, or its model does not support several texts.
        RuntimeError: the decoder was released.
    """
    batch = _WithPrefixes(decoder, at_once, rows)
    given = [prompt_ids(f"prompt {number}", prompt) for number, prompt in enumerate(without_mask("a prompt", prompts))]
    if not given:
        raise ValueError("there are no prompts; expected at least one")
    counts = _numbers("max_new_tokens", max_new_tokens, len(given), 0)
    seeds = _numbers("seed", seed, len(given), 1)
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
    for number, one in enumerate(texts):
        batch.check(one, f"prompt {number}")
    for one in texts:
        batch.add(one)
    while batch.step():
        pass
    return [results[number] for number in range(len(given))]


class _WithPrefixes(Batch):
    prefixes: Sequence[Caches] = ()

    def beginnings(self) -> Iterator[tuple[Caches, list[int]]]:
        yield from ((caches, caches.tokens) for caches in self.prefixes)
        yield from super().beginnings()


def _numbers(name: str, value: int | Sequence[int], count: int, step: int) -> list[int]:
    """A number for each prompt; a single value grows by ``step``."""
    if not isinstance(value, Iterable):
        first = check_whole(name, value, expected="one number, or one for each prompt")
        return [first + step * i for i in range(count)]
    numbers = [check_whole(f"a number of {name}", number, expected="one for each prompt") for number in value]
    if len(numbers) != count:
        raise ValueError(f"{name} has {len(numbers)} numbers; expected {count}, one for each prompt")
    return numbers
