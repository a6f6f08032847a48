"""The GGUF architectures that lowbit imports, and the mapping of their tensor names to transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..files.gguf_reader import Gguf
from . import gguf_hybrids, gguf_models
from .gguf_gemma4 import GEMMA4
from .gguf_metadata import Metadata, special_tokens
from .gguf_models import HEAD_BESIDE, MIXTRAL, Architecture, Part

ARCHITECTURES = gguf_models.ARCHITECTURES | gguf_hybrids.ARCHITECTURES | {"gemma4": GEMMA4}
_LAYER = re.compile(r"^blk\.(0|[1-9]\d{0,4})\.(.*)$")
_EXPERTS = re.compile(r"^ffn_(gate|up|gate_up|down)_exps\.(weight|bias)$")


def architecture_of(metadata: Metadata) -> Architecture:
    architecture = ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise ValueError(
            f"{metadata.path} has a model of the architecture {metadata.architecture!r}; lowbit imports "
            f"{', '.join(ARCHITECTURES)}"
        )
    # GGUF files of Mixtral have the architecture "llama", with experts.
    return MIXTRAL if metadata.architecture == "llama" and metadata.whole("expert_count", 0) else architecture


def _place(names: Mapping[str, str | Part], name: str) -> str | Part | None:
    """The name in transformers of a weight or bias."""
    holder, _, leaf = name.rpartition(".")
    place = names.get(holder) if leaf in ("weight", "bias") else None
    if isinstance(place, Part):
        return place._replace(name=f"{place.name}.{leaf}")
    return None if place is None else f"{place}.{leaf}"


def place_in_model(architecture: Architecture, name: str) -> Part | None:
    """The name in transformers of a GGUF tensor, or the part of a tensor that it is; None: unknown tensor."""
    match = _LAYER.match(name)
    if match is None:
        place = _place(architecture.outside, name)
    else:
        place = architecture.parameters.get(match[2]) or _place(architecture.names, match[2])
    if place is None:
        return None
    part = place if isinstance(place, Part) else Part(place, 0, 1)
    return part if match is None else part._replace(name=f"model.layers.{match[1]}.{part.name}")


def place_in_head(architecture: Architecture, name: str) -> Part | None:
    """As :func:`place_in_model`, for the extra layer that is a multi-token prediction head."""
    match = _LAYER.match(name)
    if match is None or architecture.head is None:
        return None
    if not match[2].startswith("nextn."):
        part = place_in_model(architecture, name)
        return None if part is None else part._replace(name=in_head(architecture, part.name))
    place = _place(architecture.head, match[2].removeprefix("nextn."))
    prefix = "mtp" if architecture.head is HEAD_BESIDE else f"model.layers.{match[1]}"
    return None if place is None else Part(f"{prefix}.{place}", 0, 1)


def in_head(architecture: Architecture, name: str) -> str:
    """The name in the multi-token prediction head of a tensor with this name in the model."""
    return f"mtp.layers.0.{name.split('.', 3)[3]}" if architecture.head is HEAD_BESIDE else name


def expert_tensor(architecture: Architecture, name: str) -> tuple[str, str, str] | None:
    """For a tensor with a matrix or bias of all experts of a layer: the name of their module in transformers; "gate", "up",
    "gate_up" or "down"; "weight" or "bias". None for any other tensor."""
    match = _LAYER.match(name)
    if match is None or not architecture.experts or (part := _EXPERTS.match(match[2])) is None:
        return None
    return f"model.layers.{match[1]}.{architecture.experts}", part[1], part[2]


def config_of(metadata: Metadata, architecture: Architecture, gguf: Gguf) -> dict[str, Any]:
    """config.json of the model, without its dtype.

    Raises:
        ValueError: a key is missing, unknown, or has an unsupported value.
    """
    table = gguf.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ValueError(f"{metadata.path} has no matrix token_embd.weight, the token embedding table")
    config = architecture.config(metadata, gguf)
    metadata.check_all_asked()
    config |= {"vocab_size": table.shape[0], "tie_word_embeddings": "output.weight" not in gguf.tensors}
    config |= special_tokens(metadata, table.shape[0])
    return config
