"""Which float layers a packed module can replace, and what the module keeps of them: hooks, mode, attributes and dtype."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.utils.parametrize import type_before_parametrizations

from .packed_module import Packed

# Subclasses of torch.nn.Linear that compute the same, but for rounding: the first rounds the product before it adds the bias,
# the second, of openai-whisper, converts its weight to the input's dtype.
LINEARS = frozenset({"transformers.models.falcon.modeling_falcon.FalconLinear", "whisper.model.Linear"})

# The hook dicts that move to the packed layer. They are not copied, because a hook's handle removes it from its dict.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def class_of(module: object) -> type:
    """The class of a module; if a parametrization computes its weight, the class that it had before."""
    kind: type = type_before_parametrizations(module)
    return kind


def class_name(module: object) -> str:
    """The qualified name of :func:`class_of`."""
    kind = class_of(module)
    return f"{kind.__module__}.{kind.__qualname__}"


class Prepared:
    """A float layer prepared by :func:`lowbit.qat.prepare_`: it computes what the packed layer will compute."""

    def pack(self, bias: torch.Tensor | None) -> torch.Tensor:
        """uint8 [bytes], as :func:`lowbit.pack`."""
        raise NotImplementedError

    def as_linear(self) -> torch.nn.Linear | None:
        """The equivalent torch.nn.Linear of a prepared layer of another class; None for a torch.nn.Linear or an embedding."""
        return None


def refuse_subclass(layer: torch.nn.Linear) -> None:
    """Raises TypeError for a subclass of torch.nn.Linear that may compute something else."""
    # Parametrized layers and the output projection of torch.nn.MultiheadAttention inherit the forward method.
    same = type(layer).forward is torch.nn.Linear.forward or class_name(layer) in LINEARS
    if not same:
        raise TypeError(f"a {type(layer).__name__} may use its weight in its own way; expected a torch.nn.Linear")


def refuse_prepared_layer(layer: torch.nn.Module) -> None:
    """Raises TypeError for a layer prepared for training: its learned scales would be lost."""
    if isinstance(layer, Prepared):
        raise TypeError(
            f"the {type(layer).__name__} is prepared for training; lowbit.qat.convert_ packs it, in the model that holds it"
        )


def refuse_hooked_weights(layer: torch.nn.Module, prefix: str = "") -> None:
    """Raises ValueError if a hook computes the layer's weight or bias before each call, as torch.nn.utils.weight_norm does."""
    for name in ("weight", "bias"):
        if isinstance(layer.__dict__.get(name), Tensor):  # a parameter would not be in __dict__
            raise ValueError(
                f"{prefix}{name} is not a parameter: a hook computes it before each call, as weight_norm, spectral_norm and "
                "pruning do; make it one first (torch.nn.utils.remove_weight_norm, remove_spectral_norm, prune.remove)"
            )


def dtype_of(layer: torch.nn.Module) -> torch.dtype:
    return torch.float32 if layer.weight.dtype == torch.float64 else layer.weight.dtype


def take_place(packed: torch.nn.Module, layer: torch.nn.Module) -> None:
    """Copies hooks, mode and user-set attributes of ``layer`` to ``packed``, which replaces it."""
    packed.train(layer.training)
    if "forward" in layer.__dict__ and isinstance(packed, Packed):
        warnings.warn(
            f"a {type(layer).__name__} has a forward of its own, set on the layer; the packed layer in its place does not "
            "have it",
            stacklevel=2,
        )
    for name in _HOOKS:
        packed.__dict__[name] = layer.__dict__[name]
    for name, value in layer.__dict__.items():
        # Not "forward": libraries that wrap it (accelerate) would keep computing with the float weight.
        if not name.startswith("_") and name != "forward" and not hasattr(packed, name):
            setattr(packed, name, value)
