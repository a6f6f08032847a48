"""Selects the layers to calibrate and checks their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import nn
from ..layers.convolutions import why_float
from ..layers.expert_stacks import Experts
from ..layers.packable import as_linear, check_floats, check_layers, kind_of, layer_at, named_layers
from ..packed.rounding import ConvConfig, LinearConfig
from ..quantizing.quantize_model import select_layers
from .grid import MatrixConfig

Configs = dict[str, MatrixConfig]  # by name


def select(model: torch.nn.Module, config: Any) -> tuple[Configs, Configs, Configs]:
    """Configs of the modules to calibrate, of the tensors of experts, and of convolutions, which are rounded to nearest.

    Args:
        config: as for :func:`lowbit.quantize_`, or a LowBitConfig.

    Raises:
        ValueError: it selects neither linear layers nor experts.
    """
    selected: Any = config.select(model) if hasattr(config, "select") else select_layers(model, config, None, experts=True)
    experts = {name for name, layer in named_layers(model) if isinstance(layer, Experts)}
    if not any(isinstance(value, LinearConfig) for value in selected.values()):
        raise ValueError("config selects no torch.nn.Linear of this model, and no experts; only those can be calibrated")
    return (
        {name: value for name, value in selected.items() if name not in experts and not isinstance(value, ConvConfig)},
        {name: value for name, value in selected.items() if name in experts},
        {name: value for name, value in selected.items() if isinstance(value, ConvConfig)},
    )


def check(model: torch.nn.Module, selected: Mapping[str, Any]) -> None:
    """Checks the weights of selected layers and experts (:func:`check_layers`), and the tensors that stay float."""
    check_floats(model, selected)
    check_layers({name: layer_at(model, name) for name in selected}, selected)


def unquantized(model: torch.nn.Module) -> dict[str, str]:
    """Modules whose weights multiply activations but cannot be packed, by name, with the reason."""
    reasons = {}
    for name, module in model.named_modules():
        if (
            kind_of(module) is not None
            or as_linear(module) is not None
            or isinstance(module, nn.Linear | nn.Embedding | nn.Conv)
        ):
            continue
        kind = type(module).__name__
        if isinstance(module, torch.nn.Linear):
            reasons[name] = f"a {kind}, which may use its weight differently"
        elif (why := why_float(module)) is not None:
            reasons[name] = why
        elif any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            reasons[name] = f"{kind}: weights of several experts in one tensor"
    return reasons


def lists_of_blocks(model: torch.nn.Module, targets: Iterable[str]) -> list[str]:
    """Names of the outermost lists of at least two modules that all have layers to calibrate."""
    targets = list(targets)
    lists: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) < 2:
            continue
        if any(name.startswith(f"{outer}.") for outer in lists):
            continue
        if all(any(target.startswith(f"{name}.{i}.") for target in targets) for i in range(len(module))):
            lists.append(name)
    return lists


def has_blocks(model: torch.nn.Module, config: Any) -> bool:
    """Whether layers to calibrate are in a list of blocks."""
    layers, experts, _ = select(model, config)
    return bool(lists_of_blocks(model, [*experts, *(n for n, c in layers.items() if isinstance(c, LinearConfig))]))
