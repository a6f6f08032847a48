"""Block by block through a model of transformers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..layers import with_linears
from ..levels import FIT
from ..quantize import EmbeddingConfig, LinearConfig
from ..quantize_model import described_to_transformers
from .capture import Call, Stop, blocks_of, inputs_of, slow_paths
from .collect import HELD, HELD_PART, add_to, inputs_in_a_run, part_held, rows_of, sets_of
from .data import Batch, batches, mask_of, tokens_of
from .distilling import Teacher, distilled
from .gptq import Moments
from .grid import Config
from .learning import put_weights
from .packing import Kept, Packer, by_name
from .result import METHODS, Calibration
from .selection import check_experts, check_weights, left_float, lists_of_blocks, select
from .tables import moments_of_tables
from .tuning import tuned

_LOG = logging.getLogger(__name__)


def run(
    model,
    data: Iterable[Any],
    config: Any,
    method: str,
    *,
    tokenizer: Any,
    window: int,
    max_tokens: int,
    progress: Callable[[int, int, str], None] | None,
    options: Mapping[str, Any] | None = None,
    kept: Kept | None = None,
) -> Calibration:
    """Runs :func:`lowbit.calibrate`.

    ``progress`` is also called when a layer begins, with its name. ``options`` are keyword arguments of :func:`gptq`, and
    steps and rate of :func:`tuned` and :func:`distilled`, for measurements.
    """
    check_method(method)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model is a {type(model).__name__}; expected a model of transformers")
    selected, experts = select(model, config)
    check_weights(model, selected)
    check_experts(model, experts)
    inputs, there = batches(model, data, tokenizer, window, max_tokens)
    with with_linears(model, selected), evaluating(model), described_to_transformers(model):
        return _Run(model, selected, experts, method, inputs, there, progress, dict(options or {}), kept).run()


def check_method(method: Any) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(map(repr, METHODS))}")


@contextmanager
def evaluating(model) -> Iterator[None]:
    """The model in eval mode, without a cache, which would grow from run to run, and without gradients."""
    # A model of texts and images has the settings of its texts in a config of their own.
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    before, training = [vars(config).copy() for config in configs], model.training
    try:
        for config in configs:
            config.use_cache = False
        model.eval()
        with torch.no_grad(), slow_paths():
            yield
    finally:
        for config, own in zip(configs, before, strict=True):
            if "use_cache" in own:
                config.use_cache = own["use_cache"]
            else:  # nor is there to be one in config.json
                del config.use_cache
        model.train(training)


def _run(calls: list[Call], block: torch.nn.Module, hidden: list[Tensor], i: int) -> Tensor:
    """A block's outputs of batch i."""
    return calls[i].run(block, hidden[i])


