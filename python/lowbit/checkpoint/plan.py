"""Plans the tensors that :func:`lowbit.quantize_checkpoint` writes, from the headers of the files only."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..files.config_json import QUANTIZED_LEAVES, quantization_settings, read_config
from ..files.safetensors import DTYPES, Stored, chunks, files_of, read_files, read_rows, same_bytes
from ..layers.expert_stacks import Experts
from ..layers.packable import is_transposed, named_layers, warn_of_floats
from ..machine.sizes import size
from ..packed.matrix import PackedInfo
from ..packed.rounding import ConvConfig, EmbeddingConfig, LinearConfig
from .writing import MAX_SHARD_BYTES, size_of_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..hf.config import LowBitConfig


@dataclass(frozen=True)
class SourceMatrix:
    """A matrix to pack: one tensor of the files, or several concatenated by rows."""

    parts: tuple[Stored, ...]
    transposed: bool = False  # in the files

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k]; all parts have the same k."""
        rows, columns = sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def reader(self) -> Callable[[int, int], torch.Tensor]:
        """A function that reads rows [begin, end)."""
        if self.transposed:  # its rows are not contiguous in the file
            whole = self._read(0, self.shape[1]).T
            return lambda begin, end: whole[begin:end]
        return self._read

    def _read(self, begin: int, end: int) -> torch.Tensor:
        pieces, at = [], 0
        for part in self.parts:
            first, last = max(begin - at, 0), min(end - at, part.shape[0])
            if first < last:
                pieces.append(read_rows(part, first, last))
            at += part.shape[0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _slices(stored: Stored) -> list[Stored]:
    """The matrices of a tensor of three dimensions."""
    size = stored.bytes // max(1, stored.shape[0])
    return [
        replace(stored, shape=stored.shape[1:], offset=stored.offset + i * size, bytes=size) for i in range(stored.shape[0])
    ]


def _band(stored: Stored, band: int, bands: int) -> Stored:
    """Band number ``band`` of ``bands`` equal bands of a tensor's rows."""
    count = stored.bytes // bands
    shape = (stored.shape[0] // bands, *stored.shape[1:])
    return replace(stored, shape=shape, offset=stored.offset + band * count, bytes=count)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write: a copy of `source`, or its packed form if there is a config."""

    name: str
    source: Stored
    config: LinearConfig | EmbeddingConfig | ConvConfig | None = None
    bias: Stored | None = None
    layer: str = ""  # of a packed weight
    transposed: bool = False  # in the files
    experts: tuple[SourceMatrix, ...] | None = None  # used instead of `source`, which is the first tensor of the first expert
    parts: tuple[Stored, ...] = ()  # concatenated by rows; used instead of `source`, the first of them

    @property
    def matrices(self) -> tuple[SourceMatrix, ...]:
        return self.experts or (SourceMatrix(self.parts or (self.source,), self.transposed),)

    @property
    def source_bytes(self) -> int:
        return sum(matrix.bytes for matrix in self.matrices)

    def info(self) -> PackedInfo | None:
        return None if self.config is None else self.packed_info()

    def packed_info(self) -> PackedInfo:
        config, shape = self.config, self.matrices[0].shape
        assert config is not None
        info = config.describe(shape, self.bias is not None)
        return info if self.experts is None else replace(info, experts=len(self.experts))

    def stored(self, path: Path) -> Stored:
        if self.config is None:
            return Stored(self.name, path, self.source.dtype, self.source.shape, 0, self.source.bytes)
        size = self.packed_info().total_bytes
        shape = (size,) if self.experts is None else (len(self.experts), size)
        return Stored(self.name, path, "U8", shape, 0, math.prod(shape))


def _check_float(*tensors: Stored | None) -> None:
    for stored in tensors:
        if stored is not None and stored.dtype not in DTYPES:
            raise ValueError(f"{stored.name} in {stored.path} has dtype {stored.dtype}; expected {', '.join(DTYPES)}")


class _Plan:
    """Plans a quantized checkpoint from a model on the meta device and the headers of its files.

    Attributes:
        tensors: name in the files -> tensor.
        names: name in the files -> name in the model and targets, from :func:`names_in_model`.
        ties: tensor of the model -> the tensor that it is tied to.
        unconverted: name in the model -> tensor, for tensors that transformers loads without conversion.
        copies: tensors of a multi-token prediction head that duplicate the model's tables; they are left out.
        rows: name in the model -> where its rows are, for tensors that transformers splits or concatenates by rows.
        selected: layer -> config.
        experts: name -> matrices, for selected experts.
        unselected: packable layer -> why it stays float.
    """

    def __init__(self, model: PreTrainedModel, config: LowBitConfig, tensors: dict[str, Stored], source: Path):
        from ..hf.mtp_layers import shared_copies
        from ..hf.names import check_complete, given_by, names_in_model

        self.model, self.tensors, self.source = model, tensors, source
        self.names, self.layers = names_in_model(model, tensors), dict(named_layers(model))
        self.state: dict[str, torch.Tensor] = model.state_dict()
        self.ties: dict[str, str] = model.all_tied_weights_keys
        check_complete(model, given_by(self.names), source)
        self.unconverted, self.rows = self._unconverted(), self._rows()
        self.copies = {
            copy for copy, own in shared_copies(model, tensors).items()
            if (stored := self.unconverted.get(own) or self.unconverted.get(self.ties.get(own, "")))
            and same_bytes(tensors[copy], stored)
        }  # fmt: skip
        self.selected, self.unselected = config.choose(model)
        self.experts = self._experts()
        for name in list(self.selected):
            if not (name in self.experts if isinstance(self.layers[name], Experts) else self._is_readable(name)):
                del self.selected[name]
                self.unselected[name] = "built by a conversion of transformers that lowbit does not support"
        if not self.selected:
            raise ValueError(f"config selects no layer of {type(model).__name__}")

    def _unconverted(self) -> dict[str, Stored]:
        by_name: dict[str, Stored] = {}
        for key, (name, targets) in self.names.items():
            if targets is not None or name not in self.state:
                continue
            stored, expected = self.tensors[key], list(self.state[name].shape)
            if name in by_name:
                raise ValueError(f"{by_name[name].name} and {key} are both the {name} of the model; expected one of them")
            if list(stored.shape) != expected:
                raise ValueError(
                    f"{key} in {stored.path} has shape {list(stored.shape)}; expected {expected}, as config.json says"
                )
            by_name[name] = stored
        for target, source in self.ties.items():
            if target in by_name and source in by_name and same_bytes(by_name[target], by_name[source]):
                del by_name[target]  # the file contains it twice
        return by_name

    def _rows(self) -> dict[str, tuple[Stored, ...]]:
        from ..hf.names import rows_of

        located = {}
        for name, pieces in rows_of(self.model, self.names).items():
            sources = [self.tensors[piece.key] for piece in pieces]
            # Uneven bands, and tensors that are also tied, are copied unchanged.
            uneven = any(
                not stored.shape or stored.shape[0] % piece.bands for stored, piece in zip(sources, pieces, strict=True)
            )
            if uneven or name not in self.state or name in self.ties or name in self.ties.values():
                continue
            bands = tuple(_band(stored, piece.band, piece.bands) for stored, piece in zip(sources, pieces, strict=True))
            shape, expected = [sum(band.shape[0] for band in bands), *bands[0].shape[1:]], list(self.state[name].shape)
            if shape != expected or any(band.shape[1:] != bands[0].shape[1:] for band in bands):
                raise ValueError(
                    f"{sources[0].name} in {sources[0].path} gives {name} the shape {shape}; expected {expected}, as "
                    "config.json says"
                )
            located[name] = bands
        return located

    def _experts(self) -> dict[str, tuple[SourceMatrix, ...]]:
        """The matrices of selected experts that can be read one by one: all of a module's, or none."""
        from ..hf.names import parts_of_experts

        parts, matrices = parts_of_experts(self.model, self.names), {}
        layers = {name: layer for name, layer in self.layers.items() if isinstance(layer, Experts) and name in self.selected}
        for name, layer in layers.items():
            if layer.bias is not None and f"{name}_bias" not in self.unconverted:
                continue
            if name in self.unconverted:
                matrices[name] = tuple(SourceMatrix((one,), layer.transposed) for one in _slices(self.unconverted[name]))
            elif name in parts and not layer.transposed:
                matrices[name] = tuple(SourceMatrix(tuple(self.tensors[key] for key in keys)) for keys in parts[name])
                self._check_experts(name, layer, matrices[name])
            for matrix in matrices.get(name, ()):
                _check_float(*matrix.parts)
        holders = [layer.holder for name, layer in layers.items() if name not in matrices]
        return {
            name: stored for name, stored in matrices.items() if all(layers[name].holder is not holder for holder in holders)
        }

    def _check_experts(self, name: str, layer: Experts, matrices: tuple[SourceMatrix, ...]) -> None:
        expected = list(layer.weight.shape[1:])
        for matrix in matrices:
            shapes, part = [list(part.shape) for part in matrix.parts], matrix.parts[0]
            is_matrix = all(len(shape) == 2 and shape[1] == expected[1] for shape in shapes)
            if not is_matrix or list(matrix.shape) != expected:
                raise ValueError(
                    f"{part.name} in {part.path} has shape {shapes[0]}; expected a part of {expected}, as config.json says"
                )
        if len(matrices) != layer.num_experts:
            raise ValueError(
                f"the files have {len(matrices)} experts of {name}; expected {layer.num_experts}, as config.json says"
            )

    def _is_readable(self, layer: str) -> bool:
        """Whether weight and bias of a selected layer can be read from the files without conversion."""
        for leaf in ("weight", "bias"):
            name = f"{layer}.{leaf}"
            if leaf == "bias" and (name not in self.state or isinstance(self.selected[layer], EmbeddingConfig)):
                continue
            tied = {self.ties.get(name), *(target for target, source in self.ties.items() if source == name)}
            tied |= {target for target, source in self.ties.items() if source in tied}
            if name in self.rows:
                if (leaf == "bias" and len(self.rows[name]) > 1) or is_transposed(self.layers[layer]):
                    return False
            elif name not in self.unconverted and not any(other in self.unconverted for other in tied):
                return False
        return True

    def _bias(self, layer: str) -> Stored | None:
        name = f"{layer}.bias"
        if isinstance(self.selected[layer], EmbeddingConfig) or name not in self.state:
            return None
        if name in self.rows:
            return self.rows[name][0]
        return self.unconverted.get(name) or self.unconverted[self.ties[name]]

    def outputs(self) -> list[PlannedTensor]:
        """The tensors to write, in the order of the files."""
        outputs: list[PlannedTensor] = []
        for key, stored in self.tensors.items():
            name, targets = self.names[key]
            in_model = name if targets is None else targets[0]
            if in_model in self.experts:
                outputs += self._of_experts(in_model)
                self.experts[in_model] = ()  # their other tensors produce no output
            elif targets is not None and all(target in self.rows for target in targets):
                outputs += self._of_rows(key, stored, targets)
            elif self.unconverted.get(name) is stored:
                outputs += self._of_weight(stored, name)
            elif (targets is not None or name not in self.state) and key not in self.copies:
                outputs.append(PlannedTensor(key, stored))
        linear = [layer for layer, config in self.selected.items() if not isinstance(config, EmbeddingConfig)]
        biases = (f"{layer}_bias" if layer in self.experts else f"{layer}.bias" for layer in linear)
        packed = {self.unconverted[name].name for name in biases if name in self.unconverted}
        return [output for output in outputs if output.config is not None or output.name not in packed]

    def _of_experts(self, name: str) -> list[PlannedTensor]:
        matrices = self.experts[name]
        if not matrices:
            return []
        first, bias = matrices[0].parts[0], self.unconverted.get(f"{name}_bias")
        return [PlannedTensor(f"{name}.packed_weight", first, self.selected[name], bias, name, experts=matrices)]

    def _of_rows(self, key: str, stored: Stored, targets: tuple[str, ...]) -> list[PlannedTensor]:
        """The outputs, packed and float, for a tensor whose rows are several tensors of the model."""

        def is_packed(name: str) -> bool:
            layer, _, leaf = name.rpartition(".")
            return layer in self.selected and (leaf == "weight" or not isinstance(self.selected[layer], EmbeddingConfig))

        if not any(map(is_packed, targets)):
            return [PlannedTensor(key, stored)]
        outputs = []
        for name in targets:
            layer, _, leaf = name.rpartition(".")
            parts = self.rows[name]
            if not is_packed(name):
                outputs.append(PlannedTensor(name, parts[0]))
            elif leaf == "weight" and parts[0].name == key:  # output once, for the first of several tensors
                bias, config = self._bias(layer), self.selected[layer]
                _check_float(*parts, bias)
                outputs.append(PlannedTensor(f"{layer}.packed_weight", parts[0], config, bias, layer, parts=parts))
        return outputs

    def _of_weight(self, stored: Stored, name: str) -> list[PlannedTensor]:
        """The outputs for a weight, ``name`` in the model, that several layers may share, of which some are selected."""
        users = [name, *(target for target, source in self.ties.items() if source == name and target not in self.unconverted)]
        if (tied := self.ties.get(name)) is not None and tied not in self.unconverted:
            users.append(tied)
        weights = [user.removesuffix(".weight") for user in users if user.endswith(".weight")]
        chosen = [layer for layer in weights if layer in self.selected]
        if not chosen:
            return [PlannedTensor(stored.name, stored)]
        if len({tuple(vars(self.selected[layer]).items()) for layer in chosen}) > 1:
            raise ValueError(
                f"{' and '.join(chosen)} share one weight but have different configs, "
                f"{' and '.join(str(self.selected[layer]) for layer in chosen)}; give all the same, or None to all "
                "but one"
            )
        biases = {layer: self._bias(layer) for layer in chosen if not isinstance(self.selected[layer], EmbeddingConfig)}
        _check_float(stored, *biases.values())

        def in_file(layer: str, leaf: str) -> str:
            return (stored.name.removesuffix("weight") if f"{layer}.weight" == name else f"{layer}.") + leaf

        outputs = []
        # As in quantize_: a packed weight holds one bias.
        share = len({id(bias) for bias in biases.values()}) <= 1
        for layer in chosen[:1] if share else chosen:
            bias = next(iter(biases.values()), None) if share else biases.get(layer)
            transposed, packed = is_transposed(self.layers[layer]), in_file(layer, "packed_weight")
            matrix = stored
            if isinstance(self.selected[layer], ConvConfig):
                matrix = replace(stored, shape=(stored.shape[0], math.prod(stored.shape[1:])))
            outputs.append(PlannedTensor(packed, matrix, self.selected[layer], bias, layer, transposed))
        floats = [layer for layer in weights if layer not in self.selected]
        return outputs + [PlannedTensor(in_file(layer, "weight"), stored) for layer in floats[:1]]

    def floats(self, outputs: Iterable[PlannedTensor]) -> dict[str, str]:
        """Matrices that stay float -> why. Warns of matrices and biases that the model does not have."""
        reasons, extra, beside = {}, {}, []
        for output in outputs:
            # Integers are not weights: old BERT files contain positions [1, 512].
            if output.config is not None or output.source.dtype not in DTYPES:
                continue
            name, targets = self.names[output.source.name]
            if len(output.source.shape) < 2:
                unknown = targets is None and name not in self.state and f"{name.rpartition('.')[0]}.weight" in self.state
                if unknown and any(bool(chunk.any()) for chunk in chunks(output.source)):
                    beside.append(output.name)
                continue
            if targets is not None and targets[0] in self.state:
                name, why = output.name if output.name in targets else targets[0], "transformers makes it a part of {}"
            elif targets is None and name in self.state:
                why = "in a layer of the kind {}"
            else:
                reasons[output.name] = f"not in {type(self.model).__name__}"
                extra[output.name] = output.source.bytes
                continue
            layer = name.rpartition(".")[0]
            kind = type(self.model.get_submodule(layer)).__name__
            known = self.unselected.get(layer) or self.unselected.get(name)
            reasons[output.name] = known or f"{why.format(kind)}, which lowbit does not pack"
        if extra:
            one = len(extra) == 1
            warnings.warn(
                f"{len(extra)} {'matrix' if one else 'matrices'} of the files ({size(sum(extra.values()))}), {min(extra)} for "
                f"example, {'is' if one else 'are'} not in {type(self.model).__name__}, and copied as they are",
                stacklevel=3,
            )
        if beside:
            warnings.warn(
                f"{len(beside)} tensors of the files beside weights, {min(beside)} for example, are not in "
                f"{type(self.model).__name__}, which computes without them; they are copied as they are",
                stacklevel=3,
            )
        return reasons

    def check_names(self, outputs: list[PlannedTensor]) -> None:
        """Puts the packed layers into the model; raises ValueError unless transformers would load each output to its layer."""
        from ..hf.names import names_in_model
        from ..hf.placing import place_packed

        placed = {output.layer: (output.name, output.packed_info()) for output in outputs if output.config is not None}
        floats = {output.name for output in outputs if output.config is None}
        place_packed(self.model, placed, floats, torch.float32)
        names = names_in_model(self.model, [output.name for output in outputs])
        for output in outputs:
            expected = f"{output.layer}.packed_weight"
            if output.config is None and output.name not in self.tensors:  # rows of a tensor, named as in the model
                expected = output.name
            elif output.config is None:
                continue
            if names[output.name] != (expected, None):
                layer = output.layer or output.name.rpartition(".")[0]
                raise ValueError(
                    f"{output.source.name} would be written as {output.name}, which transformers takes for "
                    f"{names[output.name][0]}; expected {expected}. "
                    f"Leave the layer float, and those in the same tensor: overrides={{{layer!r}: None}}"
                )


def read_and_plan(source: Path, config: LowBitConfig) -> tuple[list[PlannedTensor], dict[str, str], dict[str, Any]]:
    """The tensors to write, the matrices that stay float with reasons, and config.json; reads only headers."""
    from ..hf.config import BY_OVERRIDES, METHOD, LowBitConfig
    from ..hf.from_pretrained import meta_model
    from ..hf.mtp_layers import attach

    if not isinstance(config, LowBitConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected a lowbit.LowBitConfig")
    files, weight_map = files_of(source)
    description = read_config(source)
    tensors = read_files(files, weight_map)
    settings = quantization_settings(source, description)
    # Separate settings files may be left over from before the weights were dequantized.
    if settings is not None and (
        "quantization_config" in description or any(name.endswith(QUANTIZED_LEAVES) for name in tensors)
    ):
        method = settings.get("quant_method", "") if isinstance(settings, dict) else settings
        back = "lowbit.dequantize_checkpoint writes them" if method == METHOD else "lowbit import converts such checkpoints"
        raise ValueError(f"{source} is quantized already, by the method {method!r}; expected float weights: {back}")
    model = meta_model(source, len(tensors))
    attach(model, tensors)
    plan = _Plan(model, config, tensors, source)
    asked = {name for name, why in plan.unselected.items() if why == BY_OVERRIDES}
    warn_of_floats(plan.model, plan.selected, asked, plan.unselected)
    outputs = plan.outputs()
    floats = plan.floats(outputs)
    plan.check_names(outputs)
    return outputs, floats, description


@dataclass(frozen=True)
class PlannedSize:
    """The size of a quantized checkpoint."""

    bytes: int  # of its weight files, headers included
    packed_bytes: int
    packed_weights: int


def planned_size(source: str | os.PathLike[str], config: LowBitConfig, max_shard_bytes: int = MAX_SHARD_BYTES) -> PlannedSize:
    """The exact number of bytes that :func:`quantize_checkpoint` would write; reads only headers.

    Raises:
        OSError, ValueError: as :func:`quantize_checkpoint`.
    """
    outputs = read_and_plan(Path(source), config)[0]
    packed = [output for output in outputs if output.config is not None]
    return PlannedSize(
        size_of_files(outputs, max_shard_bytes),
        sum(output.stored(Path()).bytes for output in packed),
        sum(math.prod(output.packed_info().shape) for output in packed),
    )
