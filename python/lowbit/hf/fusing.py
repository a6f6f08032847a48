"""Makes lowbit compute attention, activation functions, norms and rotary positions in fewer passes: :func:`fuse_`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor

from . import masked, norms, planned_encoder, rotary
from .activations import Activation, is_activation, is_computed, kind_of
from .encoder_heads import is_chain


@dataclass
class FuseSummary:
    """What :func:`fuse_` replaced: the numbers of models with lowbit's attention, of activation functions, of norms, of
    attention layers with lowbit's rotary positions, and of dense layers of sentence-transformers that run row by row; and
    name -> reason for what was not replaced."""

    attention: int = 0
    activations: int = 0
    norms: int = 0
    rotary: int = 0
    dense: int = 0
    kept: dict[str, str] = field(default_factory=dict)


def fuse_(model: torch.nn.Module) -> FuseSummary:
    """Makes lowbit compute a model's attention, activation functions, norms and rotary positions, each in one pass.

    It changes the model. Use it for encoders and for language models that embed texts: attention skips padding, and with
    float32 layers a text's result does not depend on the other texts of its batch. It supports every transformers model that
    uses the attention interface, also inside a SentenceTransformer. Unrecognized modules are left unchanged. Calls with
    gradients and compiled code, which fuses such functions itself, use the original functions.

    Calls of an encoder with token ids and a padding mask run as a plan: one call of C++ that computes no padding, whose hidden
    states are 0. So do calls of a classifier, and of a SentenceTransformer with its pooling and the modules after it. The first
    such call makes the plan, and calls run the model's code if the model has none, or after a change.

    Args:
        model: any module, with packed or float layers, on the CPU.

    Returns:
        What was replaced, and why the rest was not.
    """
    summary = FuseSummary()
    transformers = import_module("transformers")
    masked.register()
    fused: list[torch.nn.Module] = []
    inner: set[int] = set()  # modules inside a model that was already handled
    for name, module in model.named_modules():
        if not isinstance(module, transformers.PreTrainedModel) or id(module) in inner:
            continue
        inner.update(id(child) for child in module.modules())
        before = module.config._attn_implementation
        reason = _refusal(module, before)
        if reason is None:
            module.set_attn_implementation(masked.ATTENTION)
            summary.attention += 1
            fused.append(module)
        else:
            summary.kept[name or type(module).__name__] = reason
    for name, module in list(model.named_modules()):
        if _is_dense(module):
            summary.dense += 1
            for part in (module.linear, module.activation_function):
                part.forward = functools.partial(_row_by_row, part)  # keep the module, which may be saved
            continue
        for child_name, child in list(module.named_children()):
            if isinstance(module, Activation) or not is_activation(child):
                continue
            kind = kind_of(child)
            if kind is None:
                summary.kept[f"{name}.{child_name}".lstrip(".")] = f"lowbit has no {type(child).__name__}"
            else:
                setattr(module, child_name, Activation(child, kind))
                summary.activations += 1
    summary.norms = len(norms.replace(model))
    summary.rotary = len(rotary.replace(model))
    for encoder in fused:
        planned_encoder.replace(encoder)
    for module in model.modules():
        if is_chain(module):
            planned_encoder.replace_chain(module)
    return summary


def _is_dense(module: torch.nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Dense" and kind.__module__.startswith("sentence_transformers.")


def _row_by_row(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Applies a float layer to embeddings one by one, because torch's product of several rows differs in the last bits."""
    forward = functools.partial(type(module).forward, module)
    if torch.compiler.is_compiling() or x.ndim != 2 or not len(x) or not is_computed(x, *module.parameters()):
        result: Tensor = forward(x)
        return result
    return torch.cat([forward(row.clone()) for row in x.split(1)])  # cloned, so that each row is aligned


def _refusal(model: torch.nn.Module, implementation: str) -> str | None:
    """Why a model keeps its attention; None if it can be replaced."""
    if not getattr(model, "_supports_sdpa", False):
        return "its attention is the model's own code, which transformers does not let others replace"
    if implementation == "eager":  # chosen by the user, as the model supports sdpa
        return "its attention is eager, which returns attentions; load the model with attn_implementation='sdpa'"
    if implementation not in ("sdpa", masked.ATTENTION):
        return f"its attention is {implementation}; expected sdpa"
    return None
