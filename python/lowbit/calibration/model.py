"""Block by block through a model of transformers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..layers import KINDS
from ..quantize import EmbeddingConfig, LinearConfig
from ..quantize_model import described_to_transformers, quantize_, select_layers
from .capture import Call, Stop, blocks_of, inputs_of
from .data import Batch, batches, tokens_of
from .gptq import Moments, gptq
from .grid import Config, Quantised
from .importance import search
from .result import METHODS, Calibration

SWEEPS = 0  # of coordinate descent behind GPTQ; docs/quality.md has what they do on text of another kind
CORRECTION = 0.25  # of GPTAQ's term, as in the paper; more follows a short text too closely


def run(
    model,
    data: Iterable[Any],
    config: Any,
    method: str,
    *,
    tokenizer: Any,
    window: int,
    progress: Callable[[int, int], None] | None,
    options: Mapping[str, Any] | None = None,
) -> Calibration:
    """:func:`lowbit.calibrate`; ``options`` are keyword arguments of :func:`gptq`, for measurements."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(map(repr, METHODS))}")
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model is a {type(model).__name__}; expected a model of transformers")
    selected = _select(model, config)
    _check_weights(model, selected)
    inputs = batches(model, data, tokenizer, window)
    use_cache, training = getattr(model.config, "use_cache", None), model.training
    try:
        model.config.use_cache = False  # a cache would grow from run to run
        with torch.no_grad(), described_to_transformers(model):
            return _Run(model.eval(), selected, method, inputs, progress, dict(options or {})).run()
    finally:
        model.config.use_cache = use_cache
        model.train(training)


# ---- what to quantise


def _select(model: torch.nn.Module, config: Any) -> dict[str, Config]:
    """Layers by their names, each with its config: as :func:`lowbit.quantize_`, or what a LowBitConfig selects."""
    selected = config.select(model) if hasattr(config, "select") else select_layers(model, config, None)
    if not any(isinstance(value, LinearConfig) for value in selected.values()):
        raise ValueError("config selects no torch.nn.Linear of this model; only those can be calibrated")
    return selected


def _check_weights(model: torch.nn.Module, selected: Mapping[str, Config]) -> None:
    configs: dict[int, tuple[str, Config]] = {}
    for name, config in selected.items():
        weight = model.get_submodule(name).weight
        if weight.device.type != "cpu":
            raise ValueError(f"{name}.weight is on {weight.device}; expected the CPU")
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"{name}.weight has dtype {weight.dtype}; expected torch.float32, torch.bfloat16 or torch.float16"
            )
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{name}.weight has NaN or infinite values; expected finite values")
        first, other = configs.setdefault(id(weight), (name, config))
        if vars(other) != vars(config):
            raise ValueError(
                f"{first} and {name} share one weight but have different configs, {other} and {config}; give both the "
                "same, or None to one of them"
            )


def _left(model: torch.nn.Module) -> dict[str, str]:
    """Modules whose weights multiply activations, but which cannot be packed."""
    left = {}
    for name, module in model.named_modules():
        if type(module) in KINDS or isinstance(module, nn.Linear | nn.Embedding):
            continue
        kind = type(module).__name__
        if kind == "Conv1D":
            left[name] = "a Conv1D of transformers, no torch.nn.Linear"
        elif isinstance(module, torch.nn.Linear):
            left[name] = f"a {kind}, which may use its weight in its own way"
        elif any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            left[name] = f"{kind}: weights of several experts in one tensor"
    return left


def _lists_of_blocks(model: torch.nn.Module, targets: Iterable[str]) -> list[str]:
    """The names of the outermost lists of at least two modules that all hold layers to calibrate."""
    targets = list(targets)
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) < 2:
            continue
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if all(any(target.startswith(f"{name}.{i}.") for target in targets) for i in range(len(module))):
            found.append(name)
    return found


# ---- the run


