"""Puts packed layers in the place of float ones."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

import torch

from . import nn
from .memory import in_huge_pages
from .quantize import Config, EmbeddingConfig, LinearConfig, check_layer, quantize_tensor

# What can be packed. Exact types: a subclass may use its weight in its own way (the output projection of
# nn.MultiheadAttention does, and a scaled embedding).
KINDS = {torch.nn.Linear: LinearConfig, torch.nn.Embedding: EmbeddingConfig}


class Prepared:
    """A float layer in training, as :func:`lowbit.qat.prepare_` makes them: it computes what a packed one will."""

    def pack(self, bias: torch.Tensor | None) -> torch.Tensor:
        """uint8 [bytes], as :func:`lowbit.pack`."""
        raise NotImplementedError


def refuse_prepared(model: torch.nn.Module) -> None:
    """Raises ValueError where layers are in training."""
    for name, module in model.named_modules():
        if isinstance(module, Prepared):
            raise ValueError(f"{name or type(module).__name__} is prepared for training; lowbit.qat.convert_ packs it")


def warn_of_floats(model: torch.nn.Module, selected: Mapping[str, Config], chosen: set[str], stacklevel: int = 2) -> None:
    """Warns, in one line, when more than a hundredth of the bytes of a float model's matrices stay float unasked.

    Args:
        model: also on the meta device.
        selected: the layers that will be packed.
        chosen: layers that stay float because the user says so; there is no warning of them.
    """
    packed, total = 0, 0
    unasked: Counter[str] = Counter()
    seen: set[int] = set()
    tied = getattr(model, "all_tied_weights_keys", {})  # which transformers ties only after loading
    # Selected layers first: a matrix that has several names is packed if one of its layers is.
    for name, module in sorted(model.named_modules(), key=lambda pair: pair[0] not in selected):
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or id(parameter) in seen or f"{name}.{leaf}" in tied:
                continue
            seen.add(id(parameter))
            total += parameter.nbytes
            if name in selected:
                packed += parameter.nbytes
            elif name not in chosen:
                unasked[type(module).__name__] += parameter.nbytes
    left = unasked.total()
    if left <= total / 100:
        return
    largest = unasked.most_common(1)[0][0]
    more = "" if len(unasked) == 1 else f" and {len(unasked) - 1} other kinds of layers"
    share = f"{100 * left / total:.0f} % of the bytes of this {type(model).__name__}'s matrices stay float, in {largest}{more}"
    only = "" if left < total / 2 else f"only {100 * packed / total:.0f} % are packed: "
    warnings.warn(
        f"{only}{share}; lowbit packs torch.nn.Linear and torch.nn.Embedding", stacklevel=stacklevel + 1
    )


def leave_fused_paths(model: torch.nn.Module) -> None:
    """Makes torch's encoder layers call their linear layers where these are quantised."""
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


def names_by_weight(modules: Mapping[str, torch.nn.Module]) -> dict[int, list[str]]:
    """The names of layers that share a weight, by its id."""
    found: dict[int, list[str]] = {}
    for name, module in modules.items():
        found.setdefault(id(module.weight), []).append(name)
    return found


def check_layers(modules: Mapping[str, torch.nn.Module], selected: Mapping[str, Config]) -> None:
    """Refuses layers that cannot be packed.

    Raises:
        TypeError, ValueError: as :func:`replace_layers`.
    """
    for names in names_by_weight(modules).values():
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


def _pack(layer: torch.nn.Module, config: Config, bias: torch.Tensor | None) -> torch.Tensor:
    return layer.pack(bias) if isinstance(layer, Prepared) else quantize_tensor(layer.weight, config, bias=bias)


def replace_layers(model: torch.nn.Module, selected: Mapping[str, Config]) -> None:
    """Packs layers of a model, in place.

    Args:
        selected: qualified names of layers, of the exact types in ``KINDS`` or ``Prepared``, each with its config. What shares a tensor is
            packed once, and stays shared.

    Raises:
        TypeError, ValueError: weights that are not finite or not on the CPU, or different configs for layers that share
            a weight. The model is then unchanged.
    """
    # All checks come before the first change.
    modules = {name: model.get_submodule(name) for name in selected}
    check_layers(modules, selected)
    by_weight = names_by_weight(modules)
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
                    packed = in_huge_pages(_pack(module, selected[name], getattr(module, "bias", None)))
                else:
                    if shared is None:
                        bias = next(iter(biases.values()), None)
                        shared = in_huge_pages(_pack(module, selected[name], bias))
                    packed = shared
                replaced[id(module)] = nn.in_place_of(module, packed, module.weight.dtype)
            model.set_submodule(name, replaced[id(module)])
            modules[name] = None  # lets go of the float weight as soon as it is packed
    leave_fused_paths(model)
