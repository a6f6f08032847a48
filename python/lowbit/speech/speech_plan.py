"""The plan of a Whisper model's decoding step."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..plan.lowering import Roles, lowered
from ..plan.model_parts import ModelParts, check_hooks, state_of
from ..plan.plan_file import Slot
from ..plan.recording import Sizes, record
from ..plan.running import Caches, Planned

if TYPE_CHECKING:
    from .speech_decoder import SpeechDecoder

_CALLS = ((4, 2), (6, 3), (9, 5), (12, 7))  # tokens of the recorded calls; the second numbers are not used
_SLOTS = (Slot.KEYS, Slot.VALUES, Slot.STATE, Slot.STATE + 1)  # of the text, and of what was heard


class SpeechPlan:
    """Runs :meth:`SpeechDecoder.step` as one call of C++, over the same caches."""

    def __init__(self, decoder: SpeechDecoder, last: Tensor):
        """
        Args:
            last: position of the last state that the decoder has heard.

        Raises:
            Unplannable: the model has no plan; the message says why.
        """
        check_hooks(decoder.model)
        caches = decoder.caches()
        self._last = [tensor for layer in caches for tensor in layer[4:]]
        kept = {(number, slot): tensor for number, layer in enumerate(caches) for slot, tensor in zip(_SLOTS, layer)}
        recordings = []
        for rows, _ in _CALLS:
            inputs = [torch.zeros(1, rows, dtype=torch.int64), torch.tensor([0]), last]
            recordings.append(record(partial(decoder.step, *inputs), [*inputs, *self._last, *kept.values()]))
        roles = Roles(3 + len(self._last), list(kept), start=1)
        self._planned = Planned(lowered(recordings, Sizes(_CALLS), roles, state_of(decoder.model)))
        self._caches = Caches(self._planned.places, kept)
        self._model: Any = decoder.model
        self._parts = ModelParts(decoder.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> SpeechPlan:
        copy = object.__new__(SpeechPlan)
        copy.__dict__ |= {name: deepcopy(value, memo) for name, value in vars(self).items() if name != "_parts"}
        copy._parts = ModelParts(copy._model)
        return copy

    def fits(self) -> bool:
        """Whether the model still has the parts that it had."""
        return self._parts.are_unchanged()

    def step(self, tokens: Tensor, start: Tensor, last: Tensor) -> Tensor:
        """As :meth:`SpeechDecoder.step`."""
        text = (0, tokens.shape[1], int(start), self._caches)
        return self._planned.run([tokens.contiguous(), start, last, *self._last], 1, [text])[0]
