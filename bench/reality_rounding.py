"""Simulations of bench/reality.py by hooks in float models: kinds of int8 activations, and bfloat16 in single parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import lowbit
import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Rounding = Callable[[Tensor], Tensor]

# Kinds of layers by the endings of their names.
KINDS = {
    "q, k, v": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "head": ("lm_head",),
}


def kind_of(name: str) -> str:
    return next(kind for kind, ends in KINDS.items() if name.rpartition(".")[2] in ends)


# ---- activations


def rows_with_zero_point(x: Tensor) -> Tensor:
    """Rounds each row to 255 steps between its smallest and largest value, with 0 in the range."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 255).clamp_min(1e-30)
    zero = (-low / step).round()
    return ((x / step + zero).round().clamp(0, 255) - zero) * step


def rows(x: Tensor) -> Tensor:
    """Rounds each row symmetrically to -127 to 127 steps."""
    step = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (x / step).round() * step


def blocks(size: int, group: int | None = None) -> Rounding:
    """Rounds each block of ``size`` inputs symmetrically; each group starts a new block."""

    def rounded(x: Tensor) -> Tensor:
        parts = x.split(group or x.shape[-1], dim=-1)
        return torch.cat([_cut(part, size) for part in parts], dim=-1) if group and group % size else _cut(x, size)

    return rounded


def _cut(x: Tensor, size: int) -> Tensor:
    k = x.shape[-1]
    return rows(torch.nn.functional.pad(x, (0, -k % size)).unflatten(-1, (-1, size))).flatten(-2)[..., :k]


def blocks_of(group: int) -> Rounding:
    """Rounds blocks of min(group, 64) inputs, cut from the start of each group."""
    return blocks(min(group, 64), group)


def rotated(rounding: Rounding, size: int | None = None) -> Rounding:
    """Rounds after a Hadamard rotation of each ``size`` inputs (None: the largest power of two that divides them), and rotates
    back."""

    def rounded(x: Tensor) -> Tensor:
        width = size or x.shape[-1] & -x.shape[-1]
        matrix = hadamard(width)
        turned = (x.unflatten(-1, (-1, width)) @ matrix).flatten(-2)
        return (rounding(turned).unflatten(-1, (-1, width)) @ matrix.T).flatten(-2)

    return rounded


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@contextmanager
def rounded_inputs(model: torch.nn.Module, layers: Mapping[str, Rounding]) -> Iterator[None]:
    """Rounds the inputs of the named layers."""
    with ExitStack() as hooks:
        for name, rounding in layers.items():

            def hook(module, arguments, rounding=rounding):
                return (rounding(arguments[0]), *arguments[1:])

            hooks.enter_context(_removing(model.get_submodule(name).register_forward_pre_hook(hook)))
        yield


@contextmanager
def _removing(handle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def noisy_embeddings(model: torch.nn.Module, size: float, seed: int) -> Iterator[None]:
    """Multiplies embeddings by 1 + ``size`` times a normal number."""
    generator = torch.Generator().manual_seed(seed)

    def hook(module, arguments, output):
        return output * (1 + size * torch.randn(output.shape, generator=generator))

    with _removing(model.get_input_embeddings().register_forward_hook(hook)):
        yield


# ---- bfloat16


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


PARTS = {
    "weights": "float weights: embedding, head and norms",
    "embedding": "output of the embedding",
    "linear": "outputs of linear layers",
    "norms": "outputs of norms",
    "keys": "keys and values, as a cache has them",
    "attention": "queries and the output of attention",
    "product": "the product in the MLP, input of down",
    "residual": "the residual stream",
    "logits": "logits",
}
MATRICES = {"matrices": "weights of linear layers"}  # only for float layers


@contextmanager
def in_bfloat16(model: torch.nn.Module, parts: set[str]) -> Iterator[None]:
    """Rounds some parts of a float32 model (Llama's or Gemma 3's) to bfloat16; everything else stays float32."""

    def of_output(module, arguments, output):
        return to_bfloat16(output)

    def of_input(module, arguments):
        return (to_bfloat16(arguments[0]), *arguments[1:])

    def in_place(module, arguments):  # in place, because the following sum adds to the same tensor
        arguments[0].copy_(to_bfloat16(arguments[0]))

    layers = model.model.layers
    with ExitStack() as stack:

        def after(module: torch.nn.Module) -> None:
            stack.enter_context(_removing(module.register_forward_hook(of_output)))

        matrices = {module.weight for module in layers.modules() if isinstance(module, torch.nn.Linear)}
        if "weights" in parts:
            stack.enter_context(_rounded_weights(set(model.parameters()) - matrices))
        if "matrices" in parts:
            stack.enter_context(_rounded_weights(matrices))
        if "embedding" in parts:
            after(model.get_input_embeddings())
        for module in model.modules():
            if "linear" in parts and isinstance(module, torch.nn.Linear | lowbit.nn.Linear) and module is not model.lm_head:
                after(module)
            if "norms" in parts and type(module).__name__.endswith("Norm"):
                after(module)
        if "product" in parts:
            for layer in layers:
                stack.enter_context(_removing(layer.mlp.down_proj.register_forward_pre_hook(of_input)))
        if "residual" in parts:
            for layer in layers:
                middle = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
                for norm in (layer.input_layernorm, middle):
                    stack.enter_context(_removing(norm.register_forward_pre_hook(in_place)))
            stack.enter_context(_removing(model.model.norm.register_forward_pre_hook(in_place)))
        if "logits" in parts:
            after(model.lm_head)
        stack.enter_context(_rounded_attention(model, "keys" in parts, "attention" in parts))
        yield


@contextmanager
def _rounded_weights(parameters: set[torch.nn.Parameter]) -> Iterator[None]:
    kept = {parameter: parameter.data for parameter in parameters}
    for parameter in kept:
        parameter.data = to_bfloat16(parameter.data)
    try:
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data


@contextmanager
def _rounded_attention(model: torch.nn.Module, keys: bool, others: bool) -> Iterator[None]:
    before = model.config._attn_implementation

    def attention(module, q, k, v, mask, **more):
        if keys:
            k, v = to_bfloat16(k), to_bfloat16(v)
        output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, to_bfloat16(q) if others else q, k, v, mask, **more)
        return to_bfloat16(output) if others else output, weights

    ALL_ATTENTION_FUNCTIONS["rounded"] = attention
    ALL_MASK_ATTENTION_FUNCTIONS["rounded"] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    model.set_attn_implementation("rounded")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
