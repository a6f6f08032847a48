"""Plans of encoders: one call of C++ for the texts of a batch, which computes no padding.

Sizes in a plan depend only on the number of rows, so the texts of a batch are concatenated to one sequence, each with its own
positions. Attention runs for each text alone.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..plan.lowering import Lowered, lowered
from ..plan.model_parts import ModelParts, ModelPlan, check_hooks, state_of
from ..plan.plan_builder import Roles
from ..plan.plan_file import Plan
from ..plan.recording import CALLS, Unplannable, record
from ..plan.running import Caches, Planned
from .encoder_heads import Chain, Classifier, is_chain, is_classifier
from .masked import make_mask, masks_made_by
from .shared_inputs import SharedInput, observed

_MOST_LENGTHS = 32  # number of text lengths whose bounds are kept
# Largest number of rows in a call of the plan, except for a longer text, which has a call of its own. With 256 rows MiniLM
# takes 0.8 to 0.9 of the time of 1024 or more, because a call's activations stay in the second-level cache.
_MOST_ROWS = 256
# Largest differences from the model's own operators, relative to the values of a text. lowbit's operators have the same bits in
# plans. Others, such as the sines of rotary positions, differ by rounding, which quantized activations amplify.
_FLOAT_LIMIT, _QUANTIZED_LIMIT = 1e-4, 0.05
_MOST_SEEN = 4096  # positions at which masks are compared
_ALL = 1 << 40  # stands for all positions: more than a text has


class _Mask:
    """A mask that the model asks for once per call: which tokens each token of a text sees."""

    def __init__(self, **arguments: Any):
        self._make = partial(make_mask, **arguments)
        self._ranges: tuple[Tensor, Tensor] | None = None
        self._bounds: dict[int, Tensor] = {}  # by length

    def ranges(self, length: int) -> tuple[Tensor, Tensor]:
        """Begin and end of the positions that each position of a text sees."""
        if self._ranges is None or len(self._ranges[0]) < length:
            bounds = self._make(batch_size=1, q_length=length, kv_length=length)
            if bounds is None:
                begin, end = torch.zeros(length, dtype=torch.int64), torch.full((length,), length)
            elif bounds.dtype is torch.int32:
                _, begin, end = bounds[0].long().unbind(-1)
            else:
                raise Unplannable("a token attends to tokens that are not adjacent to each other")
            self._ranges = begin, end
        begin, end = self._ranges
        # The ranges of a shorter text are the same, cut at its end.
        return begin[:length], end[:length].clamp(max=length)

    def distances(self, length: int) -> tuple[int, int]:
        """How many positions before and after its own each position of a text of up to ``length`` tokens sees."""
        begin, end = self.ranges(length)
        places = torch.arange(length)
        before, after = int((places - begin).max()), int((end - 1 - places).max())
        same = torch.equal(begin, (places - before).clamp(min=0)) and torch.equal(end, (places + 1 + after).clamp(max=length))
        if not same:
            raise Unplannable("tokens attend to different numbers of tokens before or after them")
        every = length - 1
        return (_ALL if before == every else before), (_ALL if after == every else after)

    def bounds(self, length: int) -> Tensor:
        """Bounds, int32 [length, 3], of a text without padding."""
        if length not in self._bounds:
            if len(self._bounds) == _MOST_LENGTHS:
                self._bounds.clear()
            self._bounds[length] = _bounds(torch.stack(self.ranges(length), -1))
        return self._bounds[length]


def _bounds(ranges: Tensor) -> Tensor:
    """Bounds of tokens from begins and ends [rows, 2]."""
    return torch.nn.functional.pad(ranges.int(), (1, 0), value=1)


def replica(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model to be recorded. It shares the model's parameters and buffers; changes of its modules do not change the
    model."""
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in state_of(model).values()})
    for module in copied.modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
            module.register_forward_hook(_channels_last)
    return copied


