"""The quantizer that transformers calls while it loads a model."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, auto

from .. import nn
from ..files.safetensors import INDEX, WEIGHTS, Stored, float_name, orders_of, packed_info, read_files, read_metadata
from ..files.untrusted import read_json
from ..layers import Experts, kind_of, layer_at, named_layers, oriented, pack_layer, put_packed, replace_layers, warn_of_floats
from ..memory import in_huge_pages
from .config import BY_OVERRIDES, METHOD, LowBitConfig
from .dequantizing import dequantize
from .names import check_complete, given_by, given_with, keep_names, names_in_model, tied_layers
from .parallel import layers_to_cut, refuse_parts, shard_as_asked, take_rules
from .placing import PACKED, expanded_ties, mark_initialized, place_packed, refuse_resizing, share_packed, tie_packed, verify

_SAVE = "lowbit_save"
_BIAS = "_bias"  # what the bias of experts in one tensor is called after it


def _shards_beside(directory: Path) -> list[Path]:
    """The files that an index names, where they are all there and are of a save of ours."""
    try:
        names = sorted(set(read_json(directory / INDEX)["weight_map"].values()) - {WEIGHTS})
        paths = [directory / name for name in names if Path(name).name == name]
        return paths if all(_SAVE in read_metadata(path) for path in paths) else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


class LowBitQuantizer(HfQuantizer):
    """Quantizes tensor by tensor while a float checkpoint is loaded, and loads packed ones as they are mapped."""

    requires_calibration = False

    def validate_environment(self, *args, device_map=None, **kwargs) -> None:
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        for place in places:
            if place not in (None, "auto", "balanced", "balanced_low_0", "sequential") and str(place) != "cpu":
                raise ValueError(f"device_map has {place!r}; expected 'cpu' or none: packed weights are for CPUs")

    def update_device_map(self, device_map):
        return None if device_map is None else {"": "cpu"}

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model):
        refuse_parts(model)
        state = model.state_dict()
        tied = getattr(model, "all_tied_weights_keys", None) or {}  # these are saved under the other name
        for name in [name for name in state if name.rpartition(".")[2] == PACKED]:
            if name not in tied:
                # Empty, but with memory of its own: transformers takes tensors at the same address for one.
                state[float_name(name, state[name].shape)] = torch.zeros(1, dtype=torch.uint8)[:0]
        # In every shard of a save the same: what a killed save leaves of an older one must not pass for a part of it.
        return state, {_SAVE: uuid.uuid4().hex}

    @property
    def is_trainable(self) -> bool:
        return True  # transformers means adapters beside the packed weights: lowbit.peft

    @property
    def is_compileable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model, dtype=None, checkpoint_files=None, **kwargs):
        self._dtype = dtype or torch.get_default_dtype()
        self._ties = expanded_ties(model)
        self._selected, self._shared, self._where = {}, {}, {}
        files = [Path(file) for file in checkpoint_files or () if os.fspath(file).endswith(".safetensors")]
        tensors = read_files(files)
        packed = {name: stored for name, stored in tensors.items() if name.rpartition(".")[2] == PACKED}
        self._check_files(files, tensors, packed)
        orders = orders_of(tensors)

        # Packed weights are called as the float ones would be, so that transformers' rules for names apply.
        aliases = {float_name(name, tensors[name].shape) if name in packed else name: name for name in tensors}
        names = names_in_model(model, aliases)
        guards = {each for alias, (name, _) in names.items() if aliases[alias] in packed for each in (alias, name)}
        if guards:
            ignored = f"^({'|'.join(map(re.escape, sorted(guards)))})$"
            own = model._keys_to_ignore_on_load_unexpected
            # A set, or in the first versions of transformers 5 a list, to which it adds its own.
            own = own | {ignored} if isinstance(own, set) else [*(own or ()), ignored]
            model._keys_to_ignore_on_load_unexpected = own
        given, placed, ordered = given_by(names), {}, set()
        layers = dict(named_layers(model))
        whole = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
        for alias, (name, _) in names.items():
            stored, layer = packed.get(aliases[alias]), name.removesuffix(".weight")
            # A class other than the checkpoint's may lack a head, or have another one.
            if stored is not None and (whole or layer in layers):
                self._where[layer] = f"{stored.name} in {stored.path}"
                placed[layer] = self._where[layer], packed_info(stored)
                ordered |= {layer} if stored.name in orders else set()
        if files and whole:
            biases = {bias for layer, (_, info) in placed.items() for bias in given_with(layer, info)}
            ties = tied_layers(model).items()
            biases |= {f"{target}.bias" for target, source in ties if f"{source}.bias" in biases}
            check_complete(model, given | biases, files[0].parent)

        if self.pre_quantized:
            floats = given - {f"{layer}.weight" for layer in placed} - placed.keys()
            self._shared = place_packed(model, placed, floats, self._dtype, ordered)
            mark_initialized(model, placed)
            self._plan = take_rules(model, placed.keys() | self._shared.keys())
            return
        self._selected, left = self.quantization_config.choose(model)
        if not self._selected:
            raise ValueError(f"quantization_config selects no layer of {type(model).__name__}")
        warn_of_floats(model, self._selected, {name for name, why in left.items() if why == BY_OVERRIDES}, left)
        self._tied = {name for pair in tied_layers(model).items() for name in pair}
        mark_initialized(model, self._selected)
        self._plan = take_rules(model, self._selected.keys())
        state = model.state_dict()
        for key, (name, targets) in names.items():
            layer = name.removesuffix(".weight")
            if targets is None and layer in self._selected and name in state:
                expected = tuple(state[name].shape)
                if tensors[key].shape != expected:
                    raise ValueError(
                        f"{key} in {tensors[key].path} has shape {list(tensors[key].shape)}; expected "
                        f"{list(expected)}, as config.json says"
                    )

    def _check_files(self, files: list[Path], tensors: dict[str, Stored], packed: dict[str, Stored]) -> None:
        if [path.name for path in files] == [WEIGHTS]:
            # Shards that were saved over a single file leave it there, and transformers would go on to load it.
            files = files + _shards_beside(files[0].parent)
        saves = {path: read_metadata(path).get(_SAVE) for path in files}
        if len(set(saves.values())) > 1:
            raise ValueError(
                f"{', '.join(path.name for path in saves)} in {files[0].parent} are of different saves: one was "
                "interrupted, or another lay there. Save again, into a new directory."
            )
        if self.pre_quantized and not packed:
            raise ValueError(
                f"the checkpoint has no tensor .{PACKED}, but its config.json says quant_method {METHOD!r}; found "
                f"{len(tensors)} tensors in {len(files)} safetensors files"
            )
        if packed and not self.pre_quantized:
            raise ValueError(
                f"{next(iter(packed.values())).path} has packed weights, but the checkpoint's config.json has no "
                "quantization_config; quantize again, or load without one"
            )
        for name in packed:
            both = float_name(name, packed[name].shape)
            if both in tensors:
                raise ValueError(f"{tensors[both].path} and {packed[name].path} have {both} and {name}; expected one of them")

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        layer = param_name.removesuffix(".weight")
        if layer == param_name:  # experts or their bias, or of a module that has no weight
            layer = layer if layer in self._selected else layer.removesuffix(_BIAS)
            return isinstance(layer_at(model, layer), Experts) if layer in self._selected else False
        # Tied weights wait until they are tied: then they are packed once.
        return layer in self._selected and layer not in self._tied

    def dequantize(self, model, dtype=None):
        """What ``model.dequantize()`` does: see :func:`lowbit.hf.dequantizing.dequantize`."""
        dequantize(model, dtype)
        self.remove_quantization_config(model)
        return model

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.pre_quantized:
            # What is cut is checked when it is cut, so that a rank reads the files once.
            verify(model, self._where, layers_to_cut(model, self._plan), keep=not self._plan)
            share_packed(model, self._shared, self._dtype)
        else:
            layers = dict(named_layers(model))
            left = {name: config for name, config in self._selected.items() if kind_of(layers[name]) is not None}
            if left:
                replace_layers(model, left)
        tie_packed(model, self._ties)
        keep_names(model)
        refuse_resizing(model)
        shard_as_asked(model, self._plan, self._where)
        del self._ties, self._shared, self._where, self._selected, self._plan
        return model


# Assigned: lowbit_autoload has put into both tables what imports this file, for which register_quantizer has an error.
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = LowBitConfig
auto.AUTO_QUANTIZER_MAPPING[METHOD] = LowBitQuantizer


class _Quantize(ConversionOps):
    """What the loader does with the weight of a selected layer: the layer becomes a packed one."""

    def __init__(self, quantizer: LowBitQuantizer):
        self._quantizer = quantizer

    def convert(self, input_dict, model=None, missing_keys=None, **kwargs):
        left = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            path = name.removesuffix(".weight")
            is_bias = path not in self._quantizer._selected and path.endswith(_BIAS)
            path = path.removesuffix(_BIAS) if is_bias else path
            layer = layer_at(model, path)
            config = self._quantizer._selected.get(path)
            if is_bias:  # of experts, which waited for it
                weight, bias = layer.weight, weight
            else:
                weight = oriented(layer, weight)
                bias = getattr(layer, "bias", None)
            # What cannot be packed now waits: for its other tensor, or for the end, where the error reaches the caller.
            if config is None or "meta" in (weight.device.type, "" if bias is None else bias.device.type):
                left[name] = value
                continue
            try:
                packed = in_huge_pages(pack_layer(layer, config, weight, bias))
            except (TypeError, ValueError):
                left[name] = value
                continue
            put_packed(model, path, layer, packed, weight.dtype)._is_hf_initialized = True
            missing_keys.difference_update((name, path))
        return left


@contextmanager
def describing(model: torch.nn.Module) -> Iterator[None]:
    """Around packing layers of a model by hand: models of transformers in it are saved and loaded as packed ones then.

    Raises:
        ValueError: a model is quantized by another method already.
    """
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in models:
        present = getattr(part, "hf_quantizer", None)
        if present is not None and not isinstance(present, LowBitQuantizer):
            method = present.quantization_config.quant_method
            raise ValueError(f"{type(part).__name__} is quantized already, by the method {method!r}")
    before = [(part, expanded_ties(part)) for part in models]
    yield
    for part, ties in before:
        if not any(isinstance(layer, nn.Packed) for layer in part.modules()):
            continue
        tie_packed(part, ties)
        keep_names(part)
        refuse_resizing(part)
        inside = any(part is not other and part in other.modules() for other in models)
        if not inside:  # a part of a model is saved on its own rarely, and its configuration may be the whole one's
            part.hf_quantizer = LowBitQuantizer(LowBitConfig.describing(part), pre_quantized=True)
            part.config.quantization_config = part.hf_quantizer.quantization_config
