"""Decoding by the plan in a file, without torch: one text, as a step of :func:`lowbit.llm.generate`, or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from .. import _C, __version__
from ..files.plan_facts import description
from ..machine.one_text import OneText
from ..operators.cache_layout import PANEL, Slot, by_slot, can_continue, states_of, stored_width, window_length
from .caches import CACHES, Caches
from .sampling import check_max_length
from .states import StateKeeper
from .texts_call import PIECE, TextsCall, TextsDecoder

_ALIGNMENT = 128  # of caches; kAlignment in ops/aligned_memory.h
# The numbers of ElementType in ops/tensor_view.h. numpy has no bfloat16, so uint16 has its bits.
_ELEMENTS = {"float32": 0, "uint16": 1, "float16": 2, "int64": 5, "int8": 7}
_STORED = {"float32": "float32", "bfloat16": "uint16", "float16": "float16", "int8": "int8", "int4": "int8"}


class PlanDecoder(TextsDecoder):
    """What :class:`lowbit.llm.Decoder` does for a model with a plan, over caches of numpy."""

    def __init__(
        self,
        plan: _C.PlanModel,
        max_length: int,
        cache: str,
        prefix: bytes | str = "the plan has no key for it",
        *,
        windows: bool = True,
    ):
        """
        Args:
            max_length: the longest text in tokens.
            cache: the type of the KV cache, as for :class:`lowbit.llm.Decoder`.
            prefix: what identifies the model in a prefix cache, or why it supports none.
            windows: as for :class:`lowbit.llm.Decoder`.

        Raises:
            ValueError: the model's texts are shorter, or an unknown type.
        """
        max_length = check_max_length(max_length, plan.positions)
        if cache not in CACHES:
            raise ValueError(f"cache is {cache!r}; expected one of {', '.join(map(repr, CACHES))}")
        self.model, self.max_length, self.vocabulary, self.cache_type = plan, max_length, plan.vocabulary, cache
        self.keep_windows(plan.windows if windows else {})
        self._prefix, self._output = prefix, _stored(plan.output_type)
        self.one_text = OneText()
        self._own: Caches | None = None  # of the text of `feed`, made when it begins
        self._keeper: StateKeeper | None = None
        self._count = 0  # its tokens

    @property
    def dtype(self) -> str:
        """The type of the model's activations."""
        return "bfloat16" if self._output == "uint16" else self._output

    @property
    def recurrent(self) -> bool:
        return any(slot >= Slot.STATE for _, slot, _, _ in self.model.caches)

    def prefix_key(self) -> bytes:
        if isinstance(self._prefix, str):
            raise ValueError(self._prefix)
        return self._prefix

    @staticmethod
    def model_key(model: Any) -> bytes:
        try:
            return b"plan" + bytes.fromhex(description(model.about, __version__)["prefix"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError("the plan has no key of its model") from None

    def make_caches(self, length: int, cache_type: str) -> list[tuple[numpy.ndarray, ...]]:
        kinds = cache_type.split(",")
        layers: dict[int, list[numpy.ndarray]] = {}
        for layer, slot, shape, element in self.model.caches:
            arrays = layers.setdefault(layer, [])
            if slot >= Slot.STATE:
                arrays.append(_zeros(shape, _stored(element)))
            elif slot < Slot.HELD:
                kind = kinds[-1] if slot == Slot.VALUES else kinds[0]
                (heads, width), window = shape, self.window_of(layer, length)
                room = -(-length // PANEL) * PANEL if window is None else window_length(window, PIECE)
                arrays.append(_zeros([1, heads, room, stored_width(width, kind)], _STORED[kind]))
                if slot == Slot.VALUES and window is not None:
                    arrays.append(_zeros([2], "int64"))
        return [tuple(layers.get(layer, ())) for layer in range(max(layers, default=-1) + 1)]

    def caches(self) -> list[tuple[numpy.ndarray, ...]]:
        """Keys, values and states of each layer of the text of :meth:`feed`."""
        self._count = self.max_length  # the caller may change them
        if self._keeper is not None:
            self._keeper.position = None
        return self._text().layers

    def arranged(self, layers: Sequence[Sequence[numpy.ndarray]]) -> _C.PlanCaches:
        """The arrays of a text as the plan uses them."""
        arrays = by_slot(layers)
        described = [
            None
            if (array := arrays.get((layer, slot))) is None
            else (array.ctypes.data, _ELEMENTS[array.dtype.name], array.shape)
            for layer, slot, _, _ in self.model.caches
        ]
        return _C.PlanCaches(described)

    def run_call(self, call: TextsCall, everywhere: bool) -> numpy.ndarray:
        keep = list(range(len(call.rows))) if everywhere else [part.end - 1 for part in call.parts]
        texts = [(part.begin, part.end, part.start, part.caches.planned(self, self.arranged)) for part in call.parts]
        return self._logits(call.rows, call.positions, keep, texts)

    def _logits(
        self, tokens: list[int], positions: list[int], keep: list[int], texts: list[tuple[int, int, int, Any]]
    ) -> numpy.ndarray:
        """Logits [keep, vocabulary], float32, of a call of the plan."""
        inputs = [numpy.array(numbers, dtype=numpy.int64) for numbers in (tokens, positions, keep)]
        logits = numpy.empty((len(keep), self.vocabulary), dtype=self._output)
        memory = [(array.ctypes.data, array.nbytes) for array in (*inputs, logits)]
        self.model.run(len(tokens), len(keep), memory[:-1], memory[-1:], texts)
        if self._output == "uint16":  # the upper half of float32
            return (logits.astype(numpy.uint32) << 16).view(numpy.float32)
        return logits.astype(numpy.float32, copy=False)

    # One text, whose caches are the decoder's own.

    def _text(self) -> Caches:
        if self._own is None:
            self._own = self.new_caches(-(-self.max_length // PANEL) * PANEL)
            states = states_of(self._own.layers)
            self._keeper = StateKeeper(states) if states else None
        return self._own

    def kept(self, count: int) -> int:
        """The number of the first ``count`` tokens of the text after which a call can continue."""
        layers = self._text().layers
        count = count if self._keeper is None else self._keeper.kept(count)
        return count if can_continue(layers, self.windows, count) else 0

    def feed(self, tokens: list[int], start: int) -> numpy.ndarray:
        """Logits [vocabulary], float32, after tokens that follow the first ``start`` ones of the text."""
        with self.one_text:
            self._check(tokens, start)
            if self._keeper is not None:
                self._keeper.begin(start)
            count, pieces = len(tokens), -(-len(tokens) // PIECE)
            for piece in range(pieces):
                begin, end = count * piece // pieces, count * (piece + 1) // pieces
                logits = self._rows(tokens[begin:end], start + begin, [end - begin - 1])
            if self._keeper is not None:
                self._keeper.end(start + count, keep=count > 1)
            return logits[0]

    def feed_all(self, tokens: list[int], start: int) -> numpy.ndarray:
        """Logits [tokens, vocabulary] after each token; otherwise as :meth:`feed`."""
        with self.one_text:
            self._check(tokens, start)
            if self._keeper is not None:
                self._keeper.begin(start, keep=True)
            logits = self._rows(tokens, start, list(range(len(tokens))))
            if self._keeper is not None:
                self._keeper.end(start + len(tokens))
            return logits

    def _check(self, tokens: list[int], start: int) -> None:
        self._text()
        if not 0 <= start <= self._count:
            raise ValueError(f"start is {start}; expected 0 to {self._count}, the tokens that the text has")
        wrong = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise ValueError(f"there is no token {wrong}; expected 0 to {self.vocabulary - 1}")
        if not tokens or start + len(tokens) > self.max_length:
            raise IndexError(
                f"a text has {start} tokens and gets {len(tokens)}; expected 1 or more, at most {self.max_length} altogether"
            )

    def _rows(self, tokens: list[int], start: int, keep: list[int]) -> numpy.ndarray:
        text, end = self._text(), start + len(tokens)
        self._count = start  # if the call fails
        call = [(0, len(tokens), start, text.planned(self, self.arranged))]
        logits = self._logits(tokens, list(range(start, end)), keep, call)
        self._count = end
        return logits


def _stored(element: int) -> str:
    """The type of numpy that has the bits of an element type."""
    return next(name for name, number in _ELEMENTS.items() if number == element)


def _zeros(shape: Sequence[int], stored: str) -> numpy.ndarray:
    """An aligned array of zeros; pages of it take memory only when they are written."""
    size = int(numpy.prod(shape)) * numpy.dtype(stored).itemsize
    block = numpy.zeros(size + _ALIGNMENT, dtype=numpy.uint8)
    begin = -block.ctypes.data % _ALIGNMENT
    return block[begin : begin + size].view(stored).reshape(shape)
