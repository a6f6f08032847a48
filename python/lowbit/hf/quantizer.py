"""The quantizer that transformers calls while it loads a model."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, auto

from .. import nn
from ..files.safetensors import (
    INDEX,
    WEIGHTS,
    Stored,
    float_name,
    orders_of,
    packed_info,
    read_files,
    read_metadata,
    refuse_two_checkpoints,
)
from ..files.untrusted import read_json
from ..layers.expert_stacks import Experts
from ..layers.packable import (
    check_floats,
    kind_of,
    layer_at,
    named_layers,
    oriented,
    pack_layer,
    put_packed,
    replace_layers,
    warn_of_floats,
)
from ..machine.memory import in_huge_pages
from ..packed.header import PackedInfo
from ..packed.rounding import ConvConfig, EmbeddingConfig, LinearConfig
from .config import BY_OVERRIDES, METHOD, LowBitConfig
from .dequantized import dequantize
from .mtp_layers import prefix_of
from .names import check_complete, given_by, given_with, keep_names, names_in_model, tied_layers
from .parallel import layers_to_cut, refuse_parts, shard_as_asked, take_rules
from .placing import (
    PACKED,
    OnCpu,
    expanded_ties,
    mark_initialized,
    place_packed,
    refuse_resizing,
    share_packed,
    tie_packed,
    verify,
)

_SAVE = "lowbit_save"
_BIAS = "_bias"  # the suffix of the parameter that holds the biases of experts


def _indexed_shards(directory: Path) -> list[Path]:
    """The files that an index names, if all exist and were saved by lowbit; else an empty list."""
    try:
        names = sorted(set(read_json(directory / INDEX)["weight_map"].values()) - {WEIGHTS})
        paths = [directory / name for name in names if Path(name).name == name]
        return paths if all(_SAVE in read_metadata(path) for path in paths) else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


class _Checkpoint:
    """The safetensors files being loaded, and the names of their tensors in the model.

    Attributes:
        tensors: name in the files -> tensor.
        packed: the subset that are packed weights.
        float_names: float name of a tensor (:func:`float_name`) -> name in the files.
        names: float name -> name in the model and targets, from :func:`names_in_model`.
        head: prefix of the tensors of a multi-token prediction head that the model does not load; None: no such tensors.
    """

    def __init__(self, model: PreTrainedModel, files: list[Path], pre_quantized: bool):
        """
        Raises:
            OSError, ValueError: a file is damaged, or the files do not belong together or to config.json.
        """
        self.files = files
        self.tensors = read_files(files)
        self.packed = {name: stored for name, stored in self.tensors.items() if name.rpartition(".")[2] == PACKED}
        self._check(pre_quantized)
        self.float_names = {
            float_name(name, stored.shape) if name in self.packed else name: name for name, stored in self.tensors.items()
        }
        self.head = prefix_of(model, self.float_names)
        self.names = names_in_model(model, self.float_names)  # by float names, so that transformers' renaming rules apply

    def _check(self, pre_quantized: bool) -> None:
        files, tensors, packed = self.files, self.tensors, self.packed
        if [path.name for path in files] == [WEIGHTS]:
            # Saving shards leaves an older single file in place, which transformers would load instead.
            files = files + _indexed_shards(files[0].parent)
        saves = {path: read_metadata(path).get(_SAVE) for path in files}
        if len(set(saves.values())) > 1:
            raise ValueError(
                f"{', '.join(path.name for path in saves)} in {files[0].parent} are of different saves: one was "
                "interrupted, or files of another model were there. Save again, into a new directory."
            )
        if [path.name for path in self.files] == [WEIGHTS]:
            refuse_two_checkpoints(self.files[0].parent)
        if pre_quantized and not packed:
            raise ValueError(
                f"the checkpoint has no tensor .{PACKED}, but its config.json says quant_method {METHOD!r}; found "
                f"{len(tensors)} tensors in {len(files)} safetensors files"
            )
        if packed and not pre_quantized:
            raise ValueError(
                f"{next(iter(packed.values())).path} has packed weights, but the checkpoint's config.json has no "
                "quantization_config; quantize again, or load without one"
            )
        for name in packed:
            both = float_name(name, packed[name].shape)
            if both in tensors:
                raise ValueError(f"{tensors[both].path} and {packed[name].path} have {both} and {name}; expected one of them")

    def ignore_guards(self, model: PreTrainedModel) -> None:
        """Keeps transformers from reporting guards (:func:`float_name`) and tensors of an MTP head as unexpected."""
        guards = {guard for name, (target, _) in self.names.items() if self.float_names[name] in self.packed
                  for guard in (name, target)}  # fmt: skip
        if guards or self.head:
            patterns = [f"{re.escape(guard)}$" for guard in sorted(guards)]
            pattern = f"^({'|'.join([*patterns, re.escape(self.head)] if self.head else patterns)})"
            ignored = model._keys_to_ignore_on_load_unexpected
            # transformers adds its own patterns. In the first 5.x versions it is a list, later a set.
            ignored = ignored | {pattern} if isinstance(ignored, set) else [*(ignored or ()), pattern]
            model._keys_to_ignore_on_load_unexpected = ignored

    def packed_layers(self, model: PreTrainedModel) -> dict[str, Stored]:
        """Layer of the model -> its packed weight. A class other than the checkpoint's may have no head or another one."""
        whole, layers = self._is_whole(model), dict(named_layers(model))
        layers_to_pack = {}
        for name, (target, _) in self.names.items():
            stored, layer = self.packed.get(self.float_names[name]), target.removesuffix(".weight")
            if stored is not None and ((whole and not (self.head and name.startswith(self.head))) or layer in layers):
                layers_to_pack[layer] = stored
        return layers_to_pack

    def check_complete(self, model: PreTrainedModel, placed: Mapping[str, tuple[str, PackedInfo]]) -> set[str]:
        """The tensors of the model that the files have. Raises ValueError if one is missing and the class is the files'."""
        given = given_by(self.names)
        if self.files and self._is_whole(model):
            biases = {bias for layer, (_, info) in placed.items() for bias in given_with(layer, info)}
            ties = tied_layers(model).items()
            biases |= {f"{target}.bias" for target, source in ties if f"{source}.bias" in biases}
            check_complete(model, given | biases, self.files[0].parent)
        return given

    def new_layers(self, model: PreTrainedModel, layers: Collection[str]) -> dict[str, str]:
        """The subset of layers that get new random weights, such as a classifier's head -> why.

        Raises:
            ValueError: the float weight of a layer differs from the model in its number of inputs or dimensions.
        """
        if not self.files:  # not safetensors
            return {}
        given, state, new = given_by(self.names), model.state_dict(), {}
        tied = model.all_tied_weights_keys
        given |= {name for pair in tied.items() if not given.isdisjoint(pair) for name in pair}
        given |= {target for target, source in tied.items() if source in given}
        for layer in layers:
            if given.isdisjoint({layer, f"{layer}.weight"}):
                new[layer] = "the checkpoint lacks its weight, which is new and random"
        for key, (name, targets) in self.names.items():
            layer = name.removesuffix(".weight")
            if targets is None and layer in layers and name in state:
                stored, expected = self.tensors[key], tuple(state[name].shape)
                if stored.shape[1:] != expected[1:] or len(stored.shape) != len(expected):
                    raise ValueError(
                        f"{key} in {stored.path} has shape {list(stored.shape)}; expected {list(expected)}, as config.json says"
                    )
                if stored.shape != expected:  # transformers raises or, with ignore_mismatched_sizes, initializes the layer
                    new[layer] = f"its weight in the checkpoint has {stored.shape[0]} rows for {expected[0]}: it is new"
        for pair in tied_layers(model).items():  # the other layer has the same new weight
            new |= {layer: new[other] for layer, other in (pair, pair[::-1]) if other in new and layer in layers}
        return new

    def _is_whole(self, model: PreTrainedModel) -> bool:
        return type(model).__name__ in (getattr(model.config, "architectures", None) or ())