class _Run:
    def __init__(self, model, selected, method, inputs: list[Batch], progress, options):
        self.model, self.method, self.inputs, self.options = model, method, inputs, options
        self.masks = [
            None if batch.get("attention_mask") is None else (batch["attention_mask"] != 0) for batch in inputs
        ]
        self.result = Calibration(sum(map(tokens_of, inputs)))
        self.embeddings = {name: c for name, c in selected.items() if isinstance(c, EmbeddingConfig)}
        self.targets = {name: c for name, c in selected.items() if isinstance(c, LinearConfig)}
        self.selected = selected
        self.done, self.progress = 0, progress

    def run(self) -> Calibration:
        model = self.model
        by_weight: dict[int, list[str]] = {}
        for name in self.selected:
            by_weight.setdefault(id(model.get_submodule(name).weight), []).append(name)
        shared = [names for names in by_weight.values() if len(names) > 1]
        first = {names[0] for names in by_weight.values() if set(names) & self.targets.keys()}
        self.total = len(first)
        self._report()

        # Layers that share a weight are calibrated once, in the float model, and before all others: an error of the
        # table is then made up for by what follows.
        together = {name for names in shared for name in names}
        alone = {name: config for name, config in self.targets.items() if name not in together}
        early = {name: config for name, config in self.targets.items() if name in together}
        if self.method == "importance":
            early = self.targets
            lists: list[str] = []
        else:
            lists = _lists_of_blocks(model, alone)
        floats, moments = self._first_pass(lists, early)
        for names in shared:
            self._quantise_shared(names, moments)
        tables = {name: config for name, config in self.embeddings.items() if name not in together}
        if tables:
            quantize_(model, tables)
        if self.method == "importance":
            for name in alone:
                self._quantise(model, name, alone[name], moments.pop(name, None))
        else:
            for name in lists:
                if name in floats:
                    self._list(name, floats.pop(name), alone)
            self._whole(alone)
        self.result.left = _left(model)
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

    def _first_pass(self, lists: list[str], early: Mapping[str, Config]):
        """The float model once over the text: how its blocks are called, and the moments of some layers."""
        blocks = {name: list(self.model.get_submodule(name)) for name in lists}
        calls: dict[str, list] = {name: [] for name in lists}
        chained = dict.fromkeys(lists, True)
        moments: dict[str, Moments] = {}
        for batch, mask in zip(self.inputs, self.masks, strict=True):
            layers = {name: self.model.get_submodule(name) for name in early}

            def take(name: str, x: Tensor, mask=mask) -> None:
                _add(moments, name, _rows(x, mask), None, diagonal=self.method == "importance")

            with inputs_of(layers, take):
                recorders = {name: blocks_of(blocks[name]) for name in lists}
                recorded = {name: recorder.__enter__() for name, recorder in recorders.items()}
                try:
                    self._call(batch)
                finally:
                    for recorder in recorders.values():
                        recorder.__exit__(None, None, None)
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
            self._segment(
                block,
                twin,
                prefix,
                targets,
                lambda i, block=block, now=now: now[i].run(block, ours[i]),
                lambda i, twin=twin, before=before: before[i].run(twin, theirs[i]),
            )
            if index + 1 < len(blocks):
                for i in range(len(self.inputs)):
                    theirs[i] = before[i].run(twin, theirs[i])
                    ours[i] = now[i].run(block, ours[i])

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
            lambda i: self.model(**self.inputs[i]),
            None if twin is None else lambda i: twin(**self.inputs[i]),
        )

    def _segment(self, module, twin, prefix: str, targets: Mapping[str, Config], ours, theirs) -> None:
        """Quantises layers of a module in the order of its calls, those that share an input at a time."""
        for layers in _sets(module, targets, lambda: ours(0)):
            moments: dict[str, Moments] = {}
            leaders = sorted(set(layers.values()))
            for i, mask in enumerate(self.masks):
                float_inputs = _inputs(twin, leaders, lambda i=i: theirs(i)) if twin is not None else {}
                for name, values in _inputs(module, leaders, lambda i=i: ours(i)).items():
                    others = float_inputs.get(name, ())
                    # An expert may get other tokens than in the float model.
                    paired = len(values) == len(others) and all(
                        x.shape == y.shape and x.numel() // x.shape[-1] == self.inputs[i]["input_ids"].numel()
                        for x, y in zip(values, others, strict=True)
                    )
                    for j, x in enumerate(values):
                        y = _rows(others[j], mask) if paired else None
                        _add(moments, name, _rows(x, mask), y, diagonal=False)
            for name, leader in layers.items():
                self._quantise(module, name, targets[name], moments.get(leader), prefix)

    # -- one layer

    def _choose(self, name: str, weight: Tensor, config: Config, moments: Moments | None) -> tuple[str, Quantised]:
        if moments is None or moments.tokens == 0:
            return "nearest", search(weight, None, config)
        if not bool(torch.isfinite(moments.square).all()):
            raise ValueError(f"the inputs of {name} have NaN or infinite values on the calibration text")
        enough = moments.tokens >= weight.shape[1]
        if moments.square.dim() == 1 or (self.method == "auto" and not enough):
            return "importance", search(weight, moments.importance(), config)
        options = {"sweeps": SWEEPS, "correction": CORRECTION} | self.options
        return "gptq", gptq(weight, moments, config, **options)

    def _quantise(self, root, name: str, config: Config, moments: Moments | None, prefix: str = "") -> None:
        layer = root.get_submodule(name)
        full = prefix + name
        self.result.methods[full], quantised = self._choose(full, layer.weight.detach().float(), config, moments)
        root.set_submodule(name, nn.in_place_of(layer, quantised.pack(layer.bias), layer.weight.dtype))
        self._report(1)

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
        together = [moments.pop(name) for name in linears if name in moments]
        total = None
        if together:
            total = Moments(sum(m.square for m in together), None, sum(m.tokens for m in together))
        weight = layers[names[0]].weight
        method, quantised = self._choose(linears[0], weight.detach().float(), self.selected[names[0]], total)
        packed = quantised.pack(next(iter(biases.values())))
        for name in names:
            layer = layers[name]
            if isinstance(layer, torch.nn.Linear):
                self.result.methods[name] = method
            self.model.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
        self._report(1)


