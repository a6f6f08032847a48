"""Places packed layers in a model of transformers, shares and verifies their weights, and updates ties."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import nn
from ..layers.computed_tensor import ComputedTensor
from ..layers.expert_stacks import Experts
from ..layers.packable import check_whole_experts, kind_of, named_layers, put_packed
from ..machine.memory import give_back
from ..packed.header import PackedInfo
from .names import tied_layers

PACKED, ORDER = "packed_weight", "input_order"


class _Awaiting(torch.nn.Module):
    """A placeholder for a layer that will share a packed weight. It has no state, so that the loader misses nothing."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        # Some models initialize a head by name; transformers skips tensors marked as initialized.
        for name in ("weight", "bias"):
            value = getattr(layer, name, None)
            if value is not None:
                value = ComputedTensor(value.detach, value.shape, value.dtype, value.device)
            self.__dict__[name] = value


class OnCpu:
    """A mixin for quantizers of transformers and diffusers that allows only CPUs."""

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        for place in device_map.values() if isinstance(device_map, dict) else [device_map]:
            if place not in (None, "auto", "balanced", "balanced_low_0", "sequential") and str(place) != "cpu":
                raise ValueError(f"device_map has {place!r}; expected 'cpu' or none: packed weights are for CPUs")

    def update_device_map(self, device_map: Any) -> dict[str, str] | None:
        return None if device_map is None else {"": "cpu"}


def place_packed(
    model: PreTrainedModel,
    packed: Mapping[str, tuple[str, PackedInfo]],
    floats: set[str],
    dtype: torch.dtype,
    ordered: Collection[str] = (),
) -> dict[str, tuple[str, torch.nn.Module]]:
    """Replaces layers of a float model on the meta device by the packed layers of a checkpoint.

    Args:
        packed: layer -> its source (for errors) and the header of its weight.
        floats: the float tensors of the checkpoint, by their names in the model.
        dtype: the dtype of the embeddings' outputs.
        ordered: the layers with an act-order permutation.

    Returns:
        Layer that shares a packed weight -> the layer that has the weight, and the float layer. Until :func:`share_packed`
        is called, the model contains a placeholder there.

    Raises:
        ValueError: the model has no such layer, or its shape differs.
    """
    tied = tied_layers(model)
    floats_of = dict(named_layers(model))
    for name, (where, info) in packed.items():
        layer = floats_of.get(name)
        if kind_of(layer) is None or isinstance(layer, Experts) != (info.experts is not None):
            actual = "no such layer" if layer is None else f"a {type(layer).__name__}"
            actual = "experts in one tensor" if isinstance(layer, Experts) else actual
            expected = "Linear or Embedding" if info.experts is None else "experts in one tensor"
            raise ValueError(f"{where} is packed, but {type(model).__name__} has {actual} there; expected {expected}")
        _check_fits(where, info, layer)
    check_whole_experts(floats_of, packed)
    for name, (where, info) in packed.items():
        order = torch.empty(info.in_features, dtype=torch.int32, device="meta") if name in ordered else None
        if order is not None and (type(floats_of[name]) is not torch.nn.Linear or name in {*tied, *tied.values()}):
            raise ValueError(f"{where} has an {ORDER}; expected one of a linear layer whose weight no other layer shares")
        put_packed(model, name, floats_of[name], info, dtype, order)
    shared = {}
    for target, source in tied.items():
        if target not in packed and source not in packed:
            continue
        without, owner = (target, source) if source in packed else (source, target)
        if without not in packed and f"{without}.weight" not in floats:
            where, info = packed[owner]
            _check_fits(where, info, floats_of[without])
            shared[without] = owner, floats_of[without]
            model.set_submodule(without, _Awaiting(floats_of[without]))
    changed = packed.keys() | shared.keys()
    ties = model.all_tied_weights_keys
    model.all_tied_weights_keys = {
        target: source
        for target, source in ties.items()
        if target.rpartition(".")[0] not in changed and source.rpartition(".")[0] not in changed
    } | _float_ties(ties, changed, floats)
    return shared


def _float_ties(ties: Mapping[str, str], packed: Collection[str], first: Collection[str] = ()) -> dict[str, str]:
    """New ties between float tensors whose common source is packed (an encoder's and a decoder's table that stay float).

    Without them the files would lack all but one of these tensors.

    Args:
        ties: target -> source.
        packed: the packed layers.
        first: tensors to prefer as the new source.
    """
    members_of: dict[str, list[str]] = {}
    for target, source in ties.items():
        if source.rpartition(".")[0] in packed and target.rpartition(".")[0] not in packed:
            members_of.setdefault(source, []).append(target)
    float_ties: dict[str, str] = {}
    for members in members_of.values():
        source = next((name for name in members if name in first), members[0])
        float_ties |= {name: source for name in members if name != source}
    return float_ties


