"""Plans the tensors that :func:`lowbit.quantize_checkpoint` writes, from the headers of the files only."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..files.config_json import QUANTIZED_LEAVES, quantization_settings, read_config
from ..files.safetensors import Stored, files_of, read_files
from ..files.tensors import DTYPES, read_rows, same_bytes
from ..layers.expert_stacks import Experts
from ..layers.packable import is_transposed, named_layers, warn_of_floats
from ..machine.sizes import size
from ..packed.rounding import EmbeddingConfig
from .codes import Float, LastRead, Read, Stacked, Weights, below_each_other, stored_float
from .outputs import Output, has_values, place_outputs
from .writing import MAX_SHARD_BYTES, size_of_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..hf.config import LowBitConfig


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


def _reader(parts: tuple[Stored, ...]) -> Read:
    return below_each_other([partial(read_rows, part) for part in parts], [part.shape[0] for part in parts])


def _whole(parts: tuple[Stored, ...]) -> torch.Tensor:
    whole: torch.Tensor = _reader(parts)(0, sum(part.shape[0] for part in parts))
    return whole


def _bias_float(bias: Stored | None) -> Float | None:
    return None if bias is None else stored_float(bias)


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
        experts: name -> the parts of each expert, for selected experts. A matrix is the concatenation of its parts by rows.
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
        self.whole = LastRead(_whole)  # of matrices that are stored transposed
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

    def _matrix(self, parts: tuple[Stored, ...], layer: str, transposed: bool = False) -> Weights:
        """A matrix to pack for a layer, from tensors that are concatenated by rows, and transposed in the files if so said."""
        rows, columns, first = sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0]
        if transposed:  # its rows are not contiguous in the file
            shape, read = (columns, rows), lambda begin, end: self.whole(parts).T[begin:end]
        else:
            shape, read = (rows, columns), _reader(parts)
        total = sum(part.bytes for part in parts)
        return Weights(first.name, first.dtype, shape, self.selected[layer], read, total, str(first.path))

    def _experts(self) -> dict[str, list[tuple[Stored, ...]]]:
        """The parts of selected experts that can be read one by one: all of a module's, or none."""
        from ..hf.names import parts_of_experts

        parts = parts_of_experts(self.model, self.names)
        matrices: dict[str, list[tuple[Stored, ...]]] = {}
        layers = {name: layer for name, layer in self.layers.items() if isinstance(layer, Experts) and name in self.selected}
        for name, layer in layers.items():
            if layer.bias is not None and f"{name}_bias" not in self.unconverted:
                continue
            if name in self.unconverted:
                matrices[name] = [(one,) for one in _slices(self.unconverted[name])]
            elif name in parts and not layer.transposed:
                matrices[name] = [tuple(self.tensors[key] for key in keys) for keys in parts[name]]
                self._check_experts(name, layer, matrices[name])
            for matrix in matrices.get(name, ()):
                _check_float(*matrix)
        holders = [layer.holder for name, layer in layers.items() if name not in matrices]
        return {
            name: stored for name, stored in matrices.items() if all(layers[name].holder is not holder for holder in holders)
        }

    def _check_experts(self, name: str, layer: Experts, matrices: list[tuple[Stored, ...]]) -> None:
        expected = list(layer.weight.shape[1:])
        for parts in matrices:
            shapes, part = [list(part.shape) for part in parts], parts[0]
            is_matrix = all(len(shape) == 2 and shape[1] == expected[1] for shape in shapes)
            if not is_matrix or sum(shape[0] for shape in shapes) != expected[0]:
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

    def outputs(self) -> list[Output]:
        """The tensors to write, in the order of the files."""
        outputs: list[Output] = []
        for key, stored in self.tensors.items():
            name, targets = self.names[key]
            in_model = name if targets is None else targets[0]
            if in_model in self.experts:
                outputs += self._of_experts(in_model)
                self.experts[in_model] = []  # their other tensors produce no output
            elif targets is not None and all(target in self.rows for target in targets):
                outputs += self._of_rows(key, stored, targets)
            elif self.unconverted.get(name) is stored:
                outputs += self._of_weight(stored, name)
            elif (targets is not None or name not in self.state) and key not in self.copies:
                outputs.append(Output(stored_float(stored), key))
        linear = [layer for layer, config in self.selected.items() if not isinstance(config, EmbeddingConfig)]
        biases = (f"{layer}_bias" if layer in self.experts else f"{layer}.bias" for layer in linear)
        packed = {self.unconverted[name].name for name in biases if name in self.unconverted}
        return [output for output in outputs if output.packed or output.name not in packed]

    def _of_experts(self, name: str) -> list[Output]:
        matrices, layer = self.experts[name], self.layers[name]
        if not matrices:
            return []
        assert isinstance(layer, Experts)
        transposed = layer.transposed

        def of(number: int) -> Weights:
            return self._matrix(matrices[number], name, transposed)

        total = sum(part.bytes for parts in matrices for part in parts)
        stacked = Stacked(matrices[0][0].name, len(matrices), of, total)
        return [Output(stacked, f"{name}.packed_weight", _bias_float(self.unconverted.get(f"{name}_bias")), name)]

    def _of_rows(self, key: str, stored: Stored, targets: tuple[str, ...]) -> list[Output]:
        """The outputs, packed and float, for a tensor whose rows are several tensors of the model."""

        def is_packed(name: str) -> bool:
            layer, _, leaf = name.rpartition(".")
            return layer in self.selected and (leaf == "weight" or not isinstance(self.selected[layer], EmbeddingConfig))

        if not any(map(is_packed, targets)):
            return [Output(stored_float(stored), key)]
        outputs = []
        for name in targets:
            layer, _, leaf = name.rpartition(".")
            parts = self.rows[name]
            if not is_packed(name):
                outputs.append(Output(stored_float(parts[0]), name))
            elif leaf == "weight" and parts[0].name == key:  # output once, for the first of several tensors
                bias = self._bias(layer)
                _check_float(*parts, bias)
                outputs.append(Output(self._matrix(parts, layer), f"{layer}.packed_weight", _bias_float(bias), layer))
        return outputs

    def _of_weight(self, stored: Stored, name: str) -> list[Output]:
        """The outputs for a weight, ``name`` in the model, that several layers may share, of which some are selected."""
        users = [name, *(target for target, source in self.ties.items() if source == name and target not in self.unconverted)]
        if (tied := self.ties.get(name)) is not None and tied not in self.unconverted:
            users.append(tied)
        weights = [user.removesuffix(".weight") for user in users if user.endswith(".weight")]
        chosen = [layer for layer in weights if layer in self.selected]
        if not chosen:
            return [Output(stored_float(stored), stored.name)]
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
            shape = (stored.shape[0], math.prod(stored.shape[1:]))  # of a convolution, too
            matrix = self._matrix((replace(stored, shape=shape),), layer, is_transposed(self.layers[layer]))
            outputs.append(Output(matrix, in_file(layer, "packed_weight"), _bias_float(bias), layer))
        floats = [layer for layer in weights if layer not in self.selected]
        return outputs + [Output(stored_float(stored), in_file(layer, "weight")) for layer in floats[:1]]

    def floats(self, outputs: Iterable[Output]) -> dict[str, str]:
        """Matrices that stay float -> why. Warns of matrices and biases that the model does not have."""
        reasons, extra, beside = {}, {}, []
        for output in outputs:
            tensor = output.tensor
            # Integers are not weights: old BERT files contain positions [1, 512].
            if not isinstance(tensor, Float) or tensor.dtype not in DTYPES:
                continue
            name, targets = self.names[tensor.name]
            if len(tensor.shape) < 2:
                unknown = targets is None and name not in self.state and f"{name.rpartition('.')[0]}.weight" in self.state
                if unknown and has_values(tensor):
                    beside.append(output.name)
                continue
            if targets is not None and targets[0] in self.state:
                name, why = output.name if output.name in targets else targets[0], "transformers makes it a part of {}"
            elif targets is None and name in self.state:
                why = "in a layer of the kind {}"
            else:
                reasons[output.name] = f"not in {type(self.model).__name__}"
                extra[output.name] = tensor.bytes
                continue
            layer = name.rpartition(".")[0]
            kind = type(self.model.get_submodule(layer)).__name__
            known = self.unselected.get(layer) or self.unselected.get(name)
            reasons[output.name] = known or f"{why.format(kind)}, which lowbit does not pack"
        if extra:
            one = len(extra) == 1
            warnings.warn(
                f"{len(extra)} {'matrix' if one else 'matrices'} of the files ({size(sum(extra.values()))}), {min(extra)} for "
                f"example, {'is' if one else 'are'} not in {type(self.model).__name__}, and copied unchanged",
                stacklevel=3,
            )
        if beside:
            warnings.warn(
                f"{len(beside)} tensors of the files next to weights, {min(beside)} for example, are not in "
                f"{type(self.model).__name__}, which does not use them; they are copied unchanged",
                stacklevel=3,
            )
        return reasons


def read_and_plan(source: Path, config: LowBitConfig) -> tuple[list[Output], dict[str, str], dict[str, Any]]:
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
    place_outputs(model, outputs, ". Leave the layer float, and those in the same tensor: overrides={{{layer!r}: None}}")
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
    packed = [info for output in outputs if (info := output.info()) is not None]
    return PlannedSize(
        size_of_files(outputs, max_shard_bytes),
        sum(output.stored(Path()).bytes for output in outputs if output.packed),
        sum(math.prod(info.shape) for info in packed),
    )
