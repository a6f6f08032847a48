"""Imports Whisper models in CTranslate2's format (used by faster-whisper): float, or int8 with a scale per output."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.codes import Float, Matrix, Rows, SourceTensor
from ..files.config_json import CONFIG
from ..files.ctranslate2_reader import read_ctranslate2
from ..files.gguf_cache import file_states
from ..files.io import read_bytes, read_row_bytes
from ..files.replace import sync
from ..files.safetensors import Stored
from ..files.tensors import read_rows
from ..files.untrusted import read_json
from .source import Source

MODEL = "model.bin"
_TOKENIZER = "tokenizer.json"
_SPECIFICATION = "WhisperSpec"
_FLOATS = ("F32", "F16", "BF16")
_NORM = {"gamma": "weight", "beta": "bias"}
# Names in a layer: norms, and matrices -> the model's layers that are concatenated by rows in them.
_NORMS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
}
_MATRICES: dict[str, tuple[str, ...]] = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
# Variables that affect the computation -> their value for Whisper.
_FLAGS = {"activation": 3, "pre_norm": 1, "alibi": 0, "scale_embeddings": 0, "start_from_zero_embedding": 0}
_UNUSED = ("alignment_heads", "alignment_layer", "num_heads")


def is_ctranslate2(path: Path) -> bool:
    """Whether a directory holds a model in CTranslate2's format."""
    return (path / MODEL).is_file() and "model_type" not in read_json(path / CONFIG)


def open_ctranslate2(path: Path) -> Source:
    """Describes and checks the Whisper model in a directory; reads no weights.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: not a Whisper model, a tensor that is missing, unknown or of another shape, or a damaged file.
    """
    states = file_states([path / MODEL])
    specification, variables = read_ctranslate2(path / MODEL)
    if specification != _SPECIFICATION:
        raise ValueError(f"{path / MODEL} is CTranslate2's {specification}; lowbit imports {_SPECIFICATION}")
    settings = read_json(path / CONFIG)
    tokens = _special_tokens(path / _TOKENIZER)
    reader = _Reader(path / MODEL, variables)
    tensors, config = reader.tensors(), reader.config(tokens)

    def write_files(directory: Path) -> None:
        (directory / _TOKENIZER).write_bytes((path / _TOKENIZER).read_bytes())
        documents = {
            "tokenizer_config.json": _tokenizer_config(),
            "preprocessor_config.json": _preprocessor_config(config),
            "generation_config.json": _generation_config(config, settings, tokens, path / CONFIG),
        }
        for name, document in documents.items():
            with open(directory / name, "x", encoding="utf-8") as file:
                json.dump(document, file, indent=2)
                sync(file)

    return Source(path, "CTranslate2", config, tensors, write_files, states)


