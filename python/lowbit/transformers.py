"""Hugging Face transformers: ``from_pretrained`` quantises, and loads what is quantised.

Importing this module, or using ``lowbit.LowBitConfig``, registers the method "lowbit" with transformers.

>>> import lowbit, transformers
>>> config = lowbit.LowBitConfig(bits=4, group_size=32)
>>> model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config)  # doctest: +SKIP
"""

from __future__ import annotations

import os
import re
import uuid
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from . import nn, ops
from ._safetensors import Stored, read_files, read_metadata
from .checkpoint import packed_info
from .memory import in_huge_pages
from .quantize import EmbeddingConfig, LinearConfig, quantize_, quantize_tensor

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        ConversionOps,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        f"transformers is not installed, or too old: {error}. Install it with `pip install 'transformers>=5'`."
    ) from error

METHOD = "lowbit"
FORMAT_VERSION = 1
PACKED = "packed_weight"
_SAVE = "lowbit_save"

_KINDS = {torch.nn.Linear: LinearConfig, torch.nn.Embedding: EmbeddingConfig}
_FIELDS = ("bits", "group_size", "mapping", "scale")


@register_quantization_config(METHOD)
class LowBitConfig(QuantizationConfigMixin):
    """How to quantise a model of transformers.

    All ``torch.nn.Linear`` and ``torch.nn.Embedding`` layers are quantised, but those that the architecture keeps in
    float32. A head that shares the embedding's weight is quantised as the embedding is.

    Args:
        bits, group_size, mapping, scale: as in :class:`lowbit.LinearConfig`.
        embedding_bits: of embedding tables; None: ``bits``.
        overrides: shell-style patterns of qualified names to what differs there, a dict with any of ``bits``,
            ``group_size``, ``mapping`` and ``scale``, or to None, which leaves the layer as it is. The last pattern
            that matches counts. ``{"lm_head": {"bits": 8}, "*embed*": None}``

    Raises:
        TypeError, ValueError: a value that is none of these.
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int | None = 32,
        mapping: str = "symmetric",
        scale: str = "mse",
        embedding_bits: int | None = None,
        overrides: Mapping[str, Mapping[str, Any] | None] | None = None,
        **others: Any,
    ):
        # What a config.json has besides; unknown entries could change what its weights mean.
        method = others.pop("quant_method", METHOD)
        if method != METHOD:
            raise ValueError(f"quant_method is {method!r}; expected {METHOD!r}")
        version = others.pop("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"quantization_config has format_version {version!r}; this lowbit reads version {FORMAT_VERSION}. "
                "Install the lowbit that wrote it, or a later one."
            )
        if others:
            raise TypeError(f"LowBitConfig has no {', '.join(map(repr, others))}; it has {', '.join(_FIELDS)}, "
                            "embedding_bits and overrides")  # fmt: skip
        if overrides is not None and not isinstance(overrides, Mapping):
            raise TypeError(f"overrides is a {type(overrides).__name__}; expected a dict of name patterns")
        self.quant_method = METHOD
        self.format_version = FORMAT_VERSION
        self.bits = bits
        self.group_size = group_size
        self.mapping = mapping
        self.scale = scale
        self.embedding_bits = embedding_bits
        self.overrides = {
            pattern: None if value is None else dict(value) if isinstance(value, Mapping) else value
            for pattern, value in (overrides or {}).items()
        }
        for kind in _KINDS.values():
            self._layer_config(kind)
            for pattern in self.overrides:
                self._layer_config(kind, pattern)

    def _layer_config(self, kind: type, pattern: str | None = None) -> LinearConfig | EmbeddingConfig | None:
        """The config of layers that `pattern` (or none) matches."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        if kind is EmbeddingConfig and self.embedding_bits is not None:
            fields["bits"] = self.embedding_bits
        if pattern is not None:
            override = self.overrides[pattern]
            if override is None:
                return None
            if not isinstance(pattern, str) or not isinstance(override, dict) or not set(override) <= set(_FIELDS):
                raise TypeError(
                    f"overrides has the entry {pattern!r}: {override!r}; expected a name pattern and a dict of "
                    f"{', '.join(_FIELDS)}, or None"
                )
            fields |= override
        return kind(**fields)

    def select(self, model: torch.nn.Module) -> dict[str, LinearConfig | EmbeddingConfig]:
        """The layers of a float model to quantise, by qualified name: a config for :func:`lowbit.quantize_`."""
        selected, overridden, unused = {}, set(), set(self.overrides)
        modules = dict(model.named_modules(remove_duplicate=False))
        # Layers that an architecture computes in float32, whose weights its code reads (T5's "wo").
        precise = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
        precise |= {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
        for name, module in modules.items():
            # Exact types: a subclass may use its weight in its own way (a scaled embedding does).
            kind = _KINDS.get(type(module))
            if kind is None:
                continue
            matching = [pattern for pattern in self.overrides if fnmatchcase(name, pattern)]
            unused.difference_update(matching)
            config = self._layer_config(kind, matching[-1] if matching else None)
            if matching:
                overridden.add(name)
            elif precise & set(name.split(".")):
                continue
            if config is not None:
                selected[name] = config
        for head, table in _ties(model).items():
            if head not in overridden and isinstance(modules[table], torch.nn.Embedding) and head in selected:
                if table in selected:
                    selected[head] = _KINDS[type(modules[head])](**vars(selected[table]))
                elif table in overridden:
                    del selected[head]  # left as it is, as its table is
        for pattern in sorted(unused):
            what = f"no linear layer or embedding of {type(model).__name__}"
            warnings.warn(f"the pattern {pattern!r} matches {what}", stacklevel=2)
        return selected


def _ties(model: torch.nn.Module) -> dict[str, str]:
    """Linear layers and embeddings that take their weight from another one, each with that one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    ties = {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        names = target.removesuffix(".weight"), source.removesuffix(".weight")
        if all(type(modules.get(name)) in _KINDS for name in names):
            ties[names[0]] = names[1]
    return ties


def names_in_model(model, keys: Iterable[str]) -> dict[str, tuple[str, tuple[str, ...] | None]]:
    """What transformers calls the tensors of a checkpoint.

    Returns:
        For each name in the files the name in the model, and None; or, where transformers computes tensors of the model
        from several of the file or the other way round, the names of what it computes.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    names = {}
    for key in sorted(keys, key=dot_natural_key):  # in the loader's order, which some renamings rely on
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        targets = None
        if pattern is not None:
            patterns = by_pattern[pattern].target_patterns
            targets = tuple(name.replace(patterns[0], target) for target in patterns)
        names[key] = (name, targets)
    return names


def given_by(names: Mapping[str, tuple[str, tuple[str, ...] | None]]) -> set[str]:
    """The tensors of the model that a checkpoint gives it; `names` from :func:`names_in_model`."""
    return {given for name, targets in names.values() for given in (targets or (name,))}


def check_complete(model, given: set[str], where: Path) -> None:
    """Refuses a checkpoint that does not give the float `model` all that it needs.

    Raises:
        ValueError: it does not.
    """
    tied = model.all_tied_weights_keys
    given = given | {target for target, source in tied.items() if source in given}
    given |= {source for target, source in tied.items() if target in given}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    needed = model.state_dict().keys()
    missing = [name for name in needed if name not in given and not any(each.search(name) for each in ignored)]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"{where} lacks {len(missing)} of the {len(needed)} tensors of {type(model).__name__}: {shown}. A shard, "
            "or its entry in the index, is missing: copy all files again."
        )