class _Run:
    def __init__(self, model, selected, experts, method, inputs: list[Batch], there: int, progress, options, kept: Kept | None):
        self.model, self.method, self.inputs, self.options = model, method, inputs, options
        self.masks = [mask_of(batch) for batch in inputs]
        self.result = Calibration(sum(map(tokens_of, inputs)), there)
        self.embeddings = {name: c for name, c in selected.items() if isinstance(c, EmbeddingConfig)}
        self.targets = {name: c for name, c in selected.items() if isinstance(c, LinearConfig)}
        self.selected, self.experts = selected, experts
        self.done, self.progress = 0, progress
        self.kept = kept or Kept({}, lambda layers: [packed for _, _, packed in layers])
        self.in_memory = kept is None
        # Whole batches: tokens behind others of the same text would know too much of them.
        step = max(HELD_PART, -(-self.result.tokens // HELD))
        last = len(inputs) - 1
        self.held = {i for i in range(len(inputs)) if i % step == step - 1} or {last}
        self.tuning = {name: self.options.pop(name) for name in ("steps", "rate") if name in self.options}
        # With a single batch nothing would be left to learn from.
        self.tunes = method == "tuned" and last > 0
        self.distils = method == "distilled" and last > 0
        self.packer = Packer(
            model, selected, experts, method, inputs, self.masks, self.options, self.kept, self.result, self._report
        )
        self.tables = {name for name, config in (selected | experts).items() if config.levels == FIT}

    def run(self) -> Calibration:
        model = self.model
        by_weight: dict[int, list[str]] = {}
        for name in self.selected:
            by_weight.setdefault(id(model.get_submodule(name).weight), []).append(name)
        shared = [names for names in by_weight.values() if len(names) > 1]
        first = {names[0] for names in by_weight.values() if set(names) & self.targets.keys()}
        known = {name: packed for name, (method, packed) in self.kept.packed.items() if method.startswith("distilled")}
        # Distilling takes as long as all before it, or so.
        self.total = (len(first) + self.packer.expert_matrices()) * (2 if self.distils and not known else 1)
        self._report(0, "the float model's run over the text")
        # The answers of the float model, which is about to go.
        teacher = Teacher(model, self.inputs) if self.distils and not known else None

        # Layers that share a weight are calibrated once, in the float model, and before all others: an error of the
        # table is then made up for by what follows.
        together = {name for names in shared for name in names}
        alone = {name: config for name, config in self.targets.items() if name not in together}
        early = {name: config for name, config in self.targets.items() if name in together}
        if self.method == "importance":
            early = self.targets
            lists = lists_of_blocks(model, self.experts)
        else:
            lists = lists_of_blocks(model, [*alone, *self.experts])
        tables = {name: config for name, config in self.embeddings.items() if name not in together}
        # At 1 bit making up for errors loses more than it gains.
        wanted = {name for name, config in tables.items() if config.bits > 1 and name not in self.kept.packed}
        of_tables = moments_of_tables(model, self.inputs, wanted if self.method != "importance" else ())
        floats, moments = self._first_pass(lists, [name for name in early if name not in self.kept.packed])
        for names in shared:
            self.packer.pack_shared(names, moments)
        self.packer.pack_tables(tables, of_tables)
        if self.method == "importance":
            for name in alone:
                self.packer.pack_layers(model, [name], alone, moments.pop(name, None))
        for name in lists:
            if name in floats:
                self._list(name, floats.pop(name), {} if self.method == "importance" else alone)
        if self.method != "importance":
            self._whole(alone)
        self.packer.pack_experts(model, "", partial(self._whole_run, model))
        if teacher is not None:
            self._distil(teacher)
        put_weights(model, {name: packed for name, packed in known.items() if name in self.embeddings})
        self.result.left = left_float(model)
        if self.in_memory:
            nn.use_huge_pages(model)
        return self.result

    def _report(self, more: int, name: str) -> None:
        self.done += more
        if more:
            _LOG.info("%d of %d layers calibrated: %s", self.done, self.total, name)
        if self.progress is not None:
            self.progress(self.done, self.total, name)

    def _until_stopped(self, batch: Batch) -> None:
        with suppress(Stop):
            self.model(**batch)

    def _first_pass(self, lists: list[str], early: list[str]):
        """The float model once over the text: how its blocks are called, and the moments of some layers."""
        blocks = {name: list(self.model.get_submodule(name)) for name in lists}
        calls: dict[str, list] = {name: [] for name in lists}
        chained = dict.fromkeys(lists, True)
        moments: dict[str, Moments] = {}
        layers = {name: self.model.get_submodule(name) for name in early}
        if not lists and not layers:
            return {}, moments
        for batch, mask in zip(self.inputs, self.masks, strict=True):
            missing = set(layers)
            recorded: dict[str, Any] = {}

            def take(name: str, x: Tensor, mask=mask, missing=missing, recorded=recorded) -> None:
                add_to(moments, name, rows_of(x, mask), None, diagonal=self.method == "importance")
                missing.discard(name)
                # The logits of all tokens, which nobody needs, would take more memory than all else.
                if not missing and all(len(one.calls) == len(blocks[list_]) for list_, one in recorded.items()):
                    raise Stop

            with ExitStack() as stack:
                stack.enter_context(inputs_of(layers, take))
                for name in lists:
                    recorded[name] = stack.enter_context(blocks_of(blocks[name], stop_after=lists == [name] and not layers))
                self._until_stopped(batch)
            for name in lists:
                chained[name] &= recorded[name].chained
                if chained[name]:
                    calls[name].append(recorded[name])
        # Blocks with something between them are no chain: the whole model takes their place.
        return {name: calls[name] for name in lists if chained[name]}, moments

    # -- blocks

    def _list(self, name: str, floats: list, alone: Mapping[str, Config]) -> None:
        blocks = list(self.model.get_submodule(name))
        packed = []
        for batch in self.inputs:
            with blocks_of(blocks, stop_after=True) as recorded:
                self._until_stopped(batch)
            packed.append(recorded)
        ours, theirs = [one.first for one in packed], [one.first for one in floats]
        for one in (*packed, *floats):
            one.first = None
        for index, block in enumerate(blocks):
            prefix = f"{name}.{index}."
            targets = {key.removeprefix(prefix): alone[key] for key in alone if key.startswith(prefix)}
            twin = copy.deepcopy(block)
            before: list[Call] = [one.calls[index] for one in floats]
            now: list[Call] = [one.calls[index] for one in packed]
            run_now = partial(_run, now, block, ours)
            self._segment(block, twin, prefix, targets, run_now, partial(_run, before, twin, theirs), tune=self.tunes)
            self.packer.pack_experts(block, prefix, run_now, tune=self.tunes)
            if index + 1 < len(blocks) or self.packer.pending:
                for i in range(len(self.inputs)):
                    theirs[i] = before[i].run(twin, theirs[i])
            if self.packer.pending:
                self._tune(block, prefix, lambda module, i, now=now: now[i].run(module, ours[i]), theirs)
            if index + 1 < len(blocks):
                for i in range(len(self.inputs)):
                    ours[i] = now[i].run(block, ours[i])

    def _tune(self, block, prefix: str, run, wanted: list[Tensor]) -> None:
        """Fits the scales of a block's new layers to the outputs of the float block, and keeps the layers."""
        names = [name.removeprefix(prefix) for (name,), _, _ in self.packer.pending]
        tables = {name.removeprefix(prefix) for name in self.tables}
        better = tuned(block, names, run, wanted, self.masks, self.held, tables=tables, **self.tuning)
        layers = []
        for name, ((full,), method, packed) in zip(names, self.packer.pending, strict=True):
            found = better.get(name, packed)
            changed = (found != packed).view(-1, packed.shape[-1]).any(1).tolist()  # of one layer, or of each expert
            method = ",".join("tuned" if new else own for own, new in zip(method.split(","), changed, strict=True))
            self.result.methods |= by_name(full, method, packed)
            layers.append(([full], method, found))
        self.packer.pending = []
        put_weights(block, dict(zip(names, self.kept.keep(layers), strict=True)))

    def _distil(self, teacher: Teacher) -> None:
        """Fits the scales of all layers to the float model's answers, and keeps the layers, all at once."""

        def report(step: int, steps: int) -> None:
            if self.progress is not None:
                self.progress(self.done + (self.total - self.done) * step // steps, self.total, f"step {step} of {steps}")

        names = {*self.selected, *self.experts}
        found = distilled(self.model, teacher, names, self.held, self.tables, progress=report, **self.tuning)
        self._report(self.total - self.done, "scales of all layers")
        by_weight: dict[int, list[str]] = {}
        for name in found:
            by_weight.setdefault(found[name].data_ptr(), []).append(name)
        layers = []
        for shared in by_weight.values():
            packed = found[shared[0]]
            layers.append((shared, ",".join(["distilled"] * (len(packed) if packed.dim() == 2 else 1)), packed))
        for (shared, method, _), packed in zip(layers, self.kept.keep(layers) if layers else (), strict=True):
            put_weights(self.model, dict.fromkeys(shared, packed))
            for name in shared:
                if name not in self.embeddings:
                    self.result.methods |= by_name(name, method, packed)

    def _whole(self, alone: Mapping[str, Config]) -> None:
        """All layers that are not quantized yet, with runs of the whole model."""
        rest = {name: config for name, config in alone.items() if name not in self.result.methods}
        if not rest:
            return
        quantized = any(name in self.result.methods for name in alone)
        # What comes behind quantized blocks has no float twin: the model would have to be there twice.
        twin = None if quantized else copy.deepcopy(self.model)
        self._segment(
            self.model,
            twin,
            "",
            rest,
            partial(self._whole_run, self.model),
            None if twin is None else partial(self._whole_run, twin),
        )

    def _whole_run(self, model: torch.nn.Module, i: int) -> Any:
        return model(**self.inputs[i])

    def _segment(self, module, twin, prefix: str, targets: Mapping[str, Config], ours, theirs, tune: bool = False) -> None:
        """Quantizes layers of a module in the order of its calls, those that share an input at a time."""
        known = self.kept.packed
        if all(prefix + name in known for name in targets):
            for name in targets:
                self.packer.pack_layers(module, [name], targets, None, prefix)
            return
        held = set() if "correction" in self.options or twin is None else self.held
        last = len(self.inputs) - 1
        for layers in sets_of(module, targets, lambda: ours(0)):
            moments: dict[str, Moments] = {}
            leaders = sorted({leader for name, leader in layers.items() if prefix + name not in known})
            for i, mask in enumerate(self.masks if leaders else ()):
                float_inputs = inputs_in_a_run(twin, leaders, partial(theirs, i)) if twin is not None else {}
                for name, values in inputs_in_a_run(module, leaders, partial(ours, i)).items():
                    others = float_inputs.get(name, ())
                    # An expert may get other tokens than in the float model.
                    paired = len(values) == len(others) and all(
                        x.shape == y.shape and x.numel() // x.shape[-1] == self.inputs[i]["input_ids"].numel()
                        for x, y in zip(values, others, strict=True)
                    )
                    for j, x in enumerate(values):
                        y = rows_of(others[j], mask) if paired else None
                        add_to(moments, name, rows_of(x, mask), y, diagonal=False, held=part_held(i in held, last == 0))
            for leader in dict.fromkeys(layers.values()):
                names = [name for name in layers if layers[name] == leader]
                self.packer.pack_layers(module, names, targets, moments.pop(leader, None), prefix, tune)
