"""The quantization config of transformers models, :class:`LowBitConfig`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from glob import escape
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import nn
from ..files.config_json import METHOD as METHOD
from ..layers.expert_stacks import Experts
from ..layers.packable import check_whole_experts, float_convolutions, kind_of, named_layers
from ..layers.patterns import Patterns
from ..packed.rounding import ConvConfig, EmbeddingConfig, LinearConfig
from .names import tied_layers

FORMAT_VERSION = 2  # the newest version that is read; written only for models with act-order permutations
_WITHOUT_ORDERS = 1

_FIELDS = ("bits", "group_size", "mapping", "scale", "levels", "rotate", "activation_bits")
_DESCRIBED = ("bits", "group_size", "mapping", "rotate", "activation_bits")  # entries for each packed layer
BY_OVERRIDES = "left float by its configuration"
BY_CONV_BITS = "a convolution, which conv_bits of the configuration (--conv-bits) would pack"
BY_ARCHITECTURE = "the architecture keeps it in float32; an explicit override would pack it"
_NO_CHANGE: dict[str, Any] = {}


def _kept_in_float32(model: torch.nn.Module) -> re.Pattern[str] | None:
    """A pattern for names of tensors that an architecture keeps in float32, because its code may read them (T5's "wo").

    As in transformers, each entry matches one or several whole parts of a name ("indexer.weights_proj").
    """
    parts = [*(getattr(model, "_keep_in_fp32_modules", None) or ())]
    parts += [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    return re.compile("|".join(rf"((^|\.){part}($|\.))" for part in parts)) if parts else None


def _pairs(overrides: Any) -> list[Any]:
    if overrides is None:
        return []
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    if isinstance(overrides, list | tuple):
        return list(overrides)
    raise TypeError(f"overrides is a {type(overrides).__name__}; expected a dict of name patterns, or a list of pairs")


def _pair(entry: Any) -> list[Any]:
    if isinstance(entry, list | tuple) and len(entry) == 2:
        pattern, change = entry
        if isinstance(pattern, str) and (change is None or (isinstance(change, Mapping) and set(change) <= set(_FIELDS))):
            return [pattern, None if change is None else dict(change)]
        entry = f"{pattern!r}: {change!r}"
    raise TypeError(f"overrides has the entry {entry}; expected a name pattern and a dict of {', '.join(_FIELDS)}, or None")


def _fields_of(layer: nn.Packed) -> tuple[Any, ...]:
    info = layer.info
    return info.bits, info.group_size, info.mapping, info.rotated_inputs > 0, info.activation_bits


def _listed(levels: Any) -> Any:
    return levels if levels is None or isinstance(levels, str) else [int(level) for level in levels]


class LowBitConfig(QuantizationConfigMixin):
    """How to quantize a model of transformers.

    Quantized are all ``torch.nn.Linear`` and ``torch.nn.Embedding`` layers and experts stored in one tensor, which are named
    after the parameter, except for layers that the architecture keeps in float32. With ``conv_bits`` also convolutions
    (:func:`lowbit.quantize_` says which). A head tied to the embedding is quantized like the embedding.

    Args:
        bits, group_size, mapping, scale, levels, rotate, activation_bits: as in :class:`lowbit.LinearConfig`.
        embedding_bits: bits of embedding tables; None: ``bits``. Widths without levels (not 2, 3 or 4) are symmetric.
        overrides: maps shell-style patterns of qualified names to a dict with any of ``bits``, ``group_size``, ``mapping``,
            ``scale``, ``levels``, ``rotate`` and ``activation_bits``, or to None, which leaves the layer float. The last
            matching pattern wins. Example: ``{"lm_head": {"bits": 8}, "*embed*": None}``. A list of such pairs may contain a
            pattern twice. The attribute is a list of pairs, because config.json keeps the order of lists only.
        conv_bits: bits of convolutions, symmetric as above; None: they stay float, whatever an override says.

    Raises:
        TypeError, ValueError: a value that is not allowed.
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int | None = 32,
        mapping: str = "symmetric",
        scale: str = "mse",
        embedding_bits: int | None = None,
        overrides: Mapping[str, Mapping[str, Any] | None] | Iterable[tuple[str, Mapping[str, Any] | None]] | None = None,
        levels: str | Sequence[int] | torch.Tensor | None = None,
        conv_bits: int | None = None,
        rotate: bool = False,
        activation_bits: int = 8,
        **others: Any,
    ):
        # Other entries of a config.json. Unknown ones are refused, because they could change the meaning of its weights.
        method = others.pop("quant_method", METHOD)
        if method != METHOD:
            raise ValueError(f"quant_method is {method!r}; expected {METHOD!r}")
        version = others.pop("format_version", _WITHOUT_ORDERS)
        if isinstance(version, bool) or version not in (_WITHOUT_ORDERS, FORMAT_VERSION):
            raise ValueError(
                f"quantization_config has format_version {version!r}; this lowbit reads versions {_WITHOUT_ORDERS} and "
                f"{FORMAT_VERSION}. Install the lowbit that wrote it, or a later one."
            )
        if others:
            raise TypeError(f"LowBitConfig has no {', '.join(map(repr, others))}; it has {', '.join(_FIELDS)}, "
                            "embedding_bits, conv_bits and overrides")  # fmt: skip
        self.quant_method = METHOD
        self.format_version = version
        self.bits = bits
        self.group_size = group_size
        self.mapping = mapping
        self.scale = scale
        self.levels = levels
        self.rotate = rotate
        self.activation_bits = activation_bits
        self.embedding_bits = embedding_bits
        self.conv_bits = conv_bits
        for name, value in (("embedding_bits", embedding_bits), ("conv_bits", conv_bits)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} is {value!r}; expected an int or None")
        self.overrides = [_pair(entry) for entry in _pairs(overrides)]
        for kind in (LinearConfig, EmbeddingConfig, ConvConfig):
            self._layer_config(kind)
            for pattern, change in self.overrides:
                try:
                    self._layer_config(kind, change)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"overrides has {pattern!r}: {error}") from error
        # Checked above. Tensors and tuples become lists for config.json.
        self.levels = _listed(self.levels)
        self.overrides = [
            [pattern, change if not change or "levels" not in change else change | {"levels": _listed(change["levels"])}]
            for pattern, change in self.overrides
        ]

    def _layer_config(self, kind: type[Any], change: Mapping[str, Any] | None = _NO_CHANGE) -> Any:
        """The config of layers with these overrides; None: they stay float."""
        if change is None:
            return None
        fields = {name: getattr(self, name) for name in _FIELDS}
        if self.levels is not None and self.mapping == "symmetric":  # the default
            fields["mapping"] = "levels"
        if kind is ConvConfig and self.conv_bits is None:
            return None
        bits = self.embedding_bits if kind is EmbeddingConfig else self.conv_bits if kind is ConvConfig else None
        if bits is not None:
            fields["bits"] = bits
            if not 2 <= bits <= 4 and (self.levels is not None or self.mapping == "levels"):
                fields |= {"mapping": "symmetric", "levels": None}
        # An override of mapping or levels also resets the other if the two contradict each other.
        if change.get("mapping", "levels") != "levels":
            fields["levels"] = None
        if change.get("levels") is not None or ("levels" in change and fields["mapping"] == "levels"):
            fields["mapping"] = ""
        fields |= change
        if kind is ConvConfig and "bits" not in change and not 2 <= fields["bits"] <= 4 and fields["mapping"] in ("", "levels"):
            fields |= {"mapping": "symmetric", "levels": None}  # the change is meant for the linear layers that it matches
        return kind(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The config as a dict, without newer fields that have their default, so that older versions of lowbit can read it."""
        fields = dict(super().to_dict())
        for name, default in (("rotate", False), ("activation_bits", 8)):
            if fields[name] == default:
                del fields[name]
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        """The whole config: a diff would not record the defaults. transformers 5.0 calls this method, but lacks it."""
        return dict(self.to_dict())

    def select(self, model: torch.nn.Module, experts: bool = True) -> dict[str, LinearConfig | EmbeddingConfig | ConvConfig]:
        """The layers of a float model to quantize, by qualified name, as a config for :func:`lowbit.quantize_`.

        Args:
            experts: include experts that are stored in a parameter.
        """
        chosen, layers = self.choose(model, stacklevel=3)[0], dict(named_layers(model))
        return {name: config for name, config in chosen.items() if experts or not isinstance(layers[name], Experts)}

    def choose(
        self, model: torch.nn.Module, stacklevel: int = 2
    ) -> tuple[dict[str, LinearConfig | EmbeddingConfig | ConvConfig], dict[str, str]]:
        """The same as :meth:`select`, with the linear layers, embeddings and convolutions that stay float and the reason for
        each: ``BY_OVERRIDES``, ``BY_ARCHITECTURE``, or the kind of a convolution."""
        selected, unselected, overridden = {}, float_convolutions(model), set()
        patterns = Patterns((pattern, change) for pattern, change in self.overrides)
        modules = dict(named_layers(model))
        precise = _kept_in_float32(model)
        for name, module in modules.items():
            kind = kind_of(module)
            if kind is None:
                continue
            override = patterns.last(name)
            config = self._layer_config(kind, _NO_CHANGE if override is None else override[1])
            if override is not None:
                overridden.add(name)
            elif precise is not None and precise.search(f"{name}.weight"):
                unselected[name] = BY_ARCHITECTURE
                continue
            if config is None:
                unselected[name] = BY_CONV_BITS if kind is ConvConfig and self.conv_bits is None else BY_OVERRIDES
            else:
                selected[name] = config
        for head, table in tied_layers(model).items():
            if head not in overridden and isinstance(modules[table], torch.nn.Embedding) and head in selected:
                if table in selected:
                    kind = kind_of(modules[head])
                    assert kind is not None  # because it is selected
                    selected[head] = kind(**vars(selected[table]))
                elif table in overridden:
                    del selected[head]  # stays float, like the table that it is tied to
                    unselected[head] = BY_OVERRIDES
        check_whole_experts(modules, selected)
        patterns.warn_unused(f"linear layer or embedding of {type(model).__name__}", stacklevel)
        return selected, unselected

    @classmethod
    def describing(cls, model: PreTrainedModel) -> LowBitConfig:
        """The config of a model with packed layers. Layers that differ from the majority become overrides."""
        packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Packed)}
        convs = [layer.info.bits for layer in packed.values() if isinstance(layer, nn.Conv)]
        matrices = [layer for layer in packed.values() if not isinstance(layer, nn.Conv)] or packed.values()
        counted = Counter(map(_fields_of, matrices))
        conv_bits = convs[0] if convs else None
        common = counted.most_common(1)[0][0]
        head = model.get_output_embeddings()  # always gets an override: otherwise a tied head would follow its table
        overrides: list[tuple[str, dict[str, Any] | None]] = []
        for name, layer in named_layers(model):
            if name in packed:
                usual = (conv_bits, *common[1:]) if isinstance(layer, nn.Conv) else common
                fields = zip(_DESCRIBED, _fields_of(packed[name]), usual, strict=True)
                change = {field: value for field, value, other in fields if value != other}
                if change or layer is head:
                    overrides.append((escape(name), change))
            elif kind_of(layer) is not None and (conv_bits is not None or kind_of(layer) is not ConvConfig):
                overrides.append((escape(name), None))
        described = dict(zip(_DESCRIBED, common, strict=True))
        ordered = any(getattr(layer, "input_order", None) is not None for layer in packed.values())
        version = FORMAT_VERSION if ordered else _WITHOUT_ORDERS
        return cls(**described, overrides=overrides, conv_bits=conv_bits, format_version=version)
