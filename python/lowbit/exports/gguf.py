"""Exports a packed checkpoint to a GGUF file, the inverse of :mod:`lowbit.importing.gguf_source`.

Codes are not requantized. ggml's types have a float16 scale per 32 inputs and no factor per row: other scales are rounded,
and the result reports it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _C
from ..files.config_json import CONFIG, quantization_method, read_config
from ..files.gguf_reader import TYPES, GgufWriter, TensorType
from ..files.io import read_bytes
from ..files.replace import replacing
from ..files.safetensors import Stored, files_of, packed_info, read_files
from ..files.tensors import DTYPES, read_rows
from ..files.untrusted import read_json
from ..importing.gguf_blocks import NL4
from ..importing.gguf_models import ARCHITECTURES
from ..packed.header import PackedInfo
from ..packed.matrix import Unpacked, unpack
from ..packed.rounding import COMPARED, is_same_weight
from ..packed.row_bands import PANEL_ROWS, Bands, rows_of_band
from .gguf_settings import architecture_metadata, completed, rotation_factors

_BLOCK = 32
_BAND_WEIGHTS = 1 << 21
# Largest allowed change of a weight, in quantization steps, by rounding its scale to float16: at 8 bits 128 codes times 2^-11
# of the scale. More means that the scale is subnormal in float16 or out of its range.
_MOST_STEPS = 2.0**-4
_TYPES = {kind.name: kind for kind in TYPES.values()}
_FLOAT_NAMES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_TIED = ("gemma", "gemma2")  # architectures whose head is always the token table
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of the file.

    ``kind`` is "exact", "float", or "rounded": scales were rounded, which changed no weight by more than ``steps`` of its
    group's quantization steps.
    """

    name: str
    type: str
    kind: str
    steps: float = 0.0


@dataclass(frozen=True)
class _GgufTensor:
    name: str
    type: TensorType
    shape: tuple[int, ...]
    write: Callable[[GgufWriter], ExportedTensor]


def _packed_type(name: str, info: PackedInfo) -> str:
    """The smallest GGUF type that holds all codes.

    Raises:
        ValueError: there is none; the message says what would work.
    """
    group = info.group_size or info.in_features
    if info.rotated_inputs:
        raise ValueError(
            f"{name} has rotated inputs, which GGUF does not support: quantize the float checkpoint with lowbit quantize, and "
            "without --rotate"
        )
    if info.in_features % _BLOCK:
        raise ValueError(
            f"{name} has {info.in_features} inputs; GGUF's types hold multiples of {_BLOCK}: leave the layer float "
            "(lowbit quantize --override 'NAME=float')"
        )
    if group % _BLOCK and group < info.in_features:
        raise ValueError(
            f"{name} has groups of {group}; GGUF's types have one scale for {_BLOCK} inputs: quantize the float "
            "checkpoint with lowbit quantize --group-size 32"
        )
    if info.mapping == "affine":
        if info.bits > 5:
            raise ValueError(
                f"{name} has {info.bits} bits and mins; GGUF has such types up to 5 bits: quantize the float "
                "checkpoint with lowbit quantize --mapping symmetric, or with fewer bits"
            )
        return "Q4_1" if info.bits <= 4 else "Q5_1"
    if info.mapping == "levels":
        return "IQ4_NL" if info.levels == NL4 else "Q8_0"
    return "Q4_0" if info.bits <= 4 else "Q5_0" if info.bits == 5 else "Q8_0"


