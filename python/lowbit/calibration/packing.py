"""Packs layers whose inputs are known, and replaces them by packed layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..layers.expert_stacks import Experts, experts_of
from ..layers.packable import leave_fused_paths, named_layers, put_packed
from ..packed.rounding import LinearConfig
from ..quantizing.quantize_model import quantize_
from .bands import packed_in_bands
from .capture import StopRun, inputs_of
from .choice import Quantizer, choose
from .collect import add_to
from .data import Sample
from .expert_inputs import holders_in, inputs_of_expert, routed, weight_of
from .gptq_solver import Moments, Solver
from .grid import MatrixConfig, Quantized, with_table
from .result import Calibration
from .tables import DAMPING

# Names of layers that share a packed weight; their method (comma-separated for experts); the packed weight.
PackedLayers = tuple[list[str], str, Tensor]


@dataclass
class Kept:
    """The layers that a resumed run need not compute, and where new ones are stored."""

    packed: Mapping[str, tuple[str, Tensor]]  # layer -> method (comma-separated for experts) and packed weight
    keep: Callable[[list[PackedLayers]], list[Tensor]]  # stores layers, all or none; returns the weights to compute with


def by_name(name: str, method: str, packed: Tensor) -> dict[str, str]:
    """The method of a layer by its name, or of each expert by its name and number."""
    if packed.dim() == 1:
        return {name: method}
    return {f"{name}.{number}": part for number, part in enumerate(method.split(","))}


class Packer:
    """Packs each layer of a model once; layers in ``kept`` are taken from there, and new layers are added to it.

    Args:
        selected: configs of the layers and tables to pack, by name.
        experts: configs of the tensors of experts to pack, by name.
        sample: the calibration text.
        options: keyword arguments of :func:`gptq`.
        report: called with the number of matrices finished since the last call, and the name of a matrix that was finished
            or, if the number is 0, begins.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        selected: Mapping[str, MatrixConfig],
        experts: Mapping[str, MatrixConfig],
        method: str,
        sample: Sample,
        options: Mapping[str, Any],
        kept: Kept,
        result: Calibration,
        report: Callable[[int, str], None],
    ):
        self.model, self.selected, self.experts, self.method = model, selected, experts, method
        self.linears = {name: config for name, config in selected.items() if isinstance(config, LinearConfig)}
        self.sample, self.options = sample, options
        self.kept, self.result, self._report = kept, result, report
        self.waiting: list[PackedLayers] = []  # layers of a block that are stored once its scales are tuned

    def expert_matrices(self) -> int:
        """Number of experts' matrices to pack."""
        return sum(layer.num_experts for name, layer in named_layers(self.model) if name in self.experts)

    def pack_experts(self, module: torch.nn.Module, prefix: str, run: Callable[[int], Any], tune: bool = False) -> None:
        """Packs the float experts in a module, one by one, each with the tokens that are routed to it.

        Args:
            prefix: the prefix of the module's names in the model.
            run: runs the module on batch i.
            tune: leave the packed experts in ``waiting``.
        """
        for path, leaves in list(holders_in(module, self.experts, prefix)):
            holder = module.get_submodule(path)
            names = [f"{path}.{leaf}" if path else leaf for leaf in leaves]
            known = [self.kept.packed.get(prefix + name) for name in names]
            rows = chosen = first = None
            if None in known:
                runs = ((partial(run, i), mask) for i, mask in enumerate(self.sample.masks))
                rows, chosen = routed(holder, runs)
            replacements = []
            for name, experts, kept in zip(names, experts_of(holder).values(), known, strict=True):
                full_name = prefix + name
                if kept is None:
                    method, packed = self._pack_experts(full_name, holder, experts, rows, chosen, first)
                    packed = self._keep(full_name, method, packed, tune)
                else:
                    method, packed = kept
                    self._report(experts.num_experts, full_name)
                self.result.methods |= by_name(full_name, method, packed)
                replacements.append((name, experts, packed))
                first = packed
            for name, experts, packed in replacements:
                put_packed(module, name, experts, packed, experts.weight.dtype)

    def _pack_experts(
        self, name: str, holder: torch.nn.Module, experts: Experts, rows: Any, chosen: Any, first: Tensor | None
    ) -> tuple[str, Tensor]:
        """The methods of the experts' matrices, comma-separated, and their packed weights, uint8 [experts, bytes]."""
        methods, weights = [], []
        for number in range(experts.num_experts):
            x = inputs_of_expert(holder, number, rows, chosen, first)
            moments: dict[str, Moments] = {}
            weight, bias = weight_of(experts, number)
            if len(x):
                diagonal = self.method == "importance"
                add_to(moments, name, self.experts[name].rotated(x) if diagonal else x, None, diagonal=diagonal)
            weight = self.experts[name].as_rounded(weight)
            key = f"{name}.{number}"
            self._report(0, key)
            method, quantizers = self._quantizers("", {key: weight}, {key: self.experts[name]}, moments.get(name))
            methods.append(method)
            weights.append(packed_in_bands(weight, *quantizers[key], bias))
            self._report(1, key)
        return ",".join(methods), torch.stack(weights)

    def _keep(self, name: str, method: str, packed: Tensor, tune: bool = False) -> Tensor:
        """Stores a packed weight, now or once it is tuned; returns the tensor to compute with."""
        if tune:
            self.waiting.append(([name], method, packed))
            return packed
        return self.kept.keep([([name], method, packed)])[0]

    def pack_layers(
        self,
        root: torch.nn.Module,
        names: list[str],
        configs: Mapping[str, MatrixConfig],
        moments: Moments | None,
        prefix: str = "",
        tune: bool = False,
    ) -> None:
        """Packs layers that have the same inputs, but not the same weight.

        Args:
            names: in ``root``.
            configs: by the same names.
            moments: the moments of the inputs; None: unknown.
            prefix: the prefix of the names of ``root`` in the model.
            tune: leave the packed layers in ``waiting``.
        """
        missing = [name for name in names if prefix + name not in self.kept.packed]
        weights = {name: configs[name].as_rounded(root.get_submodule(name).weight.detach()) for name in missing}
        self._report(0, prefix + names[0])
        method, quantizers = self._quantizers(prefix, weights, configs, moments)
        for name in names:
            layer, full_name = root.get_submodule(name), prefix + name
            if name in quantizers:
                packed = packed_in_bands(weights.pop(name), *quantizers.pop(name), layer.bias)
                packed = self._keep(full_name, method, packed, tune)
                self.result.methods[full_name] = method
            else:
                self.result.methods[full_name], packed = self.kept.packed[full_name]
            _replace(root, name, packed)
            self._report(1, full_name)
        leave_fused_paths(root)

    def _quantizers(
        self, prefix: str, weights: Mapping[str, Tensor], configs: Mapping[str, MatrixConfig], moments: Moments | None
    ) -> tuple[str, dict[str, Quantizer]]:
        def first_not_finite() -> str:
            return self._first_not_finite() or prefix + next(iter(weights))

        method = "nearest"
        quantizers: dict[str, Quantizer] = {}
        # Layers with the same input may rotate it differently.
        blocks = {name: configs[name].rotated_inputs(weight.shape[1]) for name, weight in weights.items()}
        for block in sorted(set(blocks.values())):
            some = {name: weight for name, weight in weights.items() if blocks[name] == block}
            known = moments
            if moments is not None and moments.square.dim() == 2:
                known = moments if block == max(blocks.values()) else copy.deepcopy(moments)
                known.rotate(block)
            method, chosen = choose(some, configs, known, self.method, self.options, first_not_finite)
            quantizers |= chosen
        return method, quantizers

    def _first_not_finite(self) -> str | None:
        """The first layer in a run of the model whose inputs are not finite, which is where the problem starts."""
        names: list[str] = []

        def take(name: str, x: Tensor) -> None:
            if not bool(torch.isfinite(x).all()):
                names.append(name)
                raise StopRun

        with inputs_of({name: self.model.get_submodule(name) for name in self.linears}, take):
            for i in range(len(self.sample.batches)):
                with suppress(StopRun):
                    self.sample.run(self.model, i)
                if names:
                    return names[0]
        return None

    def pack_tables(self, tables: Mapping[str, MatrixConfig], moments: dict[str, Moments]) -> None:
        """Packs embedding tables that no head shares: those with moments by GPTQ, others by round-to-nearest."""
        to_nearest = {}
        for name, config in tables.items():
            if name in self.kept.packed:
                packed = self.kept.packed[name][1]
            elif name in moments:
                weight = config.as_rounded(self.model.get_submodule(name).weight.detach())
                of_table = moments.pop(name)
                of_table.rotate(config.rotated_inputs(weight.shape[1]))
                solver = Solver(of_table, DAMPING)
                config = with_table(config, weight, solver.importance)

                def quantize(weight: Tensor, _: slice, solver: Solver = solver, config: MatrixConfig = config) -> Quantized:
                    return solver.quantize(weight, config, correction=0.0, sweeps=0)

                packed = packed_in_bands(weight, config, quantize, None)
                packed = self._keep(name, "gptq", packed)
            else:
                to_nearest[name] = config
                continue
            _replace(self.model, name, packed)
        if to_nearest:
            quantize_(self.model, to_nearest)

    def pack_shared(self, names: list[str], moments: dict[str, Moments]) -> None:
        """Packs modules that share a weight, linear layers or tables, and takes the moments of their inputs."""
        layers = {name: self.model.get_submodule(name) for name in names}
        linears = [name for name in names if name in self.linears]
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
            parts = [moments.pop(name) for name in linears if name in moments]
            total = None
            if parts:
                total = Moments(sum(m.square for m in parts), None, sum(m.tokens for m in parts))
            weight = self.selected[linears[0]].as_rounded(layers[names[0]].weight.detach())
            self._report(0, names[0])
            method, quantizers = self._quantizers("", {linears[0]: weight}, self.selected, total)
            packed = packed_in_bands(weight, *quantizers[linears[0]], next(iter(biases.values())))
            packed = self.kept.keep([(names, method, packed)])[0]
        for name in names:
            if isinstance(layers[name], torch.nn.Linear):
                self.result.methods[name] = method
            _replace(self.model, name, packed)
        leave_fused_paths(self.model)
        self._report(1, names[0])


def _replace(root: torch.nn.Module, name: str, packed: Tensor) -> None:
    """Replaces a float layer by a packed one."""
    layer = root.get_submodule(name)
    root.set_submodule(name, nn.in_place_of(layer, packed, layer.weight.dtype))
