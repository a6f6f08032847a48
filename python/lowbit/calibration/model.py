"""Calibrates a model of transformers block by block."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..layers.packable import names_by_weight, replace_layers, with_linears
from ..levels import FIT
from ..packed.rounding import EmbeddingConfig, LinearConfig
from ..quantizing.quantize_model import described_to_transformers
from .blocks import Tuner, quantize_blocks, quantize_rest
from .capture import Recorded, StopRun, blocks_of, inputs_of, slow_paths
from .collect import add_to, rows_of
from .data import Sample, batches
from .distilling import Teacher, distilled
from .gptq_solver import Moments
from .grid import MatrixConfig
from .learning import put_weights
from .packing import Kept, Packer, by_name
from .result import METHODS, Calibration
from .selection import check, lists_of_blocks, select, unquantized
from .tables import moments_of_tables

_LOG = logging.getLogger(__name__)


def run(
    model: Any,
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

    Args:
        progress: called as ``progress(matrices done, matrices, name)``, also when a layer begins.
        options: for measurements: keyword arguments of :func:`gptq`, and ``steps`` and ``rate`` of :func:`tuned` and
            :func:`distilled`.
        kept: the layers of an earlier run, and where to keep new ones; None: in memory.
    """
    check_method(method)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model is a {type(model).__name__}; expected a model of transformers")
    selected, experts, rounded = select(model, config)
    check(model, selected | rounded | experts)
    inputs, text_tokens = batches(model, data, tokenizer, window, max_tokens)
    sample, report, settings = Sample(inputs), _Progress(progress), dict(options or {})
    if not getattr(model, "can_generate", lambda: False)():
        # For encoders the text covers few of the words that they will see, so the correction would overfit
        # (docs/measurements/quality.md, Sentence embeddings).
        settings.setdefault("correction", 0.0)
    result = Calibration(sample.tokens, text_tokens)
    fitting: dict[str, Any] = {name: settings.pop(name) for name in ("steps", "rate") if name in settings}
    in_memory = Kept({}, lambda layers: [packed for _, _, packed in layers])
    packer = Packer(model, selected, experts, method, sample, settings, kept or in_memory, result, report.add)
    with with_linears(model, selected), evaluating(model), described_to_transformers(model):
        _Run(packer, report, fitting).run()
        replace_layers(model, rounded)
        if kept is None:
            nn.use_huge_pages(model)
    return result


def check_method(method: Any) -> None:
    """Raises ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(map(repr, METHODS))}")


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Puts the model in eval mode, without gradients, and without a KV cache, which would grow from run to run."""
    # Image-text models have a separate config for text.
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    settings, training = [vars(config).copy() for config in configs], model.training
    try:
        for config in configs:
            config.use_cache = False
        model.eval()
        with torch.no_grad(), slow_paths():
            yield
    finally:
        for config, before in zip(configs, settings, strict=True):
            if "use_cache" in before:
                config.use_cache = before["use_cache"]
            else:  # the attribute did not exist, so it must not appear in config.json
                del config.use_cache
        model.train(training)


@dataclass
class _Order:
    """The order in which a method quantizes the selected modules."""

    shared: list[list[str]]  # names of modules that share a weight
    early: list[str]  # linear layers that are calibrated on the float model, before all blocks
    in_blocks: Mapping[str, MatrixConfig]  # linear layers that are calibrated block by block
    tables: dict[str, MatrixConfig]  # embeddings whose weight is not shared
    lists: list[str]  # lists of blocks to quantize
    matrices: int  # number of linear layers whose weight is not shared

    @classmethod
    def of(cls, model: torch.nn.Module, selected: Mapping[str, MatrixConfig], experts: Iterable[str], method: str) -> _Order:
        weights = names_by_weight({name: model.get_submodule(name) for name in selected}).values()
        shared = [names for names in weights if len(names) > 1]
        # Shared weights come first, so that later layers can correct their errors.
        sharing = {name for names in shared for name in names}
        linears = {name: config for name, config in selected.items() if isinstance(config, LinearConfig)}
        early = [name for name in linears if method == "importance" or name in sharing]
        in_blocks = {name: config for name, config in linears.items() if name not in early}
        tables = {name: config for name, config in selected.items() if name not in linears and name not in sharing}
        lists = lists_of_blocks(model, [*in_blocks, *experts])
        return cls(shared, early, in_blocks, tables, lists, sum(bool(linears.keys() & set(names)) for names in weights))


