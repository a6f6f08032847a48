"""Registers lowbit with diffusers, whose ``from_pretrained`` then quantizes models and loads packed ones.

diffusers imports this module when it first meets the method "lowbit" (``lowbit_autoload.imports``). With ``LOWBIT_AUTOLOAD=0``
importing it registers the method. The configuration is that of transformers.

>>> import diffusers, lowbit
>>> config = lowbit.LowBitConfig(bits=4, group_size=32)
>>> model = diffusers.FluxTransformer2DModel.from_pretrained(path, quantization_config=config)  # doctest: +SKIP
>>> model.save_pretrained("packed")  # from_pretrained("packed") loads it  # doctest: +SKIP
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..machine.imports import why_not

try:
    from diffusers.quantizers import auto
    from diffusers.quantizers.base import DiffusersQuantizer
except ImportError as error:
    raise ImportError(why_not("diffusers", error, "pip install diffusers accelerate")) from error

from ..files.safetensors import orders_of, packed_info, read_files
from ..layers.packable import check_floats, kind_of, named_layers, put_packed, replace_layers, warn_of_floats
from ..transformers import METHOD, LowBitConfig
from .placing import PACKED, OnCpu, verify


class _Method(str):
    """A method's name with the ``value`` attribute of diffusers' enumeration of methods."""

    @property
    def value(self) -> str:
        return str(self)


class LowBitDiffusersQuantizer(OnCpu, DiffusersQuantizer):
    """Packs a float model when it is loaded; loads packed layers from safetensors files."""

    quantization_config: LowBitConfig

    def __init__(self, quantization_config: LowBitConfig, **more: Any):
        super().__init__(quantization_config, **more)
        quantization_config.quant_method = _Method(METHOD)
        self._dtype = torch.get_default_dtype()
        self._files: list[Path] = []
        self._where: dict[str, str] = {}  # packed layer -> tensor and file, for errors

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        self._dtype = torch_dtype or torch.get_default_dtype()
        return self._dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Any) -> list[str]:
        files = checkpoint_files if isinstance(checkpoint_files, list | tuple) else [checkpoint_files]
        self._files = [Path(file) for file in files if os.fspath(file).endswith(".safetensors")]
        return loaded_keys

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **_: Any) -> None:
        if not self.pre_quantized:
            return
        tensors = read_files(self._files)
        orders = orders_of(tensors)
        packed = {name: stored for name, stored in tensors.items() if name.rpartition(".")[2] == PACKED}
        if not packed:
            raise ValueError(
                f"the checkpoint has no tensor .{PACKED}, but its config.json says quant_method {METHOD!r}; found "
                f"{len(tensors)} tensors in {len(self._files)} safetensors files"
            )
        layers = dict(named_layers(model))
        for name, stored in packed.items():
            layer_name, where = name.rpartition(".")[0], f"{name} in {stored.path}"
            layer, info = layers.get(layer_name), packed_info(stored)
            if layer is None or kind_of(layer) is None or info.shape != tuple(layer.weight.shape):
                actual = type(layer).__name__ if layer is not None else "no such layer"
                actual += f" of shape {list(layer.weight.shape)}" if layer is not None and kind_of(layer) is not None else ""
                raise ValueError(
                    f"{where} is packed, of shape {list(info.shape)}, but {type(model).__name__} has {actual} there; "
                    "expected a Linear or Embedding of that shape, as config.json says"
                )
            order = torch.empty(info.in_features, dtype=torch.int32, device="meta") if name in orders else None
            put_packed(model, layer_name, layer, info, self._dtype, order)
            self._where[layer_name] = where

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **_: Any) -> torch.nn.Module:
        if self.pre_quantized:
            verify(model, self._where)
            return model
        selected, left = self.quantization_config.choose(model)
        if not selected:
            raise ValueError(f"quantization_config selects no layer of {type(model).__name__}")
        check_floats(model, selected)
        warn_of_floats(model, selected, set(), left, stacklevel=3)
        replace_layers(model, selected)
        return model

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False  # adapters are peft's, but diffusers chooses their targets by its own classes

    @property
    def is_compileable(self) -> bool:
        return True


# Assigned directly, because lowbit_autoload has put placeholders into both tables.
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = LowBitConfig
auto.AUTO_QUANTIZER_MAPPING[METHOD] = LowBitDiffusersQuantizer

__all__ = ["LowBitConfig", "LowBitDiffusersQuantizer"]
