"""What packs layers whose inputs are known, and puts the packed ones in their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import nn
from .._experts import experts_of
from .._layers import leave_fused_paths, named_layers, put_packed
from .._quantize_model import quantize_
from .._rounding import LinearConfig
from .bands import packed_in_bands
from .capture import Stop, inputs_of
from .choice import Quantizer, choose
from .collect import add_to
from .data import Batch
from .experts import holders_in, inputs_of_expert, routed, weight_of
from .gptq import Moments, Solver
from .grid import Config, with_table
from .result import Calibration
from .tables import DAMPING


@dataclass
class Kept:
    """Layers that are packed already, and where those go that are packed now: what a run that resumes needs."""

    packed: Mapping[str, tuple[str, Tensor]]  # by layer: the method (of experts with commas), and the packed weight
    # Takes layers at once: those of one weight, their method, the packed weight; returns the weights to compute with.
    keep: Callable[[list[tuple[list[str], str, Tensor]]], list[Tensor]]


def by_name(name: str, method: str, packed: Tensor) -> dict[str, str]:
    """The method of a layer, or that of each expert; of experts the methods have commas between them."""
    if packed.dim() == 1:
        return {name: method}
    return {f"{name}.{number}": own for number, own in enumerate(method.split(","))}


class Packer:
    """Packs layers of a model, each once: what ``kept`` has is taken from there, the rest goes to it.

    Args:
        selected: the config of each layer and table to pack, by name.
        experts: that of each tensor of experts.
        inputs: the batches of the text, and ``masks``: which of their tokens count, [batch, tokens], or None for all.
        options: keyword arguments of :func:`gptq`.
        report: called with the number of matrices that are done since the last call, 0 as well, and the name of one that is
            in work or done.
    """

    def __init__(
        self,
        model,
        selected: Mapping[str, Config],
        experts: Mapping[str, Config],
        method: str,
        inputs: list[Batch],
        masks: list[Tensor | None],
        options: Mapping[str, Any],
        kept: Kept,
        result: Calibration,
        report: Callable[[int, str], None],
    ):
        self.model, self.selected, self.experts, self.method = model, selected, experts, method
        self.targets = {name: c for name, c in selected.items() if isinstance(c, LinearConfig)}
        self.inputs, self.masks, self.options = inputs, masks, options
        self.kept, self.result, self._report = kept, result, report
        # Layers of a block that wait for its scales to be tuned; kept with these, all at once.
        self.pending: list[tuple[list[str], str, Tensor]] = []

    def expert_matrices(self) -> int:
        return sum(layer.num_experts for name, layer in named_layers(self.model) if name in self.experts)

    def pack_experts(self, module, prefix: str, call: Callable[[int], Any], tune: bool = False) -> None:
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
                    self._report(experts.num_experts, name)
                self.result.methods |= by_name(name, method, packed)
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
            self._report(0, key)
            method, quantizers = self._quantizers("", {key: weight}, {key: self.experts[name]}, moments.get(name))
            methods.append(method)
            result.append(packed_in_bands(weight, *quantizers[key], bias))
            self._report(1, key)
        return ",".join(methods), torch.stack(result)

    # -- layers

    def pack_layers(
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
        self._report(0, prefix + names[0])
        method, quantizers = self._quantizers(prefix, weights, configs, moments)
        for name in names:
            layer, full = root.get_submodule(name), prefix + name
            if name in quantizers:
                packed = packed_in_bands(weights.pop(name), *quantizers.pop(name), layer.bias)
                if tune:
                    self.pending.append(([full], method, packed))
                else:
                    packed = self.kept.keep([([full], method, packed)])[0]
                self.result.methods[full] = method
            else:
                self.result.methods[full], packed = self.kept.packed[full]
            self._place(root, name, packed)
            self._report(1, full)
        leave_fused_paths(root)

    @staticmethod
    def _place(root, name: str, packed: Tensor) -> None:
        layer = root.get_submodule(name)
        root.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))

    def _quantizers(
        self, prefix: str, weights: Mapping[str, Tensor], configs: Mapping[str, Config], moments: Moments | None
    ) -> tuple[str, dict[str, Quantizer]]:
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

            with inputs_of({name: self.model.get_submodule(name) for name in self.targets}, take), suppress(Stop):
                self.model(**batch)
            if found:
                return found[0]
        return None

    def pack_tables(self, tables: Mapping[str, Config], moments: dict[str, Moments]) -> None:
        """Packs tables of embeddings that no head shares: by GPTQ, or rounded to nearest those without moments."""
        nearest = {}
        for name, config in tables.items():
            layer = self.model.get_submodule(name)
            if name in self.kept.packed:
                packed = self.kept.packed[name][1]
            elif name in moments:
                solver, weight = Solver(moments.pop(name), DAMPING), layer.weight.detach()
                own = with_table(config, weight, solver.importance)
                packed = packed_in_bands(weight, own, partial(solver.quantize, config=own, correction=0.0), None)
                packed = self.kept.keep([([name], "gptq", packed)])[0]
            else:
                nearest[name] = config
                continue
            self.model.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
        if nearest:
            quantize_(self.model, nearest)

    def pack_shared(self, names: list[str], moments: dict[str, Moments]) -> None:
        layers = {name: self.model.get_submodule(name) for name in names}
        linears = [name for name in names if name in self.targets]
        biases = {id(layers[name].bias): layers[name].bias for name in linears}
        if not linears or len(biases) > 1:
            quantize_(self.model, {name: self.selected[name] for name in names})
            for name in linears:
                self.result.methods[name] = "nearest"
            self._report(bool(linears), names[0])
            return
        if linears[0] in self.kept.packed:
            method, packed = self.kept.packed[linears[0]]
        else:
            together = [moments.pop(name) for name in linears if name in moments]
            total = None
            if together:
                total = Moments(sum(m.square for m in together), None, sum(m.tokens for m in together))
            weight = layers[names[0]].weight.detach()
            self._report(0, names[0])
            method, quantizers = self._quantizers("", {linears[0]: weight}, self.selected, total)
            packed = packed_in_bands(weight, *quantizers[linears[0]], next(iter(biases.values())))
            packed = self.kept.keep([(names, method, packed)])[0]
        for name in names:
            layer = layers[name]
            if isinstance(layer, torch.nn.Linear):
                self.result.methods[name] = method
            self.model.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
        leave_fused_paths(self.model)
        self._report(1, names[0])
