"""Quantizes linear layers in the order in which a model calls them, with inputs from the layers quantized before."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .capture import BlockCall, Recorded, StopRun, blocks_of
from .collect import add_to, calls_in_a_run, inputs_in_a_run, rows_of, sets_of
from .data import Sample
from .gptq_solver import Moments
from .grid import MatrixConfig
from .learning import put_weights
from .packing import Packer, by_name
from .tuning import tuned

# Limit for keeping the inputs of a float module's layers, so that it runs once rather than once per set of layers. In a model
# with half a billion weights 8192 tokens take 250 MB.
_KEPT_BYTES = 1 << 29


@dataclass(frozen=True)
class Runnable:
    """A module, and how batch i of the sample runs through it."""

    module: torch.nn.Module
    run: Callable[[int], Any]
    _kept: list[dict[str, list[Tensor]]] = field(default_factory=list)  # for each batch: layer -> inputs, until they are used

    def can_keep(self, names: Iterable[str], sample: Sample) -> bool:
        """Whether the inputs of layers over the sample take little enough memory, even if no layers share them."""
        features: int = sum(self.module.get_submodule(name).in_features for name in names)
        return features * sample.tokens * 4 <= _KEPT_BYTES

    def keep_inputs(self, names: list[str], sample: Sample, calls: list[tuple[str, Tensor]] | None) -> None:
        """Runs over the sample and keeps the inputs of layers for :meth:`inputs`, unless they take too much memory.

        Args:
            calls: the calls of the layers in the first batch, from :func:`calls_in_a_run`, if they are known.
        """
        if not names or not self.can_keep(names, sample):
            return
        for i in range(len(sample.batches)):
            if i or calls is None:
                calls = calls_in_a_run(self.module, names, partial(self.run, i), whole=True)
            inputs: dict[str, list[Tensor]] = {}
            for name, x in calls:
                if name in names:
                    inputs.setdefault(name, []).append(x)
            self._kept.append(inputs)

    def inputs(self, i: int, names: list[str]) -> dict[str, list[Tensor]]:
        """The inputs of layers in batch i."""
        if not self._kept:
            return inputs_in_a_run(self.module, names, partial(self.run, i))
        return {name: self._kept[i].pop(name) for name in names if name in self._kept[i]}


@dataclass(frozen=True)
class Tuner:
    """Fits the scales of a block's new layers to the outputs of the float block."""

    packer: Packer
    sample: Sample
    tables: Collection[str]  # layers whose tables of levels may move
    options: Mapping[str, Any]  # steps and rate of :func:`tuned`

    def tune(
        self, block: torch.nn.Module, prefix: str, run: Callable[[torch.nn.Module, int], Tensor], outputs: list[Tensor]
    ) -> None:
        """Tunes the layers waiting in the packer, and stores them.

        Args:
            run: computes the outputs of a copy of the block for batch i.
            outputs: the outputs of the float block for each batch.
        """
        waiting, sample = self.packer.waiting, self.sample
        names = [name.removeprefix(prefix) for (name,), _, _ in waiting]
        tables = {name.removeprefix(prefix) for name in self.tables}
        better = tuned(block, names, run, outputs, sample.masks, sample.held_out, tables=tables, **self.options)
        layers = []
        for name, ((full_name,), method, packed) in zip(names, waiting, strict=True):
            weight = better.get(name, packed)
            changed = (weight != packed).view(-1, packed.shape[-1]).any(1).tolist()  # of a layer, or of each expert
            method = ",".join("tuned" if new else old for old, new in zip(method.split(","), changed, strict=True))
            self.packer.result.methods |= by_name(full_name, method, packed)
            layers.append(([full_name], method, weight))
        waiting.clear()
        put_weights(block, dict(zip(names, self.packer.kept.keep(layers), strict=True)))


def quantize_blocks(
    model: torch.nn.Module,
    name: str,
    originals: list[Recorded],
    targets: Mapping[str, MatrixConfig],
    packer: Packer,
    sample: Sample,
    tuner: Tuner | None,
) -> None:
    """Quantizes the blocks of a list one by one, each with inputs from the quantized blocks before it.

    Args:
        name: the name of the list in the model.
        originals: for each batch, how the float model calls the blocks.
        targets: configs of linear layers, by their names in the model.
        tuner: learns the scales of each block; None: they are not learned.
    """
    blocks = list(model.get_submodule(name))
    recordings = []
    for i in range(len(sample.batches)):
        with blocks_of(blocks, stop_after=True, skips=originals[0].skippable) as recorded, suppress(StopRun):
            sample.run(model, i)
        recordings.append(recorded)
    hidden, float_hidden = [one.first for one in recordings], [one.first for one in originals]
    for one in (*recordings, *originals):
        one.first = None  # owned by the lists above, which free them
    for index, block in enumerate(blocks):
        prefix, is_last = f"{name}.{index}.", index + 1 == len(blocks)
        calls, float_calls = ([one.calls[index] for one in batches] for batches in (recordings, originals))
        quantized = Runnable(block, partial(_run, calls, hidden, block))
        outputs: dict[int, Tensor] = {}
        original = Runnable(twin := copy.deepcopy(block), partial(_run, float_calls, float_hidden, twin, outputs=outputs))
        in_block = {key.removeprefix(prefix): config for key, config in targets.items() if key.startswith(prefix)}
        quantize_segment(quantized, original, prefix, in_block, packer, sample, tune=tuner is not None)
        packer.pack_experts(block, prefix, quantized.run, tune=tuner is not None)
        if not is_last or packer.waiting:
            for i in range(len(originals)):
                float_hidden[i] = outputs.pop(i) if i in outputs else original.run(i)
        if tuner is not None and packer.waiting:
            tuner.tune(block, prefix, partial(_run, calls, hidden), float_hidden)
        if not is_last:
            for i in range(len(recordings)):
                hidden[i] = quantized.run(i)


