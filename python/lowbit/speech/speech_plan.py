"""The plans of a Whisper model: its encoder, and its decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import nn
from ..hf.encoder_plan import replica
from ..hf.shared_inputs import SharedInput
from ..plan.lowering import Lowered, lowered
from ..plan.model_parts import ModelParts, ModelPlan, check_hooks, state_of
from ..plan.plan_builder import Roles
from ..plan.plan_file import Kind, Slot
from ..plan.recording import CALLS, Unplannable, record
from ..plan.running import Caches, Planned

if TYPE_CHECKING:
    from .speech_decoder import SpeechDecoder

_TRIAL = 24  # positions
# The encoder's hidden states may differ by rounding from those of its own code, whose convolutions and GELU are torch's;
# quantized activations amplify it.
_LISTEN_LIMIT = 0.05
_SLOTS = (Slot.KEYS, Slot.VALUES, Slot.STATE, Slot.STATE + 1)  # keys and values of the text, and of the encoder's output


class _Plan(ModelPlan):
    """A plan over the caches of a decoder."""

    def __init__(self, decoder: SpeechDecoder):
        check_hooks(decoder.model)
        layers = decoder.caches()
        self.last = [tensor for layer in layers for tensor in layer[4:]]
        self.kept = {(number, slot): tensor for number, layer in enumerate(layers) for slot, tensor in zip(_SLOTS, layer)}
        self._model: Any = decoder.model
        self.planned = Planned(self._lowered(decoder))
        self.caches = Caches(self.planned.places, self.kept)
        self._parts = ModelParts(decoder.model)

    def _lowered(self, decoder: SpeechDecoder) -> Lowered:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = object.__new__(type(self))
        copy.__dict__ |= {name: deepcopy(value, memo) for name, value in vars(self).items() if name != "_parts"}
        copy._parts = ModelParts(copy._model)
        return copy


class SpeechPlan(_Plan):
    """Runs :meth:`SpeechDecoder.step` as one call of C++, over the same caches."""

    def __init__(self, decoder: SpeechDecoder, last: Tensor):
        """
        Args:
            last: last position of the encoder's output.

        Raises:
            Unplannable: the decoder has no plan; the message says why.
        """
        self._heard = last
        super().__init__(decoder)

    def _lowered(self, decoder: SpeechDecoder) -> Lowered:
        recordings, count = [], 4 + len(self.last)
        for rows, kept in CALLS:
            tokens, positions = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)
            keep, start = torch.arange(rows - kept, rows), torch.tensor([0])
            given = [tokens, positions, keep, self._heard, *self.last, start, *self.kept.values()]
            text = (0, rows, start, decoder.caches())
            recordings.append(record(partial(decoder.step, tokens, positions, keep, self._heard, [text]), given))
        roles = Roles(count + 1, list(self.kept), start=count)
        made = lowered(recordings, roles, state_of(decoder.model))
        if any(buffer.kind is Kind.INPUT and buffer.index == count for buffer in made.plan.buffers):
            raise Unplannable("its operators use the number of earlier tokens")
        return made

    def of_beam(self, layers: Sequence[Sequence[Tensor]]) -> Caches:
        """The caches of a beam: keys and values of its text in each layer, and those of the audio."""
        own = {(number, slot): tensor for number, layer in enumerate(layers) for slot, tensor in zip(_SLOTS, layer)}
        return Caches(self.planned.places, self.kept | own)

    def run(
        self, tokens: Tensor, positions: Tensor, keep: Tensor, last: Tensor, texts: Sequence[tuple[int, int, int, Caches]]
    ) -> list[Tensor]:
        """As :meth:`SpeechDecoder.step`, for several texts: range of rows, number of earlier tokens, and caches of each."""
        return self.planned.run([tokens.contiguous(), positions, keep, last, *self.last], len(keep), texts)


class ListenPlan(_Plan):
    """Runs the encoder and :meth:`SpeechDecoder.hear` as one call of C++. Its rows are the encoder's positions."""

    def __init__(self, decoder: SpeechDecoder):
        """
        Raises:
            Unplannable: the encoder has no plan; the message says why.
        """
        super().__init__(decoder)
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(1, decoder.mel_bins, 2 * _TRIAL, generator=generator).to(decoder.model.dtype)
        expected = _shorter(decoder.model.model.encoder, _TRIAL)(features)[0]
        found = self.listen(features)
        self.difference = float((found - expected).float().norm() / expected.float().norm())
        if not self.difference <= _LISTEN_LIMIT:
            raise Unplannable(
                f"its hidden states differ by {self.difference:.2g} of their size; rounding is below {_LISTEN_LIMIT:g}"
            )

    def _lowered(self, decoder: SpeechDecoder) -> Lowered:
        recordings = []
        at = torch.tensor([0])
        for rows, _ in CALLS:
            encoder = _shorter(decoder.model.model.encoder, rows)
            for layer in encoder.layers:
                attention = layer.self_attn
                group = [attention.q_proj, attention.k_proj, attention.v_proj]
                if all(type(each) is nn.Linear for each in group):
                    SharedInput(group)
            features = torch.zeros(1, decoder.mel_bins, 2 * rows, dtype=decoder.model.dtype)
            recordings.append(record(partial(_listen, decoder, encoder, features, at), [features, at, *self.kept.values()]))
        weights = state_of(decoder.model)
        return lowered(recordings, Roles(2, list(self.kept)), weights)

    def listen(self, features: Tensor) -> Tensor:
        """Stores keys and values of a window; returns the encoder's hidden states."""
        rows = features.shape[2] // 2
        states, *last = self.planned.run([features, torch.tensor([0])], 1, [(0, rows, 0, self.caches)])
        for to, tensor in zip(self.last, last, strict=True):
            to.copy_(tensor)
        return states


def _shorter(encoder: Any, positions: int) -> Any:
    """An encoder for windows of fewer positions, with the same parameters."""
    shorter = replica(encoder)
    shorter.config.max_source_positions = positions
    shorter.embed_positions = _Positions(shorter.embed_positions, positions)
    return shorter


class _Positions(torch.nn.Module):
    """The first rows of a table."""

    def __init__(self, table: torch.nn.Module, count: int):
        super().__init__()
        self.table, self.num_embeddings = table, count

    def forward(self, indices: Tensor) -> Any:
        return self.table(indices)


def _listen(decoder: SpeechDecoder, encoder: Any, features: Tensor, at: Tensor) -> list[Tensor]:
    states = encoder(features)[0]
    return [states, *(last.clone(memory_format=torch.contiguous_format) for last in decoder.hear(states, at))]
