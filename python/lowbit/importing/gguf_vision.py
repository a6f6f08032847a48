"""Joins the vision tower of an "mmproj" GGUF file to the language model of another one, as a model of images and text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.codes import Float, SourceTensor
from ..files.gguf_cache import file_states
from ..files.gguf_reader import Gguf, StoredBlocks, parts_of, read_gguf
from ..files.replace import sync
from ..files.untrusted import printable
from .gguf_metadata import Metadata
from .gguf_models import Part
from .joining import joined
from .source import Source

_LAYER = re.compile(r"v\.blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)", re.ASCII)
_SIGLIP = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_QWEN: dict[str, str | Part] = {
    "ln1": "norm1", "ln2": "norm2", "attn_q": Part("attn.qkv", 0, 3), "attn_k": Part("attn.qkv", 1, 3),
    "attn_v": Part("attn.qkv", 2, 3), "attn_out": "attn.proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _siglip(tower: str) -> dict[str, str]:
    """The tensors of a SigLIP tower outside of its layers."""
    places = {"patch_embd": "embeddings.patch_embedding", "position_embd": "embeddings.position_embedding"}
    return {f"v.{ours}": f"{tower}.{name}" for ours, name in {**places, "post_ln": "post_layernorm"}.items()}


@dataclass(frozen=True)
class _Facts:
    """The facts of a tower in its file."""

    metadata: Metadata
    gguf: Gguf
    mean: list[float]
    deviation: list[float]

    def whole(self, name: str, *default: Any) -> int:
        value = self.metadata.whole(f"vision.{name}", *default)
        if not value:
            raise ValueError(f"{self.metadata.path} has clip.vision.{name} {value}; expected 1 or more")
        return int(value)

    def layers(self) -> int:
        count, most = self.whole("block_count"), len(self.gguf.tensors)
        if count > most:
            raise ValueError(f"{self.metadata.path} has clip.vision.block_count {count}; expected at most its {most} tensors")
        return count

    def rows(self, name: str) -> int:
        stored = self.gguf.tensors.get(name)
        if stored is None:
            raise ValueError(f"{self.metadata.path} has no tensor {name}")
        return int(stored.shape[0])


@dataclass(frozen=True)
class _Family:
    """How the files of a kind of projector map to transformers."""

    model_type: str
    class_name: str
    language: tuple[str, str]  # model_type of the language model, and its name in the model
    layers: str  # the name of the tower's layers in the model
    outside: Mapping[str, str]  # tensors outside of these layers
    tokens: Mapping[str, str]  # name in tokenizer_config.json -> special token of the tokenizer
    config: Callable[[_Facts, Mapping[str, int]], dict[str, Any]]  # by the ids of these tokens; without the language model's
    processor: Callable[[_Facts, Mapping[str, Any]], dict[str, dict[str, Any]]]  # from the config; file -> content
    offset: Mapping[str, float] = field(default_factory=dict)  # what ggml adds to a tensor
    names: Mapping[str, str | Part] = field(default_factory=lambda: _SIGLIP)  # tensors of a layer
    parameters: Mapping[str, str] = field(default_factory=dict)  # tensors that are neither a weight nor a bias
    flat_patches: bool = False  # the patch embedding is a linear layer
    language_type: str = ""  # model_type of the language model within the model, if it is another one


def _tower(facts: _Facts, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": facts.whole("embedding_length"),
        "intermediate_size": facts.whole("feed_forward_length"),
        "num_hidden_layers": facts.layers(),
        "num_attention_heads": facts.whole("attention.head_count"),
        "patch_size": facts.whole("patch_size"),
        "layer_norm_eps": facts.metadata.positive("vision.attention.layer_norm_epsilon", 1e-6),
    }


def _normalizing(facts: _Facts, kind: str, **more: Any) -> dict[str, Any]:
    return {"image_processor_type": kind, "image_mean": facts.mean, "image_std": facts.deviation, **more}


def _idefics3(facts: _Facts, ids: Mapping[str, int]) -> dict[str, Any]:
    tower = _tower(facts, "idefics3_vision") | {"image_size": facts.whole("image_size")}
    factor = facts.whole("projector.scale_factor")
    return {"vision_config": tower, "scale_factor": factor, "image_token_id": ids["image_token"]}


def _idefics3_processor(facts: _Facts, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tower = config["vision_config"]
    size = tower["image_size"]
    longest = facts.whole("preproc_image_size", 4 * size)
    images = _normalizing(
        facts, "Idefics3ImageProcessor", do_image_splitting=True, size={"longest_edge": longest},
        max_image_size={"longest_edge": size},
    )  # fmt: skip
    tokens = (size // tower["patch_size"] // config["scale_factor"]) ** 2
    return {
        "preprocessor_config.json": images,
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": tokens},
    }


def _gemma3(facts: _Facts, ids: Mapping[str, int]) -> dict[str, Any]:
    tower = _tower(facts, "siglip_vision_model") | {"image_size": facts.whole("image_size"), "vision_use_head": False}
    side = tower["image_size"] // tower["patch_size"] // facts.whole("projector.scale_factor", 4)
    return {
        "vision_config": tower,
        "mm_tokens_per_image": side**2,
        "boi_token_index": ids["boi_token"],
        "eoi_token_index": ids["eoi_token"],
        "image_token_index": ids["image_token"],
    }


def _gemma3_processor(facts: _Facts, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    size = config["vision_config"]["image_size"]
    images = _normalizing(facts, "Gemma3ImageProcessor", size={"height": size, "width": size})
    settings = {"processor_class": "Gemma3Processor", "image_seq_length": config["mm_tokens_per_image"]}
    return {"preprocessor_config.json": images, "processor_config.json": settings}


def _lfm2(facts: _Facts, ids: Mapping[str, int]) -> dict[str, Any]:
    facts.metadata.ignore("vision.image_size", "vision.image_min_pixels", "vision.image_max_pixels")  # of llama.cpp's resizing
    facts.metadata.expect("vision.image_resize_algo", "bilinear")
    tower = _tower(facts, "siglip2_vision_model") | {"vision_use_head": False}
    return {
        "vision_config": tower | {"num_patches": facts.rows("v.position_embd.weight")},
        "downsample_factor": facts.whole("projector.scale_factor", 2),
        "projector_hidden_size": facts.rows("mm.1.weight"),
        "projector_hidden_act": "gelu",
        "projector_bias": "mm.1.bias" in facts.gguf.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in facts.gguf.tensors,
        "image_token_id": ids["image_token"],
    }


def _lfm2_processor(facts: _Facts, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    images = _normalizing(
        facts, "Lfm2VlImageProcessor", downsample_factor=config["downsample_factor"],
        encoder_patch_size=config["vision_config"]["patch_size"],
    )  # fmt: skip
    return {"preprocessor_config.json": images, "processor_config.json": {"processor_class": "Lfm2VlProcessor"}}


def _qwen25(facts: _Facts, ids: Mapping[str, int]) -> dict[str, Any]:
    facts.metadata.ignore("vision.image_size")  # of llama.cpp's warm-up
    tower = _tower(facts, "qwen2_5_vl_vision")
    if not math.isclose(tower.pop("layer_norm_eps"), 1e-6, rel_tol=1e-3):
        raise ValueError(f"{facts.metadata.path} has another epsilon of norms than 1e-6, the only one of Qwen2.5-VL")
    depth, every = tower.pop("num_hidden_layers"), facts.whole("n_wa_pattern")
    return {
        "vision_config": tower | {
            "hidden_act": "silu", "depth": depth, "num_heads": tower.pop("num_attention_heads"), "temporal_patch_size": 2,
            "fullatt_block_indexes": list(range(every - 1, depth, every)), "window_size": facts.whole("window_size", 112),
            "spatial_merge_size": facts.whole("spatial_merge_size", 2), "out_hidden_size": facts.rows("mm.2.weight"),
        },
        **{name.replace("_token", "_token_id"): ids[name] for name in _QWEN_TOKENS},
    }  # fmt: skip


def _qwen25_processor(facts: _Facts, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tower = config["vision_config"]
    least, most = facts.whole("image_min_pixels", 56 * 56), facts.whole("image_max_pixels", 16384 * 28 * 28)
    images = _normalizing(
        facts, "Qwen2VLImageProcessor", patch_size=tower["patch_size"], merge_size=tower["spatial_merge_size"],
        temporal_patch_size=2, size={"shortest_edge": least, "longest_edge": most},
    )  # fmt: skip
    return {"preprocessor_config.json": images, "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor"}}


_QWEN_TOKENS = {
    "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>", "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}  # fmt: skip
_FAMILIES = {
    "idefics3": _Family(
        "idefics3", "Idefics3ForConditionalGeneration", ("llama", "text_model"),
        "vision_model.encoder.layers",
        _siglip("vision_model") | {"mm.model.fc": "connector.modality_projection.proj"},
        {
            "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
        },
        _idefics3, _idefics3_processor,
    ),
    "gemma3": _Family(
        "gemma3", "Gemma3ForConditionalGeneration", ("gemma3_text", "language_model"),
        "vision_tower.encoder.layers",
        _siglip("vision_tower") | {"mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm"},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        _gemma3, _gemma3_processor, {"mm.soft_emb_norm.weight": 1.0},
        parameters={"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"},
    ),
    "lfm2": _Family(
        "lfm2_vl", "Lfm2VlForConditionalGeneration", ("lfm2", "language_model"), "vision_tower.encoder.layers",
        _siglip("vision_tower") | {
            "mm.input_norm": "multi_modal_projector.layer_norm", "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"},
        _lfm2, _lfm2_processor, flat_patches=True,
    ),
    "qwen2.5vl_merger": _Family(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", ("qwen2", "language_model"), "visual.blocks",
        {
            "v.patch_embd": "visual.patch_embed.proj", "v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0",
            "mm.2": "visual.merger.mlp.2",
        },
        _QWEN_TOKENS, _qwen25, _qwen25_processor, names=_QWEN, language_type="qwen2_5_vl_text",
    ),
}  # fmt: skip


def _facts(path: Path, gguf: Gguf) -> tuple[_Facts, _Family]:
    metadata = Metadata(gguf)
    if metadata.architecture != "clip":
        raise ValueError(f"{path} has the architecture {metadata.architecture!r}; expected 'clip', a vision tower (mmproj)")
    metadata.expect("has_vision_encoder", True)
    for other in ("has_audio_encoder", "has_text_encoder"):
        metadata.expect(other, False)
    kind = metadata.text("projector_type", metadata.text("vision.projector_type", None))
    if kind not in _FAMILIES:
        raise ValueError(f"{path} has a projector of the type {kind!r}; lowbit imports {', '.join(_FAMILIES)}")
    gated = "ffn_gate" in _FAMILIES[kind].names
    metadata.expect("use_gelu", not gated)
    metadata.expect("use_silu", gated)
    metadata.ignore("has_llava_projector", "vision.projection_dim")  # the tensors show both
    return _Facts(metadata, gguf, *(_colors(metadata, name) for name in ("image_mean", "image_std"))), _FAMILIES[kind]


def _colors(metadata: Metadata, name: str) -> list[float]:
    """A number for each color."""
    metadata.ignore(f"vision.{name}")
    found = metadata.all.get(f"clip.vision.{name}")
    values = found.tolist() if isinstance(found, np.ndarray) else found
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(v, float) and math.isfinite(v) for v in values):
        raise ValueError(f"{metadata.path} has no three finite numbers as clip.vision.{name}")
    return [float(str(np.float32(value))) for value in values]  # the shortest decimals of the file's float32


def _place(family: _Family, name: str, swapped: bool, layers: int) -> Part | None:
    """The part of a tensor in transformers that a tensor of the file becomes; None if the tower has no such tensor."""
    if name in family.parameters:
        return Part(f"model.{family.parameters[name]}", 0, 1)
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        if int(layer[1]) >= layers:
            return None
        other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
        place, prefix, leaf = family.names.get(other.get(layer[2], layer[2])), f"{family.layers}.{layer[1]}.", layer[3]
    else:
        holder, _, leaf = name.rpartition(".")
        place, prefix = family.outside.get(holder) if leaf in ("weight", "bias") else None, ""
    if place is None:
        return None
    part = place if isinstance(place, Part) else Part(place, 0, 1)
    return part._replace(name=f"model.{prefix}{part.name}.{leaf}")


def _of_two_images(parts: list[Float]) -> Float:
    """Joins two convolutions over patches, one for each of two images, to one over both."""
    first, second = parts
    if first.shape != second.shape or len(first.shape) != 4:
        raise ValueError(f"{first.name} has the parts {list(first.shape)} and {list(second.shape)}; expected the same 4 sizes")

    def read(begin: int, end: int) -> Tensor:
        return torch.stack([part.read(begin, end).float() for part in parts], 2)

    count, colors, *sides = first.shape
    bytes_ = first.bytes + second.bytes
    return Float(first.name, first.source, "F32", (count, colors, 2, *sides), read, bytes_)


def _flat(patches: Float) -> Float:
    """A convolution over patches, [n, colors, rows, columns], as the matrix of a linear layer of rows, columns and colors."""
    count, *sizes = patches.shape
    if len(sizes) != 3:
        raise ValueError(f"{patches.name} has the shape {list(patches.shape)}; expected [n, colors, rows, columns]")

    def read(begin: int, end: int) -> Tensor:
        values: Tensor = patches.read(begin, end)
        return values.permute(0, 2, 3, 1).reshape(end - begin, -1)

    return replace(patches, shape=(count, math.prod(sizes)), read=read)


def with_vision(
    text: Source,
    path: Path,
    read_tensor: Callable[[Gguf, StoredBlocks, str, float], SourceTensor],
    token_ids: Callable[[], Mapping[str, int]],
) -> Source:
    """The model of images and text of a language model and the vision tower in an mmproj file.

    Args:
        text: the language model, from a GGUF file.
        path: the mmproj file.
        read_tensor: describes a tensor of a file under another name, minus a number.
        token_ids: the ids of the tokenizer's tokens by their texts.

    Raises:
        OSError, ValueError: the file cannot be read or is damaged, has another kind of tower, or does not belong to the model.
    """
    states = file_states(parts_of(path))
    gguf = read_gguf(path)
    facts, family = _facts(path, gguf)
    if text.config["model_type"] != family.language[0]:
        raise ValueError(
            f"{path} belongs to a model of type {family.language[0]!r}; {text.path} has {text.config['model_type']!r}"
        )
    known = token_ids()
    missing = [token for token in family.tokens.values() if token not in known]
    if missing:
        raise ValueError(f"the tokenizer in {text.path} has no token {missing[0]!r}, which {path} needs")
    config = family.config(facts, {name: known[token] for name, token in family.tokens.items()})
    files = family.processor(facts, config)
    facts.metadata.check_all_asked()

    width = config["vision_config"]["intermediate_size"]
    first = gguf.tensors.get("v.blk.0.ffn_up.weight")
    # Early converters exchanged the names of the two matrices of the feed-forward network.
    swapped = first is not None and first.shape == (config["vision_config"]["hidden_size"], width) and first.shape[0] != width
    layers = facts.layers()
    counts: dict[str, int] = {}
    places: dict[str, dict[int, Any]] = {}  # tensor of the model -> its parts
    halves: list[Any] = []  # of the patch embedding of Qwen's towers
    for stored in gguf.tensors.values():
        pair = family.names is _QWEN and stored.name in ("v.patch_embd.weight", "v.patch_embd.weight.1")
        part = _place(family, "v.patch_embd.weight" if pair else stored.name, swapped, layers)
        if part is None:
            raise ValueError(
                f"{path} has the tensor {printable(stored.name)!r}, which lowbit does not know in a tower of {layers} layers"
            )
        tensor = read_tensor(gguf, stored, part.name, family.offset.get(stored.name, 0.0))
        if family.flat_patches and stored.name == "v.patch_embd.weight" and isinstance(tensor, Float):
            tensor = _flat(tensor)
        halves += [tensor] if pair else []
        places.setdefault(part.name, {})[part.number] = tensor
        counts[part.name] = part.parts
    tensors: list[SourceTensor] = []
    for name, parts in places.items():
        if halves and name == halves[0].name:
            if len(halves) != 2 or not all(isinstance(half, Float) for half in halves):
                raise ValueError(f"{path} has no v.patch_embd.weight and v.patch_embd.weight.1 in floats")
            tensors.append(_of_two_images(halves))
        elif len(parts) < counts[name]:
            raise ValueError(f"{path} has {len(parts)} of the {counts[name]} parts of {name}")
        else:
            tensors.append(joined([parts[number] for number in sorted(parts)], name, path) if len(parts) > 1 else parts[0])

    language: dict[str, Any] = dict(text.config)
    if family.language_type:
        if "mrope_section" not in language.get("rope_parameters", ()):
            raise ValueError(f"{text.path} has no positions with three axes, which {path} needs")
        language["model_type"] = family.language_type
    shared = {name: language.pop(name) for name in ("tie_word_embeddings", "dtype")}
    language.pop("architectures")
    ends = {name: language[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config.update(architectures=[family.class_name], model_type=family.model_type, **shared, **ends)
    config["text_config"] = {**language, "tie_word_embeddings": shared["tie_word_embeddings"]}

    def renamed(tensor: SourceTensor) -> SourceTensor:
        name = tensor.name
        if name.startswith("model."):
            name = f"model.{family.language[1]}.{name.removeprefix('model.')}"
        return replace(tensor, name=name)

    def write_files(directory: Path) -> None:
        text.write_files(directory)
        settings = directory / "tokenizer_config.json"
        content = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        settings.unlink(missing_ok=True)
        for name, document in {**files, settings.name: {**content, **family.tokens}}.items():
            with open(directory / name, "x", encoding="utf-8") as file:
                json.dump(document, file, indent=2)
                sync(file)

    return Source(text.path, "GGUF", config, [*map(renamed, text.tensors), *tensors], write_files, [*text.files, *states])
