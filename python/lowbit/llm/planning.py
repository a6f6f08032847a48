"""Plans of decoders: a call of the model as one call of C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..hf.rotary_tables import computed
from ..plan.lowering import Lowered, lowered
from ..plan.model_parts import ModelParts, ModelPlan, check_hooks, state_of
from ..plan.plan_builder import Roles, bytes_of
from ..plan.plan_file import Buffer, Kind, Plan, Slot
from ..plan.recording import CALLS, Recording, Unplannable, record
from ..plan.running import Caches, Planned, by_slot
from .caches import name_of
from .proof import EXACT_LIMIT, PIECES_LIMIT, Rounding

if TYPE_CHECKING:
    from .decoder import Decoder


Text = tuple[int, int, int, Caches]  # range of rows, earlier tokens, caches


def lowered_step(
    run: Callable[..., Any],
    inputs: Callable[[int, int], Sequence[Tensor]],
    new_caches: Callable[[], Sequence[Sequence[Tensor]]],
    model: torch.nn.Module,
) -> Lowered:
    """The plan of a step over caches.

    Args:
        run: computes the step from the inputs, the number of earlier tokens, and the caches of all layers.
        inputs: gives the inputs of a call, by its rows and kept rows.
        new_caches: gives empty caches of all layers.
        model: the modules with the weights.

    Raises:
        Unplannable: the step has no plan; the message says why.
    """
    recordings: list[Recording] = []
    places: list[tuple[int, int]] = []
    for rows, kept in CALLS:
        given, start, layers = inputs(rows, kept), torch.tensor([0]), new_caches()
        count, places = len(given), list(by_slot(layers))
        tensors = [*given, start, *(tensor for layer in layers for tensor in layer)]
        with computed():
            recordings.append(record(partial(run, *given, start, layers), tensors))
    made = lowered(recordings, Roles(count + 1, places, count), state_of(model))
    if any(buffer.kind is Kind.INPUT and buffer.index >= count for buffer in made.plan.buffers):
        raise Unplannable("its operators use the number of earlier tokens")
    return made


def _lowered(decoder: Decoder) -> Lowered:
    def run(tokens: Tensor, positions: Tensor, keep: Tensor, start: Tensor, layers: Sequence[Any]) -> list[Tensor]:
        logits, hidden = decoder.run_observed(tokens, positions, start, layers, keep)
        return [logits] if hidden is None else [logits, hidden]

    def inputs(rows: int, kept: int) -> list[Tensor]:
        return [torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows), torch.arange(rows - kept, rows)]

    made = lowered_step(run, inputs, lambda: decoder.new_caches(16).layers, decoder.model)
    for buffer in made.plan.buffers:
        if buffer.kind is Kind.CACHE and buffer.slot != Slot.HELD:
            buffer.shape, buffer.dtype = decoder.cache_shape(buffer.index, buffer.slot)
    return made


class DecoderPlan(ModelPlan):
    """The plan of a decoder's model; with hidden states as a further result if they are observed."""

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

    @property
    def gives_hidden(self) -> bool:
        """Whether calls return hidden states."""
        return len(self._planned.outputs) > 1

    @property
    def gives_kept_rows(self) -> bool:
        """Whether its logits are those of the kept rows, as without torch; some models ignore logits_to_keep."""
        return not any(size.per_row for size in self._planned.outputs[0].size)

    @property
    def plan(self) -> Plan:
        """The plan for programs, which returns only logits."""
        made = self._planned.plan
        buffers = [
            Buffer(Kind.TEMPORARY, bytes_of(self._planned.outputs[1]))
            if buffer.kind is Kind.OUTPUT and buffer.index == 1
            else buffer
            for buffer in made.buffers
        ]
        return Plan(made.about, buffers, made.steps)

    @property
    def weights(self) -> dict[int, Tensor]:
        """The weights of the plan, by buffer."""
        return self._planned.weights

    def caches(self, layers: Sequence[Sequence[Tensor]]) -> Caches:
        """A text's caches as the plan uses them; they must stay where they are."""
        return Caches(self._planned.places, by_slot(layers))

    def run(self, tokens: Tensor, positions: Tensor, keep: Tensor, texts: Sequence[Text]) -> tuple[Tensor, Tensor | None]:
        """Logits [len(keep), vocabulary], and hidden states [1, s, size] if the plan returns them.

        Arguments as in :meth:`Decoder.run`.
        """
        (logits, *_), *hidden = self._planned.run([tokens.contiguous(), positions, keep], len(keep), texts)
        logits = logits if logits.shape[0] == len(keep) else logits[keep]  # some models ignore logits_to_keep
        return logits, hidden[0] if hidden else None

    def _logits(self, decoder: Decoder, tokens: Tensor, cache_type: str) -> tuple[Tensor, list[Tensor]]:
        """The logits of a text in pieces; and the rows of several tokens, of single tokens, and of the rest."""
        count = tokens.shape[1]
        mine = self.caches(decoder.new_caches(16, cache_type).layers)

        def logits_of(begin: int, end: int) -> Tensor:
            rows = torch.arange(end - begin)
            return self.run(tokens[:, begin:end], rows + begin, rows, [(0, end - begin, begin, mine)])[0]

        parts = [part for part in torch.arange(count).tensor_split((count // 2, count - count // 4)) if len(part)]
        ends = [[part] if number % 2 == 0 else list(part[:, None]) for number, part in enumerate(parts)]
        logits = [logits_of(int(piece[0]), int(piece[-1]) + 1) for pieces in ends for piece in pieces]
        return torch.cat(logits)[None], parts

    @torch.inference_mode()
    def prove(self, decoder: Decoder, tokens: Tensor, rounding: Rounding) -> float:
        """The difference from the decoder's own operators, 0 if all bits are equal.

        Raises:
            Unplannable: it is more than rounding.
        """
        caches = decoder.new_caches(16, name_of(decoder.model.dtype))
        whole = decoder.run(tokens, torch.arange(tokens.shape[1]), torch.tensor([0]), caches.layers)
        result, parts = self._logits(decoder, tokens, caches.cache_type)
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

    @torch.inference_mode()
    def check_same(self, decoder: Decoder, tokens: Tensor, proven: DecoderPlan) -> None:
        """Checks that this plan has the bits of another one of the same model.

        Raises:
            Unplannable: it has not.
        """
        one, other = (plan._logits(decoder, tokens, decoder.cache_type)[0] for plan in (self, proven))
        if not torch.equal(one, other):
            raise Unplannable("its logits change when hidden states are a result")


class MtpPlan(ModelPlan):
    """The plan of a multi-token prediction head, with the model's embedding and output head."""

    def __init__(
        self,
        run: Callable[..., Sequence[Tensor]],
        new_caches: Callable[[int], Sequence[Sequence[Tensor]]],
        model: torch.nn.Module,
        size: int,
        exact: bool,
    ):
        """
        Args:
            run: computes results and logits of kept rows from the next tokens, hidden states, positions, kept rows, the number
                of earlier tokens, and caches.
            new_caches: gives empty caches of a length.
            model: the modules with the weights.
            size: the size of a hidden state.
            exact: the model has float32 weights only.

        Raises:
            Unplannable: the head has no plan; the message says why.
        """
        check_hooks(model)
        self._parts = ModelParts(model)
        dtype = new_caches(16)[0][0].dtype

        def inputs(rows: int, kept: int) -> list[Tensor]:
            hidden = torch.arange(rows * size).sin().view(rows, size).to(dtype)
            return [torch.arange(rows)[None], hidden, torch.arange(rows), torch.arange(rows - kept, rows)]

        self._planned = Planned(lowered_step(run, inputs, lambda: new_caches(16), model))
        self._prove(run, inputs, new_caches, 1e-4 if exact else 0.05)

    @torch.inference_mode()
    def _prove(
        self,
        run: Callable[..., Sequence[Tensor]],
        inputs: Callable[[int, int], Sequence[Tensor]],
        new_caches: Callable[[int], Sequence[Sequence[Tensor]]],
        limit: float,
    ) -> None:
        """Compares the plan with the head's own operators, for several rows and a single one after them.

        Raises:
            Unplannable: they differ by more than rounding.
        """
        own, mine = new_caches(16), new_caches(16)
        planned = self.caches(mine)
        ids, hidden, positions, _ = inputs(10, 1)
        for rows in (slice(0, 9), slice(9, 10)):
            given = [ids[:, rows], hidden[rows], positions[rows], torch.arange(rows.stop - rows.start)]
            expected, found = run(*given, torch.tensor([rows.start]), own), self.run(given, rows.start, planned)
            for one, other in zip(expected, found, strict=True):
                # The median, because rounding may route single tokens to another expert.
                difference = float(((one - other).float().norm(dim=-1) / one.float().norm(dim=-1)).median())
                if not difference <= limit:
                    raise Unplannable(f"its results differ by {difference:.2g} of their size; rounding is below {limit:g}")

    def caches(self, layers: Sequence[Sequence[Tensor]]) -> Caches:
        """Caches as the plan uses them; they must stay where they are."""
        return Caches(self._planned.places, by_slot(layers))

    def run(self, inputs: Sequence[Tensor], start: int, caches: Caches) -> list[Tensor]:
        """Results and logits, of inputs as for ``run`` of the constructor."""
        return self._planned.run(inputs, len(inputs[-1]), [(0, inputs[0].shape[1], start, caches)])
