"""Puts packed layers in the place of float ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from . import nn
from .memory import in_huge_pages
from .quantize import Config, EmbeddingConfig, LinearConfig, check_layer, quantize_tensor

# What can be packed. Exact types: a subclass may use its weight in its own way (the output projection of
# nn.MultiheadAttention does, and a scaled embedding).
KINDS = {torch.nn.Linear: LinearConfig, torch.nn.Embedding: EmbeddingConfig}


def _leave_fused_paths(model: torch.nn.Module) -> None:
    # In evaluation torch's encoder layers hand the float weights of their linear layers to one fused operator. These
    # two attributes are what they themselves set to call the linear layers instead.
    def is_quantised(layer: torch.nn.Module) -> bool:
        return isinstance(layer, torch.nn.TransformerEncoderLayer) and not all(
            isinstance(linear, torch.nn.Linear) for linear in (layer.linear1, layer.linear2)
        )

    for module in model.modules():
        if is_quantised(module):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, torch.nn.TransformerEncoder) and any(map(is_quantised, module.layers)):
            module.use_nested_tensor = False


def replace_layers(model: torch.nn.Module, selected: Mapping[str, Config]) -> None:
    """Packs layers of a model, in place.

    Args:
        selected: qualified names of layers of the exact types in ``KINDS``, each with its config. What shares a tensor is
            packed once, and stays shared.

    Raises:
        TypeError, ValueError: weights that are not finite or not on the CPU, or different configs for layers that share
            a weight. The model is then unchanged.
    """
    # All checks come before the first change.
    modules = {name: model.get_submodule(name) for name in selected}
    by_weight: dict[int, list[str]] = {}
    for name, module in modules.items():
        by_weight.setdefault(id(module.weight), []).append(name)
    for names in by_weight.values():
        first = names[0]
        for name in names:
            check_layer(modules[name].weight, getattr(modules[name], "bias", None), selected[name], f"{name}.")
            if modules[name].weight.dtype == torch.float64:
                raise TypeError(
                    f"{name}.weight has dtype torch.float64; expected torch.float32, torch.bfloat16 or torch.float16, "
                    "in which the layer then computes (model.float())"
                )
            if getattr(modules[name], "max_norm", None) is not None:
                raise ValueError(f"{name} has max_norm={modules[name].max_norm}; expected None: it changes the weights")
            if vars(selected[name]) != vars(selected[first]):
                raise ValueError(
                    f"{first} and {name} share one weight but have different configs, {selected[first]} and "
                    f"{selected[name]}; give both the same, or None to one of them"
                )

    for names in by_weight.values():
        # One buffer holds one bias: linear layers that share a weight but not a bias are packed one by one.
        # An embedding reads no bias.
        linears = [modules[name] for name in names if isinstance(modules[name], torch.nn.Linear)]
        biases = {id(linear.bias): linear.bias for linear in linears}
        shared = None
        replaced: dict[int, torch.nn.Module] = {}
        for name in names:
            module = modules[name]
            if id(module) not in replaced:
                if len(biases) > 1:
                    packed = quantize_tensor(module.weight, selected[name], bias=getattr(module, "bias", None))
                    packed = in_huge_pages(packed)
                else:
                    if shared is None:
                        shared = quantize_tensor(module.weight, selected[name], bias=next(iter(biases.values()), None))
                        shared = in_huge_pages(shared)
                    packed = shared
                replacement = nn.in_place_of(module, packed, module.weight.dtype)
                replaced[id(module)] = replacement.train(module.training)
            model.set_submodule(name, replaced[id(module)])
            modules[name] = None  # lets go of the float weight as soon as it is packed
    _leave_fused_paths(model)