def _half_bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.astype("<f2"))[..., None].view(np.uint8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Packs codes [rows, blocks, 32] into nibbles [rows, blocks, 16], the first 16 in the low halves."""
    return codes[..., :16] & 15 | (codes[..., 16:] & 15) << 4


def encode(type_name: str, info: PackedInfo, codes: Tensor, scales: Tensor, mins: Tensor | None) -> np.ndarray:
    """Encodes rows as blocks of a GGUF type, uint8 [rows, bytes]; scales and mins are rounded to float16.

    Args:
        codes: uint8 [rows, k].
        scales, mins: float32 [rows, groups].
    """
    rows, k = codes.shape
    groups = np.minimum(np.arange(k // _BLOCK) * _BLOCK // (info.group_size or k), scales.shape[1] - 1)
    scale = _half_bytes(scales.numpy()[:, groups])
    values = codes.numpy().astype(np.int16)
    width = 8 if type_name == "Q8_0" else 5 if type_name.startswith("Q5") else 4
    if info.mapping == "levels":
        if type_name == "Q8_0":
            values = np.array(info.levels, np.int16)[values]
    elif info.mapping == "symmetric":
        values = 2 * values - 1 if info.bits == 1 else values - 2 ** (info.bits - 1)
        values += 0 if width == 8 else 2 ** (width - 1)
    blocks = values.astype(np.uint8).reshape(rows, -1, _BLOCK)  # -128 to 127 as a byte
    parts = [scale] if mins is None else [scale, _half_bytes(mins.numpy()[:, groups])]
    if width == 5:
        parts.append(np.packbits(blocks >> 4, axis=-1, bitorder="little"))
    parts.append(blocks if width == 8 else _nibbles(blocks))
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def _steps(name: str, info: PackedInfo, scales: Tensor, mins: Tensor | None) -> float:
    """Largest change of a weight by float16 scales and mins, in quantization steps of its group.

    Raises:
        ValueError: the change is too large, or a scale is out of float16's range.
    """
    scale_error = (scales.half().float() - scales).abs()
    min_error = torch.zeros(()) if mins is None else (mins.half().float() - mins).abs()
    largest = 2**info.bits - 1 if mins is not None else 127 if info.levels else 2 ** (info.bits - 1)
    step = scales.abs()
    step = torch.where(step > 0, step, step.amax(1, keepdim=True))
    moved = torch.where(scale_error + min_error > 0, (largest * scale_error + min_error) / step, torch.zeros(()))
    steps = float(moved.max())
    if not steps <= _MOST_STEPS:
        raise ValueError(
            f"{name} has scales from {float(scales.abs().min()):.2g} to {float(scales.abs().max()):.2g}"
            + ("" if mins is None else f" and mins up to {float(mins.abs().max()):.2g}")
            + "; GGUF's float16 cannot represent them precisely enough: leave the layer float (lowbit quantize --override)"
        )
    return steps


class _Bands:
    """Reads rows of a packed weight in a file, some panels at a time, and verifies the checksum at the end."""

    def __init__(self, stored: Stored):
        self.stored, self.info = stored, packed_info(stored)
        info = self.info
        self._bands = Bands(info)
        self._header = self._bands.header_bytes
        self._panel = (info.total_bytes - self._header) // -(-info.out_features // PANEL_ROWS)

    def read(self, rows: int) -> Iterator[Unpacked]:
        """Yields all rows, at most ``rows`` at a time, a multiple of 16.

        Raises:
            ValueError: the checksum is wrong.
        """
        n = self.info.out_features
        for begin in range(0, n, rows):
            end = min(begin + rows, n)
            at = self._header + begin // PANEL_ROWS * self._panel
            until = self._header + -(-end // PANEL_ROWS) * self._panel
            band = torch.empty(self._header + until - at, dtype=torch.uint8)
            band[self._header :] = read_bytes(self.stored, at, until)
            self._put_header(band, end - begin, 0)  # fold_panels needs a header
            folded = _C.fold_panels(band.data_ptr(), band.numel(), 0)
            self._bands.add(band)
            self._put_header(band, end - begin, folded)
            yield unpack(band)
        if read_bytes(self.stored, 0, self._header).numpy().tobytes() != self._bands.header():
            raise ValueError(f"{self.stored.name} in {self.stored.path} is damaged: its checksum is wrong")

    def _put_header(self, band: Tensor, rows: int, folded: int) -> None:
        band[: self._header] = torch.frombuffer(bytearray(self._bands.header(rows, folded)), dtype=torch.uint8)


def _ordered(heads: int, rows: int) -> Tensor:
    """Permutation of the rows of q or k to ggml's order, which interleaves the halves of each head."""
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


def _packed(name: str, stored: Stored, heads: int, done: Callable[[int], None]) -> list[_GgufTensor]:
    """The GGUF tensors of a packed layer: its weight, and its bias if it has one.

    Args:
        heads: number of heads whose rows are permuted; 0: none.
        done: called with the number of bytes read.
    """
    info = packed_info(stored)
    kind = _packed_type(stored.name, info)
    biases: list[Tensor] = []

    def write(writer: GgufWriter) -> ExportedTensor:
        steps, n = 0.0, info.out_features
        rows = n + PANEL_ROWS if heads else rows_of_band(info.in_features, _BAND_WEIGHTS)
        for band in _Bands(stored).read(rows // PANEL_ROWS * PANEL_ROWS):
            codes, scales, mins, bias = band[:4]
            steps = max(steps, _steps(stored.name, info, scales, mins))
            if bias is not None:
                biases.append(bias)
            if heads:
                order = _ordered(heads, n)
                codes, scales, mins = (None if part is None else part[order] for part in (codes, scales, mins))
            writer.write(encode(kind, info, codes, scales, mins))
            done(len(codes) * stored.bytes // n)
        return ExportedTensor(f"{name}.weight", kind, "rounded" if steps else "exact", steps)

    def write_bias(writer: GgufWriter) -> ExportedTensor:
        bias = torch.cat(biases)
        writer.write((bias[_ordered(heads, len(bias))] if heads else bias).numpy())
        return ExportedTensor(f"{name}.bias", "F32", "float")

    weight = _GgufTensor(f"{name}.weight", _TYPES[kind], (info.out_features, info.in_features), write)
    bias = _GgufTensor(f"{name}.bias", _TYPES["F32"], (info.out_features,), write_bias)
    return [weight, bias] if info.has_bias else [weight]


def _float(name: str, stored: Stored, heads: int, done: Callable[[int], None], added: float = 0.0) -> _GgufTensor:
    """A float tensor; vectors become float32, as ggml requires, plus ``added``."""
    if stored.dtype not in DTYPES or stored.dtype not in _FLOAT_NAMES or len(stored.shape) > 2:
        raise ValueError(f"{stored.name} is {stored.dtype} {list(stored.shape)}; GGUF holds F32, F16 and BF16 matrices")
    kind = "F32" if len(stored.shape) == 1 else _FLOAT_NAMES[stored.dtype]

    def write(writer: GgufWriter) -> ExportedTensor:
        n = stored.shape[0]
        rows = n if heads else max(1, _BAND_WEIGHTS // max(1, math.prod(stored.shape[1:])))
        for begin in range(0, n, rows):
            values = read_rows(stored, begin, min(begin + rows, n))
            values = values[_ordered(heads, n)] if heads else values
            values = values.float() if kind == "F32" else values
            values = values + added if added else values
            writer.write(values.contiguous().view(torch.uint8).numpy())
            done(stored.bytes * len(values) // n)
        return ExportedTensor(name, kind, "float")

    return _GgufTensor(name, _TYPES[kind], stored.shape, write)


def export_gguf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    progress: Callable[[int, int, str], None] | None = None,
    *,
    tokenizer: bool = True,
) -> list[ExportedTensor]:
    """Exports a packed or float checkpoint to a GGUF file, some rows of a matrix at a time.

    Codes are not requantized: 1 to 3 bits become Q4_0 or Q4_1, 6 and 7 bits and tables of levels Q8_0. Importing the file
    gives the same weights and, where ggml has a type of that width, the same bytes.

    Args:
        source: a directory with a model of llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text or phi3.
        path: a name that ends in .gguf; an existing file is replaced atomically.
        progress: called as ``progress(bytes read, bytes to read, name of the tensor)``.
        tokenizer: False: the file has the number of tokens but not their texts, which is enough for llama-bench.

    Returns:
        The tensors of the file, in its order.

    Raises:
        OSError: a file is missing or cannot be read, or path cannot be written.
        ValueError: an architecture, a setting, a tokenizer or a tensor that GGUF cannot represent. An existing file is kept.
    """
    source = Path(source)
    config = read_config(source)
    if quantization_method(config) not in (None, "lowbit"):
        raise ValueError(f"{source} is quantized by the method {quantization_method(config)!r}: lowbit import it first")
    config = completed(source, config)
    metadata = architecture_metadata(source, config)
    tensors = read_files(*files_of(source))
    architecture = metadata["general.architecture"]
    window = metadata.get("phi3.attention.sliding_window")
    if window is not None and window < metadata["phi3.context_length"]:
        warnings.warn(
            f"llama.cpp ignores phi3's sliding window of {window} tokens: its logits differ for longer texts", stacklevel=2
        )
    total, read = sum(stored.bytes for stored in tensors.values()), 0

    def done(count: int) -> None:
        nonlocal read
        read += count
        if progress is not None:
            progress(read, total, "")

    outputs = _outputs(tensors, metadata, bool(config.get("tie_word_embeddings")), done)
    if architecture in _TIED and any(output.name == "output.weight" for output in outputs):
        raise ValueError(
            f"{source} has a separate head (lm_head); GGUF's {architecture} uses the token embedding table: quantize the "
            "float checkpoint with lowbit quantize --override lm_head=float"
        )
    table = next((output for output in outputs if output.name == "token_embd.weight"), None)
    if table is None:
        raise ValueError(f"{source} has no model.embed_tokens, the token embedding table")
    head = next((output for output in outputs if output.name == "output.weight"), table)
    if head.shape != table.shape:
        raise ValueError(
            f"{source} has a head of {list(head.shape)} and a token table of {list(table.shape)}; expected one shape"
        )
    rotated = metadata[f"{architecture}.rope.dimension_count"]
    outputs += [_made(name, values) for name, values in rotation_factors(source, config, rotated).items()]
    if tokenizer:
        metadata |= _tokenizer(source, config, table.shape[0])
    else:
        metadata |= {"tokenizer.ggml.model": "none", f"{architecture}.vocab_size": table.shape[0]}
    with replacing(path, ".gguf") as file:
        listed = [(output.name, output.type, output.shape) for output in outputs]
        with GgufWriter(file, metadata, listed) as writer:
            return [output.write(writer) for output in outputs]


def _outputs(
    tensors: Mapping[str, Stored], metadata: Mapping[str, Any], tied: bool, done: Callable[[int], None]
) -> list[_GgufTensor]:
    """The GGUF tensors of a checkpoint.

    Args:
        tied: the head is tied to the token table; GGUF then has no head, unless the checkpoint has another one.
        done: called with the number of bytes read.

    Raises:
        ValueError: the architecture has no such tensor, or another number of rows.
    """
    architecture = metadata["general.architecture"]
    offset = ARCHITECTURES[architecture].norm_offset
    leaves = {ours: theirs for theirs, ours in ARCHITECTURES[architecture].names.items()}
    outputs: list[_GgufTensor] = []
    for key, stored in tensors.items():
        layer, _, leaf = key.rpartition(".")
        if leaf == "weight" and f"{layer}.packed_weight" in tensors:
            continue  # a guard (files/safetensors.py)
        if leaf == "input_order":
            raise ValueError(f"{layer} has an act-order permutation ({key}), which GGUF does not support")
        name = _OUTSIDE.get(layer)
        if name is None and layer.startswith("model.layers."):
            number, _, part = layer.removeprefix("model.layers.").partition(".")
            name = f"blk.{number}.{leaves[part]}" if part in leaves and number.isdecimal() else None
        if name is None or leaf not in ("weight", "bias", "packed_weight"):
            raise ValueError(f"{stored.path} has the tensor {key}, which GGUF's {architecture} does not have")
        heads = _heads(name, key, stored, metadata)
        if leaf == "packed_weight":
            outputs += _packed(name, stored, heads, done)
        elif name != "output" or not tied or not _is_table(stored, tensors):
            added = offset if name.endswith("norm") else 0.0
            outputs.append(_float(f"{name}.{leaf}", stored, heads, done, added))
    return outputs


def _is_table(head: Stored, tensors: Mapping[str, Stored]) -> bool:
    """Whether a float head is the token table, which may be packed: transformers does not tie weights that differ."""
    packed, plain = (tensors.get(f"model.embed_tokens.{leaf}") for leaf in ("packed_weight", "weight"))
    if packed is not None:
        info = packed_info(packed)
        if head.shape != (info.out_features, info.in_features):
            return False
        table = next(_Bands(packed).read(COMPARED))
        return is_same_weight(table, read_rows(head, 0, len(table.codes)))
    if plain is None or plain.shape != head.shape:
        return plain is None
    rows = max(1, _BAND_WEIGHTS // max(1, math.prod(head.shape[1:])))
    spans = ((begin, min(begin + rows, head.shape[0])) for begin in range(0, head.shape[0], rows))
    return all(torch.equal(read_rows(head, *span), read_rows(plain, *span)) for span in spans)


def _heads(name: str, key: str, stored: Stored, metadata: Mapping[str, Any]) -> int:
    """Number of heads of a tensor whose rows ggml permutes; 0: its rows keep their order."""
    architecture = metadata["general.architecture"]
    counts = {"attn_q": "head_count", "attn_k": "head_count_kv"} if ARCHITECTURES[architecture].permuted else {}
    what = counts.get(name.rpartition(".")[2])
    if what is None:
        return 0
    heads: int = metadata[f"{architecture}.attention.{what}"]
    rows = packed_info(stored).out_features if key.endswith("packed_weight") else stored.shape[0]
    expected = heads * metadata[f"{architecture}.attention.key_length"]
    if rows != expected:
        raise ValueError(f"{stored.path} has {rows} rows in {key}; expected {expected}, as {CONFIG} has {heads} heads")
    return heads


def _made(name: str, values: np.ndarray) -> _GgufTensor:
    """A computed float32 tensor that is not in the checkpoint."""

    def write(writer: GgufWriter) -> ExportedTensor:
        writer.write(values)
        return ExportedTensor(name, "F32", "float")

    return _GgufTensor(name, _TYPES["F32"], values.shape, write)


def _tokenizer(source: Path, config: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Metadata of the tokenizer, with the tokens that end a text."""
    from ..hf.gguf_tokenizer import tokenizer_metadata
    from ..llm.loading import load_tokenizer

    metadata = tokenizer_metadata(source, load_tokenizer(source), vocabulary)
    file = source / "generation_config.json"
    ends = (read_json(file) if file.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    for key, token in zip(("eos", "eot", "eom"), ends, strict=False):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"{source} ends texts at the token {token!r}; expected 0 to {vocabulary - 1}")
        metadata[f"tokenizer.ggml.{key}_token_id"] = token
    return metadata
