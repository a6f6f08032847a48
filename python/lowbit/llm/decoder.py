"""A static KV cache around a causal language model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..hf import decoding
from ..hf.recurrent import is_state
from ..ops import cache_storage, cache_width
from .caches import Caches, common, copy_layer
from .proof import Reference, ask, measure_caches, prove
from .sampling import prompt_ids
from .states import StateKeeper

# What keys and values can be kept in.
CACHES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int4": torch.int4,
}

# Tokens of a prompt that are computed at a time. More would cost time: what layers hand on then takes so many megabytes
# that malloc returns them to the system after each use, and every page comes back with a fault.
PIECE = 256


def pieces(tokens: Tensor, start: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A call [1, s] in pieces of at most PIECE tokens and nearly the same length, each with its start."""
    for piece in tokens.tensor_split(max(1, -(-tokens.shape[1] // PIECE)), dim=1):
        yield piece, start
        start = start + piece.shape[1]


def check_call(tokens: Tensor, start: Tensor, vocabulary: int, max_length: int) -> None:
    """Refuses what a decoder cannot take; machine code would not notice, or end the process.

    Raises:
        ValueError: another shape or dtype than [1, s] and [1], int64; or a token that is not in the vocabulary.
        IndexError: a text beyond max_length, or a negative start.
    """
    for name, tensor, shape in (("tokens", tokens, "[1, s]"), ("start", start, "[1]")):
        if tensor.dtype != torch.int64 or tensor.dim() != shape.count(",") + 1 or tensor.shape[0] != 1:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected torch.int64 {shape}")
    if not tokens.numel():
        raise ValueError("tokens is torch.int64 [1, 0]; expected at least one token")
    least, most = (tokens.item(),) * 2 if tokens.numel() == 1 else (int(end) for end in tokens.aminmax())
    if least < 0 or most >= vocabulary:
        raise ValueError(f"there is no token {least if least < 0 else most}; expected 0 to {vocabulary - 1}")
    begin = start.item()
    if begin < 0 or begin + tokens.shape[1] > max_length:
        raise IndexError(
            f"start is {begin} and there are {tokens.shape[1]} tokens; expected a start from 0 and no more than the "
            f"max_length of {max_length} tokens altogether"
        )


class Decoder(torch.nn.Module):
    """One step of a causal language model, with static KV caches of its own, and states of recurrent layers.

    The same module runs in eager, under torch.compile, and exported to .pte and .pt2. Its caches are buffers that each
    call updates, so a text may come in any pieces; ``start`` says how many tokens came before. A new text starts at 0.

    Recurrent layers (linear attention, Mamba-2, short convolutions) have states, which cannot be cut back: their text continues
    where it ended, where a longer call of the decoder ended, or from 0. :meth:`kept` says how far it is there.

    Not every model can be decoded so. At construction a few tokens go through the model as it
    came, and through the decoder whole and in pieces: either all agree, or the model is refused and left as it was.
    """

    _STEP = 16  # max_length is a multiple of this; caches have room for the next multiple of 16

    def __init__(self, model: torch.nn.Module, max_length: int = 2048, cache: str | None = None):
        """
        Args:
            model: a transformers causal language model, quantized or not, in eval mode. It belongs to the decoder until
                :meth:`release`: its attention runs over the decoder's caches. A decoder that had it before is released.
            max_length: the longest text in tokens, prompt included; a multiple of 16.
            cache: what keys and values are kept in: "float32", "bfloat16", "float16", or "int8" or "int4", which have a scale
                for each position of a head; None: the model's dtype. All else is computed as before.

        Raises:
            ValueError: max_length is no positive multiple of 16 or beyond the model's positions; an unknown kind of
                cache, or one that does not hold the model's numbers; or the decoder would not compute what the model
                does. The sentence says what was found.
        """
        super().__init__()
        config = model.config.get_text_config()
        limit = decoding.position_limit(config)
        if max_length <= 0 or max_length % self._STEP:
            raise ValueError(f"max_length is {max_length}; expected a positive multiple of 16")
        if limit is not None and max_length > limit:
            raise ValueError(f"max_length is {max_length}; expected at most the model's {limit} positions")
        if cache is not None and cache not in CACHES:
            raise ValueError(f"cache is {cache!r}; expected one of {', '.join(CACHES)}, or None")
        if model.training:
            raise ValueError("the model is in training mode; call its eval() first")
        self.model = model
        self.max_length = max_length
        self.cache_dtype: torch.dtype = model.dtype if cache is None else CACHES[cache]
        decoding.give_back(model)
        self._takeover: decoding.Takeover | None = None
        try:
            self._take(config)
        except Exception as error:
            decoding.give_back(model)
            raise decoding.refusal(model, error) from error

    def _take(self, config: Any) -> None:
        decoding.check_config(config, self.max_length)
        with torch.inference_mode():
            reference = Reference(self.model, self.max_length)
        vocabulary, layers = (getattr(config, name, None) for name in ("vocab_size", "num_hidden_layers"))
        if not isinstance(vocabulary, int) or vocabulary <= 0 or not isinstance(layers, int) or layers <= 0:
            raise decoding.Unsupported("its configuration does not say how many layers it has")
        self.vocabulary, self.layers = vocabulary, layers
        self._takeover = decoding.Takeover(self.model, self.max_length)
        if self._takeover.has_alibi and not self.cache_dtype.is_floating_point:
            kind = str(self.cache_dtype).removeprefix("torch.")
            raise decoding.Unsupported(
                f"the keys of its attention carry positions (alibi), which a cache of {kind} would round; expected a cache of "
                "float32, bfloat16 or float16"
            )
        try:
            asked = ask(self, reference)
        except decoding.NoCaches:
            self._takeover.hand_on(self.model)
            asked = ask(self, reference)
        self._shapes, self._states, self.exact = asked.shapes, asked.states, reference.exact
        decoding.check_windows(config, asked, self.max_length)
        for layer, tensors in enumerate(self._make(self.max_length, self.cache_dtype)):
            for name, cache in zip(self._names(layer), tensors, strict=True):
                self.register_buffer(name, cache, persistent=False)
        states = [tensor for layer in self._caches() for tensor in layer if is_state(tensor)]
        self._keeper = StateKeeper(states) if states else None
        if self.cache_dtype is self.model.dtype:
            self.measured = prove(self, reference, self._caches())
            return
        # Whether the model can be decoded is judged without the rounding of the caches; these are for a short text.
        self.measured = prove(self, reference, self._make(reference.tokens.shape[1], self.model.dtype))
        self.measured["cache"] = measure_caches(self, reference)

    def _names(self, layer: int) -> list[str]:
        """The buffers of a layer: keys and values, where it has attention, and then states."""
        attention = [f"{name}_cache_{layer}" for name in "kv"] if layer in self._shapes else []
        return attention + [f"state_{number}_cache_{layer}" for number in range(len(self._states.get(layer, ())))]

    def _make(self, length: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
        caches = []
        length = -(-length // 16) * 16
        for layer in range(self.layers):
            tensors = []
            heads, *widths = self._shapes.get(layer, (0,))
            try:
                for width in widths:
                    tensors.append(torch.zeros((1, heads, length, cache_width(width, dtype)), dtype=cache_storage(dtype)))
            except ValueError as error:
                raise decoding.Unsupported(str(error)) from error
            tensors += [torch.zeros(shape, dtype=kind) for shape, kind in self._states.get(layer, ())]
            caches.append(tuple(tensors))
        return caches

    @property
    def recurrent(self) -> bool:
        """Whether layers have states, which cannot be cut back."""
        return self._keeper is not None

    def uses(self, layer: int) -> int:
        """How often a call asks for the caches of a layer: once for its attention, once for its states."""
        return (layer in self._shapes) + (layer in self._states)

    def kept(self, count: int) -> int:
        """How many of the first `count` tokens of the decoder's text a call can continue behind."""
        return count if self._keeper is None else self._keeper.kept(count)

    @property
    def released(self) -> bool:
        """Whether the model belongs to this decoder no longer."""
        return self._takeover is None or not self._takeover.active

    def release(self) -> torch.nn.Module:
        """Ends the decoder: frees its caches and gives the model back, which computes what it did before, to the bit.

        Steps that were compiled from the decoder end with it. Exported files do not. Does nothing the second time.

        Returns:
            The model.
        """
        if self._takeover is not None and self._takeover.active:
            self._takeover.end(self.model)
        for name in [name for name, _ in self.named_buffers(recurse=False)]:
            delattr(self, name)
        return self.model

    def check(self) -> None:
        """Raises RuntimeError if the decoder was released, or its model changed."""
        if self._takeover is None or not self._takeover.active:
            raise RuntimeError("this decoder was released, or its model taken by a later one; make a new Decoder")
        if not self._takeover.is_whole():
            raise RuntimeError(
                "the model of this decoder was given another attention implementation; call release(), and make a new Decoder"
            )

    def caches(self) -> list[tuple[Tensor, ...]]:
        """Keys, values and states of each layer; docs/internals/operators.md says how they lie."""
        if self._keeper is not None:
            self._keeper.position = None  # the caller may change them
        return self._caches()

    def _caches(self) -> list[tuple[Tensor, ...]]:
        return [tuple(getattr(self, name) for name in self._names(layer)) for layer in range(self.layers)]

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        start: Tensor,
        caches: Sequence | decoding.Asked | decoding.Texts,
        keep: int | Tensor = 0,
    ) -> Tensor:
        """Logits [1, s, vocabulary] behind the last ``keep`` tokens, or behind all with 0, or behind those at these places."""
        more: dict[str, Any] = {"input_ids": tokens, "use_cache": False, "logits_to_keep": keep}
        takeover = self._takeover
        if takeover is None:
            return self.model(position_ids=positions[None], caches=caches, start=start, **more).logits
        if takeover.takes_positions:
            more["position_ids"] = positions[None]
        if takeover.call is None:
            more |= {"caches": caches, "start": start}
        else:
            takeover.call.give(caches, start, positions)
        takeover.states.give(caches, start)
        try:
            return self.model(**more).logits
        finally:
            takeover.states.clear()
            if takeover.call is not None:
                takeover.call.clear()

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """A long prompt is computed in pieces, which packed layers do not notice: the bits are the same.

        Args:
            tokens: [1, s] int64.
            start: [1] int64: how many tokens are in the caches already.

        Returns:
            [1, vocabulary] of the model's dtype: the logits behind the last token.

        Raises:
            ValueError: tokens or start of another shape or dtype, or a token that is not in the vocabulary.
            IndexError: the text is longer than max_length.
            RuntimeError: the decoder was released.
        """
        if torch.compiler.is_compiling():
            return self._step(tokens, start)
        self.check()
        check_call(tokens, start, self.vocabulary, self.max_length)
        return self.whole(self._step, tokens, start)

    def whole(self, step: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, start: Tensor) -> Tensor:
        """A call of any length in pieces that `step` takes; the states are known before and behind it."""
        if self._keeper is not None:
            self._keeper.begin(int(start))
        *before, last = pieces(tokens, start)
        for piece in before:
            step(*piece)
        logits = step(*last)
        if self._keeper is not None:
            self._keeper.end(int(start) + tokens.shape[1], keep=tokens.shape[1] > 1)
        return logits

    def _step(self, tokens: Tensor, start: Tensor) -> Tensor:
        return self.run(tokens, start + torch.arange(tokens.shape[1]), start, self._caches(), keep=1)[:, -1]

    def all_logits(self, tokens: Tensor, start: Tensor) -> Tensor:
        """As a call, but [1, s, vocabulary]: the logits behind each token."""
        self.check()
        check_call(tokens, start, self.vocabulary, self.max_length)
        if self._keeper is not None:
            self._keeper.begin(int(start), keep=True)
        logits = self.run(tokens, start + torch.arange(tokens.shape[1]), start, self._caches())
        if self._keeper is not None:
            self._keeper.end(int(start) + tokens.shape[1])
        return logits

    def new_caches(self, length: int, dtype: torch.dtype | None = None) -> Caches:
        """Caches for another text.

        Args:
            length: tokens that there is room for, a multiple of 16.
            dtype: of keys and values; None: as the decoder's own.

        Raises:
            ValueError: another length or dtype.
            RuntimeError: the decoder was released.
        """
        self.check()
        dtype = dtype or self.cache_dtype
        if length <= 0 or length % 16:
            raise ValueError(f"length is {length}; expected a positive multiple of 16")
        if dtype not in CACHES.values():
            raise ValueError(f"dtype is {dtype}; expected one of {', '.join(map(str, CACHES.values()))}")
        return Caches(self._make(length, dtype), dtype, self.model, length)

    def check_caches(self, caches: Caches, dtype: torch.dtype | None = None) -> None:
        """Refuses caches that cannot be copied from.

        Args:
            dtype: of what they are copied to; None: the decoder's own.

        Raises:
            ValueError: they are of another kind, or another model computed them.
        """
        dtype = dtype or self.cache_dtype
        if caches.dtype is not dtype:
            raise ValueError(f"the caches are of {caches.dtype}; expected {dtype}")
        if not caches.is_of(self.model):
            raise ValueError("the caches have keys and values of another model; expected those of the decoder's")

    def read(self, tokens: Sequence[int], begin: Caches | None = None) -> Caches:
        """Computes keys and values of a text's beginning (a system prompt, a document), for texts that begin with it.

        Args:
            tokens: at least one.
            begin: of another text, which may begin alike: what both have in common is copied.

        Raises:
            ValueError: no tokens, or one that is not in the vocabulary; or ``begin`` is of another model or kind.
            IndexError: more than max_length tokens.
            RuntimeError: the decoder was released.
        """
        tokens = prompt_ids("the text", tokens)
        if begin is not None:
            self.check_caches(begin)
        check_call(torch.tensor([tokens]).long(), torch.tensor([0]), self.vocabulary, self.max_length)
        caches = self.new_caches(-(-len(tokens) // 16) * 16)
        same = 0 if begin is None else begin.usable(common(begin.tokens, tokens))
        if begin is not None:
            for source, target in zip(begin.layers, caches.layers, strict=True):
                copy_layer(source, target, same)
        caches.tokens = tokens[:same]
        with torch.inference_mode():
            for at in range(same, len(tokens), PIECE):
                self.run_texts([(caches, tokens[at : at + PIECE])])
        return caches

    def begin(self, caches: Caches, tokens: Sequence[int]) -> int:
        """Copies to the decoder's own caches what a text has in common with `caches`; a compiled step has the same ones.

        Returns:
            How many of the tokens the decoder has now: the ``cached`` of :func:`generate`, at least one less than there are.

        Raises:
            ValueError: the text has no tokens, or the caches are of another model or kind.
            RuntimeError: the decoder was released.
        """
        self.check()
        self.check_caches(caches)
        tokens = prompt_ids("the text", tokens)
        if not tokens:
            raise ValueError("the text has no tokens; expected at least one")
        count = caches.usable(min(common(caches.tokens, tokens), len(tokens) - 1, self.max_length))
        if count:
            for source, target in zip(caches.layers, self.caches(), strict=True):
                copy_layer(source, target, count)
            if self._keeper is not None:
                self._keeper.begin(0)
                self._keeper.end(count, keep=True)
        return count

    def run_texts(
        self,
        texts: Sequence[tuple[Caches, Sequence[int]] | tuple[Caches, Sequence[int], tuple[Caches, int]]],
        everywhere: bool = False,
    ) -> list[Tensor]:
        """Continues several texts in one call of the model, each by any number of tokens.

        Args:
            texts: the caches of each, which get the tokens, and these; of a new text also the caches of one with the same
                beginning, and how many tokens of that are copied first. They may be those of a text before it in the call.
            everywhere: logits behind each token instead of the last one of each text.

        Returns:
            Of each text [vocabulary], or [s, vocabulary].

        Raises:
            ValueError: no texts, one without tokens, or with one that is not in the vocabulary; or caches to copy from
                that are of another model or kind, or have states of more tokens.
            IndexError: a text is longer than its caches.
            RuntimeError: the decoder was released.
        """
        self.check()
        if not texts:
            raise ValueError("there are no texts; expected at least one")
        rows: list[int] = []
        positions: list[int] = []
        parts = []
        lengths: dict[int, int] = {}  # that caches will have behind this call
        for caches, tokens, *source in texts:
            before, start, begin = None, lengths.get(id(caches), len(caches.tokens)), len(rows)
            if source:
                other, count = source[0]
                self.check_caches(other, caches.dtype)
                there = lengths.get(id(other), len(other.tokens))
                start = min(count, there)
                if self.recurrent and start != there:
                    raise ValueError(
                        f"{start} tokens are to be copied from caches that have {there}; expected all of them, as their states "
                        "cannot be cut back"
                    )
                before = _copy_from(other, caches, start)
            if not len(tokens):
                raise ValueError("a text has no tokens; expected at least one")
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            if not 0 <= wrong < self.vocabulary:
                raise ValueError(f"there is no token {wrong}; expected 0 to {self.vocabulary - 1}")
            if start + len(tokens) > caches.length:
                raise IndexError(f"a text has {start + len(tokens)} tokens; expected at most {caches.length}, as its caches")
            rows += tokens
            positions += range(start, start + len(tokens))
            lengths[id(caches)] = start + len(tokens)
            parts.append(decoding.Part(begin, len(rows), torch.tensor([start]), caches.layers, before))
        for caches, _, *source in texts:
            if source:
                caches.tokens = []  # what they had is written over
        keep = torch.arange(len(rows)) if everywhere else torch.tensor([part.end - 1 for part in parts])
        logits = self.run(
            torch.tensor([rows]), torch.tensor(positions), torch.tensor([0]), decoding.Texts(parts), 0 if everywhere else keep
        )[0]
        # Only now: what a call that failed did not compute must not be taken for computed.
        for caches, tokens, *source in texts:
            if source:
                caches.tokens = source[0][0].tokens[: source[0][1]]
            caches.tokens += tokens
        if logits.shape[0] != len(keep):  # a model that gives all of them always
            logits = logits[keep]
        return [logits[part.begin : part.end] for part in parts] if everywhere else list(logits)


def _copy_from(source: Caches, target: Caches, count: int) -> Callable[[int, bool], None]:
    def before(layer: int, states: bool) -> None:
        copy_layer(source.layers[layer], target.layers[layer], count, states)

    return before
