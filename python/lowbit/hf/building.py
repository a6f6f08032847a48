"""Builds models of transformers without weights from an untrusted config.json, and checks them against the files.

A model is built before its weights are read, and a config.json may describe one that fits no machine. So the number of modules
is bounded by the number of tensors in the files, and no memory is allocated until all shapes agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from ..files.config_json import CONFIG
from ..files.safetensors import Stored, float_name, packed_info
from ..layers.packable import layer_at
from ..machine.sizes import size
from .names import check_complete, given_by, given_with, names_in_model
from .placing import PACKED

_MOST_LAYERS = 10_000  # real models have up to some hundreds; configs make lists of this length
# "num_hidden_layers", "n_layer"; not "hidden_size_per_layer_input".
_LAYERS = re.compile(r"^([a-z]+_)*layers?$")


def check_numbers(config: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError if a number of layers in a config.json, at any depth, is above 10,000."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_numbers(value, file)
        elif isinstance(value, int | float) and value > _MOST_LAYERS and _LAYERS.match(name):
            raise ValueError(f"{file} has {name} {value}; expected at most {_MOST_LAYERS}")


@contextmanager
def bounded(tensors: int, file: Path) -> Iterator[None]:
    """A context for building a model on the meta device.

    Raises:
        ValueError: the model has far more modules than the files have tensors.
    """
    most, count = 1000 + 20 * tensors, 0  # activations, dropouts and blocks are modules without tensors

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise ValueError(
                f"{file} describes a model of more than {most} modules; the checkpoint's files have {tensors} tensors"
            )

    handle = torch_modules.register_module_module_registration_hook(counted)
    try:
        with torch.device("meta"):
            yield
    finally:
        handle.remove()


def check_fits(model: torch.nn.Module, tensors: Mapping[str, Stored], directory: Path) -> None:
    """Checks a model on the meta device against the float or packed tensors of its files, before memory is allocated.

    Raises:
        ValueError: a tensor of the files has another shape, tensors are missing, or the model's computed tables, which are
            in no file, exceed this machine's memory.
    """
    packed = {name for name in tensors if name.rpartition(".")[2] == PACKED}
    called = {float_name(name, tensors[name].shape) if name in packed else name: name for name in tensors}
    names, state = names_in_model(model, called), model.state_dict()
    given = given_by(names)
    for alias, (name, targets) in names.items():
        stored = tensors[called[alias]]
        if targets is not None or name not in state:
            continue
        shape = list(stored.shape)
        if stored.name in packed:
            info, layer = packed_info(stored), name.removesuffix(".weight")
            given |= given_with(layer, info)
            shape = list(info.shape)
            state[name] = getattr(layer_at(model, layer), "weight", state[name])  # [out, in], even if stored transposed
        expected = list(state[name].shape)
        if shape != expected:
            raise ValueError(f"{stored.name} in {stored.path} has shape {shape}; expected {expected}, as config.json says")
    check_complete(model, given, directory)
    tables = sum(buffer.nbytes for buffer in model.buffers())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if tables > memory:
        raise ValueError(
            f"{directory / CONFIG} describes a model whose tables take {size(tables)} in addition to its weights; "
            f"this machine has {size(memory)} of memory"
        )
