"""Round-to-nearest quantization of models."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .. import nn
from ..layers.convolutions import CLASSES
from ..layers.expert_stacks import Experts
from ..layers.packable import (
    check_floats,
    check_whole_experts,
    float_convolutions,
    kind_of,
    named_layers,
    names_by_weight,
    refuse_prepared,
    replace_layers,
    warn_of_floats,
)
from ..layers.patterns import Patterns
from ..layers.replacing import class_name, class_of
from ..machine.sizes import size
from ..packed.rounding import Config, ConvConfig, EmbeddingConfig, LinearConfig


def select_layers(
    model: torch.nn.Module,
    config: Config | Mapping[str, Config | None],
    filter_fn: Callable[[torch.nn.Module, str], bool] | None,
    experts: bool = False,
) -> dict[str, Config]:
    """The qualified names of the layers to quantize, with their configs; expert parameters only if ``experts`` is set."""
    if isinstance(config, Config):
        patterns: dict[str, Config | None] = {"*": config}
    elif isinstance(config, Mapping):
        patterns = dict(config)
        for pattern, value in patterns.items():
            if not isinstance(pattern, str) or not (value is None or isinstance(value, Config)):
                raise TypeError(
                    f"config has the entry {pattern!r}: {value!r}; expected a name pattern and a LinearConfig, "
                    "an EmbeddingConfig, a ConvConfig or None"
                )
    else:
        raise TypeError(
            f"config is a {type(config).__name__}; expected a LinearConfig, an EmbeddingConfig, a ConvConfig or a "
            "dict of patterns"
        )

    selected: dict[str, Config] = {}
    ordered, layers = Patterns(patterns.items()), dict(named_layers(model))
    for name, module in layers.items():
        kind = kind_of(module)
        if kind is None or (isinstance(module, Experts) and not experts):
            continue
        chosen = ordered.last(name, lambda value, kind=kind: value is None or isinstance(value, kind))  # type: ignore[misc]
        if chosen is not None and chosen[1] is not None and (filter_fn is None or filter_fn(module, name)):
            selected[name] = chosen[1]
    ordered.warn_unused("layer that its config applies to", stacklevel=4)
    check_whole_experts(layers, selected)
    return selected


def _warn_of_half_a_tie(model: torch.nn.Module, selected: Mapping[str, Config]) -> None:
    layers = {name: layer for name, layer in named_layers(model) if not isinstance(layer, Experts) and kind_of(layer)}
    for names in names_by_weight(layers).values():
        packed, floats = [name for name in names if name in selected], [name for name in names if name not in selected]
        if packed and floats:
            weight, config = layers[packed[0]].weight, selected[packed[0]]
            packed_bytes = config.describe(weight.shape, False).total_bytes
            warnings.warn(
                f"{floats[0]} and {packed[0]} share one weight, of which only {packed[0]} is packed: the model grows by "
                f"{size(packed_bytes)} instead of shrinking by {size(weight.nbytes - packed_bytes)}. Give both a config of "
                "the same bits, or None to both",
                stacklevel=4,
            )


def _refuse_adapters(model: torch.nn.Module, selected: Mapping[str, Config]) -> None:
    for name, module in model.named_modules():
        kinds = getattr(module, "adapter_layer_names", None)  # peft's layers have it
        for kind in kinds if isinstance(kinds, tuple) else ():
            prefix = f"{name}.{kind}."
            adapters = [layer for layer in selected if layer.startswith(prefix) and kind != "modules_to_save"]
            if adapters:
                raise ValueError(
                    f"{adapters[0]} is an adapter of peft, which could no longer be trained; select the layers below "
                    "adapters ('*.base_layer') and exclude adapters ('*.lora_*': None), or merge them first"
                )


_BASES = (torch.nn.Linear, torch.nn.Embedding, *CLASSES)


def _subclasses(model: torch.nn.Module) -> str:
    """Names the classes of layers that stay float because they are subclasses."""
    floats = (layer for _, layer in named_layers(model) if isinstance(layer, _BASES) and kind_of(layer) is None)
    kinds = {class_name(layer) for layer in floats if class_of(layer) not in _BASES}
    return f"; {', '.join(sorted(kinds))}: a subclass may use its weight in its own way, and stays float" if kinds else ""


def choose_layers(
    model: torch.nn.Module,
    config: Config | Mapping[str, Config | None],
    filter_fn: Callable[[torch.nn.Module, str], bool] | None,
    experts: bool = False,
) -> dict[str, Config]:
    """Like :func:`select_layers`, with the errors and warnings of :func:`quantize_`."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if class_of(model) in _BASES:
        name = class_of(model).__name__
        form = "Conv" if class_of(model) in CLASSES else name
        raise TypeError(f"model is itself a torch.nn.{name}; use lowbit.nn.{form}.from_float(model, config)")
    refuse_prepared(model)
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet; call the model once before it is quantized")
    selected = select_layers(model, config, filter_fn, experts)
    if not selected:
        raise ValueError(
            "config selects no torch.nn.Linear or torch.nn.Embedding of this model, and no convolution" + _subclasses(model)
        )
    _refuse_adapters(model, selected)
    check_floats(model, selected)

    kinds = {name: kind_of(layer) for name, layer in named_layers(model) if experts or not isinstance(layer, Experts)}
    entries = list(config.items()) if isinstance(config, Mapping) else [("*", config)]
    reasons = float_convolutions(model)
    if not any(isinstance(value, ConvConfig) for _, value in entries):
        floats = Patterns(entry for entry in entries if entry[1] is None)  # the user did not ask for other layers to stay float
        convs = (name for name, kind in kinds.items() if kind is ConvConfig and floats.last(name) is None)
        reasons |= dict.fromkeys(convs, "a convolution, which a lowbit.ConvConfig packs")
    chosen = {name for name, kind in kinds.items() if kind is not None} - selected.keys() - reasons.keys()
    warn_of_floats(model, selected, chosen, reasons, stacklevel=3)
    _warn_of_half_a_tie(model, selected)
    return selected


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "diffusers saves packed layers, but cannot load them. Save the float model, and quantize it in from_pretrained "
        "(quantization_config=lowbit.LowBitConfig(...)): that model can be saved"
    )