def place_packed(
    model, packed: Mapping[str, tuple[str, ops.PackedInfo]], floats: set[str], dtype: torch.dtype
) -> dict[str, tuple[str, torch.nn.Module]]:
    """Replaces layers of a float model on the meta device by packed ones, as a checkpoint has them.

    Args:
        packed: layer -> where it comes from (for errors), and the description of its weight.
        floats: the float tensors that the checkpoint has, as the model calls them.
        dtype: that the embeddings give.

    Returns:
        Layers that take their weight from a packed one -> that one, and the float layer. Until :func:`share_packed`
        something without state stands in their place, so that a loader does not miss their weights.

    Raises:
        ValueError: the model has no such layer, or one of another shape.
    """
    ties = _ties(model)
    floats_of = dict(model.named_modules(remove_duplicate=False))
    for name, (where, info) in packed.items():
        layer = floats_of.get(name)
        if type(layer) not in _KINDS:
            found = "no such layer" if layer is None else f"a {type(layer).__name__}"
            raise ValueError(
                f"{where} is packed, but {type(model).__name__} has {found} there; expected Linear or Embedding"
            )
        _check_fits(where, info, layer)
        model.set_submodule(name, nn.in_place_of(layer, info, dtype))
    shared = {}
    for target, source in ties.items():
        if target not in packed and source not in packed:
            continue
        without, owner = (target, source) if source in packed else (source, target)
        if without not in packed and f"{without}.weight" not in floats:
            where, info = packed[owner]
            _check_fits(where, info, floats_of[without])
            shared[without] = owner, floats_of[without]
            model.set_submodule(without, torch.nn.Identity())
    changed = packed.keys() | shared.keys()
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if target.rpartition(".")[0] not in changed and source.rpartition(".")[0] not in changed
    }
    return shared


