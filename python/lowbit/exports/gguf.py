"""A packed checkpoint as a GGUF file: the way of :mod:`lowbit.importing.gguf` back.

The codes stay as they are. A type of ggml has one float16 scale for 32 inputs, without a factor per row: a scale that
is no float16 is rounded, and said to be.
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
from .._bands import PANEL_ROWS, Bands, rows_of_band
from .._packed import PackedInfo, Unpacked, unpack
from ..files.config_json import CONFIG, quantization_method, read_config
from ..files.gguf import TYPES, GgufWriter, TensorType
from ..files.replace import replacing
from ..files.safetensors import DTYPES, Stored, files_of, packed_info, read_bytes, read_files, read_rows
from ..files.untrusted import read_json
from ..importing.gguf_blocks import NL4
from ..importing.gguf_models import ARCHITECTURES
from .gguf_settings import architecture_metadata, rotation_factors

_BLOCK = 32
_BAND_WEIGHTS = 1 << 21
# That rounding scales to float16 may move a weight: the most of 8 bits, 128 codes by 2^-11 of the scale. More means that
# float16 has fewer digits for the scale than usual, or none.
_MOST_STEPS = 2.0**-4
_TYPES = {kind.name: kind for kind in TYPES.values()}
_FLOAT_NAMES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_ONE_TABLE = ("gemma", "gemma2")  # of tokens, which is the head, too
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of the file.

    ``kind`` is "exact", "float", or "rounded": scales were rounded, which moved no weight by more than ``steps`` times its
    group's quantization step.
    """

    name: str
    type: str
    kind: str
    steps: float = 0.0


@dataclass(frozen=True)
class _Output:
    name: str
    type: TensorType
    shape: tuple[int, ...]
    write: Callable[[GgufWriter], ExportedTensor]


def _packed_type(name: str, info: PackedInfo) -> str:
    """The smallest type that has all of the codes.

    Raises:
        ValueError: there is none; the sentence says what would work.
    """
    group = info.group_size or info.in_features
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
    """Of [rows, blocks, 32]: the first 16 in the low halves, the others in the high ones."""
    return codes[..., :16] & 15 | (codes[..., 16:] & 15) << 4