# ---- helpers


def _rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """[..., k] -> float32 [tokens, k], without padding."""
    if mask is not None and x.shape[:-1] == mask.shape:
        return x[mask].float()
    if mask is not None and x.dim() == 2 and x.shape[0] == mask.numel():
        return x[mask.flatten()].float()
    return x.reshape(-1, x.shape[-1]).float()


def _add(moments: dict[str, Moments], name: str, x: Tensor, y: Tensor | None, *, diagonal: bool) -> None:
    square = x.square().sum(0) if diagonal else x.T @ x
    drift = None if y is None else (y - x).T @ x
    known = moments.get(name)
    if known is None:
        moments[name] = Moments(square, drift, len(x))
        return
    known.square += square
    known.tokens += len(x)
    known.drift = known.drift + drift if known.drift is not None and drift is not None else None


def _inputs(module: torch.nn.Module, names: list[str], call: Callable[[], Any]) -> dict[str, list[Tensor]]:
    """What goes into some layers in one run, which ends when there is nothing more to come."""
    found: dict[str, list[Tensor]] = {}

    def take(name: str, x: Tensor) -> None:
        found.setdefault(name, []).append(x.detach())
        if len(names) == 1 and "expert" not in name:
            raise Stop

    with inputs_of({name: module.get_submodule(name) for name in names}, take):
        try:
            call()
        except Stop:
            pass
    return found


def _sets(
    module: torch.nn.Module, targets: Mapping[str, Config], call: Callable[[], Any]
) -> Iterable[dict[str, str]]:
    """Layers that can be quantised at the same time, in the order of their calls: layer -> one with the same input.

    All experts of a block are one layer as far as the order goes.
    """
    order: list[tuple[str, Tensor]] = []
    with inputs_of({name: module.get_submodule(name) for name in targets}, lambda name, x: order.append((name, x))):
        call()
    sets: list[dict[str, str]] = []
    place: dict[str, int] = {}
    leaders: list[tuple[str, Tensor]] = []
    for name, x in order:
        if any(name in layers for layers in sets):
            continue
        leader = next((other for other, y in leaders if x is y), None)
        key = _without_expert(name)
        if leader is not None:
            index = place[_without_expert(leader)]
        else:
            leaders.append((name, x))
            leader = name
            if key not in place:
                sets.append({})
            index = place.get(key, len(sets) - 1)
        place.setdefault(key, index)
        sets[index][name] = leader
    # Layers that the first run did not use: experts that got no token, or what is used in training only.
    for name in targets:
        if not any(name in layers for layers in sets):
            key = _without_expert(name)
            if key not in place:
                place[key] = len(sets)
                sets.append({})
            sets[place[key]][name] = name
    return sets


def _without_expert(name: str) -> str:
    return re.sub(r"(experts?)\.\d+\.", r"\1.*.", name)
