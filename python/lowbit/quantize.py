"""Round-to-nearest quantisation of tensors and models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from . import _C, ops
from .memory import in_huge_pages

# Beyond this, the range of a group or its scale could overflow float32.
_LARGEST_WEIGHT = torch.finfo(torch.float32).max / 4


@dataclass(frozen=True)
class _Config:
    bits: int = 4
    group_size: int | None = 32
    mapping: str = "symmetric"
    scale: str = "mse"

    def __post_init__(self):
        if isinstance(self.bits, bool) or not isinstance(self.bits, int):
            raise TypeError(f"bits is {self.bits!r}; expected an int")
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits is {self.bits}; expected 1 to 8")
        if self.group_size is not None:
            if isinstance(self.group_size, bool) or not isinstance(self.group_size, int):
                raise TypeError(f"group_size is {self.group_size!r}; expected an int or None")
            if self.group_size <= 0 or self.group_size % 16:
                raise ValueError(
                    f"group_size is {self.group_size}; expected a positive multiple of 16, or None for one group per row"
                )
        if self.mapping not in ("symmetric", "affine"):
            raise ValueError(f"mapping is {self.mapping!r}; expected 'symmetric' or 'affine'")
        if self.scale not in ("absmax", "mse"):
            raise ValueError(f"scale is {self.scale!r}; expected 'absmax' or 'mse'")


@dataclass(frozen=True)
class LinearConfig(_Config):
    """How to quantise a linear layer.

    Args:
        bits: 1 to 8.
        group_size: inputs that share a scale, a multiple of 16; None for one scale per output row.
        mapping: "symmetric" (scale only) or "affine" (scale and minimum).
        scale: "absmax" covers the whole range of a group; "mse" tries smaller ranges too and keeps the one with the least
            squared error, which pays at 4 bits and below and takes several times as long.
    """


@dataclass(frozen=True)
class EmbeddingConfig(_Config):
    """How to quantise an embedding table; the arguments are those of :class:`LinearConfig`."""


def _check_values(values: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} is a {type(values).__name__}; expected a tensor")
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(f"{name} has dtype {values.dtype}; expected a floating-point type")
    if values.device.type != "cpu":
        raise ValueError(f"{name} is on {values.device}; expected the CPU")
    if values.shape != shape:
        raise ValueError(f"{name} has shape {list(values.shape)}; expected {list(shape)}")
    low, high = (float(end) for end in torch.aminmax(values.detach()))  # one pass, and a NaN anywhere makes both NaN
    if not math.isfinite(high - low):
        bad = values.numel() - int(torch.isfinite(values).sum())
        if bad:
            raise ValueError(f"{name} has {bad} NaN or infinite values; expected finite values")
    if max(-low, high) > _LARGEST_WEIGHT:
        raise ValueError(f"{name} reaches from {low:g} to {high:g}; expected magnitudes up to {_LARGEST_WEIGHT:g}")


def _check_layer(weight: Tensor, bias: Tensor | None, config: _Config, prefix: str = "") -> None:
    """Refuses whatever the quantiser or the packer would refuse, before either starts."""
    if isinstance(weight, Tensor) and (weight.dim() != 2 or weight.numel() == 0):
        raise ValueError(f"{prefix}weight has shape {list(weight.shape)}; expected [n, k] with n and k at least 1")
    _check_values(weight, f"{prefix}weight", weight.shape if isinstance(weight, Tensor) else ())
    n, k = weight.shape
    if bias is not None:
        _check_values(bias, f"{prefix}bias", (n,))
    _C.packed_bytes(n, k, config.bits, config.group_size or 0, config.mapping == "affine", bias is not None)


def quantize_tensor(weight: Tensor, config: LinearConfig | EmbeddingConfig, bias: Tensor | None = None) -> Tensor:
    """Quantises a weight matrix by round-to-nearest and packs it.

    Args:
        weight: [n, k] of any floating-point dtype, finite, on the CPU.
        config: bits, group size, mapping and choice of scale.
        bias: [n] or None; stored as float32.

    Returns:
        uint8 [bytes], as :func:`lowbit.pack`.

    Raises:
        TypeError, ValueError: a wrong type, shape or device, or a value that is not finite.
    """
    if not isinstance(config, _Config):
        raise TypeError(f"config is a {type(config).__name__}; expected a LinearConfig or an EmbeddingConfig")
    _check_layer(weight, bias, config)
    if weight.dtype == torch.float64:
        weight = weight.float()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    affine = config.mapping == "affine"
    codes, scales, mins = torch.ops.lowbit.quantize(
        weight.detach(), config.bits, config.group_size or 0, affine, config.scale == "mse"
    )
    return ops.pack(
        codes,
        scales,
        mins if affine else None,
        None if bias is None else bias.detach().float(),
        bits=config.bits,
        group_size=config.group_size,
        mapping=config.mapping,
    )


def _select(
    model: torch.nn.Module,
    config: _Config | Mapping[str, _Config | None],
    filter_fn: Callable[[torch.nn.Module, str], bool] | None,
) -> dict[str, _Config]:
    """The qualified names to quantise, each with its config."""
    kinds = {torch.nn.Linear: LinearConfig, torch.nn.Embedding: EmbeddingConfig}
    if isinstance(config, _Config):
        patterns = {"*": config}
    elif isinstance(config, Mapping):
        patterns = dict(config)
        for pattern, value in patterns.items():
            if not isinstance(pattern, str) or not (value is None or isinstance(value, _Config)):
                raise TypeError(
                    f"config has the entry {pattern!r}: {value!r}; expected a name pattern and a LinearConfig, "
                    "an EmbeddingConfig or None"
                )
    else:
        raise TypeError(
            f"config is a {type(config).__name__}; expected a LinearConfig, an EmbeddingConfig or a dict of patterns"
        )

    selected, matched = {}, set()
    for name, module in model.named_modules(remove_duplicate=False):
        # Exact types: a subclass may use its weight in its own way (nn.MultiheadAttention's output projection does).
        kind = kinds.get(type(module))
        if kind is None:
            continue
        chosen = None
        for pattern, value in patterns.items():
            if fnmatchcase(name, pattern) and (value is None or isinstance(value, kind)):
                matched.add(pattern)
                chosen = value
        if chosen is not None and (filter_fn is None or filter_fn(module, name)):
            selected[name] = chosen
    for pattern in patterns:
        if pattern not in matched:
            warnings.warn(f"the pattern {pattern!r} matches no layer that its config applies to", stacklevel=3)
    return selected


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


def quantize_(
    model: torch.nn.Module,
    config: LinearConfig | EmbeddingConfig | Mapping[str, LinearConfig | EmbeddingConfig | None],
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> torch.nn.Module:
    """Replaces the linear layers and embedding tables of a model by quantised ones, in place.

    Args:
        model: holds ``torch.nn.Linear`` and ``torch.nn.Embedding`` modules (not subclasses of them) at any depth.
        config: one config, for all layers of its kind; or shell-style patterns of qualified names (``"*embed*"``) to
            configs, of which the last that matches wins, and None leaves a layer as it is.
        filter_fn: called as ``filter_fn(module, qualified_name)`` for each chosen layer; False leaves it as it is.

    Returns:
        The model. A tensor that an embedding and an output head share is packed once, and stays shared.

    Raises:
        TypeError, ValueError: a wrong config, nothing to quantise, weights that are not finite or not on the CPU, or
            different configs for layers that share a weight. The model is then unchanged.
    """
    from . import nn  # nn needs this file

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if type(model) in (torch.nn.Linear, torch.nn.Embedding):
        name = type(model).__name__
        raise TypeError(f"model is itself a torch.nn.{name}; use lowbit.nn.{name}.from_float(model, config)")
    selected = _select(model, config, filter_fn)
    if not selected:
        raise ValueError("config selects no torch.nn.Linear or torch.nn.Embedding of this model")

    # All checks come before the first change.
    modules = {name: model.get_submodule(name) for name in selected}
    by_weight: dict[int, list[str]] = {}
    for name, module in modules.items():
        by_weight.setdefault(id(module.weight), []).append(name)
    for names in by_weight.values():
        first = names[0]
        for name in names:
            _check_layer(modules[name].weight, getattr(modules[name], "bias", None), selected[name], f"{name}.")
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
    return model
