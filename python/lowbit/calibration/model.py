"""Block by block through a model of transformers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _C, nn, ops
from ..layers import KINDS, leave_fused_paths
from ..quantize import EmbeddingConfig, LinearConfig, check_layer
from ..quantize_model import described_to_transformers, quantize_, select_layers
from .capture import Call, Stop, blocks_of, inputs_of, slow_paths
from .data import Batch, batches, tokens_of
from .gptq import Moments, Solver, best_correction, gptq
from .grid import Config, Quantised
from .importance import search
from .result import METHODS, Calibration

_PANEL_ROWS = 16
_BAND_WEIGHTS = 1 << 22  # of a matrix that are quantised at a time, which bounds the memory
_HELD = 1024  # the most tokens by which GPTAQ's correction is chosen, ...
_HELD_PART = 4  # ... and which part of the text they are at the most


@dataclass
class Kept:
    """Layers that are packed already, and where those go that are packed now: what a run that resumes needs."""

    packed: Mapping[str, tuple[str, Tensor]]  # by layer: the method, and the packed weight
    keep: Callable[[list[str], str, Tensor], Tensor]  # layers of one weight, method, packed; returns what to compute with


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
    """:func:`lowbit.calibrate`; ``options`` are keyword arguments of :func:`gptq`, for measurements."""
    check_method(method)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model is a {type(model).__name__}; expected a model of transformers")
    selected = _select(model, config)
    check_weights(model, selected)
    inputs, there = batches(model, data, tokenizer, window, max_tokens)
    with evaluating(model), described_to_transformers(model):
        return _Run(model, selected, method, inputs, there, progress, dict(options or {}), kept).run()


def has_blocks(model: torch.nn.Module, config: Any) -> bool:
    """Whether layers to calibrate lie in a list of blocks."""
    return bool(_lists_of_blocks(model, [n for n, c in _select(model, config).items() if isinstance(c, LinearConfig)]))


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


# ---- what to quantise


def _select(model: torch.nn.Module, config: Any) -> dict[str, Config]:
    """Layers by their names, each with its config: as :func:`lowbit.quantize_`, or what a LowBitConfig selects."""
    selected = config.select(model, experts=False) if hasattr(config, "select") else select_layers(model, config, None)
    if not any(isinstance(value, LinearConfig) for value in selected.values()):
        raise ValueError("config selects no torch.nn.Linear of this model; only those can be calibrated")
    for name, value in selected.items():
        if value.mapping not in ("symmetric", "affine"):
            raise ValueError(
                f"the config of {name} has mapping {value.mapping!r}; expected 'symmetric' or 'affine': tables of levels are "
                "chosen without a text"
            )
    return selected


def check_weights(model: torch.nn.Module, selected: Mapping[str, Config]) -> None:
    configs: dict[int, tuple[str, Config]] = {}
    for name, config in selected.items():
        layer = model.get_submodule(name)
        weight = layer.weight
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"{name}.weight has dtype {weight.dtype}; expected torch.float32, torch.bfloat16 or torch.float16"
            )
        check_layer(weight, getattr(layer, "bias", None), config, f"{name}.")
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
    def __init__(self, model, selected, method, inputs: list[Batch], there: int, progress, options, kept: Kept | None):
        self.model, self.method, self.inputs, self.options = model, method, inputs, options
        self.masks = [
            None if batch.get("attention_mask") is None else (batch["attention_mask"] != 0) for batch in inputs
        ]
        self.result = Calibration(sum(map(tokens_of, inputs)), there)
        self.embeddings = {name: c for name, c in selected.items() if isinstance(c, EmbeddingConfig)}
        self.targets = {name: c for name, c in selected.items() if isinstance(c, LinearConfig)}
        self.selected = selected
        self.done, self.progress = 0, progress
        self.kept = kept or Kept({}, lambda names, method, packed: packed)
        self.in_memory = kept is None

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
        floats, moments = self._first_pass(lists, [name for name in early if name not in self.kept.packed])
        for names in shared:
            self._quantise_shared(names, moments)
        tables = {name: config for name, config in self.embeddings.items() if name not in together}
        if tables:
            quantize_(model, tables)
        if self.method == "importance":
            for name in alone:
                self._quantise(model, [name], alone, moments.pop(name, None))
        else:
            for name in lists:
                if name in floats:
                    self._list(name, floats.pop(name), alone)
            self._whole(alone)
        self.result.left = _left(model)
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
                _add(moments, name, _rows(x, mask), None, diagonal=self.method == "importance")
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
        known = self.kept.packed
        if all(prefix + name in known for name in targets):
            for name in targets:
                self._quantise(module, [name], targets, None, prefix)
            return
        # Whole batches: tokens behind others of the same text would know too much of them.
        step = max(_HELD_PART, -(-self.result.tokens // _HELD))
        last = len(self.inputs) - 1
        held = {i for i in range(len(self.inputs)) if i % step == step - 1} or {last}
        if "correction" in self.options or twin is None:
            held = set()
        for layers in _sets(module, targets, lambda: ours(0)):
            moments: dict[str, Moments] = {}
            leaders = sorted({leader for name, leader in layers.items() if prefix + name not in known})
            for i, mask in enumerate(self.masks if leaders else ()):
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
                        _add(moments, name, _rows(x, mask), y, diagonal=False, held=_held(i in held, last == 0))
            for leader in dict.fromkeys(layers.values()):
                names = [name for name in layers if layers[name] == leader]
                self._quantise(module, names, targets, moments.pop(leader, None), prefix)

    # -- layers

    def _quantise(
        self, root, names: list[str], configs: Mapping[str, Config], moments: Moments | None, prefix: str = ""
    ) -> None:
        """Packs layers that have the same inputs, but not the same weight."""
        todo = [name for name in names if prefix + name not in self.kept.packed]
        weights = {name: root.get_submodule(name).weight.detach() for name in todo}
        method, quantisers = self._quantisers(prefix, weights, configs, moments)
        for name in names:
            layer, full = root.get_submodule(name), prefix + name
            if name in quantisers:
                packed = packed_in_bands(weights.pop(name), configs[name], layer.bias, quantisers.pop(name))
                packed = self.kept.keep([full], method, packed)
                self.result.methods[full] = method
            else:
                self.result.methods[full], packed = self.kept.packed[full]
            root.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
            self._report(1)
        leave_fused_paths(root)

    def _quantisers(
        self, prefix: str, weights: Mapping[str, Tensor], configs: Mapping[str, Config], moments: Moments | None
    ) -> tuple[str, dict[str, Callable[[Tensor], Quantised]]]:
        """The method for layers with the same inputs, and for each what quantises rows of its weight."""
        if moments is not None and moments.tokens == 0:
            moments.join()
        if moments is None or moments.tokens == 0 or not weights:
            return "nearest", {name: lambda rows, name=name: search(rows, None, configs[name]) for name in weights}
        held = moments.held
        if not all(bool(torch.isfinite(x).all()) for x in (moments.square, *(x for pair in held for x in pair))):
            raise ValueError(
                f"the inputs of {self._first_not_finite() or prefix + next(iter(weights))} have NaN or infinite values on "
                "the calibration text"
            )
        enough = moments.tokens + sum(len(x) for x, _ in held) >= len(moments.importance())
        if moments.square.dim() == 1 or (self.method == "auto" and not enough):
            moments.join()
            importance = moments.importance()
            return "importance", {
                name: lambda rows, name=name: search(rows, importance, configs[name]) for name in weights
            }
        corrections = {}
        if held:
            trial = Solver(moments)
            for name, weight in weights.items():
                corrections[name] = best_correction(trial, weight, configs[name], held)
            del trial
            moments.join()
        if self.options.keys() - {"correction"}:
            return "gptq", {
                name: lambda rows, name=name: gptq(rows, moments, configs[name], **self.options) for name in weights
            }
        solver = Solver(moments)
        return "gptq", {
            name: lambda rows, name=name: solver.quantise(
                rows, configs[name], self.options.get("correction", corrections.get(name, 1.0))
            )
            for name in weights
        }

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
            packed = packed_in_bands(
                weight, self.selected[names[0]], next(iter(biases.values())), quantisers[linears[0]]
            )
            packed = self.kept.keep(names, method, packed)
        for name in names:
            layer = layers[name]
            if isinstance(layer, torch.nn.Linear):
                self.result.methods[name] = method
            self.model.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
        leave_fused_paths(self.model)
        self._report(1)


# ---- helpers


def packed_in_bands(
    weight: Tensor, config: Config, bias: Tensor | None, quantise: Callable[[Tensor], Quantised]
) -> Tensor:
    """A packed matrix, uint8 [bytes], of what ``quantise`` makes of its rows, some at a time.

    Each band is packed as a matrix of its own, whose panels are the whole one's.
    """
    n, k = weight.shape
    rows = max(1, _BAND_WEIGHTS // k // _PANEL_ROWS) * _PANEL_ROWS
    if n <= rows:
        return quantise(weight.float()).pack(bias)
    info = ops.describe((n, k), config.bits, config.group_size, config.mapping, bias is not None)
    result = torch.empty(info.total_bytes, dtype=torch.uint8)
    folded, at = 0, 64
    for begin in range(0, n, rows):
        band = slice(begin, min(begin + rows, n))
        packed = quantise(weight[band].float()).pack(None if bias is None else bias[band])
        folded = _C.fold_panels(packed.data_ptr(), packed.numel(), folded)
        count = packed.numel() - 64
        result[at : at + count] = packed[64:]
        at += count
    header = _C.packed_header(n, k, info.bits, info.group_size or 0, info.mapping == "affine", info.has_bias, folded, None)
    result[:64] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return result


def _rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """[..., k] -> float32 [tokens, k], without padding."""
    if mask is not None and x.shape[:-1] == mask.shape:
        return x[mask].float()
    if mask is not None and x.dim() == 2 and x.shape[0] == mask.numel():
        return x[mask.flatten()].float()
    return x.reshape(-1, x.shape[-1]).float()


def _held(chosen: bool, alone: bool) -> float:
    """The part of a batch's tokens that is held back: all, or of a batch that is the only one its end."""
    return (1 / _HELD_PART if alone else 1.0) if chosen else 0.0


def _add(
    moments: dict[str, Moments], name: str, x: Tensor, y: Tensor | None, *, diagonal: bool, held: float = 0.0
) -> None:
    """Adds inputs of a layer to its moments; the last ones are held back, a part of `held`, if there are float ones."""
    k = x.shape[1]
    if name not in moments:
        square = torch.zeros(k) if diagonal else torch.zeros(k, k)
        moments[name] = Moments(square, None if y is None else torch.zeros(k, k), 0)
    known = moments[name]
    count = 0 if y is None else round(held * len(x))
    if count:
        known.held.append((x[-count:].clone(), y[-count:].clone()))
        x, y = x[:-count], y[:-count]
    known.add(x, y)


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
    missing = set(targets)

    def take(name: str, x: Tensor) -> None:
        order.append((name, x))
        missing.discard(name)
        if not missing:
            raise Stop

    with inputs_of({name: module.get_submodule(name) for name in targets}, take):
        try:
            call()
        except Stop:
            pass
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
