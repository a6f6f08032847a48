"""Writes a ``Source`` of any format as a packed checkpoint, some rows of a matrix at a time."""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..checkpoint import CheckpointEntry, counted, new_checkpoint, write_json, write_note, write_tensors
from ..files.config_json import CONFIG
from ..files.replace import resolve_new_directory
from ..files.safetensors import DTYPES, ORDER_SUFFIX, PACKED_SUFFIX, Stored, Writer
from ..machine.sizes import size
from ..packed.matrix import PackedInfo
from ..packed.row_bands import Bands, rows_of_band
from .codes import Float, Matrix, Nearness, SourceTensor, Stacked, Weights, as_floats, pack_rows, requantize_rows
from .joining import describe_experts, stacked
from .source import Source
from .summary import REPORT, VERSION, ImportedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
_BAND_WEIGHTS = 1 << 21

Progress: TypeAlias = Callable[[int, int, str], None]  # (done, total, what)
# The steps before the first weight is read.
READ, LIBRARIES, MODEL, CHECKS, FILES = OPENING = (
    "reading the source", "loading transformers", "building the model", "checking the tensors", "writing the tokenizer",
)  # fmt: skip


@dataclass(frozen=True)
class ImportSummary:
    """The result of :func:`import_checkpoint`."""

    target: Path
    format: str  # of the source
    entries: list[CheckpointEntry]
    tensors: list[ImportedTensor]  # with the error of each against the source
    source_bytes: int
    target_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Output:
    tensor: SourceTensor
    name: str
    bias: Float | None = None
    layer: str = ""  # name of the layer in the model, if packed

    @property
    def packed(self) -> bool:
        return not isinstance(self.tensor, Float)

    def order(self) -> _Output | None:
        """The act-order permutation, written as a separate tensor; None without one."""
        order = self.tensor.order if isinstance(self.tensor, Matrix) else None
        if order is None:
            return None
        order = order.int()
        read = lambda begin, end: order[begin:end]  # noqa: E731
        name = self.name.removesuffix(PACKED_SUFFIX) + ORDER_SUFFIX
        return _Output(Float(self.tensor.name, self.tensor.source, "I32", (len(order),), read, order.nbytes), name)

    def info(self) -> PackedInfo | None:
        return None if isinstance(self.tensor, Float) else self.tensor.info(self.bias is not None)

    def stored(self, path: Path) -> Stored:
        if isinstance(self.tensor, Float):
            return Stored(self.name, path, self.tensor.dtype, self.tensor.shape, 0, self.tensor.bytes)
        info = self.tensor.info(self.bias is not None)
        shape = tuple(size for size in (info.experts, info.total_bytes) if size is not None)
        return Stored(self.name, path, "U8", shape, 0, math.prod(shape))