def _channels_last(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A convolution's result in the memory order of tokens, in which the next operators compute."""
    return output.movedim(1, -1).contiguous().movedim(-1, 1)


class EncoderPlan(ModelPlan):
    """The plan of an encoder."""

    def __init__(self, model: Any, head: Classifier | Chain | None = None, alone: bool = False):
        """
        Args:
            head: computes the result of each text from its hidden states.
            alone: the plan's only result is that of the head.

        Raises:
            Unplannable: the model has no plan; the message says why.
        """
        self._model, self._head, self._alone = model, head, alone
        whole = model if head is None else head
        self._parts = ModelParts(whole)
        check_hooks(whole)
        self._names = set(inspect.signature(type(model).forward).parameters)
        if not {"input_ids", "attention_mask", "position_ids"} <= self._names:
            raise Unplannable("its forward does not take input_ids, attention_mask and position_ids")
        ids = torch.zeros(1, 4, dtype=torch.int64)
        named = {"past_key_values", "cache"}  # the latter since transformers 5.24
        self.makes_caches = "use_cache" in self._names and bool(named & _own(model, ids, use_cache=True).keys())
        output = self._own(model, ids)
        fields = {name for name, value in output.items() if value is not None}
        if not {"last_hidden_state"} <= fields <= {"last_hidden_state", "pooler_output"}:
            raise Unplannable(f"it returns {', '.join(sorted(fields))}")
        self._output, self._pools = type(output), "pooler_output" in fields
        self._masks: list[_Mask] = []
        made = self._lowered()
        self.planned, self._no_caches = Planned(made), Caches([], {})
        self.width, self._dtype = made.outputs[0].size[-1].constant, made.outputs[0].dtype
        padding = model.config.pad_token_id
        self._padding = padding if isinstance(padding, int) and 0 <= padding < model.config.vocab_size else 0
        self._counts_tokens = False  # positions count the tokens that are not padding, as in RoBERTa
        try:
            self.difference = self._prove()
        except (Unplannable, IndexError):
            self._counts_tokens = True
            self.difference = self._prove()

    @property
    def names(self) -> list[str]:
        """The results of a call, in order."""
        names = [*([] if self._alone else ["last_hidden_state", *(["pooler_output"] if self._pools else [])])]
        return names if self._head is None else [*names, "head"]

    def _own(self, model: Any, ids: Tensor, **arguments: Any) -> Any:
        return _own(model, ids, **arguments, **({"use_cache": False} if self.makes_caches else {}))

    def _lowered(self) -> Lowered:
        head = self._replica_of_head()
        model = replica(self._model) if head is None else head.base

        def asked(**arguments: Any) -> Tensor | None:
            for name in ("batch_size", "q_length", "kv_length", "attention_mask"):
                del arguments[name]
            self._masks.append(_Mask(**arguments))
            return None

        with masks_made_by(asked), observed(model) as groups:
            self._own(model, torch.zeros(1, 4, dtype=torch.int64))
        if not self._masks:
            raise Unplannable("it makes no mask")
        for group in groups:
            SharedInput(group)
        recordings, given = [], 0
        for rows, texts in CALLS:
            ids = torch.zeros(1, rows, dtype=torch.int64)
            ranges = torch.arange(texts)[:, None] + torch.tensor([0, 1])
            arguments = {"position_ids": torch.arange(rows)[None]}
            if self._has_types:
                arguments["token_type_ids"] = torch.zeros_like(ids)
            bounds = [torch.tensor([1, 0, rows], dtype=torch.int32).repeat(1, rows, 1) for _ in self._masks]
            tensors = [ids, *arguments.values(), ranges, *bounds]
            recordings.append(record(partial(self._packed, model, head, ids, arguments, ranges, bounds), tensors))
            given = len(tensors)
        return lowered(recordings, Roles(given, []), state_of(model if head is None else head))

    def _packed(
        self, model: Any, head: Any, ids: Tensor, arguments: dict[str, Tensor], ranges: Tensor, bounds: list[Tensor]
    ) -> list[Tensor]:
        """The results for concatenated texts: hidden states, the pooler's output for their first tokens, the head's result."""
        left = iter(bounds)
        with masks_made_by(lambda **_: next(left)):
            # With a mask of ones: without a mask, transformers looks for concatenated texts itself.
            hidden = self._own(
                model, ids, attention_mask=torch.ones(ids.shape, dtype=torch.int64), **arguments
            ).last_hidden_state
        found = [hidden, model.pooler(hidden[0, ranges[:, 0]][:, None])] if self._pools else [hidden]
        if head is None:
            return found

        def output(first: Tensor) -> Any:
            return self._output(first, *found[1:])

        made: Tensor = head.rows(hidden, ranges, output)
        return [made] if self._alone else [*found, made]

    def _replica_of_head(self) -> Any:
        if self._head is None:
            return None
        made: Any = replica(self._head)
        made.drop_plans()
        return made

    @property
    def _has_types(self) -> bool:
        return "token_type_ids" in self._names

    def _prove(self) -> float:
        """The largest difference of a text from the model's own operators, 0 if all bits are equal."""
        config = self._model.config
        shown = torch.ones(3, 12, dtype=torch.int64)
        shown[1, 7:], shown[2, :5] = 0, 0
        ids = (torch.arange(shown.numel()).view_as(shown) * 7 + 3) % config.vocab_size
        ids = torch.where((shown != 0) & (ids != self._padding), ids, self._padding)
        types = {"token_type_ids": torch.arange(12)[None] % max(1, getattr(config, "type_vocab_size", 1))}
        quantized = any(isinstance(module, nn.Linear | nn.LinearExperts) for module in self._model.modules())
        limit = _FLOAT_LIMIT if self._dtype is torch.float32 and not quantized else _QUANTIZED_LIMIT
        worst = 0.0
        head = self._replica_of_head()
        for given in ({}, types) if self._has_types else ({},):
            expected, found = self._own(self._model, ids, attention_mask=shown, **given), self.run(ids, shown, **given)
            pairs = []
            if not self._alone:
                states = found["last_hidden_state"]
                pairs = [(expected[0][row][shown[row] != 0], states[row][shown[row] != 0]) for row in range(3)]
            # The pooler and classifiers read the first position, which is padding in the last text.
            if self._pools and not self._alone:
                pairs += zip(expected.pooler_output[:2], found["pooler_output"][:2], strict=True)
            if head is not None:
                with torch.inference_mode():
                    made = head.own(ids, shown, **given)
                texts = 3 if isinstance(head, Chain) else 2
                pairs += zip(made[:texts], found["head"][:texts], strict=True)
            for one, other in pairs:
                if not torch.equal(one, other):
                    difference = (one - other).float().norm() / one.float().norm()
                    worst = max(worst, float(difference)) if difference <= limit else float("inf")
        if worst > limit:
            raise Unplannable(f"its results in a plan have a relative difference of {worst:.2g}; expected less than {limit:g}")
        return worst

    @property
    def positions(self) -> int:
        """Tokens of the longest text."""
        most: int = self._model.config.max_position_embeddings
        return most - self._padding - 1 if self._counts_tokens else most

    def facts(self) -> dict[str, list[int]]:
        """The facts from which plan/model.cpp computes a plan's inputs for some tokens.

        Raises:
            Unplannable: its attention has a mask that facts cannot describe.
        """
        config = self._model.config
        facts = {"vocabulary": [config.vocab_size], "positions": [self.positions], "width": [self.width]}
        if self._has_types:
            facts["types"] = [config.type_vocab_size]
        if self._counts_tokens:
            facts |= {"first_position": [self._padding + 1], "padding": [self._padding]}
        length = min(self.positions, _MOST_SEEN)
        facts["masks"] = [number for mask in self._masks for number in mask.distances(length)]
        if length < self.positions and (getattr(config, "sliding_window", None) or 0) >= length:
            raise Unplannable(f"its attention has a window of more than {length} tokens")
        return facts

    def has_its_memory(self) -> bool:
        """Whether the parameters are still where they were."""
        return self._parts.have_their_memory()

    def run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The results by :attr:`names`. Hidden states of padding are 0.

        Raises:
            IndexError, ValueError: the input does not fit the model.
            Unplannable: the plan has no such calls.
        """
        batch, length = input_ids.shape
        shown = None if attention_mask is None else attention_mask != 0
        if shown is not None and bool(shown.all()):
            shown = None
        if any(int(each.min()) < 0 for each in (input_ids, token_type_ids, position_ids) if each is not None):
            raise IndexError("an index is negative")
        if position_ids is None and self._counts_tokens:
            counted = input_ids != self._padding
            position_ids = counted.cumsum(1) * counted + self._padding
        elif position_ids is None:
            position_ids = torch.arange(length)[None]
        columns = [input_ids, position_ids]
        if self._has_types:
            columns.append(torch.zeros(1, length, dtype=torch.int64) if token_type_ids is None else token_type_ids)
        columns = [column.long().expand(batch, length) for column in columns]
        pieces = self._pieces(batch, length, shown)
        if len(pieces) == 1:
            found = self._run(columns, shown)
        else:
            parts = [self._run([x[piece] for x in columns], None if shown is None else shown[piece]) for piece in pieces]
            found = [torch.cat(each) for each in zip(*parts, strict=True)]
        return dict(zip(self.names, found, strict=True))

    def output(self, found: dict[str, Tensor]) -> Any:
        """The model's output from the results of a call."""
        return self._output(**found)

    @staticmethod
    def _pieces(batch: int, length: int, shown: Tensor | None) -> list[slice]:
        """Divides a batch into pieces of few tokens."""
        if batch * length <= _MOST_ROWS:
            return [slice(0, batch)]
        counts = [length] * batch if shown is None else shown.sum(1).tolist()
        begins, rows = [0], 0
        for text, count in enumerate(counts):
            if text > begins[-1] and rows + count > _MOST_ROWS:
                begins.append(text)
                rows = 0
            rows += count
        return list(map(slice, begins, [*begins[1:], batch]))

    def _run(self, columns: list[Tensor], shown: Tensor | None) -> list[Tensor]:
        """The plan's results for a batch of texts: hidden states, the pooler's outputs, and those of the head."""
        batch, length = columns[0].shape
        columns = [column.contiguous().view(-1) for column in columns]
        if shown is None:
            ends = list(range(length, batch * length + 1, length))
            bounds = [mask.bounds(length) for mask in self._masks]
            if batch > 1:
                bounds = [each.repeat(batch, 1) for each in bounds]
        else:
            # The number of tokens of a text before each position.
            before = torch.nn.functional.pad(shown.cumsum(1), (1, 0))
            ends = before[:, -1].cumsum(0).tolist()
            if not bool(before[:, -1].all()):
                raise Unplannable("a text has no tokens")
            places = shown.reshape(-1).nonzero()[:, 0]
            columns = [column[places] for column in columns]
            bounds = [torch.stack([before[:, end] for end in mask.ranges(length)], -1) for mask in self._masks]
            bounds = [_bounds(each.view(-1, 2)[places]) for each in bounds]
        begins = [0, *ends[:-1]]
        texts = [(begin, end, 0, self._no_caches) for begin, end in zip(begins, ends, strict=True)]
        ranges = torch.tensor([begins, ends]).t().contiguous()
        found = self.planned.run([*columns, ranges, *bounds], batch, texts)
        if self._alone:
            return found
        hidden, *others = found
        if shown is not None:
            whole = torch.zeros(batch * length, self.width, dtype=self._dtype)
            hidden = whole.index_copy_(0, places, hidden[0])
        return [hidden.view(batch, length, self.width), *others]


def _own(model: Any, ids: Tensor, attention_mask: Tensor | None = None, **arguments: Any) -> Any:
    """The output of a model's own code."""
    mask = torch.ones(ids.shape, dtype=torch.int64) if attention_mask is None else attention_mask
    with torch.inference_mode():
        output = type(model).forward(model, input_ids=ids, attention_mask=mask, **arguments)
    if not isinstance(output, import_module("transformers").utils.ModelOutput):
        raise Unplannable(f"it returns a {type(output).__name__}")
    return output


@dataclass(frozen=True)
class FilePlan:
    """A plan that computes embeddings or scores of texts from their tokens, for programs without Python.

    Attributes:
        facts: from which such a program computes the plan's inputs.
        positions: number of tokens of the longest text.
    """

    plan: Plan
    weights: dict[int, Tensor]
    facts: dict[str, list[int]]
    positions: int


def plan_for_files(model: Any) -> FilePlan:
    """The plan of a fused SentenceTransformer or CrossEncoder.

    Raises:
        Unplannable: the model has no plan; the message says why.
    """
    if is_chain(model):
        head: Chain | Classifier = Chain(model)
    elif len(list(model)) == 1 and is_classifier(model[0].model):
        head = Classifier(model[0].model)
    else:
        raise Unplannable(f"it is a {type(model).__name__} with modules that plans do not support")
    made = EncoderPlan(head.base, head, alone=True)
    return FilePlan(made.planned.plan, made.planned.weights, made.facts(), made.positions)
