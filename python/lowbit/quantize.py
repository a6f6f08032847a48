"""Round-to-nearest quantisation of tensors and models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from . import ops

# Rows are quantised in pieces of about this many weights, to bound the temporaries.
_CHUNK_WEIGHTS = 1 << 21


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


def _shrink_factors(config: _Config) -> list[float]:
    # Fewer bits gain from cutting off more of a group's tail.
    if config.scale == "absmax":
        return [1.0]
    lowest = {1: 0.3, 2: 0.35, 3: 0.55, 4: 0.7}.get(config.bits, 0.85)
    steps = round((1.0 - lowest) / 0.05)
    return [1.0 - 0.05 * i for i in range(steps + 1)]


def _quantize_groups(weight: Tensor, config: _Config) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight float32 [rows, groups, group] -> codes (same shape, uint8), scales [rows, groups], mins or None."""
    bits, top = config.bits, 2**config.bits - 1
    if config.mapping == "symmetric" and bits == 1:
        # The scale of least squared error for +-s is the mean magnitude (Rastegari et al., XNOR-Net, 2016).
        magnitude = weight.abs()
        scale = magnitude.mean(-1) if config.scale == "mse" else magnitude.amax(-1)
        return (weight >= 0).to(torch.uint8), scale, None

    low, high = weight.amin(-1), weight.amax(-1)
    half = 2 ** (bits - 1)
    if config.mapping == "symmetric":
        # Levels reach from -half to half - 1. The longer tail goes to the longer side, by the sign of the scale.
        upright = torch.maximum(-low / half, high / (half - 1))
        flipped = torch.maximum(high / half, -low / (half - 1))
        full_scale = torch.where(upright <= flipped, upright, -flipped)
        full_min = full_scale * -half
    else:
        full_scale = (high - low) / top
        full_min = low

    best_error = best_codes = best_scale = best_min = None
    for factor in _shrink_factors(config):
        scale = full_scale * factor
        if config.mapping == "symmetric":
            minimum = scale * -half
        else:
            minimum = full_min + full_scale * (top * (1.0 - factor) / 2)
        usable = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = ((weight - minimum.unsqueeze(-1)) / usable.unsqueeze(-1)).round_().clamp_(0, top)
        if config.mapping == "symmetric":
            codes = torch.where((scale == 0).unsqueeze(-1), torch.full_like(codes, half), codes)
        error = (codes * scale.unsqueeze(-1) + minimum.unsqueeze(-1) - weight).square_().sum(-1)
        if best_error is None:
            best_error, best_codes, best_scale, best_min = error, codes.to(torch.uint8), scale, minimum
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_codes = torch.where(better.unsqueeze(-1), codes.to(torch.uint8), best_codes)
        best_scale = torch.where(better, scale, best_scale)
        best_min = torch.where(better, minimum, best_min)
    return best_codes, best_scale, best_min if config.mapping == "affine" else None


def _check_weight(weight: Tensor, name: str) -> None:
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(f"{name} has dtype {weight.dtype}; expected a floating-point type")
    if weight.device.type != "cpu":
        raise ValueError(f"{name} is on {weight.device}; expected the CPU")
    bad = weight.numel() - int(torch.isfinite(weight).sum())
    if bad:
        raise ValueError(f"{name} has {bad} NaN or infinite values; expected finite values")


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
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight has shape {list(weight.shape)}; expected [n, k] with n and k at least 1")
    _check_weight(weight, "weight")
    if bias is not None:
        _check_weight(bias, "bias")
    n, k = weight.shape
    group = k if config.group_size is None else min(config.group_size, k)
    groups = -(-k // group)

    codes = torch.empty((n, k), dtype=torch.uint8)
    scales = torch.empty((n, groups), dtype=torch.float32)
    mins = torch.empty_like(scales) if config.mapping == "affine" else None
    rows = max(1, _CHUNK_WEIGHTS // k)
    whole = k // group  # groups of full length; a short last one is quantised by itself
    with torch.no_grad():
        for begin in range(0, n, rows):
            part = weight[begin : begin + rows].float()
            piece = slice(begin, begin + part.shape[0])
            for columns, first in ((part[:, : whole * group], 0), (part[:, whole * group :], whole)):
                if columns.shape[1] == 0:
                    continue
                shaped = columns.reshape(columns.shape[0], -1, group if first == 0 else columns.shape[1])
                found, scale, minimum = _quantize_groups(shaped, config)
                start = first * group
                codes[piece, start : start + columns.shape[1]] = found.reshape(columns.shape)
                scales[piece, first : first + scale.shape[1]] = scale
                if mins is not None:
                    mins[piece, first : first + scale.shape[1]] = minimum
    return ops.pack(
        codes,
        scales,
        mins,
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
        _check_weight(modules[first].weight, f"{first}.weight")
        for name in names:
            bias = getattr(modules[name], "bias", None)
            if bias is not None:
                _check_weight(bias, f"{name}.bias")
            if getattr(modules[name], "max_norm", None) is not None:
                raise ValueError(f"{name} has max_norm={modules[name].max_norm}; expected None: it changes the weights")
            if vars(selected[name]) != vars(selected[first]):
                raise ValueError(
                    f"{first} and {name} share one weight but have different configs, {selected[first]} and "
                    f"{selected[name]}; give both the same, or None to one of them"
                )

    for names in by_weight.values():
        biases = {id(b): b for name in names if (b := getattr(modules[name], "bias", None)) is not None}
        # One buffer holds one bias: layers that share a weight but not a bias are packed one by one.
        shared = None
        replaced: dict[int, torch.nn.Module] = {}
        for name in names:
            module = modules[name]
            if id(module) not in replaced:
                if len(biases) > 1:
                    packed = quantize_tensor(module.weight, selected[name], bias=getattr(module, "bias", None))
                else:
                    if shared is None:
                        shared = quantize_tensor(module.weight, selected[name], bias=next(iter(biases.values()), None))
                    packed = shared
                if isinstance(module, torch.nn.Embedding):
                    replacement = nn.Embedding(packed, module.weight.dtype, module.padding_idx)
                else:
                    replacement = nn.Linear(packed)
                replaced[id(module)] = replacement.train(module.training)
            model.set_submodule(name, replaced[id(module)])
            modules[name] = None  # lets go of the float weight as soon as it is packed
    return model