class _Progress:
    """Counts finished matrices and reports them."""

    def __init__(self, callback: Callable[[int, int, str], None] | None):
        self._callback, self.done, self.total = callback, 0, 0

    def add(self, matrices: int, name: str) -> None:
        self.done += matrices
        if matrices:
            _LOG.info("%d of %d layers calibrated: %s", self.done, self.total, name)
        if self._callback is not None:
            self._callback(self.done, self.total, name)

    def step(self, step: int, steps: int) -> None:
        """Reports a step of distillation, which accounts for the rest of the total."""
        if self._callback is not None:
            self._callback(self.done + (self.total - self.done) * step // steps, self.total, f"step {step} of {steps}")


class _Run:
    """One calibration of a model."""

    def __init__(self, packer: Packer, progress: _Progress, fitting: dict[str, Any]):
        """
        Args:
            packer: with the model, the configs and the sample.
            fitting: ``steps`` and ``rate`` of :func:`tuned` and :func:`distilled`, if given.
        """
        self.packer, self.progress, self.fitting = packer, progress, fitting
        self.model: Any = packer.model
        self.method, self.sample, self.kept = packer.method, packer.sample, packer.kept
        self.configs = {**packer.selected, **packer.experts}
        self.plan = _Order.of(self.model, packer.selected, packer.experts, packer.method)
        self.tables = {name for name, config in self.configs.items() if config.levels == FIT}

    def run(self) -> None:
        model, plan, packer, sample = self.model, self.plan, self.packer, self.sample
        kept = self.kept.packed
        distilled_before = {name: packed for name, (method, packed) in kept.items() if method.startswith("distilled")}
        # With a single batch nothing could be held out to evaluate what is learned.
        learns = len(sample.batches) > 1
        distils = self.method == "distilled" and learns and not distilled_before
        # Distillation takes about as long as the rest.
        self.progress.total = (plan.matrices + packer.expert_matrices()) * (2 if distils else 1)
        self.progress.add(0, "the float model's run over the text")
        teacher = Teacher(model, sample.batches) if distils else None  # runs the float model before it is changed
        # At 1 bit GPTQ makes tables worse.
        by_gptq = {name for name, config in plan.tables.items() if config.bits > 1 and name not in kept}
        table_moments = moments_of_tables(model, sample.batches, () if self.method == "importance" else by_gptq)
        originals, moments = self._first_pass([name for name in plan.early if name not in kept])
        for names in plan.shared:
            packer.pack_shared(names, moments)
        packer.pack_tables(plan.tables, table_moments)
        if self.method == "importance":
            sharing = {name for names in plan.shared for name in names}
            for name in plan.early:
                if name not in sharing:
                    packer.pack_layers(model, [name], self.configs, moments.pop(name, None))
        tuner = None
        if self.method == "tuned" and learns:
            tuner = Tuner(packer, sample, self.tables, self.fitting)
        for name in plan.lists:
            if name in originals:
                quantize_blocks(model, name, originals.pop(name), plan.in_blocks, packer, sample, tuner)
        quantize_rest(model, plan.in_blocks, packer, sample)
        packer.pack_experts(model, "", partial(sample.run, model))
        if teacher is not None:
            self._distil(teacher)
        put_weights(model, {name: packed for name, packed in distilled_before.items() if self._is_embedding(name)})
        packer.result.unquantized = unquantized(model)

    def _is_embedding(self, name: str) -> bool:
        return isinstance(self.configs[name], EmbeddingConfig)

    def _first_pass(self, early: list[str]) -> tuple[dict[str, list[Recorded]], dict[str, Moments]]:
        """Runs the float model once over the text.

        Returns:
            For each list of blocks, how its blocks are called in each batch; and the moments of the inputs of ``early``.
        """
        model, lists = self.model, self.plan.lists
        blocks = {name: list(model.get_submodule(name)) for name in lists}
        recordings: dict[str, list[Recorded]] = {name: [] for name in lists}
        moments: dict[str, Moments] = {}
        layers = {name: model.get_submodule(name) for name in early}
        for i, mask in enumerate(self.sample.masks if lists or layers else ()):
            missing = set(layers)
            running: dict[str, Recorded] = {}

            def take(
                name: str,
                x: Tensor,
                mask: Tensor | None = mask,
                missing: set[str] = missing,
                running: dict[str, Recorded] = running,
            ) -> None:
                diagonal = self.method == "importance"
                rows = rows_of(x, mask)
                add_to(moments, name, self.configs[name].rotated(rows) if diagonal else rows, None, diagonal=diagonal)
                missing.discard(name)
                # Stop before the head: the logits of all tokens are not needed and would take more memory than all else.
                if not missing and all(len(one.calls) == len(blocks[key]) for key, one in running.items()):
                    raise StopRun

            with ExitStack() as stack:
                stack.enter_context(inputs_of(layers, take))
                for name in lists:
                    alone = lists == [name] and not layers  # nothing else is needed from the run
                    known = recordings.get(name, [])
                    skips = alone and len(known) > 0 and known[0].skippable
                    running[name] = stack.enter_context(blocks_of(blocks[name], stop_after=alone, skips=skips))
                with suppress(StopRun):
                    self.sample.run(model, i)
            for name in list(recordings):
                recordings[name].append(running[name])
                # If something runs between blocks, they are quantized by runs of the whole model.
                if not running[name].chained:
                    del recordings[name]
                elif i == 0:
                    running[name].skippable = self._skippable(name, running[name])
        return recordings, moments

    def _skippable(self, name: str, recorded: Recorded) -> bool:
        """Whether the arguments of the float blocks in the first batch are those of a run in which no block computes.

        What blocks keep in their modules is not compared.
        """
        if not recorded.plain:
            return False
        # The rest of the model may fail with such hidden states, for example if blocks change their shape.
        with blocks_of(list(self.model.get_submodule(name)), stop_after=True, skips=True) as skipped, suppress(Exception):
            self.sample.run(self.model, 0)
        return skipped.chained and skipped.same_arguments(recorded)

    def _large_heads(self) -> set[str]:
        """The names of a head with more rows than the text has tokens, and of its table.

        Its scales would be fitted to few tokens each, for half of the time and memory, and gain nothing
        (docs/measurements/quality.md, Learned scales).
        """
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        if not isinstance(head, nn.Linear) or head.info.out_features <= self.sample.tokens:
            return set()
        return {
            name
            for name in self.configs
            if getattr(self.model.get_submodule(name), "packed_weight", None) is head.packed_weight
        }

    def _distil(self, teacher: Teacher) -> None:
        """Fits the scales of all layers to the float model's answers, and stores all layers at once."""
        learned, step = self.configs.keys() - self._large_heads(), self.progress.step
        weights: dict[str, Tensor] = {}
        if learned:
            held_out = self.sample.held_out
            weights = distilled(self.model, teacher, learned, held_out, self.tables, progress=step, **self.fitting)
        self.progress.add(self.progress.total - self.progress.done, "scales of all layers")
        by_weight: dict[int, list[str]] = {}
        for name, packed in weights.items():
            by_weight.setdefault(packed.data_ptr(), []).append(name)
        layers = []
        for names in by_weight.values():
            packed = weights[names[0]]
            layers.append((names, ",".join(["distilled"] * (len(packed) if packed.dim() == 2 else 1)), packed))
        for (names, method, _), packed in zip(layers, self.kept.keep(layers) if layers else (), strict=True):
            put_weights(self.model, dict.fromkeys(names, packed))
            for name in names:
                if not self._is_embedding(name):
                    self.packer.result.methods |= by_name(name, method, packed)
