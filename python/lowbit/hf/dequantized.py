"""Replaces the packed layers of a model with float layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import nn
from ..layers.embedding_layers import give_state
from ..layers.expert_stacks import Experts
from ..layers.packable import is_transposed, named_layers
from ..layers.replacing import take_place
from ..packed.matrix import repack, unpack
from ..packed.rounding import COMPARED, is_same_weight
from ..packed.slices import slice_rows
from .parallel import refuse_parts

# Attributes that placing.py and names.py set on a packed model and on the models inside it.
_SET_BY_PACKING = ("_tied_weights_keys", "resize_token_embeddings", "_weight_conversions")


def dequantize(
    model: PreTrainedModel, dtype: torch.dtype | None = None, progress: Callable[[int, int, str], None] | None = None
) -> None:
    """Replaces packed layers by float layers with the dequantized weights, in place.

    Activations are no longer rounded to int8. Layers that shared a packed weight share the float weight.

    Args:
        dtype: the dtype of the weights: float32, bfloat16 or float16; None: each layer's dtype.
        progress: called as ``progress(layers done, layers, name)``.

    Raises:
        ValueError: packed bytes were modified, or this process has only a part of the model (tensor parallelism).
    """
    refuse_parts(model)
    floats = _on_meta(model)
    layers = dict(named_layers(floats))
    packed = [pair for pair in model.named_modules(remove_duplicate=False) if isinstance(pair[1], nn.Packed)]
    for _, layer in packed:
        layer.verify()  # all of them before the first change
    parameters: dict[tuple[Any, ...], torch.nn.Parameter] = {}
    parts = [name for name, part in floats.named_modules() if isinstance(part, PreTrainedModel)]
    tied = {f"{name}.{each}".removeprefix(".") for name in parts for pair in _ties(floats, name).items() for each in pair}
    kept: dict[int, torch.Tensor] = {}  # packed weights that may be tied, by the id of the new parameter
    for number, (name, layer) in enumerate(packed, 1):
        float_layer = layers[name]
        key = (layer.packed_weight.data_ptr(), is_transposed(float_layer))
        if key not in parameters:
            parameters[key] = _parameter(float_layer, layer.dequantize(dtype or layer.weight.dtype))
        if f"{name}.weight" in tied:
            kept[id(parameters[key])] = layer.packed_weight
        if isinstance(layer, nn.LinearExperts):
            _put_experts(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], layer, parameters[key])
        else:
            _put_layer(model, name, layer, floats.get_submodule(name), parameters[key])
        if progress is not None:
            progress(number, len(packed), name)
    for name in reversed(parts):  # inner models first, because an outer model repeats their ties
        _as_before(model.get_submodule(name), floats.get_submodule(name), kept)


def _ties(floats: PreTrainedModel, name: str) -> dict[str, str]:
    ties: dict[str, str] = floats.get_submodule(name).all_tied_weights_keys
    return ties


def _on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with float layers on the meta device, as a template for the layers to restore."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(model)._from_config(config)


def _parameter(layer: Any, weight: torch.Tensor) -> torch.nn.Parameter:
    """A weight [out, in] or [experts, out, in] as a parameter, transposed if the model stores it transposed."""
    turned = layer.transposed if isinstance(layer, Experts) else is_transposed(layer)
    return torch.nn.Parameter(weight.transpose(-1, -2).contiguous() if turned else weight)


def _put_experts(holder: torch.nn.Module, leaf: str, packed: nn.LinearExperts, weight: torch.nn.Parameter) -> None:
    delattr(holder, leaf)
    holder.register_parameter(leaf, weight)
    if packed.info.has_bias:
        zeros, experts = torch.zeros(1, packed.in_features), torch.arange(packed.num_experts)[None]
        holder.register_parameter(f"{leaf}_bias", torch.nn.Parameter(packed(zeros, experts)[0].to(weight.dtype)))
    vars(holder).pop("forward", None)  # remove the forward for packed experts


def _put_layer(
    model: PreTrainedModel, name: str, packed: nn.Packed, layer: torch.nn.Module, weight: torch.nn.Parameter
) -> None:
    bias = getattr(packed, "bias", None)
    layer.weight = weight
    if isinstance(packed, nn.Embedding):
        give_state(layer, packed._table, packed)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias.clone().to(weight.dtype))
    take_place(layer, packed)
    for attribute in ("_info", "_seen"):
        vars(layer).pop(attribute, None)
    model.set_submodule(name, layer)


def _is_packed_from(rows: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether these are the first rows of the matrix that was packed."""
    return is_same_weight(unpack(slice_rows(repack(packed, "panel16"), 0, len(rows))), rows)


def _as_before(part: Any, floats: Any, packed: Mapping[int, torch.Tensor]) -> None:
    """Restores the names, ties and methods of a model without packed layers.

    If only one of two tied weights was packed, both get the other one, which was never quantized. Two weights that were
    packed separately, or are different matrices, stay separate.

    Args:
        packed: packed weights that may be tied, by the id of the dequantized parameter.
    """
    for name in _SET_BY_PACKING:
        vars(part).pop(name, None)
        if name in vars(floats):
            setattr(part, name, vars(floats)[name])
    ties = floats.all_tied_weights_keys
    for pair in ties.items():
        first, second = map(part.get_parameter, pair)
        if first is not second and (id(first) in packed) != (id(second) in packed):
            taken, given, name = (second, first, pair[0]) if id(first) in packed else (first, second, pair[1])
            if taken.shape != given.shape or not _is_packed_from(taken.detach()[:COMPARED], packed[id(given)]):
                continue
            setattr(part.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], taken)
    part.all_tied_weights_keys = {
        target: source for target, source in ties.items() if part.get_parameter(target) is part.get_parameter(source)
    }
    if len(part.all_tied_weights_keys) < len(ties):
        for config in {id(config): config for config in (part.config, part.config.get_text_config())}.values():
            config.tie_word_embeddings = False
