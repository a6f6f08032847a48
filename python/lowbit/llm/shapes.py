"""Random models with the shapes of well-known language models, for speed measurements."""

from __future__ import annotations

import copy
import functools
import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..machine.memory import in_huge_pages
from ..packed.matrix import pack
from ..packed.rounding import EmbeddingConfig, LinearConfig
from ..quantizing.quantize_model import described_to_transformers

_LLAMA_3 = {
    "vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


def _llama_3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


# Name -> configuration class of transformers, and its arguments.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("LlamaConfig", _LLAMA_3 | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
        "tie_word_embeddings": True, "rope_parameters": _llama_3_rope(32.0),
    }),
    "llama-3.2-3b": ("LlamaConfig", _LLAMA_3 | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128,
        "tie_word_embeddings": True, "rope_parameters": _llama_3_rope(32.0),
    }),
    "llama-3.1-8b": ("LlamaConfig", _LLAMA_3 | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128,
        "tie_word_embeddings": False, "rope_parameters": _llama_3_rope(8.0),
    }),
    "qwen3-0.6b": ("Qwen3Config", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "bos_token_id": 151643, "eos_token_id": 151645,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }),
}  # fmt: skip

NAMES = tuple(_SHAPES)
_LAYERS = (torch.nn.Linear, torch.nn.Embedding)


def shape_config(name: str) -> Any:
    """The transformers configuration of a shape: "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b" or "qwen3-0.6b".

    Raises:
        ValueError: an unknown name.
        ImportError: transformers is not installed.
    """
    if name not in _SHAPES:
        raise ValueError(f"there is no shape {name!r}; expected one of {', '.join(NAMES)}")
    kind, arguments = _SHAPES[name]
    return getattr(import_module("transformers"), kind)(**arguments)


def _skeleton(config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """A model whose linear layers and embeddings are on the meta device; other parameters are 1, biases 0."""
    with torch.device("meta"):
        model = import_module("transformers").AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # the first 5.x versions of transformers do not
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                # Rotary embeddings compute their buffers from the configuration.
                setattr(module, name, type(child)(config))
        if not isinstance(module, _LAYERS):
            for name, parameter in list(module.named_parameters(recurse=False)):
                fill = 0.0 if name == "bias" else 1.0
                value = torch.full(parameter.shape, fill, dtype=dtype)
                setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    return model.eval()


def _random_packed(
    pool: Tensor, n: int, k: int, bias: bool, config: LinearConfig | EmbeddingConfig, generator: torch.Generator
) -> Tensor:
    """Packed weights [n, k] of mean 0 and a variance of about 1 / k, with codes from a random part of the pool."""
    offset = int(torch.randint(pool.numel() - n * k + 1, (), generator=generator))
    codes = pool[offset : offset + n * k].view(n, k)
    groups = 1 if config.group_size is None else -(-k // config.group_size)
    affine = config.mapping == "affine"
    variance = 1.0 if config.bits == 1 and not affine else (4**config.bits - 1) / 12  # of weights at a scale of 1
    scales = torch.rand(n, groups, generator=generator).add_(0.5).div_(math.sqrt(variance * k))
    if affine:
        mins = scales * (-((1 << config.bits) - 1) / 2)
    else:  # scales of both signs, because the mean of symmetric codes is not 0
        mins = None
        scales *= torch.randint(2, scales.shape, generator=generator).mul_(2).sub_(1)
    return pack(
        codes,
        scales,
        mins,
        torch.zeros(n) if bias else None,
        bits=config.bits,
        group_size=config.group_size,
        mapping=config.mapping,
        rotated_inputs=config.rotated_inputs(k),
        activation_bits=config.activation_bits,
    )


def random_model(
    shape: str | Any,
    linear: LinearConfig | None,
    embedding: EmbeddingConfig | None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> torch.nn.Module:
    """A language model with random weights, made in packed form without a float model.

    Weights have mean 0 and a variance of about 1 / in_features, norms are 1, so that activations stay in a normal range. The
    model can be saved and loaded like any packed model.

    Args:
        shape: a name, as for :func:`shape_config`, or a configuration of transformers.
        linear, embedding: how weights are packed; None: floats of ``dtype``. A tied head shares the table's buffer.
        dtype: the dtype of activations and of unpacked parameters: float32, bfloat16 or float16.
        seed: the seed of the weights.

    Raises:
        ValueError: an unknown name.
        ImportError: transformers is not installed.
    """
    config = shape_config(shape) if isinstance(shape, str) else copy.deepcopy(shape)
    model = _skeleton(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    largest = max(layer.weight.numel() for layer in model.modules() if isinstance(layer, _LAYERS))

    @functools.cache
    def pool(bits: int) -> Tensor:  # more random codes than the largest matrix has
        words = torch.empty(largest // 8 + (1 << 16), dtype=torch.int64)
        words.random_(torch.iinfo(torch.int64).min, None, generator=generator)
        return words.view(torch.uint8).bitwise_and_((1 << bits) - 1)

    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, _LAYERS):
            owners.setdefault(id(module.weight), []).append(name)
    with described_to_transformers(model):
        for names in owners.values():
            layers = [model.get_submodule(name) for name in names]
            n, k = layers[0].weight.shape
            tables = [layer for layer in layers if isinstance(layer, torch.nn.Embedding)]
            chosen = embedding if tables else linear
            if chosen is None:
                weight = torch.empty(n, k, dtype=dtype).normal_(0, 1 / math.sqrt(k), generator=generator)
                parameter = torch.nn.Parameter(weight, requires_grad=False)
                for layer in layers:
                    layer.weight = parameter
                    if getattr(layer, "bias", None) is not None:
                        layer.bias = torch.nn.Parameter(torch.zeros(n, dtype=dtype), requires_grad=False)
                continue
            bias = any(getattr(layer, "bias", None) is not None for layer in layers)
            packed = in_huge_pages(_random_packed(pool(chosen.bits), n, k, bias, chosen, generator))
            for name, layer in zip(names, layers, strict=True):
                model.set_submodule(name, nn.in_place_of(layer, packed, dtype).eval())
    return model
