"""Writes a ``Source`` of any format as a packed checkpoint, some rows of a matrix at a time."""

from __future__ import annotations

import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..checkpoint import MAX_SHARD_BYTES, counted, new_checkpoint, write_json, write_note, write_tensors
from ..checkpoint.codes import Float, Nearness, SourceTensor, Stacked, Weights, as_floats
from ..checkpoint.outputs import Output, has_values, place_outputs, write_output
from ..files.config_json import CONFIG
from ..files.entries import CheckpointEntry
from ..files.gguf_cache import REPORT, VERSION
from ..files.import_report import ImportedTensor
from ..files.replace import resolve_new_directory
from ..files.safetensors import ORDER_SUFFIX, Writer
from ..files.tensors import DTYPES
from ..machine.sizes import size
from ..packed.matrix import check_activation_bits
from .joining import describe_experts, stacked
from .source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)

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


def _meta_model(config: dict[str, Any], tensors: int) -> PreTrainedModel:
    from ..hf.from_pretrained import meta_model

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return meta_model(Path(directory), tensors)


class _Plan:
    """The tensors to write for a source, each checked against the model."""

    def __init__(self, source: Source, model: PreTrainedModel, activation_bits: int | None):
        from ..hf.names import head_layers, names_in_model
        from ..layers.packable import named_layers

        self.source, self.model, self.activation_bits = source, model, activation_bits
        self.tensors: dict[str, SourceTensor] = {}
        for tensor in source.tensors:
            if tensor.name in self.tensors:
                raise ValueError(f"{source.path} has two tensors that become {tensor.name}; expected one")
            self.tensors[tensor.name] = tensor
        self.state, self.modules = model.state_dict(), dict(named_layers(model))
        self.heads = head_layers(model)
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

    def outputs(self) -> list[Output]:
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
            activation_bits = self.activation_bits or (16 if layer in self.heads else 8)
            outputs.append(Output(tensor, packed, bias, layer, activation_bits))
        check_complete(self.model, given_by(self.names), self.source.path)
        self._warn(floats)
        outputs += [Output(tensor, key) for key, tensor in floats.items() if key not in biases]
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
        floats = ((key, self.tensors[key]) for key in sorted(extra) if self._is_beside_a_weight(key))
        beside = {key: tensor for key, tensor in floats if isinstance(tensor, Float)}
        used = [key for key, tensor in beside.items() if has_values(tensor)]
        if used:
            shown = ", ".join(used[:3]) + (", ..." if len(used) > 3 else "")
            raise ValueError(
                f"{self.source.path} has {len(used)} tensors beside weights that {type(self.model).__name__} has no place "
                f"for, {shown}: they are not zero, so the model would compute something else without them"
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
                        f"{key} in {self.source.path} is {tensor.dtype} {list(tensor.shape)}, which is neither a float tensor "
                        "nor a part of a quantized layer that lowbit knows"
                    )
        if extra:
            warnings.warn(
                f"{len(extra)} tensors of {self.source.path} are not in {type(self.model).__name__}, {min(extra)} for "
                "example: they are copied unchanged",
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
                f"{len(requantized)} matrices of {source.path} have codes that lowbit cannot represent; they are requantized: "
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


def begin_step(opening: Progress | None, step: str) -> None:
    """Reports the beginning of a step of opening a source."""
    if opening is not None:
        opening(OPENING.index(step), len(OPENING), step)


def write_checkpoint(
    source: Source,
    target: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    activation_bits: int | None = None,
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

    if activation_bits is not None:
        check_activation_bits(activation_bits)
    resolve_new_directory(target)  # raises before the model is built
    begin_step(opening, MODEL)
    model = _meta_model(source.config, len(source.tensors))
    attach(model, [tensor.name for tensor in source.tensors])
    begin_step(opening, CHECKS)
    outputs = _Plan(source, model, activation_bits).outputs()
    # Without a version, transformers 5.19 mistakes a large tokenizer for an old one of Mistral, and warns.
    description = {"transformers_version": version("transformers")} | source.config
    if any(output.packed for output in outputs):
        place_outputs(model, outputs)
        description["quantization_config"] = LowBitConfig.describing(model).to_dict()

    total = sum(output.tensor.bytes for output in outputs)
    target_bytes = sum(output.stored(Path()).bytes for output in outputs)
    done = counted(progress, total)
    tensors: list[ImportedTensor] = []

    def write(output: Output, writer: Writer) -> None:
        tensor, nearness = output.tensor, Nearness()
        write_output(output, writer, lambda count: done(count, output.name), nearness)
        if isinstance(tensor, Float):
            nearness.kind = "dequantized" if tensor.dequantized else "float"
        if not output.name.endswith(ORDER_SUFFIX):  # an act-order permutation counts as part of its packed weight
            tensors.append(ImportedTensor(output.name, tensor.source, nearness.kind, nearness.steps, nearness.error))

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