def _run(
    calls: list[BlockCall], hidden: list[Tensor], block: torch.nn.Module, i: int, outputs: dict[int, Tensor] | None = None
) -> Tensor:
    """A block's output for batch i, which is also stored in ``outputs``."""
    output = calls[i].run(block, hidden[i])
    if outputs is not None:
        outputs[i] = output
    return output


def quantize_rest(model: torch.nn.Module, targets: Mapping[str, MatrixConfig], packer: Packer, sample: Sample) -> None:
    """Quantizes the remaining linear layers by runs of the whole model."""
    rest = {name: config for name, config in targets.items() if name not in packer.result.methods}
    if not rest:
        return
    original = None
    # Once blocks are quantized, a float copy would need the whole float model in memory.
    if len(rest) == len(targets):
        original = Runnable(twin := copy.deepcopy(model), partial(sample.run, twin))
    quantize_segment(Runnable(model, partial(sample.run, model)), original, "", rest, packer, sample)


def quantize_segment(
    quantized: Runnable,
    original: Runnable | None,
    prefix: str,
    targets: Mapping[str, MatrixConfig],
    packer: Packer,
    sample: Sample,
    tune: bool = False,
) -> None:
    """Quantizes linear layers of a module in the order of its calls; those that share an input at the same time.

    Args:
        original: the float copy of the module; None: not available.
        prefix: the prefix of the module's names in the model.
        targets: configs by name in the module.
        tune: leave the packed layers waiting for :class:`Tuner`.
    """
    kept = packer.kept.packed
    if all(prefix + name in kept for name in targets):
        for name in targets:
            packer.pack_layers(quantized.module, [name], targets, None, prefix)
        return
    whole = original is not None and original.can_keep(targets, sample)
    first = original if original is not None and whole else quantized
    calls = calls_in_a_run(first.module, targets, partial(first.run, 0), whole)
    sets = sets_of(calls, targets)
    missing = [sorted({leader for name, leader in leaders.items() if prefix + name not in kept}) for leaders in sets]
    if original is not None:
        original.keep_inputs([name for names in missing for name in names], sample, calls if whole else None)
    calls.clear()
    for leaders, unknown in zip(sets, missing, strict=True):
        followers = Counter(leaders.values())
        weights = {name: quantized.module.get_submodule(name).weight.detach() for name in unknown if followers[name] == 1}
        moments = _moments(quantized, original, unknown, weights, sample, holds_out="correction" not in packer.options)
        for leader in dict.fromkeys(leaders.values()):
            names = [name for name in leaders if leaders[name] == leader]
            packer.pack_layers(quantized.module, names, targets, moments.pop(leader, None), prefix, tune)


def _moments(
    quantized: Runnable,
    original: Runnable | None,
    names: list[str],
    weights: Mapping[str, Tensor],
    sample: Sample,
    holds_out: bool,
) -> dict[str, Moments]:
    """Moments of the inputs of layers over the sample.

    Args:
        weights: the weights of layers that share their inputs with no other.
        holds_out: store some tokens' inputs separately.
    """
    moments: dict[str, Moments] = {}
    for i, mask in enumerate(sample.masks if names else ()):
        tokens = sample.batches[i]["input_ids"].numel()
        part = sample.part_held_out(i) if holds_out and original is not None else 0.0
        float_inputs = {} if original is None else original.inputs(i, names)
        for name, inputs in quantized.inputs(i, names).items():
            partners = float_inputs.get(name, [])
            # An expert may receive other tokens than in the float model.
            paired = len(inputs) == len(partners) and all(
                x.shape == y.shape and x.numel() // x.shape[-1] == tokens for x, y in zip(inputs, partners, strict=True)
            )
            for j, x in enumerate(inputs):
                y = rows_of(partners[j], mask) if paired else None
                add_to(moments, name, rows_of(x, mask), y, diagonal=False, held=part, weight=weights.get(name))
    return moments
