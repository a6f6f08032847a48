"""Opens a model in GGUF files as a ``Source`` for importing."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.codes import Float, Matrix, Rows, SourceTensor, Stacked, Weights, below_each_other, put_together, values_of
from ..files.gguf_cache import file_states
from ..files.gguf_reader import Gguf, StoredBlocks, parts_of, read_gguf
from ..files.io import read_row_bytes
from ..files.replace import sync
from ..packed.rounding import LinearConfig
from .gguf_architectures import architecture_of, config_of, expert_tensor, in_head, place_in_head, place_in_model
from .gguf_blocks import block_type, decode
from .gguf_i2s import check_order, i2s_reader
from .gguf_lattices import LATTICES
from .gguf_layouts import Layout, laid_out
from .gguf_metadata import Metadata, generation_config
from .gguf_models import IN_CONFIG, Architecture
from .gguf_vision import with_vision
from .joining import joined
from .source import Source

_FLOATS = {"F32": ("F32", torch.float32), "F16": ("F16", torch.float16), "BF16": ("BF16", torch.bfloat16)}


def read_blocks(stored: StoredBlocks, begin: int, end: int) -> np.ndarray:
    """Reads rows of a tensor into new memory, uint8 [rows, bytes]."""
    return read_row_bytes(stored, begin, end).numpy()


def _unpermuted(read: Callable[[int, int], Any], rows: int, heads: int) -> Callable[[int, int], Any]:
    """Reads rows of q or k in transformers' order: for each head, first the even rows of the file, then the odd ones."""
    size = rows // heads

    def chosen(rows: Any, order: Any) -> Any:
        if isinstance(rows, Tensor):
            return rows[order]
        return Rows(*(None if part is None else part[order] for part in rows))

    def take(begin: int, end: int) -> Any:
        if end - begin >= size:
            first, last = begin // size, -(-end // size)
            order = torch.arange((last - first) * size).view(-1, size // 2, 2).transpose(1, 2).reshape(-1)
            return chosen(read(first * size, last * size), order[begin - first * size : end - first * size])
        # A malicious file may claim huge heads. If less than a head is wanted, read only the needed rows and those
        # between them.
        half, pieces = size // 2, []
        while begin < end:
            number = begin // half  # index of a half head: the even or the odd rows of a head
            until = min(end, (number + 1) * half)
            at = number // 2 * size + 2 * (begin - number * half)
            pieces.append(chosen(read(at, at + 2 * (until - begin)), slice(number % 2, None, 2)))
            begin = until
        return put_together(pieces, torch.cat)

    return take


def _joined(parts: Sequence[Callable[[int, int], Any]], n: int, interleaved: bool) -> Callable[[int, int, int], Any]:
    """Reads rows of an expert's matrix from one or two tensors with n rows per expert; the rows of two tensors are
    concatenated or interleaved."""

    def read(expert: int, begin: int, end: int) -> Any:
        start = expert * n
        if len(parts) == 1:
            return parts[0](start + begin, start + end)
        if interleaved:
            first, last = begin // 2, -(-end // 2)
            pieces = [part(start + first, start + last) for part in parts]
            local = slice(begin - 2 * first, end - 2 * first)
            return put_together(pieces, lambda halves: torch.stack(halves, 1).flatten(0, 1)[local])
        experts = [lambda first, last, part=part: part(start + first, start + last) for part in parts]
        return below_each_other(experts, [n] * len(parts))(begin, end)

    return read


class _Reader:
    def __init__(
        self, gguf: Gguf, metadata: Metadata, architecture: Architecture, config: dict[str, Any], i2s_order: str | None
    ):
        self.gguf, self.metadata, self.architecture, self.config = gguf, metadata, architecture, config
        self.i2s_order = i2s_order
        self.layouts: Mapping[str, Layout] = {} if architecture.layouts is None else architecture.layouts(config)

    def tensors(self) -> list[Matrix | Stacked | Weights | Float]:
        outputs: list[Matrix | Stacked | Weights | Float] = []
        experts: dict[str, dict[tuple[str, str], StoredBlocks]] = {}
        places: dict[str, dict[int, StoredBlocks]] = {}  # tensor of the model -> its parts
        counts: dict[str, int] = {}
        for stored in self.gguf.tensors.values():
            drafting = self._is_drafting(stored.name)
            if stored.name in IN_CONFIG or (drafting and not self._is_of_head(stored.name)):
                continue
            expert = expert_tensor(self.architecture, stored.name)
            if expert is not None:
                holder = in_head(self.architecture, expert[0]) if drafting else expert[0]
                experts.setdefault(holder, {})[expert[1:]] = stored
                continue
            part = (place_in_head if drafting else place_in_model)(self.architecture, stored.name)
            if part is None:
                raise ValueError(
                    f"{stored.path} has the tensor {stored.name!r}, which lowbit does not know in "
                    f"the architecture {self.metadata.architecture!r}"
                )
            if stored.name.endswith("ffn_gate_inp_shexp.weight") and len(stored.shape) == 1:
                stored = replace(stored, shape=(1, *stored.shape))  # one row, where transformers has a matrix
            places.setdefault(part.name, {})[part.number] = stored
            counts[part.name] = part.parts
        for name, parts in places.items():
            if len(parts) < counts[name]:
                stored = next(iter(parts.values()))
                raise ValueError(f"{stored.path} has {stored.name} without the tensor that belongs to it in {name}")
            outputs.append(self._placed(name, [parts[number] for number in sorted(parts)]))
        for holder, tensors in experts.items():
            for leaf in ("weight", "bias") if any(leaf == "bias" for _, leaf in tensors) else ("weight",):
                first = "up_proj" if self.architecture.ungated else "gate_up_proj"
                merged = (
                    ("up",) if self.architecture.ungated else ("gate_up",) if ("gate_up", leaf) in tensors else ("gate", "up")
                )
                for name, wanted in ((first, merged), ("down_proj", ("down",))):
                    missing = [part for part in wanted if (part, leaf) not in tensors]
                    if missing:
                        path = self.metadata.path
                        raise ValueError(f"{path} has no ffn_{missing[0]}_exps.{leaf} for {holder}; expected one")
                    suffix = "_bias" if leaf == "bias" else ""
                    outputs.append(self._experts([tensors.pop((part, leaf)) for part in wanted], f"{holder}.{name}{suffix}"))
            for stored in tensors.values():
                raise ValueError(
                    f"{stored.path} has {stored.name} beside the other matrices of the experts; expected gate and up, or both "
                    "in one" + (", but no gate in this architecture" if self.architecture.ungated else "")
                )
        return outputs

    def _is_drafting(self, name: str) -> bool:
        """Whether a tensor belongs to extra layers after the model's, which predict further tokens."""
        layer = name.split(".")[1] if name.startswith("blk.") else ""
        return layer.isdecimal() and int(layer) >= self.config["num_hidden_layers"] and "nextn_predict_layers" in self.metadata

    @property
    def has_head(self) -> bool:
        """Whether the first of these layers becomes the model's multi-token prediction head."""
        name = f"blk.{self.config['num_hidden_layers']}.nextn.eh_proj.weight"
        return self.architecture.head is not None and name in self.gguf.tensors and self._is_drafting(name)

    def _is_of_head(self, name: str) -> bool:
        """Whether a tensor of the extra layers belongs to the head; its tables duplicate the model's and are left out."""
        tables = name.endswith((".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight"))
        return self.has_head and name.startswith(f"blk.{self.config['num_hidden_layers']}.") and not tables

    def _placed(self, name: str, stored: list[StoredBlocks]) -> Matrix | Weights | Float:
        """A tensor of the model, joined from its parts and converted to transformers' layout."""
        if name.endswith("kv_b_proj.weight") and len(stored) == 2:
            return self._kv_b(name, *stored)
        tensor = joined([self.tensor(one, name) for one in stored], name, stored[0].path)
        layer = name.split(".", 3)[-1] if name.startswith("model.layers.") else name
        layout = self.layouts.get(layer)
        return tensor if layout is None else laid_out(tensor, layout, stored[0].path)

    def _kv_b(self, name: str, keys: StoredBlocks, values: StoredBlocks) -> Weights | Float:
        """Joins keys [heads, rank, k] and values [heads, v, rank] to one matrix with k rows and v rows per head."""
        if not len(keys.shape) == len(values.shape) == 3 or (keys.shape[0], keys.shape[1]) != (
            values.shape[0],
            values.shape[2],
        ):
            raise ValueError(
                f"{keys.path}: {keys.name} is {list(keys.shape)} and {values.name} {list(values.shape)}; expected "
                "[heads, rank, k] and [heads, v, rank]"
            )
        heads, rank, k = keys.shape
        rows = k + values.shape[1]
        parts = [self.tensor(replace(one, shape=(heads * one.shape[1], one.shape[2])), name) for one in (keys, values)]
        read_keys, read_values = map(values_of, parts)

        def read(begin: int, end: int) -> Tensor:
            first, last = begin // rows, -(-end // rows)
            of_heads = [
                torch.cat(
                    [read_keys(head * rank, (head + 1) * rank).t(), read_values(head * (rows - k), (head + 1) * (rows - k))]
                )
                for head in range(first, last)
            ]
            return torch.cat(of_heads)[begin - first * rows : end - first * rows]

        total = keys.bytes + values.bytes
        if all(isinstance(part, Float) for part in parts):
            return Float(name, parts[0].source, "F32", (heads * rows, rank), read, total)
        bits = max(part.bits if isinstance(part, Matrix) else 8 for part in parts)
        source = " and ".join(dict.fromkeys(part.source for part in parts))
        return Weights(name, source, (heads * rows, rank), LinearConfig(min(bits + 1, 8)), read, total)

    def _experts(self, stored: list[StoredBlocks], name: str) -> Stacked | Float:
        """A matrix or bias of all experts, from one tensor or from two that are one in the model."""
        first, bias = stored[0], name.endswith("_bias")
        for other in stored:
            if len(other.shape) != (2 if bias else 3) or other.shape != first.shape or other.type != first.type:
                raise ValueError(
                    f"{other.path}: {other.name} is {other.type.name} {list(other.shape)}, and {first.name} "
                    f"{first.type.name} {list(first.shape)}; expected {'[experts, n]' if bias else '[experts, n, k]'}, "
                    "both alike"
                )
        if bias and first.type.name not in _FLOATS:
            raise ValueError(f"{first.path}: {first.name} is {first.type.name}; expected a bias in floats")
        count, n, k = first.shape if not bias else (*first.shape, 1)
        parts = [self.tensor(replace(tensor, shape=(count * n, k)), name) for tensor in stored]
        rows, total, one = n * len(parts), sum(part.bytes for part in parts), parts[0]
        read = _joined([part.read for part in parts], n, self.architecture.interleaved)
        if not isinstance(one, Float):

            def of(expert: int) -> Matrix | Weights:
                read_expert, called = partial(read, expert), f"{name}, expert {expert}"
                return replace(one, name=called, shape=(rows, k), read=read_expert, bytes=total // count)

            return Stacked(name, count, of, total)
        transposed = self.architecture.interleaved and not bias
        shape = (count, rows) if bias else (count, k, rows) if transposed else (count, rows, k)

        def floats(begin: int, end: int) -> Tensor:
            values = torch.stack([read(expert, 0, rows) for expert in range(begin, end)])
            return (values.transpose(1, 2) if transposed else values).reshape(end - begin, *shape[1:])

        return replace(one, name=name, shape=shape, read=floats, bytes=total)

    def _heads(self, stored: StoredBlocks) -> int:
        """Number of heads if the tensor has permuted rows of q or k; otherwise 0."""
        if not self.architecture.permuted:
            return 0
        key = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(stored.name.split(".")[-2])
        if key is None:
            return 0
        heads = int(self.config[key])
        if not heads or stored.shape[0] % (2 * heads):
            raise ValueError(
                f"{stored.path}: {stored.name} has {stored.shape[0]} rows; expected a multiple "
                f"of {2 * heads}, for {heads} heads"
            )
        return heads

    def tensor(self, stored: StoredBlocks, name: str) -> Matrix | Weights | Float:
        """A tensor of the file with a name in transformers."""
        heads, kind = self._heads(stored), stored.type.name

        def ordered(read: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
            return _unpermuted(read, stored.shape[0], heads) if heads else read

        if kind in _FLOATS:
            dtype, torch_dtype = _FLOATS[kind]
            offset = self.architecture.offset_of(name)

            def floats(begin: int, end: int) -> Tensor:
                rows = torch.from_numpy(read_blocks(stored, begin, end)).view(torch_dtype)
                values = rows.view(end - begin, *stored.shape[1:])
                return values - offset if offset else values

            return Float(name, kind, dtype, stored.shape, ordered(floats), stored.bytes)
        if len(stored.shape) != 2:
            raise ValueError(f"{stored.path}: {stored.name} is {kind} with {len(stored.shape)} dimensions; expected a matrix")
        if kind == "I2_S":
            ternary = ordered(i2s_reader(stored, self.i2s_order))
            return Matrix(name, kind, stored.shape, 2, None, False, ternary, stored.bytes)
        blocks = LATTICES[kind].block_type(_dequantizer(stored)) if kind in LATTICES else block_type(kind)
        if blocks is not None:

            def codes(begin: int, end: int) -> Rows:
                data = read_blocks(stored, begin, end)
                return decode(blocks, data.reshape(end - begin, -1, stored.type.bytes))

            return Matrix(
                name, kind, stored.shape, blocks.bits, blocks.group_size, blocks.affine, ordered(codes), stored.bytes,
                blocks.levels,
            )  # fmt: skip
        raise ValueError(f"{stored.path}: {stored.name} has the type {kind}; expected a type of weights")


def _dequantizer(stored: StoredBlocks) -> Callable[[np.ndarray], np.ndarray]:
    kind = stored.type.name
    try:
        gguf = import_module("gguf")
        number = gguf.GGMLQuantizationType[kind]
    except (ImportError, KeyError) as error:
        raise ImportError(
            f"{stored.path}: {stored.name} has the type {kind}, whose values the package gguf computes; it is not "
            "installed, or too old: pip install gguf"
        ) from error
    return lambda data: np.ascontiguousarray(gguf.dequantize(data, number), np.float32)


def open_gguf(
    path: str | os.PathLike[str], i2s_order: str | None = None, mmproj: str | os.PathLike[str] | None = None
) -> Source:
    """Opens the model in a GGUF file, or in all parts of a split one.

    Args:
        i2s_order, mmproj: as for :func:`lowbit.import_checkpoint`.

    Raises:
        OSError, ValueError: as :func:`lowbit.files.gguf_reader.read_gguf`; an unknown architecture, key, tensor or type; or
            I2_S without its order.
        ImportError: a type requires the package gguf, which is not installed.
    """
    check_order(i2s_order)
    path = Path(path)
    states = file_states(parts_of(path))  # before reading, so that files changed later count as out of date
    gguf = read_gguf(path)
    metadata = Metadata(gguf)
    architecture = architecture_of(metadata)
    config = config_of(metadata, architecture, gguf)
    reader = _Reader(gguf, metadata, architecture, config, i2s_order)
    tensors = reader.tensors()
    if (heads := metadata.whole("nextn_predict_layers", 0)) > reader.has_head:
        left = f"{heads - reader.has_head} layers" if reader.has_head else "layers"
        warnings.warn(
            f"{path} has {left} for multi-token prediction that lowbit does not import; they are left out", stacklevel=3
        )
    packed = any(not isinstance(tensor, Float) for tensor in tensors)
    # ggml computes with dequantized weights in float32. A file with only floats keeps the dtype of its matrices.
    halves = {tensor.source for tensor in tensors if isinstance(tensor, Float) and len(tensor.shape) > 1}
    dtype = _FLOATS[halves.pop()][1] if not packed and len(halves) == 1 else torch.float32
    config["dtype"] = str(dtype).removeprefix("torch.")

    def write_files(directory: Path) -> None:
        from ..hf.gguf_tokenizer import save_tokenizer

        with open(directory / "generation_config.json", "x", encoding="utf-8") as file:
            json.dump(generation_config(metadata, config), file, indent=2)
            sync(file)
        save_tokenizer(path, gguf.metadata, metadata.architecture, config["vocab_size"], directory)

    text = Source(path, "GGUF", config, tensors, write_files, states)
    return text if mmproj is None else with_vision(text, Path(mmproj), _tower_tensor, partial(_token_ids, gguf))


# The tensors of vision towers have no order of heads and no norms that differ by their names.
_TOWER = Architecture("clip", "", {})


def _tower_tensor(gguf: Gguf, stored: StoredBlocks, name: str, offset: float) -> SourceTensor:
    """A tensor of a vision tower, minus ``offset``, with a name in transformers."""
    tensor = _Reader(gguf, Metadata(gguf), _TOWER, {}, None).tensor(stored, name)
    if not offset:
        return tensor
    read = values_of(tensor)
    return Float(name, tensor.source, "F32", tensor.shape, lambda begin, end: read(begin, end).float() - offset, tensor.bytes)


def _token_ids(gguf: Gguf) -> dict[str, int]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return {token: number for number, token in enumerate(tokens)} if isinstance(tokens, list) else {}
