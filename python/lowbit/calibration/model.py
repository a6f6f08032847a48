"""Block by block through a model of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..layers import experts_of, leave_fused_paths, named_layers, put_packed, with_linears
from ..levels import FIT
from ..quantize import EmbeddingConfig, LinearConfig
from ..quantize_model import described_to_transformers, quantize_
from .bands import packed_in_bands
from .capture import Call, Stop, blocks_of, inputs_of, slow_paths
from .choice import Quantiser, choose
from .collect import HELD, HELD_PART, add_to, inputs_in_a_run, part_held, rows_of, sets_of
from .data import Batch, batches, tokens_of
from .distilling import Teacher, distilled
from .experts import holders_in, inputs_of_expert, routed, weight_of
from .gptq import Moments, Solver
from .grid import Config, with_table
from .learning import put_weights
from .result import METHODS, Calibration
from .selection import check_experts, check_weights, left_float, lists_of_blocks, select
from .tables import DAMPING, moments_of_tables
from .tuning import tuned


@dataclass
class Kept:
    """Layers that are packed already, and where those go that are packed now: what a run that resumes needs."""

    packed: Mapping[str, tuple[str, Tensor]]  # by layer: the method (of experts with commas), and the packed weight
    # Takes layers at once: those of one weight, their method, the packed weight; returns the weights to compute with.
    keep: Callable[[list[tuple[list[str], str, Tensor]]], list[Tensor]]


def run(
    model,
    data: Iterable[Any],
    config: Any,
    method: str,
    *,
    tokenizer: Any,
    window: int,
    max_tokens: int,
    progress: Callable[[int, int], None] | None,
    options: Mapping[str, Any] | None = None,
    kept: Kept | None = None,
) -> Calibration:
    """:func:`lowbit.calibrate`; ``options`` are keyword arguments of :func:`gptq`, and steps and rate of :func:`tuned` and
    :func:`distilled`, for measurements."""
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
    use_cache, training = getattr(model.config, "use_cache", None), model.training
    try:
        model.config.use_cache = False
        model.eval()
        with torch.no_grad(), slow_paths():
            yield
    finally:
        model.config.use_cache = use_cache
        model.train(training)


def _run(calls: list[Call], block: torch.nn.Module, hidden: list[Tensor], i: int) -> Tensor:
    """A block's outputs of batch i."""
    return calls[i].run(block, hidden[i])


def _by_name(name: str, method: str, packed: Tensor) -> dict[str, str]:
    """The method of a layer, or that of each expert; of experts the methods have commas between them."""
    if packed.dim() == 1:
        return {name: method}
    return {f"{name}.{number}": own for number, own in enumerate(method.split(","))}


# ---- the run