def _special_tokens(path: Path) -> dict[str, int]:
    """The tokenizer's special tokens: text -> id."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected Whisper's tokenizer next to the model")
    added: Any = read_json(path).get("added_tokens")
    try:
        tokens = {str(token["content"]): int(token["id"]) for token in added}
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path} has the added_tokens {added!r:.100}; expected a list of tokens") from error
    for name in ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"):
        if name not in tokens:
            raise ValueError(f"{path} has no token {name}; expected Whisper's tokenizer")
    return tokens


class _Reader:
    def __init__(self, path: Path, variables: dict[str, Stored]):
        self.path, self._variables = path, dict(variables)
        self.layers = {part: self._count_layers(part) for part in ("encoder", "decoder")}

    def _count_layers(self, part: str) -> int:
        prefix = f"{part}/layer_"
        numbers = {name.removeprefix(prefix).partition("/")[0] for name in self._variables if name.startswith(prefix)}
        numbers.discard("norm")  # "layer_norm" of the encoder or decoder
        if numbers != {str(number) for number in range(len(numbers))} or not numbers:
            raise ValueError(f"{self.path} has the layers {', '.join(sorted(numbers))} in its {part}; expected 0, 1, ...")
        return len(numbers)

    def _take(self, name: str, *dtypes: str) -> Stored:
        variable = self._variables.pop(name, None)
        if variable is None:
            raise ValueError(f"{self.path} has no {name}")
        if dtypes and variable.dtype not in dtypes:
            raise ValueError(f"{self.path}: {name} is {variable.dtype}; expected {' or '.join(dtypes)}")
        if 0 in variable.shape:
            raise ValueError(f"{self.path}: {name} is empty, {list(variable.shape)}")
        return variable

    def tensors(self) -> list[SourceTensor]:
        self._variables.pop("decoder/projection/weight", None)  # an alias of the embedding table
        for part in self.layers:
            for name, expected in _FLAGS.items():
                variable = self._variables.pop(f"{part}/{name}", None)
                if variable is not None and _number(variable) != expected:
                    raise ValueError(f"{self.path}: {variable.name} is {_number(variable)}; expected {expected}, as in Whisper")
        self.heads = {part: _number(self._take(f"{part}/num_heads")) for part in self.layers}
        for part in self.layers:
            for name in _UNUSED:
                self._variables.pop(f"{part}/{name}", None)
        self.table = self._shape("decoder/embeddings/weight", 2)
        self.stem = self._shape("encoder/conv1/weight", 3)
        self.widths = {part: self._shape(f"{part}/layer_0/ffn/linear_0/weight", 2)[0] for part in self.layers}
        self.positions = {part: self._shape(f"{part}/position_encodings/encodings", 2)[0] for part in self.layers}
        tensors = self._matrix("decoder/embeddings", ("model.decoder.embed_tokens",), biased=False)
        for conv in ("conv1", "conv2"):
            tensors += [*self._values(f"encoder/{conv}/weight", f"model.encoder.{conv}.weight")]
            tensors += [*self._values(f"encoder/{conv}/bias", f"model.encoder.{conv}.bias")]
        for part, count in self.layers.items():
            tensors += self._values(f"{part}/position_encodings/encodings", f"model.{part}.embed_positions.weight")
            tensors += self._norm(f"{part}/layer_norm", f"model.{part}.layer_norm")
            for number in range(count):
                theirs, ours = f"{part}/layer_{number}", f"model.{part}.layers.{number}"
                crossing = part == "decoder"
                for name, norm in _NORMS.items():
                    if crossing or not name.startswith("attention"):
                        tensors += self._norm(f"{theirs}/{name}", f"{ours}.{norm}")
                for name, layers in _MATRICES.items():
                    if crossing or not name.startswith("attention"):
                        tensors += self._matrix(f"{theirs}/{name}", tuple(f"{ours}.{layer}" for layer in layers))
        if self._variables:
            raise ValueError(f"{self.path} has {min(self._variables)}, which lowbit does not know in Whisper")
        return tensors

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        shape = self._variables[name].shape if name in self._variables else None
        if shape is None or len(shape) != rank or 0 in shape:
            raise ValueError(f"{self.path}: {name} has the shape {shape and list(shape)}; expected {rank} dimensions")
        return shape

    def _norm(self, theirs: str, ours: str) -> list[SourceTensor]:
        return [tensor for name, leaf in _NORM.items() for tensor in self._values(f"{theirs}/{name}", f"{ours}.{leaf}")]

    def _values(self, theirs: str, ours: str) -> list[SourceTensor]:
        """A tensor that is written as floats."""
        stored = self._take(theirs, *_FLOATS, "I8")
        if stored.dtype != "I8":
            return [Float(ours, stored.dtype, stored.dtype, stored.shape, partial(read_rows, stored), stored.bytes)]
        scales = self._scales(theirs, stored.shape[0])

        def read(begin: int, end: int) -> Tensor:
            factors = scales(begin, end)
            return _codes_of(stored, begin, end).float() * factors.view(-1, *[1] * (len(stored.shape) - 1))

        return [Float(ours, "I8", "F32", stored.shape, read, 4 * stored.bytes, dequantized=True)]

    def _scales(self, weight: str, rows: int) -> Callable[[int, int], Tensor]:
        """Reads the scales of a matrix, float32 [rows]; CTranslate2 stores their inverses."""
        stored = self._take(f"{weight}_scale", "F32")
        if stored.shape != (rows,):
            raise ValueError(f"{self.path}: {stored.name} is {list(stored.shape)}; expected [{rows}], a scale for each row")
        return lambda begin, end: 1 / read_rows(stored, begin, end)

    def _matrix(self, theirs: str, layers: tuple[str, ...], biased: bool = True) -> list[SourceTensor]:
        """The layers that are concatenated by rows in a matrix, with their biases."""
        weight = self._take(f"{theirs}/weight", *_FLOATS, "I8")
        if len(weight.shape) != 2 or weight.shape[0] % len(layers):
            count = "" if len(layers) == 1 else f"; expected a multiple of {len(layers)} rows"
            raise ValueError(f"{self.path}: {weight.name} is {list(weight.shape)}; expected a matrix{count}")
        scales = self._scales(weight.name, weight.shape[0]) if weight.dtype == "I8" else None
        bias = self._take(f"{theirs}/bias", *_FLOATS) if biased else None
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{self.path}: {bias.name} is {list(bias.shape)}; expected {list(weight.shape[:1])}")
        n, k = weight.shape[0] // len(layers), weight.shape[1]
        tensors: list[SourceTensor] = []
        for number, layer in enumerate(layers):
            first, size = number * n, weight.bytes // len(layers)
            name = f"{layer}.weight"
            if scales is None:
                tensors.append(Float(name, weight.dtype, weight.dtype, (n, k), _rows(weight, first), size))
            else:
                tensors.append(Matrix(name, "int8", (n, k), 8, None, False, _codes(weight, scales, first), size))
            if bias is None:
                continue
            if layer.endswith(".k_proj"):  # Whisper's key projections have no bias
                if read_rows(bias, first, first + n).any():
                    raise ValueError(f"{self.path}: {bias.name} has a nonzero bias for keys; expected zeros, as in Whisper")
                continue
            size = bias.bytes // len(layers)
            tensors.append(Float(f"{layer}.bias", bias.dtype, bias.dtype, (n,), _rows(bias, first), size))
        return tensors

    def config(self, tokens: dict[str, int]) -> dict[str, Any]:
        """config.json of transformers."""
        end = tokens["<|endoftext|>"]
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "d_model": self.table[1],
            "vocab_size": self.table[0],
            "num_mel_bins": self.stem[1],
            "encoder_layers": self.layers["encoder"],
            "decoder_layers": self.layers["decoder"],
            "num_hidden_layers": self.layers["encoder"],
            "encoder_attention_heads": self.heads["encoder"],
            "decoder_attention_heads": self.heads["decoder"],
            "encoder_ffn_dim": self.widths["encoder"],
            "decoder_ffn_dim": self.widths["decoder"],
            "max_source_positions": self.positions["encoder"],
            "max_target_positions": self.positions["decoder"],
            "decoder_start_token_id": tokens["<|startoftranscript|>"],
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
            "dtype": "float32",
        }


def _number(stored: Stored) -> int:
    """The value of a variable that is one whole number."""
    return int.from_bytes(read_bytes(stored).numpy().tobytes(), "little", signed=True)


def _codes_of(stored: Stored, begin: int, end: int) -> Tensor:
    """Reads rows of a matrix of int8."""
    return read_row_bytes(stored, begin, end).view(torch.int8).view(end - begin, *stored.shape[1:])


def _rows(stored: Stored, first: int) -> Callable[[int, int], Tensor]:
    return lambda begin, end: read_rows(stored, first + begin, first + end)


def _codes(weight: Stored, scales: Callable[[int, int], Tensor], first: int) -> Callable[[int, int], Rows]:
    def read(begin: int, end: int) -> Rows:
        values = _codes_of(weight, first + begin, first + end)
        return Rows((values.int() + 128).to(torch.uint8), scales(first + begin, first + end)[:, None].contiguous())

    return read


def _tokenizer_config() -> dict[str, Any]:
    end = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "model_max_length": 1024,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), end),
    }


def _preprocessor_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": config["num_mel_bins"],
        "chunk_length": config["max_source_positions"] // 50,
    }


def _generation_config(config: dict[str, Any], settings: Any, tokens: dict[str, int], path: Path) -> dict[str, Any]:
    def numbers(name: str) -> list[int]:
        value = settings.get(name, [])
        if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
            raise ValueError(f"{path} has the {name} {value!r:.100}; expected a list of tokens")
        return value

    names = {number: text for text, number in tokens.items()}
    tasks = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in tokens}
    return {
        **{name: config[name] for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")},
        "is_multilingual": len(tasks) == 2 and config["vocab_size"] >= 51865,
        "lang_to_id": {names[number]: number for number in numbers("lang_ids") if number in names},
        "task_to_id": tasks,
        "no_timestamps_token_id": tokens["<|notimestamps|>"],
        **({"prev_sot_token_id": tokens["<|startofprev|>"]} if "<|startofprev|>" in tokens else {}),
        "suppress_tokens": numbers("suppress_ids"),
        "begin_suppress_tokens": numbers("suppress_ids_begin"),
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
        **({"alignment_heads": settings["alignment_heads"]} if "alignment_heads" in settings else {}),
    }