def _refuse_diffusers(model: torch.nn.Module) -> None:
    library = sys.modules.get("diffusers.models.modeling_utils")
    if library is None:  # not loaded, so this is not a diffusers model
        return
    for module in model.modules():
        if isinstance(module, library.ModelMixin) and any(isinstance(part, nn.Packed) for part in module.modules()):
            module.save_pretrained = _refuse_to_save


@contextmanager
def described_to_transformers(model: torch.nn.Module) -> Iterator[None]:
    """A context around packing that makes ``save_pretrained`` of transformers and diffusers aware of the packed layers."""
    try:
        with _described_to_transformers(model):
            yield
    finally:  # also if the run is interrupted, with some layers packed
        _refuse_diffusers(model)


@contextmanager
def _described_to_transformers(model: torch.nn.Module) -> Iterator[None]:
    library = sys.modules.get("transformers.modeling_utils")  # None: not loaded, so this is not a transformers model
    if library is None or not any(isinstance(module, library.PreTrainedModel) for module in model.modules()):
        yield
        return
    try:
        from ..hf.quantizer import describing
    except ImportError as error:  # unsupported version: the model runs, but saved files would load as random weights
        reason = str(error)

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"lowbit cannot save this quantized model: {reason}")

        try:
            yield
        finally:
            for module in model.modules():
                if isinstance(module, library.PreTrainedModel):
                    module.save_pretrained = refuse
        return
    with describing(model):
        yield


def quantize_(
    model: torch.nn.Module,
    config: LinearConfig | EmbeddingConfig | ConvConfig | Mapping[str, LinearConfig | EmbeddingConfig | ConvConfig | None],
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> torch.nn.Module:
    """Replaces the linear layers, embedding tables and convolutions of a model by packed ones, in place.

    Args:
        model: has layers at any depth. Packed are ``torch.nn.Linear``, ``torch.nn.Embedding``; transformers' ``Conv1D``,
            ``FalconLinear``, ``Linear`` of openai-whisper, tables that scale or normalize their rows (Gemma, BART), and
            parameters with the weights of all experts, named after the parameter (``"*.experts.down_proj"``). Other
            subclasses stay float. A weight that a parametrization computes (torch.nn.utils.parametrizations) is packed as
            computed. Convolutions are
            packed if their kernel is 1, if kernel and stride are equal and there is no padding (patches), or, in one
            dimension, if the kernel is at most 4. Grouped (depthwise), dilated and transposed convolutions and those with
            fewer than 16 inputs stay float.
        config: one config for all layers of its kind; or a dict from shell-style patterns of qualified names (``"*embed*"``)
            to configs. The last matching pattern wins; None leaves a layer float.
        filter_fn: called as ``filter_fn(module, qualified_name)`` for each chosen layer; False leaves it float. For experts
            ``module`` is an object with ``weight``, ``in_features`` and ``out_features``.

    Returns:
        The model. A tensor that an embedding and an output head share is packed once and stays shared. If only one of
        them is selected (a LinearConfig alone selects the head), the other keeps the float tensor, and the model grows by
        the packed one; a warning says by how much. ``{"*": LinearConfig(), "*embed*": EmbeddingConfig()}`` packs both: a
        pattern applies only to layers of its config's kind.

    A transformers model gets a ``quantization_config``: after ``save_pretrained``, ``from_pretrained`` loads it wherever
    lowbit is installed. ``save_pretrained`` of a diffusers model raises, because diffusers could not load it; a model that
    ``from_pretrained`` quantized with a ``quantization_config`` can be saved.

    Warns of patterns that match nothing, and of float matrices in layers of other kinds if they exceed 1 % of the model's
    bytes.

    Raises:
        TypeError, ValueError: a wrong config, nothing to quantize, an adapter of peft, weights that are not finite or not
            on the CPU, NaN in a tensor that stays float, or different configs for layers that share a weight. The model is
            then unchanged.
    """
    selected = choose_layers(model, config, filter_fn, experts=True)
    with described_to_transformers(model):
        replace_layers(model, selected)
    return model