class _Run:
    def __init__(
        self, model, selected, experts, method, inputs: list[Batch], there: int, progress, options, kept: Kept | None
    ):
        self.model, self.method, self.inputs, self.options = model, method, inputs, options
        self.masks = [
            None if batch.get("attention_mask") is None else (batch["attention_mask"] != 0) for batch in inputs
        ]
        self.result = Calibration(sum(map(tokens_of, inputs)), there)
        self.embeddings = {name: c for name, c in selected.items() if isinstance(c, EmbeddingConfig)}
        self.targets = {name: c for name, c in selected.items() if isinstance(c, LinearConfig)}
        self.selected = selected
        self.experts = experts
        self.done, self.progress = 0, progress
        self.kept = kept or Kept({}, lambda layers: [packed for _, _, packed in layers])
        self.in_memory = kept is None
        # Layers of a block that wait for its scales to be tuned; kept with these, all at once.
        self.pending: list[tuple[list[str], str, Tensor]] = []
        # Whole batches: tokens behind others of the same text would know too much of them.
        step = max(HELD_PART, -(-self.result.tokens // HELD))
        last = len(inputs) - 1
        self.held = {i for i in range(len(inputs)) if i % step == step - 1} or {last}
        self.tuning = {name: self.options.pop(name) for name in ("steps", "rate") if name in self.options}
        # With a single batch nothing would be left to learn from.
        self.tunes = method == "tuned" and last > 0
        self.distils = method == "distilled" and last > 0
        self.tables = {name for name, config in (selected | experts).items() if config.levels == FIT}

    def run(self) -> Calibration:
        model = self.model
        by_weight: dict[int, list[str]] = {}
        for name in self.selected:
            by_weight.setdefault(id(model.get_submodule(name).weight), []).append(name)
        shared = [names for names in by_weight.values() if len(names) > 1]
        first = {names[0] for names in by_weight.values() if set(names) & self.targets.keys()}
        known = {
            name: packed for name, (method, packed) in self.kept.packed.items() if method.startswith("distilled")
        }
        # Distilling takes as long as all before it, or so.
        self.total = (len(first) + self._expert_matrices()) * (2 if self.distils and not known else 1)
        self._report()
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
            self._quantise_shared(names, moments)
        self._quantise_tables(tables, of_tables)
        if self.method == "importance":
            for name in alone:
                self._quantise(model, [name], alone, moments.pop(name, None))
        for name in lists:
            if name in floats:
                self._list(name, floats.pop(name), {} if self.method == "importance" else alone)
        if self.method != "importance":
            self._whole(alone)
        self._experts(model, "", partial(self._whole_run, model))
        if teacher is not None:
            self._distil(teacher)
        put_weights(model, {name: packed for name, packed in known.items() if name in self.embeddings})
        self.result.left = left_float(model)
        if self.in_memory:
            nn.use_huge_pages(model)
        return self.result

    def _report(self, more: int = 0) -> None:
        self.done += more
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _call(self, batch: Batch) -> None:
        try:
            self.model(**batch)
        except Stop:
            pass

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
                self._call(batch)
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
                self._call(batch)
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
            self._segment(
                block,
                twin,
                prefix,
                targets,
                run_now,
                partial(_run, before, twin, theirs),
                tune=self.tunes,
            )
            self._experts(block, prefix, run_now, tune=self.tunes)
            if index + 1 < len(blocks) or self.pending:
                for i in range(len(self.inputs)):
                    theirs[i] = before[i].run(twin, theirs[i])
            if self.pending:
                self._tune(block, prefix, lambda module, i, now=now: now[i].run(module, ours[i]), theirs)
            if index + 1 < len(blocks):
                for i in range(len(self.inputs)):
                    ours[i] = now[i].run(block, ours[i])

    def _tune(self, block, prefix: str, run, wanted: list[Tensor]) -> None:
        """Fits the scales of a block's new layers to the outputs of the float block, and keeps the layers."""
        names = [name.removeprefix(prefix) for (name,), _, _ in self.pending]
        tables = {name.removeprefix(prefix) for name in self.tables}
        better = tuned(block, names, run, wanted, self.masks, self.held, tables=tables, **self.tuning)
        layers = []
        for name, ((full,), method, packed) in zip(names, self.pending, strict=True):
            found = better.get(name, packed)
            changed = (found != packed).view(-1, packed.shape[-1]).any(1).tolist()  # of one layer, or of each expert
            method = ",".join("tuned" if new else own for own, new in zip(method.split(","), changed, strict=True))
            self.result.methods |= _by_name(full, method, packed)
            layers.append(([full], method, found))
        self.pending = []
        put_weights(block, dict(zip(names, self.kept.keep(layers), strict=True)))

    def _distil(self, teacher: Teacher) -> None:
        """Fits the scales of all layers to the float model's answers, and keeps the layers, all at once."""

        def report(step: int, steps: int) -> None:
            if self.progress is not None:
                self.progress(self.done + (self.total - self.done) * step // steps, self.total)

        names = {*self.selected, *self.experts}
        found = distilled(self.model, teacher, names, self.held, self.tables, progress=report, **self.tuning)
        self._report(self.total - self.done)
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
                    self.result.methods |= _by_name(name, method, packed)

    def _whole(self, alone: Mapping[str, Config]) -> None:
        """All layers that are not quantised yet, with runs of the whole model."""
        rest = {name: config for name, config in alone.items() if name not in self.result.methods}
        if not rest:
            return
        quantised = any(name in self.result.methods for name in alone)
        # What comes behind quantised blocks has no float twin: the model would have to be there twice.
        twin = None if quantised else copy.deepcopy(self.model)
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

    def _segment(
        self, module, twin, prefix: str, targets: Mapping[str, Config], ours, theirs, tune: bool = False
    ) -> None:
        """Quantises layers of a module in the order of its calls, those that share an input at a time."""
        known = self.kept.packed
        if all(prefix + name in known for name in targets):
            for name in targets:
                self._quantise(module, [name], targets, None, prefix)
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
                self._quantise(module, names, targets, moments.pop(leader, None), prefix, tune)

    # -- experts

    def _expert_matrices(self) -> int:
        return sum(layer.num_experts for name, layer in named_layers(self.model) if name in self.experts)

    def _experts(self, module, prefix: str, call: Callable[[int], Any], tune: bool = False) -> None:
        """Packs the float experts in a module, one by one: the inputs of each are the tokens that are routed to it."""
        for at, leaves in list(holders_in(module, self.experts, prefix)):
            holder = module.get_submodule(at)
            names = {leaf: f"{at}.{leaf}" if at else leaf for leaf in leaves}
            known = [self.kept.packed.get(prefix + name) for name in names.values()]
            rows = chosen = before = None
            if None in known:
                runs = ((partial(call, i), mask) for i, mask in enumerate(self.masks))
                rows, chosen = routed(holder, runs)
            done = []
            for (leaf, experts), kept in zip(experts_of(holder).items(), known, strict=True):
                name = prefix + names[leaf]
                if kept is None:
                    method, packed = self._of_experts(name, holder, experts, rows, chosen, before)
                    if tune:
                        self.pending.append(([name], method, packed))
                    else:
                        packed = self.kept.keep([([name], method, packed)])[0]
                else:
                    method, packed = kept
                    self._report(experts.num_experts)
                self.result.methods |= _by_name(name, method, packed)
                done.append((names[leaf], experts, packed))
                before = packed
            for name, experts, packed in done:
                put_packed(module, name, experts, packed, experts.weight.dtype)

    def _of_experts(self, name: str, holder, experts, rows: Tensor, chosen: Tensor, before: Tensor | None):
        """The methods of the experts' matrices, with commas between, and their packed weights [experts, bytes]."""
        methods, result = [], []
        for number in range(experts.num_experts):
            x = inputs_of_expert(holder, number, rows, chosen, before)
            moments: dict[str, Moments] = {}
            if len(x):
                add_to(moments, name, x, None, diagonal=self.method == "importance")
            weight, bias = weight_of(experts, number)
            key = f"{name}.{number}"
            method, quantisers = self._quantisers("", {key: weight}, {key: self.experts[name]}, moments.get(name))
            methods.append(method)
            result.append(packed_in_bands(weight, *quantisers[key], bias))
            self._report(1)
        return ",".join(methods), torch.stack(result)

    # -- layers

    def _quantise(
        self,
        root,
        names: list[str],
        configs: Mapping[str, Config],
        moments: Moments | None,
        prefix: str = "",
        tune: bool = False,
    ) -> None:
        """Packs layers that have the same inputs, but not the same weight."""
        todo = [name for name in names if prefix + name not in self.kept.packed]
        weights = {name: root.get_submodule(name).weight.detach() for name in todo}
        method, quantisers = self._quantisers(prefix, weights, configs, moments)
        for name in names:
            layer, full = root.get_submodule(name), prefix + name
            if name in quantisers:
                packed = packed_in_bands(weights.pop(name), *quantisers.pop(name), layer.bias)
                if tune:
                    self.pending.append(([full], method, packed))
                else:
                    packed = self.kept.keep([([full], method, packed)])[0]
                self.result.methods[full] = method
            else:
                self.result.methods[full], packed = self.kept.packed[full]
            self._place(root, name, packed)
            self._report(1)
        leave_fused_paths(root)

    @staticmethod
    def _place(root, name: str, packed: Tensor) -> None:
        layer = root.get_submodule(name)
        root.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))

    def _quantisers(
        self, prefix: str, weights: Mapping[str, Tensor], configs: Mapping[str, Config], moments: Moments | None
    ) -> tuple[str, dict[str, Quantiser]]:
        def first_not_finite() -> str:
            return self._first_not_finite() or prefix + next(iter(weights))

        return choose(weights, configs, moments, self.method, self.options, first_not_finite)

    def _first_not_finite(self) -> str | None:
        """The first layer of a run of the model whose inputs are not finite: those behind it only inherit that."""
        for batch in self.inputs:
            found: list[str] = []

            def take(name: str, x: Tensor, found=found) -> None:
                if not bool(torch.isfinite(x).all()):
                    found.append(name)
                    raise Stop

            with inputs_of({name: self.model.get_submodule(name) for name in self.targets}, take):
                self._call(batch)
            if found:
                return found[0]
        return None

    def _quantise_tables(self, tables: Mapping[str, Config], moments: dict[str, Moments]) -> None:
        """Packs tables of embeddings that no head shares: by GPTQ, or rounded to nearest those without moments."""
        nearest = {}
        for name, config in tables.items():
            layer = self.model.get_submodule(name)
            if name in self.kept.packed:
                packed = self.kept.packed[name][1]
            elif name in moments:
                solver, weight = Solver(moments.pop(name), DAMPING), layer.weight.detach()
                own = with_table(config, weight, solver.importance)
                packed = packed_in_bands(weight, own, partial(solver.quantise, config=own, correction=0.0), None)
                packed = self.kept.keep([([name], "gptq", packed)])[0]
            else:
                nearest[name] = config
                continue
            self.model.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
        if nearest:
            quantize_(self.model, nearest)

    def _quantise_shared(self, names: list[str], moments: dict[str, Moments]) -> None:
        layers = {name: self.model.get_submodule(name) for name in names}
        linears = [name for name in names if name in self.targets]
        biases = {id(layers[name].bias): layers[name].bias for name in linears}
        if not linears or len(biases) > 1:
            quantize_(self.model, {name: self.selected[name] for name in names})
            for name in linears:
                self.result.methods[name] = "nearest"
            self._report(bool(linears))
            return
        if linears[0] in self.kept.packed:
            method, packed = self.kept.packed[linears[0]]
        else:
            together = [moments.pop(name) for name in linears if name in moments]
            total = None
            if together:
                total = Moments(sum(m.square for m in together), None, sum(m.tokens for m in together))
            weight = layers[names[0]].weight.detach()
            method, quantisers = self._quantisers("", {linears[0]: weight}, self.selected, total)
            packed = packed_in_bands(weight, *quantisers[linears[0]], next(iter(biases.values())))
            packed = self.kept.keep([(names, method, packed)])[0]
        for name in names:
            layer = layers[name]
            if isinstance(layer, torch.nn.Linear):
                self.result.methods[name] = method
            self.model.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
        leave_fused_paths(self.model)
        self._report(1)