@dataclass
class _Load:
    """The state shared by the hooks of one load.

    Attributes:
        dtype: the dtype of the model.
        ties: from :func:`expanded_ties`, before any layer was packed.
        selected: layers of a float checkpoint to quantize.
        tied: the selected layers that are quantized only after tying.
        loaded: the selected layers whose weight has been loaded; of others the names of the files say that they have one.
        shared: from :func:`place_packed`.
        where: packed layer -> tensor and file, for errors.
        rules: from :func:`take_rules`.
    """

    dtype: torch.dtype
    ties: dict[str, dict[str, str]]
    selected: dict[str, LinearConfig | EmbeddingConfig | ConvConfig] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    shared: dict[str, tuple[str, torch.nn.Module]] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)

    def place_packed(self, model: PreTrainedModel, checkpoint: _Checkpoint) -> None:
        """Puts the packed layers of the files into a model on the meta device."""
        layers = checkpoint.packed_layers(model)
        self.where = {layer: f"{stored.name} in {stored.path}" for layer, stored in layers.items()}
        placed = {layer: (self.where[layer], packed_info(stored)) for layer, stored in layers.items()}
        given = checkpoint.check_complete(model, placed)
        orders = orders_of(checkpoint.tensors)
        ordered = {layer for layer, stored in layers.items() if stored.name in orders}
        floats = given - {f"{layer}.weight" for layer in placed} - placed.keys()
        self.shared = place_packed(model, placed, floats, self.dtype, ordered)
        mark_initialized(model, placed)
        self.rules = take_rules(model, placed.keys() | self.shared.keys())

    def select(self, model: PreTrainedModel, checkpoint: _Checkpoint, config: LowBitConfig) -> None:
        """Chooses the layers of a float checkpoint to quantize while they are loaded."""
        checkpoint.check_complete(model, {})
        selected, unselected = config.choose(model)
        overridden = {name for name, why in unselected.items() if why == BY_OVERRIDES}
        new = checkpoint.new_layers(model, selected)  # not packed, because they need training
        self.selected = {name: layer_config for name, layer_config in selected.items() if name not in new}
        if not self.selected:
            raise ValueError(f"quantization_config selects no layer of {type(model).__name__} whose weight the checkpoint has")
        warn_of_floats(model, self.selected, overridden, unselected | new, stacklevel=3)
        self.tied = {name for pair in tied_layers(model).items() for name in pair}
        if checkpoint.files:
            self.loaded = set(self.selected)
        mark_initialized(model, self.selected)
        self.rules = take_rules(model, self.selected.keys())


