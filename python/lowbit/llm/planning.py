"""Plans of decoders: a call of the model as one call of C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..hf.rotary_tables import computed
from ..plan.lowering import Lowered, Roles, lowered
from ..plan.model_parts import ModelParts, check_hooks, state_of
from ..plan.plan_file import Kind, Plan, Slot
from ..plan.recording import Recording, Sizes, Unplannable, record
from ..plan.running import Caches, Planned, by_slot
from .proof import EXACT_LIMIT, PIECES_LIMIT, Rounding

if TYPE_CHECKING:
    from .decoder import Decoder

# Rows and kept rows of the recorded calls. More than one of each, because torch treats dimensions of size 1 differently.
_CALLS = ((4, 2), (6, 3), (9, 5), (12, 7))
_INPUTS = 3  # tokens, positions, kept rows; start follows, which each text has

Text = tuple[int, int, int, Caches]  # range of rows, earlier tokens, caches


def _lowered(decoder: Decoder) -> Lowered:
    recordings: list[Recording] = []
    places: list[tuple[int, int]] = []
    for rows, kept in _CALLS:
        layers = decoder.new_caches(16).layers
        places = list(by_slot(layers))
        tokens, positions = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)
        keep, start = torch.arange(rows - kept, rows), torch.tensor([0])

        given = [tokens, positions, keep, start, *(tensor for layer in layers for tensor in layer)]
        with computed():
            recordings.append(record(partial(decoder.run, tokens, positions, start, layers, keep), given))
    made = lowered(recordings, Sizes(_CALLS), Roles(_INPUTS + 1, places, _INPUTS), state_of(decoder.model))
    if any(buffer.kind is Kind.INPUT and buffer.index >= _INPUTS for buffer in made.plan.buffers):
        raise Unplannable("its operators use the number of earlier tokens")
    for buffer in made.plan.buffers:
        if buffer.kind is Kind.CACHE and buffer.slot != Slot.HELD:
            buffer.shape, buffer.dtype = decoder.cache_shape(buffer.index, buffer.slot)
    return made


class DecoderPlan:
    """The plan of a decoder's model."""

    def __init__(self, decoder: Decoder):
        """
        Raises:
            Unplannable: the model has no plan; the message says why.
        """
        check_hooks(decoder.model)
        self._planned = Planned(_lowered(decoder))
        self._model = decoder.model
        self._parts = ModelParts(decoder.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> DecoderPlan:
        copy = object.__new__(DecoderPlan)
        copy._planned, copy._model = deepcopy(self._planned, memo), deepcopy(self._model, memo)
        copy._parts = ModelParts(copy._model)
        return copy

    def measured(self, run: Callable[[], object]) -> dict[str, float]:
        """The seconds that each operator takes in ``run()``."""
        return self._planned.measured(run)

    def fits(self) -> bool:
        """Whether the model still has the modules, parameters and hooks that it had."""
        return self._parts.are_unchanged()

    @property
    def plan(self) -> Plan:
        return self._planned.plan

    @property
    def weights(self) -> dict[int, Tensor]:
        """The weights of the plan, by buffer."""
        return self._planned.weights

    def caches(self, layers: Sequence[Sequence[Tensor]]) -> Caches:
        """A text's caches as the plan uses them; they must stay where they are."""
        return Caches(self._planned.places, by_slot(layers))

    def run(self, tokens: Tensor, positions: Tensor, keep: Tensor, texts: Sequence[Text]) -> Tensor:
        """Logits [len(keep), vocabulary]; arguments as in :meth:`Decoder.run`."""
        logits = self._planned.run([tokens.contiguous(), positions, keep], len(keep), texts)[0][0]
        return logits if logits.shape[0] == len(keep) else logits[keep]  # some models ignore logits_to_keep

    @torch.inference_mode()
    def prove(self, decoder: Decoder, tokens: Tensor, rounding: Rounding) -> float:
        """The difference from the decoder's own operators, 0 if all bits are equal.

        Raises:
            Unplannable: it is more than rounding.
        """
        count = tokens.shape[1]
        caches = decoder.new_caches(16, str(decoder.model.dtype).removeprefix("torch."))
        whole = decoder.run(tokens, torch.arange(count), torch.tensor([0]), caches.layers)
        mine = self.caches(decoder.new_caches(16, caches.cache_type).layers)

        def logits_of(begin: int, end: int) -> Tensor:
            rows = torch.arange(end - begin)
            return self.run(tokens[:, begin:end], rows + begin, rows, [(0, end - begin, begin, mine)])

        # Several tokens at once, tokens one by one, and the rest.
        parts = [part for part in torch.arange(count).tensor_split((count // 2, count - count // 4)) if len(part)]
        ends = [[part] if number % 2 == 0 else list(part[:, None]) for number, part in enumerate(parts)]
        result = torch.cat([logits_of(int(piece[0]), int(piece[-1]) + 1) for pieces in ends for piece in pieces])[None]
        if torch.equal(result, whole):
            return 0.0
        # The median of each part, because rounding may route single tokens to another expert.
        differences, limit = rounding.differences(result, whole), EXACT_LIMIT if rounding.exact else PIECES_LIMIT
        difference = max(float(differences[part].median()) for part in parts)
        if not difference <= limit:
            raise Unplannable(
                f"its logits differ (by {difference:.2g} of the earlier text's effect; rounding is below {limit:g})"
            )
        return difference
