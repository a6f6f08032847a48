"""Training before packing: float layers that compute, with gradients, what packed layers will.

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

import torch

from .embeddings import table_of
from .layers import Prepared, as_linear, check_layers, layer_at, leave_fused_paths, names_by_weight, replace_layers
from .nn import Packed
from .prepared import KINDS, Embedding, Layer, Linear, fake_quantize_activations, stored
from .quantize import EmbeddingConfig, LinearConfig
from .quantize_model import choose_layers, described_to_transformers, know_transformers


def _kind(name: str, module: torch.nn.Module) -> type:
    if type(module) in KINDS:
        return KINDS[type(module)]
    if table_of(module) is not None:
        return Embedding
    if isinstance(module, torch.nn.Linear) and as_linear(module) is not None:  # FalconLinear
        return Linear
    raise ValueError(f"{name} is a {type(module).__name__}, which lowbit.qat cannot train; give it the config None")


def prepare_(
    model: torch.nn.Module,
    config: LinearConfig | EmbeddingConfig | Mapping[str, LinearConfig | EmbeddingConfig | None],
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> torch.nn.Module:
    """Prepares a model for training with quantized weights and activations, in place.

    The chosen layers, transformers' ``Conv1D`` among them, compute what packed ones will: weights from the very codes
    and scales that :func:`convert_` stores, activations int8 per segment. Only the order of float sums differs. Their
    weights stay float parameters, the same objects, and get gradients straight through the rounding (Bengio et al.,
    2013) where they are within the range of their group. Scales and mins are parameters too, ``weight_scale`` and
    ``weight_min``, with the gradients of LSQ (Esser et al., Learned step size quantization, ICLR 2020) and LSQ+ (Bhalgat et
    al., 2020), one for each group as in EfficientQAT (Chen et al., 2024). They begin as :func:`lowbit.quantize_` chooses
    them, so that a model that is converted without training has the same bytes.

    Any optimizer trains it, on any device; scales want no weight decay. Checkpoints of training are state dicts: what
    ``save_pretrained`` writes before ``convert_`` is a float model with the scales beside it.

    Args:
        model, config, filter_fn: as for :func:`lowbit.quantize_`, on the CPU; symmetric or affine.

    Returns:
        The model. What shares a weight shares the scales.

    Raises:
        TypeError, ValueError: as :func:`lowbit.quantize_`; or layers that are packed or prepared already. The model is
            then unchanged.
    """
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            if isinstance(module, Packed):
                raise ValueError(f"{name or 'model'} is packed already; expected a float model to prepare")
    know_transformers()
    selected = choose_layers(model, config, filter_fn)
    for name, chosen in selected.items():
        if chosen.mapping not in ("symmetric", "affine"):
            raise ValueError(f"{name} has mapping {chosen.mapping!r}; expected 'symmetric' or 'affine' for training")
    modules = {name: model.get_submodule(name) for name in selected}
    kinds = {name: _kind(name, module) for name, module in modules.items()}
    check_layers({name: layer_at(model, name) for name in selected}, selected)
    for names in names_by_weight(modules).values():
        owner = None
        for name in names:
            module = modules[name]
            if not isinstance(module, Prepared):  # else it is there under several names
                if isinstance(module, torch.nn.Embedding):
                    module._table = table_of(module)  # its class is about to go
                module.__class__ = kinds[name]  # keeps its hooks, its attributes, and who else refers to it
                module.prepare(selected[name], owner)
            owner = owner or module
    leave_fused_paths(model)
    return model


def convert_(model: torch.nn.Module) -> torch.nn.Module:
    """Packs the layers that :func:`prepare_` prepared, in place: the layers of :func:`lowbit.quantize_`, as trained.

    Args:
        model: on the CPU.

    Returns:
        The model. What shares a weight is packed once; a model of transformers can be saved with ``save_pretrained``.

    Raises:
        TypeError, ValueError: nothing is prepared, or trained weights or scales are not finite or not on the CPU. The
            model is then unchanged.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, Prepared):
        raise TypeError("model is itself a prepared layer; convert_ takes the model that holds it")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Layer)}
    if not modules:
        packed = sum(isinstance(module, Packed) for module in model.modules())
        found = f"; {packed} are packed already" if packed else ""
        raise ValueError(f"the model has no layers that lowbit.qat.prepare_ has prepared{found}")
    selected = {name: module._config for name, module in modules.items()}
    for name, module in modules.items():
        for values, what in zip(module.grid(), ("weight_scale", "weight_min"), strict=True):
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ValueError(f"{name}.{what} has NaN or infinite values; expected finite values")
    check_layers({name: layer_at(model, name) for name in selected}, selected)
    with described_to_transformers(model):
        replace_layers(model, selected)
    return model


__all__ = ["Embedding", "Linear", "convert_", "fake_quantize_activations", "prepare_", "stored"]