class LowBitQuantizer(OnCpu, HfQuantizer):
    """Quantizes tensor by tensor while a float checkpoint is loaded; loads packed weights mapped from their files."""

    requires_calibration = False
    _load: _Load  # set between the hooks before and after the loading of weights

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        refuse_parts(model)
        state: dict[str, torch.Tensor] = model.state_dict()
        tied = getattr(model, "all_tied_weights_keys", None) or {}  # saved under the name of the source
        for name in [name for name in state if name.rpartition(".")[2] == PACKED]:
            if name not in tied:
                # Empty, but with separate memory, because transformers takes tensors at the same address for one.
                state[float_name(name, state[name].shape)] = torch.zeros(1, dtype=torch.uint8)[:0]
        # All shards of a save get the same id, so that loading detects a mix with shards of an older save.
        return state, {_SAVE: uuid.uuid4().hex}

    @property
    def is_trainable(self) -> bool:
        return True  # transformers means training adapters: lowbit.peft

    @property
    def is_compileable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, dtype: torch.dtype | None = None, checkpoint_files: Any = None, **_: Any
    ) -> None:
        files = [Path(file) for file in checkpoint_files or () if os.fspath(file).endswith(".safetensors")]
        self._load = _Load(dtype or torch.get_default_dtype(), expanded_ties(model))
        checkpoint = _Checkpoint(model, files, self.pre_quantized)
        checkpoint.ignore_guards(model)
        if self.pre_quantized:
            self._load.place_packed(model, checkpoint)
        else:
            self._load.select(model, checkpoint, self.quantization_config)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        selected, layer = self._load.selected, param_name.removesuffix(".weight")
        if layer == param_name:  # experts or their bias, or a parameter not named "weight"
            layer = layer if layer in selected else layer.removesuffix(_BIAS)
            return isinstance(layer_at(model, layer), Experts) if layer in selected else False
        return layer in selected and layer not in self._load.tied  # tied weights are packed once, after tying

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Implements ``model.dequantize()`` by :func:`lowbit.hf.dequantized.dequantize`."""
        dequantize(model, dtype)
        self.remove_quantization_config(model)
        return model

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self._load.selected, self._load.loaded)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        load = self._load
        del self._load
        if self.pre_quantized:
            # Layers to be split are verified when they are split, so that a rank reads the files once.
            verify(model, load.where, layers_to_cut(model, load.rules), keep=not load.rules)
            share_packed(model, load.shared, load.dtype)
        else:
            layers = dict(named_layers(model))
            waiting = {
                name: config for name, config in load.selected.items()
                if name in load.loaded | load.tied and kind_of(layers[name]) is not None
            }  # fmt: skip
            check_floats(model, waiting)
            if waiting:
                replace_layers(model, waiting)
        tie_packed(model, load.ties)
        keep_names(model)
        refuse_resizing(model)
        shard_as_asked(model, load.rules, load.where)
        return model


# Assigned directly: lowbit_autoload has put placeholders into both tables, which register_quantizer would refuse to replace.
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = LowBitConfig
auto.AUTO_QUANTIZER_MAPPING[METHOD] = LowBitQuantizer


class _Quantize(ConversionOps):
    """The loader's conversion step for the weight of a selected layer, which replaces it by a packed layer."""

    def __init__(self, selected: Mapping[str, LinearConfig | EmbeddingConfig | ConvConfig], loaded: set[str]):
        self._selected, self._loaded = selected, loaded

    def convert(self, input_dict: dict[str, Any], model: Any = None, missing_keys: Any = None, **_: Any) -> dict[str, Any]:
        waiting = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            path = name.removesuffix(".weight")
            is_bias = path not in self._selected and path.endswith(_BIAS)
            path = path.removesuffix(_BIAS) if is_bias else path
            layer: Any = layer_at(model, path)
            config = self._selected.get(path)
            self._loaded.add(path)
            if is_bias:  # experts waited for their bias
                weight, bias = layer.weight, weight
            else:
                weight = oriented(layer, weight)
                bias = getattr(layer, "bias", None)
            # A layer that cannot be packed yet waits for its other tensor, or for the end of loading, where an error is
            # reported to the caller.
            if config is None or "meta" in (weight.device.type, "" if bias is None else bias.device.type):
                waiting[name] = value
                continue
            try:
                packed = in_huge_pages(pack_layer(layer, config, weight, bias))
            except (TypeError, ValueError):
                waiting[name] = value
                continue
            put_packed(model, path, layer, packed, weight.dtype)._is_hf_initialized = True
            missing_keys.difference_update((name, path))
        return waiting


@contextmanager
def describing(model: torch.nn.Module) -> Iterator[None]:
    """A context around packing layers that enables saving and loading the packed models of transformers inside ``model``.

    Raises:
        ValueError: a model is already quantized by another method.
    """
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in models:
        present = getattr(part, "hf_quantizer", None)
        if present is not None and not isinstance(present, LowBitQuantizer):
            method = present.quantization_config.quant_method
            raise ValueError(f"{type(part).__name__} is quantized already, by the method {method!r}")
    before = [(part, expanded_ties(part)) for part in models]
    try:
        yield
    finally:  # an interrupted run leaves some layers packed and others float
        for part, ties in before:
            if not any(isinstance(layer, nn.Packed) for layer in part.modules()):
                continue
            tie_packed(part, ties)
            keep_names(part)
            refuse_resizing(part)
            inside = any(part is not other and part in other.modules() for other in models)
            if not inside:  # inner models are rarely saved separately, and may share the config of the outer one
                part.hf_quantizer = LowBitQuantizer(LowBitConfig.describing(part), pre_quantized=True)
                part.config.quantization_config = part.hf_quantizer.quantization_config
