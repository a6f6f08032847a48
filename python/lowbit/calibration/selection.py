"""Selects the layers to calibrate and checks their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import nn
from ..layers.convolutions import why_float
from ..layers.expert_stacks import Experts
from ..layers.packable import as_linear, check_layers, kind_of, layer_at, named_layers
from ..packed.rounding import ConvConfig, LinearConfig, check_layer
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


def check_experts(model: torch.nn.Module, selected: Mapping[str, MatrixConfig]) -> None:
    """Checks the weights of tensors of experts, as :func:`check_layers`."""
    layers = {name: layer for name, layer in named_layers(model) if name in selected}
    check_layers(layers, {name: selected[name] for name in layers})


def check_weights(model: torch.nn.Module, selected: Mapping[str, MatrixConfig]) -> None:
    """Checks dtypes, values and shared weights of the selected modules.

    Raises:
        TypeError, ValueError: a weight cannot be quantized, or a shared weight has two configs.
    """
    configs: dict[int, tuple[str, MatrixConfig]] = {}
    for name, config in selected.items():
        layer = layer_at(model, name)
        weight = layer.weight
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{name}.weight has dtype {weight.dtype}; expected torch.float32, torch.bfloat16 or torch.float16")
        check_layer(weight, getattr(layer, "bias", None), config, f"{name}.")
        first, other = configs.setdefault(id(weight), (name, config))
        if vars(other) != vars(config):
            raise ValueError(
                f"{first} and {name} share one weight but have different configs, {other} and {config}; give both the "
                "same, or None to one of them"
            )


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
