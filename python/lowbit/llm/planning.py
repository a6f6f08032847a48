"""Plans of decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..hf.rotary_tables import computed
from ..plan.lowering import Roles, lowered
from ..plan.plan_file import Kind
from ..plan.recording import Recording, Sizes, Unplannable, record
from ..plan.running import Planned, slots

if TYPE_CHECKING:
    from .decoder import Decoder

# Rows and kept rows of the calls that are recorded. More than one of each, because torch treats dimensions of size 1 differently.
_CALLS = ((4, 2), (6, 3), (9, 5), (12, 7))
_INPUTS = 3  # tokens, positions, kept rows; start follows, which each text has


def plan_of(decoder: Decoder) -> Planned:
    """The plan of a decoder's calls.

    Raises:
        Unplannable: the model has none; the message says why.
    """
    recordings: list[Recording] = []
    places: list[tuple[int, int]] = []
    for rows, kept in _CALLS:
        layers = decoder.new_caches(16).layers
        places = [(layer, slot) for layer, tensors in enumerate(layers) for slot in slots(tensors)]
        tokens, positions = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)
        keep, start = torch.arange(rows - kept, rows), torch.tensor([0])

        def step() -> Tensor:
            return decoder.run(tokens, positions, start, layers, keep)

        given = [tokens, positions, keep, start, *(tensor for layer in layers for tensor in layer)]
        with computed():
            recordings.append(record(step, given))
    roles = Roles(_INPUTS + 1, places)
    state = dict(decoder.model.named_parameters(remove_duplicate=False)) | dict(decoder.model.named_buffers(remove_duplicate=False))
    made = lowered(recordings, Sizes(_CALLS), roles, state)
    if any(buffer.kind is Kind.INPUT and buffer.index >= _INPUTS for buffer in made.plan.buffers):
        raise Unplannable("its operators use the number of earlier tokens")
    return Planned(made)