def encode(type_name: str, info: PackedInfo, codes: Tensor, scales: Tensor, mins: Tensor | None) -> np.ndarray:
    """Rows of codes with their scales and mins as blocks of a GGUF type.

    ``codes`` uint8 [rows, k] and ``scales``, ``mins`` float32 [rows, groups] give uint8 [rows, bytes]. Scales are rounded to
    float16.
    """
    rows, k = codes.shape
    taken = np.minimum(np.arange(k // _BLOCK) * _BLOCK // (info.group_size or k), scales.shape[1] - 1)
    scale = _half_bytes(scales.numpy()[:, taken])
    values = codes.numpy().astype(np.int16)
    width = 8 if type_name == "Q8_0" else 5 if type_name.startswith("Q5") else 4
    if info.mapping == "levels":
        if type_name == "Q8_0":
            values = np.array(info.levels, np.int16)[values]
    elif info.mapping == "symmetric":
        values = 2 * values - 1 if info.bits == 1 else values - 2 ** (info.bits - 1)
        values += 0 if width == 8 else 2 ** (width - 1)
    blocks = values.astype(np.uint8).reshape(rows, -1, _BLOCK)  # -128 to 127 as a byte
    parts = [scale] if mins is None else [scale, _half_bytes(mins.numpy()[:, taken])]
    if width == 5:
        parts.append(np.packbits(blocks >> 4, axis=-1, bitorder="little"))
    parts.append(blocks if width == 8 else _nibbles(blocks))
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def _steps(name: str, info: PackedInfo, scales: Tensor, mins: Tensor | None) -> float:
    """How far float16 scales and mins move a weight at most, in steps of its group.

    Raises:
        ValueError: too far, or beyond float16.
    """
    scale_off = (scales.half().float() - scales).abs()
    min_off = torch.zeros(()) if mins is None else (mins.half().float() - mins).abs()
    most = 2**info.bits - 1 if mins is not None else 127 if info.levels else 2 ** (info.bits - 1)
    step = scales.abs()
    step = torch.where(step > 0, step, step.amax(1, keepdim=True))
    moved = torch.where(scale_off + min_off > 0, (most * scale_off + min_off) / step, torch.zeros(()))
    steps = float(moved.max())
    if not steps <= _MOST_STEPS:
        raise ValueError(
            f"{name} has scales from {float(scales.abs().min()):.2g} to {float(scales.abs().max()):.2g}"
            + ("" if mins is None else f" and mins up to {float(mins.abs().max()):.2g}")
            + "; GGUF's float16 does not hold them nearly enough: leave the layer float (lowbit quantize --override)"
        )
    return steps


class _Bands:
    """Rows of a packed weight in a file, some panels at a time; the checksum is that of all of them."""

    def __init__(self, stored: Stored):
        self.stored, self.info = stored, packed_info(stored)
        info = self.info
        self._bands = Bands(info)
        self._header = self._bands.header_bytes
        self._panel = (info.total_bytes - self._header) // -(-info.out_features // PANEL_ROWS)

    def read(self, rows: int) -> Iterator[Unpacked]:
        """All rows, at most so many at a time, a multiple of 16.

        Raises:
            ValueError: the bytes do not have their checksum.
        """
        n = self.info.out_features
        for begin in range(0, n, rows):
            end = min(begin + rows, n)
            at = self._header + begin // PANEL_ROWS * self._panel
            until = self._header + -(-end // PANEL_ROWS) * self._panel
            band = torch.empty(self._header + until - at, dtype=torch.uint8)
            band[self._header :] = read_bytes(self.stored, at, until)
            self._put_header(band, end - begin, 0)  # folding wants one
            own = _C.fold_panels(band.data_ptr(), band.numel(), 0)
            self._bands.add(band)
            self._put_header(band, end - begin, own)
            yield unpack(band)
        if read_bytes(self.stored, 0, self._header).numpy().tobytes() != self._bands.header():
            raise ValueError(f"{self.stored.name} in {self.stored.path} is damaged: its checksum is another")

    def _put_header(self, band: Tensor, rows: int, folded: int) -> None:
        band[: self._header] = torch.frombuffer(bytearray(self._bands.header(rows, folded)), dtype=torch.uint8)


def _ordered(heads: int, rows: int) -> Tensor:
    """ggml's order of the rows of q or k: of each head the first of both halves, then the second."""
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


def _packed(name: str, stored: Stored, heads: int, done: Callable[[int], None]) -> list[_Output]:
    """A packed weight, and its bias."""
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

    weight = _Output(f"{name}.weight", _TYPES[kind], (info.out_features, info.in_features), write)
    bias = _Output(f"{name}.bias", _TYPES["F32"], (info.out_features,), write_bias)
    return [weight, bias] if info.has_bias else [weight]


def _float(name: str, stored: Stored, heads: int, done: Callable[[int], None], added: float = 0.0) -> _Output:
    """Floats as they are; vectors as float32, which is what ggml adds and multiplies by, and with `added`."""
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

    return _Output(name, _TYPES[kind], stored.shape, write)


def export_gguf(
    source: str | os.PathLike[str], path: str | os.PathLike[str], progress: Callable[[int, int, str], None] | None = None
) -> list[ExportedTensor]:
    """Writes a checkpoint, packed or float, as a GGUF file, some rows of one matrix at a time.

    Codes stay as they are; 1 to 3 bits become Q4_0 or Q4_1, 6 and 7 bits and tables of levels Q8_0, which hold them.
    What the importer then makes of the file has the same weights, and where ggml has a type of that width the same
    bytes.

    Args:
        source: a directory with a model of llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text or phi3.
        path: a name that ends in .gguf; what is there is replaced in one step.
        progress: called as ``progress(bytes read, bytes to read, name of the tensor)``.

    Returns:
        what became of each tensor, in the order of the file.

    Raises:
        OSError: a file is missing or cannot be read, or path cannot be written.
        ValueError: an architecture, a setting, a tokenizer or a tensor that the file cannot hold. Nothing is left of
            path then, and what was there stays.
    """
    source = Path(source)
    config = read_config(source)
    if quantization_method(config) not in (None, "lowbit"):
        raise ValueError(f"{source} is quantized by the method {quantization_method(config)!r}: lowbit import it first")
    metadata = architecture_metadata(source, config)
    tensors = read_files(*files_of(source))
    architecture = metadata["general.architecture"]
    window = metadata.get("phi3.attention.sliding_window")
    if window is not None and window < metadata["phi3.context_length"]:
        warnings.warn(
            f"llama.cpp computes phi3 without its window of {window} tokens: longer texts get other logits there", stacklevel=2
        )
    total, read = sum(stored.bytes for stored in tensors.values()), 0

    def done(count: int) -> None:
        nonlocal read
        read += count
        if progress is not None:
            progress(read, total, "")

    outputs = _outputs(tensors, metadata, bool(config.get("tie_word_embeddings")), done)
    if architecture in _ONE_TABLE and any(output.name == "output.weight" for output in outputs):
        raise ValueError(
            f"{source} has a head of its own (lm_head); GGUF's {architecture} takes the table of tokens: quantize the "
            "float checkpoint with lowbit quantize --override lm_head=float"
        )
    table = next((output for output in outputs if output.name == "token_embd.weight"), None)
    if table is None:
        raise ValueError(f"{source} has no model.embed_tokens, the table of its tokens")
    rotated = metadata[f"{architecture}.rope.dimension_count"]
    outputs += [_made(name, values) for name, values in rotation_factors(source, config, rotated).items()]
    metadata |= _tokenizer(source, config, table.shape[0])
    with replacing(path, ".gguf") as file:
        listed = [(output.name, output.type, output.shape) for output in outputs]
        with GgufWriter(file, metadata, listed) as writer:
            return [output.write(writer) for output in outputs]


def _outputs(
    tensors: Mapping[str, Stored], metadata: Mapping[str, Any], tied: bool, done: Callable[[int], None]
) -> list[_Output]:
    """What each tensor of a checkpoint becomes.

    Args:
        tied: the head is the table of tokens, which GGUF says by leaving it out.
        done: called with the number of bytes that were read.

    Raises:
        ValueError: the architecture has no such tensor, or not with as many rows.
    """
    architecture = metadata["general.architecture"]
    offset = ARCHITECTURES[architecture].norm_offset
    leaves = {ours: theirs for theirs, ours in ARCHITECTURES[architecture].names.items()}
    outputs: list[_Output] = []
    for key, stored in tensors.items():
        layer, _, leaf = key.rpartition(".")
        if leaf == "weight" and f"{layer}.packed_weight" in tensors:
            continue  # stands in its place for programs that do not know packed weights
        if leaf == "input_order":
            raise ValueError(f"{layer} has its inputs in an order of its own ({key}); GGUF has no such layers")
        name = _OUTSIDE.get(layer)
        if name is None and layer.startswith("model.layers."):
            number, _, part = layer.removeprefix("model.layers.").partition(".")
            name = f"blk.{number}.{leaves[part]}" if part in leaves and number.isdecimal() else None
        if name is None or leaf not in ("weight", "bias", "packed_weight"):
            raise ValueError(f"{stored.path} has the tensor {key}, which GGUF's {architecture} does not have")
        heads = _heads(name, key, stored, metadata)
        if leaf == "packed_weight":
            outputs += _packed(name, stored, heads, done)
        elif name != "output" or not tied:
            added = offset if name.endswith("norm") else 0.0
            outputs.append(_float(f"{name}.{leaf}", stored, heads, done, added))
    return outputs


def _heads(name: str, key: str, stored: Stored, metadata: Mapping[str, Any]) -> int:
    """How many heads a tensor has rows of that ggml wants in another order; 0: its rows stay as they are."""
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


def _made(name: str, values: np.ndarray) -> _Output:
    """A tensor of float32 that the checkpoint has not."""

    def write(writer: GgufWriter) -> ExportedTensor:
        writer.write(values)
        return ExportedTensor(name, "F32", "float")

    return _Output(name, _TYPES["F32"], values.shape, write)


def _tokenizer(source: Path, config: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Its metadata; and the tokens that end a text, of which a file has two."""
    from ..hf.gguf_tokenizer import tokenizer_metadata
    from ..llm.loading import load_tokenizer

    found = tokenizer_metadata(source, load_tokenizer(source), vocabulary)
    file = source / "generation_config.json"
    ends = (read_json(file) if file.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    for key, token in zip(("eos", "eot", "eom"), ends, strict=False):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"{source} ends texts at the token {token!r}; expected 0 to {vocabulary - 1}")
        found[f"tokenizer.ggml.{key}_token_id"] = token
    return found