def _check_fits(where: str, info: PackedInfo, layer: torch.nn.Module) -> None:
    actual: list[int | str] = list(info.shape)
    expected: list[int | str] = list(layer.weight.shape)
    if not isinstance(layer, torch.nn.Embedding) and info.has_bias != (layer.bias is not None):
        actual.append("with a bias" if info.has_bias else "without a bias")
        expected.append("without a bias" if info.has_bias else "with a bias")
    if actual != expected:
        raise ValueError(
            f"{where} has weights {actual}; expected {expected}, as config.json says. The files do not belong together: "
            "quantize again."
        )


def share_packed(model: PreTrainedModel, shared: Mapping[str, tuple[str, torch.nn.Module]], dtype: torch.dtype) -> None:
    """Replaces the placeholders of :func:`place_packed` by packed layers that share a weight."""
    for name, (owner, layer) in shared.items():
        model.set_submodule(name, nn.in_place_of(layer, model.get_submodule(owner).packed_weight, dtype))


def verify(model: PreTrainedModel, where: Mapping[str, str], skipped: Collection[str] = (), keep: bool = True) -> None:
    """Checks all bytes of packed weights against their checksums, on torch's number of threads.

    Args:
        where: layer -> source of its weight, for errors.
        skipped: layers that are checked elsewhere.
        keep: keep the pages read from files in this process's memory.

    Raises:
        ValueError: a weight was modified.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Packed) and name not in skipped}

    def check(name: str) -> None:
        verify_layer(name, layers[name], where)
        if not keep:
            give_back(layers[name].packed_weight)

    names = sorted(layers, key=lambda name: -layers[name].packed_weight.numel())
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(check, names):
            pass


def verify_layer(name: str, layer: nn.Packed, where: Mapping[str, str]) -> None:
    """Raises ValueError, naming the source of the weight, if its bytes were modified."""
    try:
        layer.verify()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where.get(name, name)}: {error}. The file was damaged: copy it, or quantize, again.") from error


def mark_initialized(model: PreTrainedModel, layers: Iterable[str]) -> None:
    """Keeps transformers from initializing the parent modules of these layers."""
    # Some architectures initialize the weights of a layer from its parent module (T5's attention).
    experts = {name for name, layer in named_layers(model) if isinstance(layer, Experts | nn.LinearExperts)}
    for name in layers:
        parent = model.get_submodule(name.rpartition(".")[0])
        if name in experts or (not parent._parameters and not parent._buffers):
            parent._is_hf_initialized = True


def expanded_ties(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """Name of each (sub)model -> its tied tensors, target -> source."""
    return {
        name: part.get_expanded_tied_weights_keys(all_submodels=False)
        for name, part in model.named_modules()
        if hasattr(part, "get_expanded_tied_weights_keys")
    }


def tie_packed(model: PreTrainedModel, expanded: dict[str, dict[str, str]]) -> None:
    """Updates the attributes by which transformers ties and saves tensors to their names after quantization."""

    def layer_of(part: torch.nn.Module, tensor: str) -> torch.nn.Module:
        return part.get_submodule(tensor.rpartition(".")[0])

    changed = False
    for name, ties in reversed(expanded.items()):  # inner models first, because an outer model repeats their ties
        part = model.get_submodule(name)
        kept = {}
        for target, source in ties.items():
            first, second = layer_of(part, target), layer_of(part, source)
            packed = [isinstance(layer, nn.Linear | nn.Embedding) for layer in (first, second)]
            if all(packed) and first.packed_weight is second.packed_weight:
                kept[target.removesuffix("weight") + PACKED] = source.removesuffix("weight") + PACKED
            elif not any(packed):
                kept[target] = source
        # Only for layers that are never packed. Other layers share the packed weight if no file has theirs.
        never = {target: source for target, source in ties.items() if kind_of(layer_of(part, target)) is None}
        kept |= _float_ties(never, {name for name, layer in part.named_modules() if isinstance(layer, nn.Packed)})
        changed |= kept != ties
        if kept != ties:
            part._tied_weights_keys = kept
        if changed:
            part.all_tied_weights_keys = part.get_expanded_tied_weights_keys(all_submodels=True)


def _resize(
    model: PreTrainedModel, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
) -> torch.nn.Module:
    """Refuses to resize: transformers' method would change the table and then fail at the packed head, or vice versa."""
    table = model.get_input_embeddings()
    size = table.num_embeddings if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
    if size != table.num_embeddings:
        raise ValueError(
            f"the embedding table or the head of this {type(model).__name__} is packed, with {table.num_embeddings} rows, and "
            f"cannot get {size}: call resize_token_embeddings before quantizing"
        )
    return table


def refuse_resizing(model: PreTrainedModel) -> None:
    """Replaces ``resize_token_embeddings`` by :func:`_resize` in models whose embedding table or head is packed."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            try:
                layers = part.get_input_embeddings(), part.get_output_embeddings()
            except (NotImplementedError, AttributeError):  # not a text model
                continue
            if any(isinstance(layer, nn.Packed) for layer in layers):
                part.resize_token_embeddings = functools.partial(_resize, part)
