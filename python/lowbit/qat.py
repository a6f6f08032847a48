"""Quantization-aware training: float layers that compute, differentiably, what packed layers will compute.

>>> import torch, lowbit
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
>>> _ = lowbit.qat.prepare_(model, lowbit.LinearConfig(bits=2, group_size=32))
>>> model(torch.randn(1, 64)).sum().backward()  # train it as any other model
>>> _ = lowbit.qat.convert_(model)
>>> model[0].info.bits
2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import torch

from .layers.convolutions import window_of
from .layers.embedding_layers import table_of
from .layers.packable import (
    as_linear,
    check_floats,
    check_layers,
    is_transposed,
    layer_at,
    leave_fused_paths,
    names_by_weight,
    replace_layers,
)
from .layers.prepared import Embedding, Linear, PreparedLayer, fake_quantize_activations, stored
from .layers.replacing import Prepared, class_of
from .nn import Packed
from .packed.rounding import EmbeddingConfig, LinearConfig
from .quantizing.quantize_model import choose_layers, described_to_transformers


def _trained_class(name: str, module: torch.nn.Module) -> type[PreparedLayer]:
    if class_of(module) is not type(module):
        raise ValueError(f"{name} has a parametrization, which lowbit.qat cannot train; give it the config None, or remove it")
    if table_of(module) is not None:
        return Embedding
    if window_of(module) is not None:
        raise ValueError(
            f"{name} is a convolution, which lowbit.qat cannot train; give it the config None "
            "(conv_bits=None of a LowBitConfig)"
        )
    linear = as_linear(module)
    if type(module) is torch.nn.Linear or (linear is not None and not is_transposed(linear)):
        return Linear
    if linear is not None:
        trained: type[PreparedLayer] = import_module("lowbit.hf.conv1d").TrainedConv1D
        return trained
    raise ValueError(f"{name} is a {type(module).__name__}, which lowbit.qat cannot train; give it the config None")


def prepare_(
    model: torch.nn.Module,
    config: LinearConfig | EmbeddingConfig | Mapping[str, LinearConfig | EmbeddingConfig | None],
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> torch.nn.Module:
    """Prepares a model for training with quantized weights and activations, in place.

    The chosen layers (transformers' ``Conv1D`` included) compute what the packed layers will: weights from the codes and
    scales that :func:`convert_` stores, and int8 activations per segment, in two planes with ``activation_bits=16``. Only the
    order of float sums differs. The weights remain the same float parameters; a straight-through estimator (Bengio et al.,
    2013) gives them gradients within the range of their group. Scales and mins become parameters too, ``weight_scale`` and
    ``weight_min``, one per group as in EfficientQAT (Chen et al., 2024), with the gradients of LSQ (Esser et al., Learned step
    size quantization, ICLR 2020) and LSQ+ (Bhalgat et al., 2020). Their initial values are those of :func:`lowbit.quantize_`,
    so converting an untrained model gives the same bytes.

    Train with any optimizer on any device; use no weight decay for scales. To save progress, save the state dict:
    ``save_pretrained`` before ``convert_`` writes a float model with the scales as extra tensors.

    Args:
        model, config, filter_fn: as for :func:`lowbit.quantize_`, on the CPU, with a symmetric or affine mapping.

    Returns:
        The model. Layers that share a weight share the scales.

    Raises:
        TypeError, ValueError: as :func:`lowbit.quantize_`, or layers are already packed or prepared. The model is then
            unchanged.
    """
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            if isinstance(module, Packed):
                raise ValueError(f"{name or 'model'} is packed already; expected a float model to prepare")
    selected = choose_layers(model, config, filter_fn)
    for name, chosen in selected.items():
        if chosen.mapping not in ("symmetric", "affine"):
            raise ValueError(f"{name} has mapping {chosen.mapping!r}; expected 'symmetric' or 'affine' for training")
    modules = {name: model.get_submodule(name) for name in selected}
    classes = {name: _trained_class(name, module) for name, module in modules.items()}
    check_layers({name: layer_at(model, name) for name in selected}, selected)
    for names in names_by_weight(modules).values():
        owner = None
        for name in names:
            module = modules[name]
            if not isinstance(module, Prepared):  # otherwise it was prepared under another name
                if isinstance(module, torch.nn.Embedding):
                    module._table = table_of(module)  # determined by the class, which the next line replaces
                module.__class__ = classes[name]  # keeps hooks, attributes and references to the module
                module.prepare(selected[name], owner)
            owner = owner or module
    leave_fused_paths(model)
    return model


def convert_(model: torch.nn.Module) -> torch.nn.Module:
    """Packs the trained layers that :func:`prepare_` prepared, in place.

    Args:
        model: on the CPU.

    Returns:
        The model. A shared weight is packed once; a model of transformers can be saved with ``save_pretrained``.

    Raises:
        TypeError, ValueError: nothing is prepared, or trained weights or scales are not finite or not on the CPU. The
            model is then unchanged.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, Prepared):
        raise TypeError("model is itself a prepared layer; convert_ takes the model that holds it")
    modules = {
        name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, PreparedLayer)
    }
    if not modules:
        packed = sum(isinstance(module, Packed) for module in model.modules())
        already = f"; {packed} are packed already" if packed else ""
        raise ValueError(f"the model has no layers that lowbit.qat.prepare_ has prepared{already}")
    selected = {name: module._config for name, module in modules.items()}
    for name, module in modules.items():
        for values, what in zip(module.grid(), ("weight_scale", "weight_min"), strict=True):
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ValueError(f"{name}.{what} has NaN or infinite values; expected finite values")
    check_floats(model, selected)
    check_layers({name: layer_at(model, name) for name in selected}, selected)
    with described_to_transformers(model):
        replace_layers(model, selected)
    return model


__all__ = ["Embedding", "Linear", "convert_", "fake_quantize_activations", "prepare_", "stored"]