def _bands(shape: tuple[int, ...], whole_panels: bool) -> Iterator[tuple[int, int]]:
    n, k = (*shape, 1)[0], max(1, math.prod(shape[1:]))  # a shape of [] has one element
    rows = rows_of_band(k, _BAND_WEIGHTS) if whole_panels else max(1, _BAND_WEIGHTS // k)
    for begin in range(0, n, rows):
        yield begin, min(begin + rows, n)


def _write(output: _Output, writer: Writer, done: Callable[[int], None]) -> ImportedTensor:
    tensor = output.tensor
    n = tensor.shape[0] if tensor.shape else 1
    if isinstance(tensor, Float):
        for begin, end in _bands(tensor.shape, False):
            values = tensor.read(begin, end).contiguous().view(-1).view(torch.uint8)
            if n * len(values) != (end - begin) * tensor.bytes:
                raise AssertionError(f"{tensor.name}: rows {begin} to {end} have {len(values)} bytes of {tensor.bytes}")
            writer.write(values.numpy())
            done(tensor.bytes * (end - begin) // n)
        return ImportedTensor(output.name, tensor.source, "dequantized" if tensor.dequantized else "float")
    nearness, info = Nearness(), tensor.info(output.bias is not None)
    if isinstance(tensor, Stacked):
        for number in range(tensor.experts):
            bias = None if output.bias is None else output.bias.read(number, number + 1)[0].float()
            _write_matrix(info, tensor.of(number), bias, nearness, writer, done)
    else:
        bias = None if output.bias is None else output.bias.read(0, n).float()
        _write_matrix(info, tensor, bias, nearness, writer, done)
    return ImportedTensor(output.name, tensor.source, nearness.kind, nearness.steps, nearness.error)


def _write_matrix(
    info: PackedInfo,
    tensor: Matrix | Weights,
    bias: torch.Tensor | None,
    nearness: Nearness,
    writer: Writer,
    done: Callable[[int], None],
) -> None:
    n = tensor.shape[0]
    bands = Bands(info)
    start = writer.write(bytes(bands.header_bytes))
    for begin, end in _bands(tensor.shape, True):
        rows, part = tensor.read(begin, end), None if bias is None else bias[begin:end]
        try:
            if isinstance(tensor, Matrix):
                packed = pack_rows(tensor, rows, part, nearness)
            else:
                packed = requantize_rows(tensor, rows, part, nearness)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{tensor.name}, rows {begin} to {end - 1}: {error}") from error
        writer.write(bands.add(packed).numpy())
        done(tensor.bytes * (end - begin) // n)
        del rows, packed  # free them before the next band is allocated
    writer.write_at(start, bands.header())


def _meta_model(config: dict[str, Any], tensors: int) -> PreTrainedModel:
    from ..hf.from_pretrained import meta_model

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return meta_model(Path(directory), tensors)


class _Plan:
    """The tensors to write for a source, each checked against the model."""

    def __init__(self, source: Source, model: PreTrainedModel):
        from ..hf.names import names_in_model
        from ..layers.packable import named_layers

        self.source, self.model = source, model
        self.tensors: dict[str, SourceTensor] = {}
        for tensor in source.tensors:
            if tensor.name in self.tensors:
                raise ValueError(f"{source.path} has two tensors that become {tensor.name}; expected one")
            self.tensors[tensor.name] = tensor
        self.state, self.modules = model.state_dict(), dict(named_layers(model))
        self.quantized = {tensor.name.rpartition(".")[0] for tensor in source.tensors if not isinstance(tensor, Float)}
        self.uneven: dict[str, tuple[str, int]] = {}  # experts of different kinds -> description, bytes in the source
        self._stack_experts()
        # Name in the files -> name in the model and targets.
        self.names = names_in_model(model, self.tensors)
        self._check_extra()

    def _stack_experts(self) -> None:
        """Joins the matrices of single experts to one tensor where the model has one."""
        from ..hf.names import names_in_model, parts_of_experts
        from ..layers.expert_stacks import Experts

        names = names_in_model(self.model, self.tensors)
        found: dict[str, dict[str, Stacked | None]] = {}  # layer -> matrices: a layer's experts are all packed, or all float
        parts = {
            target: [[self.tensors[key] for key in keys] for keys in experts]
            for target, experts in parts_of_experts(self.model, names).items()
            if isinstance(self.modules.get(target), Experts)
        }
        for target, experts in parts.items():
            found.setdefault(target.rpartition(".")[0], {})[target] = stacked(experts, target, self.source.path)
        for layers in found.values():
            whole = all(layers.values())
            for target, tensor in layers.items():
                quantized = any(not isinstance(part, Float) for each in parts[target] for part in each)
                if whole and tensor is not None:
                    for each in parts[target]:
                        for part in each:
                            del self.tensors[part.name]
                    self.tensors[target] = tensor
                if quantized and (tensor is None or not whole or tensor.differ):
                    bytes_ = sum(part.bytes for each in parts[target] for part in each)
                    causes = [target] if whole else layers
                    kinds = "; ".join(f"in {one.rpartition('.')[2]} {describe_experts(parts[one])}" for one in causes)
                    self.uneven[target] = kinds, bytes_

    def outputs(self) -> list[_Output]:
        """The tensors to write, in the order of the source.

        Raises:
            ValueError: a tensor is missing, has another shape, or is quantized where the model has no matrix.
        """
        from ..hf.names import check_complete, given_by
        from ..layers.packable import kind_of

        biases: set[str] = set()
        floats: dict[str, Float] = {}
        outputs = []
        for key, (name, targets) in self.names.items():
            tensor, layer = self.tensors[key], name.removesuffix(".weight")
            self._check_shape(key, name, targets)
            if isinstance(tensor, Float):
                floats[key] = tensor
                continue
            if targets is None and name not in self.state:
                raise ValueError(
                    f"{key} in {self.source.path} is quantized ({tensor.source}), but {type(self.model).__name__} has no "
                    "such tensor"
                )
            if targets is not None or kind_of(self.modules.get(layer)) is None:
                assert not isinstance(tensor, Stacked)  # refused by _check_shape
                floats[key] = as_floats(tensor)
                continue
            bias = self._bias_of(key, layer)
            biases |= {bias.name} if bias is not None else set()
            packed = f"{key}.packed_weight" if isinstance(tensor, Stacked) else key.removesuffix("weight") + "packed_weight"
            outputs.append(_Output(tensor, packed, bias, layer))
        check_complete(self.model, given_by(self.names), self.source.path)
        self._warn(floats)
        outputs += [_Output(tensor, key) for key, tensor in floats.items() if key not in biases]
        outputs += [order for output in outputs if (order := output.order()) is not None]
        places = {name: place for place, name in enumerate(self.tensors)}
        return sorted(outputs, key=lambda output: places[output.tensor.name])

    def _check_shape(self, key: str, name: str, targets: Any) -> None:
        from ..layers.expert_stacks import Experts
        from ..layers.packable import is_transposed

        tensor, layer = self.tensors[key], self.modules.get(name.removesuffix(".weight"))
        expected = self.state[name].shape if name in self.state else tensor.shape
        if isinstance(tensor, Stacked):
            experts = self.modules.get(name)
            if targets is not None or not isinstance(experts, Experts):
                raise ValueError(
                    f"{key} in {self.source.path} holds the matrices of experts, but {type(self.model).__name__} has no "
                    "such parameter"
                )
            expected = experts.weight.shape
        elif layer is not None and is_transposed(layer) and not isinstance(tensor, Float):
            expected = layer.weight.shape  # a quantized matrix is [out, in] in every format
        if targets is None and tuple(expected) != tuple(tensor.shape):
            raise ValueError(
                f"{key} in {self.source.path} has shape {list(tensor.shape)}; expected {list(expected)}, as its "
                "configuration says"
            )

    def _bias_of(self, key: str, layer: str) -> Float | None:
        """The bias to pack with the weight `key`; None if the layer has none."""
        if getattr(self.modules[layer], "bias", None) is None:
            return None
        called = f"{layer}_bias" if isinstance(self.tensors[key], Stacked) else f"{layer}.bias"
        biases = [self.tensors[other] for other, (name, _) in self.names.items() if name == called]
        if len(biases) != 1 or not isinstance(biases[0], Float):
            raise ValueError(f"{self.source.path} has no {called}; expected the bias of {key}")
        return biases[0]

    def _check_extra(self) -> None:
        """Drops all-zero tensors of layers that have no such tensor in the model, and warns of other extra tensors.

        Some writers add a bias to every quantized matrix.

        Raises:
            ValueError: such a tensor is not zero; or an integer tensor belongs to no layer, which may then be quantized in a
                way that lowbit does not know.
        """
        from ..hf.names import unused_by

        extra = {key: name for key, (name, targets) in self.names.items() if targets is None and name not in self.state}
        unused = unused_by(self.model, extra.values())
        extra = {key: name for key, name in extra.items() if name not in unused}
        beside = sorted(key for key in extra if isinstance(self.tensors[key], Float) and self._is_beside_a_weight(key))
        used = [key for key in beside if _has_values(self.tensors[key])]
        if used:
            shown = ", ".join(used[:3]) + (", ..." if len(used) > 3 else "")
            raise ValueError(
                f"{self.source.path} has {len(used)} tensors beside weights that {type(self.model).__name__} has no place "
                f"for, {shown}: they are not zero, so without them the model would compute something else"
            )
        for key in beside:
            del self.names[key], self.tensors[key], extra[key]
        for key, (name, targets) in self.names.items():
            tensor, known = self.tensors[key], self.state.get(name)
            if isinstance(tensor, Float) and tensor.dtype not in DTYPES:
                is_mask = key in extra and tensor.dtype == "BOOL"
                expects_floats = targets is not None or (known is not None and known.dtype.is_floating_point)
                if expects_floats or (key in extra and not is_mask):
                    raise ValueError(
                        f"{key} in {self.source.path} is {tensor.dtype} {list(tensor.shape)}, which is no part of a quantized "
                        "layer that lowbit knows, and no float tensor"
                    )
        if extra:
            warnings.warn(
                f"{len(extra)} tensors of {self.source.path} are not in {type(self.model).__name__}, {min(extra)} for "
                "example: they are copied as they are",
                stacklevel=6,
            )

    def _is_beside_a_weight(self, key: str) -> bool:
        """Whether a tensor belongs to a layer with a weight, quantized in the files or present in the model."""
        places = key.split(".")
        quantized = any(".".join(places[:end]) in self.quantized for end in range(1, len(places)))
        return quantized or f"{self.names[key][0].rpartition('.')[0]}.weight" in self.state

    def _warn(self, floats: Mapping[str, Float]) -> None:
        source = self.source
        alike = [tensor for tensor in self.tensors.values() if not isinstance(tensor, Stacked) or tensor.differ is None]
        matrices = [tensor.of(0) if isinstance(tensor, Stacked) else tensor for tensor in alike]
        requantized = [matrix for matrix in matrices if isinstance(matrix, Weights)]
        if requantized:
            kinds = sorted({(matrix.source, matrix.config.bits) for matrix in requantized})
            warnings.warn(
                f"{len(requantized)} matrices of {source.path} have codes that lowbit does not have; they are requantized: "
                + ", ".join(f"{kind} to {bits} bits" for kind, bits in kinds),
                stacklevel=5,
            )
        for target, (kinds_of_experts, bytes_) in self.uneven.items():
            if isinstance(tensor := self.tensors.get(target), Stacked):
                info = tensor.info(False)
                how = f"are packed with {info.bits} bits, {size(tensor.experts * info.total_bytes)}"
            else:
                how = f"become floats, {size(sum(floats[key].bytes for key in floats if self._is_of(key, target)))}"
            warnings.warn(
                f"all experts of {target} {how} instead of {size(bytes_)}, because one tensor holds them all with one kind of "
                f"codes: {kinds_of_experts}",
                stacklevel=5,
            )
        wide = [
            tensor for key, tensor in floats.items()
            if tensor.dequantized and not any(self._is_of(key, target) for target in self.uneven)
        ]  # fmt: skip
        if wide:
            bytes_ = sum(tensor.bytes for tensor in wide)
            warnings.warn(
                f"{len(wide)} quantized tensors of {source.path} become floats, {size(bytes_)}: lowbit packs no layer "
                f"of their kind, {wide[0].name} for example",
                stacklevel=5,
            )

    def _is_of(self, key: str, target: str) -> bool:
        targets = self.names[key][1]
        return targets is not None and target in targets


def _has_values(tensor: SourceTensor) -> bool:
    return any(bool(tensor.read(begin, end).any()) for begin, end in _bands(tensor.shape, False))  # type: ignore[union-attr]


def begin_step(opening: Progress | None, step: str) -> None:
    """Reports the beginning of a step of opening a source."""
    if opening is not None:
        opening(OPENING.index(step), len(OPENING), step)


def write_checkpoint(
    source: Source,
    target: Path,
    *,
    max_shard_bytes: int,
    progress: Progress | None = None,
    opening: Progress | None = None,
    begin: float | None = None,
) -> ImportSummary:
    """Writes a source as a packed checkpoint, atomically. The other arguments are those of ``import_checkpoint``.

    Args:
        begin: ``time.perf_counter()`` when the source was opened; None: now.
    """
    begin = time.perf_counter() if begin is None else begin
    begin_step(opening, LIBRARIES)
    from ..hf.config import LowBitConfig
    from ..hf.mtp_layers import attach
    from ..hf.names import names_in_model
    from ..hf.placing import place_packed

    resolve_new_directory(target)  # raises before the model is built
    begin_step(opening, MODEL)
    model = _meta_model(source.config, len(source.tensors))
    attach(model, [tensor.name for tensor in source.tensors])
    begin_step(opening, CHECKS)
    outputs = _Plan(source, model).outputs()
    # Without a version, transformers 5.19 mistakes a large tokenizer for an old one of Mistral, and warns.
    description = {"transformers_version": version("transformers")} | source.config
    infos = {output.layer: (output.name, output.info()) for output in outputs if output.packed}
    packed = {layer: (name, info) for layer, (name, info) in infos.items() if info is not None}
    if packed:
        floats = {output.name for output in outputs if not output.packed}
        ordered = {output.layer for output in outputs if output.order() is not None}
        place_packed(model, packed, floats, torch.float32, ordered)
        names = names_in_model(model, [output.name for output in outputs])
        for output in outputs:
            if output.packed and names[output.name] != (f"{output.layer}.packed_weight", None):
                raise ValueError(
                    f"{output.tensor.name} would be packed as {output.name}, which transformers takes for "
                    f"{names[output.name][0]}; expected {output.layer}.packed_weight"
                )
        description["quantization_config"] = LowBitConfig.describing(model).to_dict()

    total = sum(output.tensor.bytes for output in outputs)
    target_bytes = sum(output.stored(Path()).bytes for output in outputs)
    done = counted(progress, total)
    tensors: list[ImportedTensor] = []

    def write(output: _Output, writer: Writer) -> None:
        written = _write(output, writer, lambda count: done(count, output.name))
        if not output.name.endswith(ORDER_SUFFIX):  # an act-order permutation counts as part of its packed weight
            tensors.append(written)

    with new_checkpoint(target, target_bytes) as directory:
        begin_step(opening, FILES)
        source.write_files(directory)
        write_note(directory)
        entries = write_tensors(directory, outputs, max_shard_bytes, write)
        report = {
            "version": VERSION,
            "files": source.files,
            "source": source.path.name,
            "format": source.format,
            "tensors": [asdict(tensor) for tensor in tensors],
        }
        write_json(directory / REPORT, report)
        write_json(directory / CONFIG, description)  # written last: without it nothing loads
    seconds = time.perf_counter() - begin
    _LOG.info("%s, %s: %d tensors written to %s in %.1f s", source.path, source.format, len(entries), target, seconds)
    source_bytes = sum(tensor.bytes for tensor in source.tensors)  # not from the plan, whose tensors may be dequantized
    return ImportSummary(target, source.format, entries, tensors, source_bytes, target_bytes, seconds)