def _check_fits(where: str, info: ops.PackedInfo, layer: torch.nn.Module) -> None:
    found, expected = [info.out_features, info.in_features], list(layer.weight.shape)
    if isinstance(layer, torch.nn.Linear) and info.has_bias != (layer.bias is not None):
        found.append("with a bias" if info.has_bias else "without a bias")
        expected.append("without a bias" if info.has_bias else "with a bias")
    if found != expected:
        raise ValueError(
            f"{where} has weights {found}; expected {expected}, as config.json says. The files do not belong together: "
            "quantise again."
        )


def share_packed(model, shared: Mapping[str, tuple[str, torch.nn.Module]], dtype: torch.dtype) -> None:
    """Puts a packed layer where :func:`place_packed` has left one out."""
    for name, (owner, layer) in shared.items():
        model.set_submodule(name, nn.in_place_of(layer, model.get_submodule(owner).packed_weight, dtype))


def _verify(model, where: Mapping[str, str]) -> None:
    """Checks all bytes of all packed weights against their checksums, on as many threads as torch has."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)}

    def check(name: str) -> None:
        try:
            layers[name].info = ops.verify(layers[name].packed_weight)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where.get(name, name)}: {error}. The file was damaged: copy it, or quantise, again."
            ) from error

    names = sorted(layers, key=lambda name: -layers[name].packed_weight.numel())
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(check, names):
            pass


def _mark_initialised(model, layers: Iterable[str]) -> None:
    # Some architectures initialise the weights of a layer from the module around it (T5's attention).
    for name in layers:
        parent = model.get_submodule(name.rpartition(".")[0])
        if not parent._parameters and not parent._buffers:
            parent._is_hf_initialized = True


def _expanded_ties(model) -> dict[str, dict[str, str]]:
    """For each part of a model that is a model itself: its tied tensors, target -> source."""
    return {
        name: part.get_expanded_tied_weights_keys(all_submodels=False)
        for name, part in model.named_modules()
        if hasattr(part, "get_expanded_tied_weights_keys")
    }


def _tie_packed(model, expanded: dict[str, dict[str, str]]) -> None:
    """Names tied tensors as they are after quantisation, where transformers looks when it ties and saves."""

    def layer_of(part: torch.nn.Module, tensor: str) -> torch.nn.Module:
        return part.get_submodule(tensor.rpartition(".")[0])

    for name, ties in expanded.items():
        part = model.get_submodule(name)
        kept = {}
        for target, source in ties.items():
            first, second = layer_of(part, target), layer_of(part, source)
            packed = [isinstance(layer, nn.Linear | nn.Embedding) for layer in (first, second)]
            if all(packed) and first.packed_weight is second.packed_weight:
                kept[target.removesuffix("weight") + PACKED] = source.removesuffix("weight") + PACKED
            elif not any(packed):
                kept[target] = source
        if kept != ties:
            part._tied_weights_keys = kept
            part.all_tied_weights_keys = part.get_expanded_tied_weights_keys(all_submodels=True)


@register_quantizer(METHOD)
class LowBitQuantizer(HfQuantizer):
    """Quantises tensor by tensor while a float checkpoint is loaded, and loads packed ones as they are mapped."""

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
        # In every shard of a save the same: what a killed save leaves of an older one must not pass for a part of it.
        return None, {_SAVE: uuid.uuid4().hex}

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model, dtype=None, checkpoint_files=None, **kwargs):
        self._dtype = dtype or torch.get_default_dtype()
        self._ties = _expanded_ties(model)
        self._selected, self._shared, self._where = {}, {}, {}
        files = [Path(file) for file in checkpoint_files or () if os.fspath(file).endswith(".safetensors")]
        tensors = read_files(files)
        packed = {name: stored for name, stored in tensors.items() if name.rpartition(".")[2] == PACKED}
        self._check_files(files, tensors, packed)

        # Packed weights are called as the float ones would be, so that transformers' rules for names apply.
        aliases = {name.removesuffix(PACKED) + "weight" if name in packed else name: name for name in tensors}
        names = names_in_model(model, aliases)
        given, placed = given_by(names), {}
        layers = dict(model.named_modules(remove_duplicate=False))
        whole = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
        for alias, (name, _) in names.items():
            stored, layer = packed.get(aliases[alias]), name.removesuffix(".weight")
            # A class other than the checkpoint's may lack a head, or have another one.
            if stored is not None and (whole or layer in layers):
                self._where[layer] = f"{stored.name} in {stored.path}"
                placed[layer] = self._where[layer], packed_info(stored)
        if files and whole:
            with_bias = {layer for layer, (_, info) in placed.items() if info.has_bias}
            with_bias |= {target for target, source in _ties(model).items() if source in with_bias}
            check_complete(model, given | {f"{layer}.bias" for layer in with_bias}, files[0].parent)

        if self.pre_quantized:
            floats = given - {f"{layer}.weight" for layer in placed}
            self._shared = place_packed(model, placed, floats, self._dtype)
            _mark_initialised(model, placed)
            return
        self._selected = self.quantization_config.select(model)
        if not self._selected:
            raise ValueError(f"quantization_config selects no layer of {type(model).__name__}")
        self._tied = {name for pair in _ties(model).items() for name in pair}
        _mark_initialised(model, self._selected)
        for key, (name, targets) in names.items():
            layer = name.removesuffix(".weight")
            if targets is None and layer in self._selected and name.endswith(".weight"):
                expected = tuple(layers[layer].weight.shape)
                if tensors[key].shape != expected:
                    raise ValueError(
                        f"{key} in {tensors[key].path} has shape {list(tensors[key].shape)}; expected "
                        f"{list(expected)}, as config.json says"
                    )

    def _check_files(self, files: list[Path], tensors: dict[str, Stored], packed: dict[str, Stored]) -> None:
        saves = {path: read_metadata(path).get(_SAVE) for path in files}
        if len(set(saves.values())) > 1:
            raise ValueError(
                f"{', '.join(path.name for path in saves)} in {files[0].parent} are of different saves: one was "
                "interrupted. Save again, into a new directory."
            )
        if self.pre_quantized and not packed:
            raise ValueError(
                f"the checkpoint has no tensor .{PACKED}, but its config.json says quant_method {METHOD!r}; found "
                f"{len(tensors)} tensors in {len(files)} safetensors files"
            )
        if packed and not self.pre_quantized:
            raise ValueError(
                f"{next(iter(packed.values())).path} has packed weights, but the checkpoint's config.json has no "
                "quantization_config; quantise again, or load without one"
            )
        for name in packed:
            both = name.removesuffix(PACKED) + "weight"
            if both in tensors:
                raise ValueError(
                    f"{tensors[both].path} and {packed[name].path} have {both} and {name}; expected one of them"
                )

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        layer, _, leaf = param_name.rpartition(".")
        # Tied weights wait until they are tied: then they are packed once.
        return leaf == "weight" and layer in self._selected and layer not in self._tied

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.pre_quantized:
            _verify(model, self._where)
            share_packed(model, self._shared, self._dtype)
        else:
            left = {
                name: config for name, config in self._selected.items() if type(model.get_submodule(name)) in _KINDS
            }
            if left:
                quantize_(model, left)
        _tie_packed(model, self._ties)
        del self._ties, self._shared, self._where, self._selected
        return model


class _Quantize(ConversionOps):
    """What the loader does with the weight of a selected layer: the layer becomes a packed one."""

    def __init__(self, quantizer: LowBitQuantizer):
        self._quantizer = quantizer

    def convert(self, input_dict, model=None, missing_keys=None, **kwargs):
        left = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            path = name.removesuffix(".weight")
            layer = model.get_submodule(path)
            config = self._quantizer._selected.get(path)
            bias = getattr(layer, "bias", None)
            # What cannot be packed now is left to the end, where its bias is there, or the error reaches the caller.
            if config is None or (bias is not None and bias.device.type == "meta"):
                left[name] = value
                continue
            try:
                packed = in_huge_pages(quantize_tensor(weight, config, bias=bias))
            except (TypeError, ValueError):
                left[name] = value
                continue
            quantised = nn.in_place_of(layer, packed, weight.dtype)
            quantised._is_hf_initialized = True
            model.set_submodule(path, quantised)
            missing_keys.discard(name)
        return left
