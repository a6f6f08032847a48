"""Plans what :func:`lowbit.quantize_checkpoint` writes, from the headers of the files alone."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import ops
from .._sizes import size
from ..files.config_json import quantization_method, read_config
from ..files.safetensors import DTYPES, Stored, files_of, read_files, read_rows, same_bytes
from ..layers import Experts, is_transposed, named_layers, warn_of_floats
from ..quantize import EmbeddingConfig, LinearConfig
from .writing import MAX_SHARD_BYTES, size_of_files

if TYPE_CHECKING:
    from ..hf.config import LowBitConfig

_EXTRA = "not in {}"


@dataclass(frozen=True)
class Matrix:
    """A matrix to pack, from one tensor of the files or several stacked ones."""

    parts: tuple[Stored, ...]
    transposed: bool = False  # in the files

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k]; all parts have the same columns."""
        rows, columns = sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def reader(self) -> Callable[[int, int], torch.Tensor]:
        """A function that reads rows [begin, end)."""
        if self.transposed:  # its rows lie all over the file
            whole = self._read(0, self.shape[1]).T
            return lambda begin, end: whole[begin:end]
        return self._read

    def _read(self, begin: int, end: int) -> torch.Tensor:
        found, at = [], 0
        for part in self.parts:
            first, last = max(begin - at, 0), min(end - at, part.shape[0])
            if first < last:
                found.append(read_rows(part, first, last))
            at += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)


def _slices(stored: Stored) -> list[Stored]:
    """Each matrix of a tensor of three dimensions."""
    size = stored.bytes // max(1, stored.shape[0])
    return [
        replace(stored, shape=stored.shape[1:], offset=stored.offset + i * size, bytes=size) for i in range(stored.shape[0])
    ]


@dataclass(frozen=True)
class Output:
    """A tensor to write: a copy of `source`, or with a config its packed form."""

    name: str
    source: Stored
    config: LinearConfig | EmbeddingConfig | None = None
    bias: Stored | None = None
    layer: str = ""  # that it is for, when packed
    transposed: bool = False  # in the files
    experts: tuple[Matrix, ...] | None = None  # instead of the source, which is the first tensor of the first one
    parts: tuple[Stored, ...] = ()  # below each other, instead of the source, which is the first of them

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.experts or (Matrix(self.parts or (self.source,), self.transposed),)

    @property
    def source_bytes(self) -> int:
        return sum(matrix.bytes for matrix in self.matrices)

    def info(self) -> ops.PackedInfo | None:
        return None if self.config is None else self.packed_info()

    def packed_info(self) -> ops.PackedInfo:
        config, shape = self.config, self.matrices[0].shape
        assert config is not None
        info = ops.describe(shape, config.bits, config.group_size, config.mapping, self.bias is not None)
        return info if self.experts is None else replace(info, experts=len(self.experts))

    def stored(self, path: Path) -> Stored:
        if self.config is None:
            return Stored(self.name, path, self.source.dtype, self.source.shape, 0, self.source.bytes)
        size = self.packed_info().total_bytes
        shape = (size,) if self.experts is None else (len(self.experts), size)
        return Stored(self.name, path, "U8", shape, 0, math.prod(shape))


def _called_in_model(model, names: dict, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors of a checkpoint that become tensors of the model as they are, by their name in the model."""
    state = model.state_dict()
    by_name: dict[str, Stored] = {}
    for key, (name, targets) in names.items():
        if targets is not None or name not in state:
            continue
        stored, expected = tensors[key], list(state[name].shape)
        if name in by_name:
            raise ValueError(f"{by_name[name].name} and {key} are both the {name} of the model; expected one of them")
        if list(stored.shape) != expected:
            raise ValueError(f"{key} in {stored.path} has shape {list(stored.shape)}; expected {expected}, as config.json says")
        by_name[name] = stored
    for target, source in model.all_tied_weights_keys.items():
        if target in by_name and source in by_name and same_bytes(by_name[target], by_name[source]):
            del by_name[target]  # the file has it twice
    return by_name


def _rows(model, keys: Iterable[str], tensors: Mapping[str, Stored]) -> dict[str, tuple[Stored, ...]]:
    """Tensors of the model that are whole rows of tensors of the files, by their name in the model: where they lie.

    Raises:
        ValueError: of another shape than the model's.
    """
    from ..hf.names import rows_of

    state, found = model.state_dict(), {}
    ties = model.all_tied_weights_keys
    for name, pieces in rows_of(model, keys).items():
        sources = [tensors[rows.key] for rows in pieces]
        # Uneven bands, and what is tied besides, are copied as they are.
        cannot = any(not stored.shape or stored.shape[0] % rows.bands for stored, rows in zip(sources, pieces, strict=True))
        if cannot or name not in state or name in ties or name in ties.values():
            continue
        shape = [sum(each.shape[0] // rows.bands for each, rows in zip(sources, pieces, strict=True)), *sources[0].shape[1:]]
        if shape != list(state[name].shape) or any(each.shape[1:] != sources[0].shape[1:] for each in sources):
            raise ValueError(
                f"{sources[0].name} in {sources[0].path} gives {name} the shape {shape}; expected {list(state[name].shape)}, "
                "as config.json says"
            )
        found[name] = tuple(_band(each, rows.band, rows.bands) for each, rows in zip(sources, pieces, strict=True))
    return found


def _band(stored: Stored, band: int, bands: int) -> Stored:
    """One of equal bands of the rows of a tensor."""
    count = stored.bytes // bands
    shape = (stored.shape[0] // bands, *stored.shape[1:])
    return replace(stored, shape=shape, offset=stored.offset + band * count, bytes=count)


def _experts(
    model,
    selected: Collection[str],
    by_name: Mapping[str, Stored],
    tensors: Mapping[str, Stored],
    parts: Mapping[str, list[list[str]]],
) -> dict[str, tuple[Matrix, ...]]:
    """The matrices of selected experts, where they can be read one by one; all of a module's, or none."""
    found: dict[str, tuple[Matrix, ...]] = {}
    layers = {name: layer for name, layer in named_layers(model) if isinstance(layer, Experts) and name in selected}
    for name, layer in layers.items():
        if name in by_name:
            found[name] = tuple(Matrix((each,), layer.transposed) for each in _slices(by_name[name]))
        elif name in parts and not layer.transposed:
            found[name] = tuple(Matrix(tuple(tensors[key] for key in keys)) for keys in parts[name])
            for matrix in found[name]:
                shapes = [list(part.shape) for part in matrix.parts]
                expected, same = list(layer.weight.shape[1:]), {len(shape) for shape in shapes} == {2}
                if not same or {shape[1] for shape in shapes} != {expected[1]} or list(matrix.shape) != expected:
                    part = matrix.parts[0]
                    raise ValueError(
                        f"{part.name} in {part.path} has shape {shapes[0]}; expected a part of {expected}, as config.json says"
                    )
            if len(found[name]) != layer.num_experts:
                raise ValueError(
                    f"the files have {len(found[name])} experts of {name}; expected {layer.num_experts}, as config.json says"
                )
        for part in (part for matrix in found.get(name, ()) for part in matrix.parts):
            if part.dtype not in DTYPES:
                raise ValueError(f"{part.name} in {part.path} has dtype {part.dtype}; expected {', '.join(DTYPES)}")
        if layer.bias is not None and f"{name}_bias" not in by_name:
            found.pop(name, None)
    return {
        name: matrices
        for name, matrices in found.items()
        if all(other in found for other in layers if layers[other].holder is layers[name].holder)
    }


def _users(by_name: Mapping[str, Stored], ties: Mapping[str, str]) -> dict[str, list[str]]:
    """All tensors of the model that a tensor of the files becomes, by the first: itself, and what is tied to it."""
    users = {name: [name] for name in by_name}
    for target, tied in ties.items():
        if target not in by_name and tied in by_name:
            users[tied].append(target)
        elif tied not in by_name and target in by_name:
            users[target].append(tied)
    return users


@dataclass(frozen=True)
class _Chosen:
    """Facts about a model and its files that planning needs."""

    layers: Mapping[str, torch.nn.Module | Experts]
    state: Collection[str]  # names of the model's tensors
    ties: Mapping[str, str]
    by_name: Mapping[str, Stored]
    rows: Mapping[str, tuple[Stored, ...]]
    selected: Mapping[str, LinearConfig | EmbeddingConfig]

    def bias(self, layer: str) -> Stored | None:
        name = f"{layer}.bias"
        if not isinstance(self.selected[layer], LinearConfig) or name not in self.state:
            return None
        if name in self.rows:
            return self.rows[name][0]
        return self.by_name.get(name) or self.by_name[self.ties[name]]

    def follows(self, layer: str) -> bool:
        """Whether the weight and the bias of a selected layer can be read from the files without conversion."""
        for leaf in ("weight", "bias"):
            name = f"{layer}.{leaf}"
            if leaf == "bias" and (name not in self.state or not isinstance(self.selected[layer], LinearConfig)):
                continue
            tied = {self.ties.get(name), *(target for target, source in self.ties.items() if source == name)}
            tied |= {target for target, source in self.ties.items() if source in tied}
            if name in self.rows:
                if (leaf == "bias" and len(self.rows[name]) > 1) or is_transposed(self.layers[layer]):
                    return False
            elif name not in self.by_name and not any(other in self.by_name for other in tied):
                return False
        return True

    def cut(self, key: str, stored: Stored, targets: tuple[str, ...]) -> list[Output]:
        """What a tensor becomes of which transformers makes others by whole rows: what is packed of it, and floats."""

        def is_packed(name: str) -> bool:
            layer, _, leaf = name.rpartition(".")
            return layer in self.selected and (leaf == "weight" or isinstance(self.selected[layer], LinearConfig))

        if not any(map(is_packed, targets)):
            return [Output(key, stored)]
        outputs = []
        for name in targets:
            layer, _, leaf = name.rpartition(".")
            parts = self.rows[name]
            if not is_packed(name):
                outputs.append(Output(name, parts[0]))
            elif leaf == "weight" and parts[0].name == key:  # of several tensors the first stands for all
                bias = self.bias(layer)
                for each in filter(None, (*parts, bias)):
                    if each.dtype not in DTYPES:
                        raise ValueError(f"{each.name} in {each.path} has dtype {each.dtype}; expected {', '.join(DTYPES)}")
                outputs.append(Output(f"{layer}.packed_weight", parts[0], self.selected[layer], bias, layer, parts=parts))
        return outputs

    def outputs_of(self, stored: Stored, name: str, weights: list[str]) -> list[Output]:
        """What a tensor, ``name`` in the model, becomes: the weight of these layers, some of which are selected."""
        chosen = [layer for layer in weights if layer in self.selected]
        if len({tuple(vars(self.selected[layer]).items()) for layer in chosen}) > 1:
            raise ValueError(
                f"{' and '.join(chosen)} share one weight but have different configs, "
                f"{' and '.join(str(self.selected[layer]) for layer in chosen)}; give all the same, or None to all "
                "but one"
            )
        biases = {layer: self.bias(layer) for layer in chosen if isinstance(self.selected[layer], LinearConfig)}
        for each in (stored, *biases.values()):
            if each is not None and each.dtype not in DTYPES:
                raise ValueError(f"{each.name} in {each.path} has dtype {each.dtype}; expected {', '.join(DTYPES)}")

        def called(user: str, leaf: str) -> str:
            own = stored.name.removesuffix("weight") if f"{user}.weight" == name else f"{user}."
            return own + leaf

        outputs = []
        # As quantize_ does: one buffer holds one bias.
        together = len({id(bias) for bias in biases.values()}) <= 1
        for layer in chosen[:1] if together else chosen:
            bias = next(iter(biases.values()), None) if together else biases.get(layer)
            transposed = is_transposed(self.layers[layer])
            config = self.selected[layer]
            outputs.append(Output(called(layer, "packed_weight"), stored, config, bias, layer, transposed))
        floats = [layer for layer in weights if layer not in self.selected]
        if floats:
            outputs.append(Output(called(floats[0], "weight"), stored))
        return outputs


def _left(model, outputs: Iterable[Output], names: Mapping, unselected: Mapping[str, str]) -> dict[str, str]:
    """The matrices that stay float, with the reasons."""
    state, left = model.state_dict(), {}
    for output in outputs:
        # Integers are no weights: BERT's old files have their positions as [1, 512].
        if output.config is not None or len(output.source.shape) < 2 or output.source.dtype not in DTYPES:
            continue
        name, targets = names[output.source.name]
        if targets is None and name in state:
            layer = name.rpartition(".")[0]
            kind = type(model.get_submodule(layer)).__name__
            why = unselected.get(layer) or unselected.get(name)
            left[output.name] = why or f"in a layer of the kind {kind}, which lowbit does not pack"
        elif targets is not None and targets[0] in state:
            name = output.name if output.name in targets else targets[0]
            layer = name.rpartition(".")[0]
            kind = type(model.get_submodule(layer)).__name__
            why = unselected.get(layer) or unselected.get(name)
            left[output.name] = why or f"transformers makes it a part of {kind}, which lowbit does not pack"
        else:
            left[output.name] = _EXTRA.format(type(model).__name__)
    return left


def _plan(model, config: LowBitConfig, tensors: dict[str, Stored], source: Path) -> tuple[list[Output], dict[str, str]]:
    """The tensors to write, and the matrices that stay float with the reasons."""
    from ..hf.config import BY_OVERRIDES
    from ..hf.names import check_complete, given_by, names_in_model, parts_of_experts

    names, layers = names_in_model(model, tensors), dict(named_layers(model))
    state = model.state_dict()
    check_complete(model, given_by(names), source)
    by_name = _called_in_model(model, names, tensors)
    selected, unselected = config.choose(model)
    experts = _experts(model, selected, by_name, {key: tensors[key] for key in names}, parts_of_experts(model, names))
    rows = _rows(model, names, tensors)
    known = _Chosen(layers, state, model.all_tied_weights_keys, by_name, rows, selected)
    for name in list(selected):
        if not (name in experts if isinstance(layers[name], Experts) else known.follows(name)):
            del selected[name]
            unselected[name] = "transformers makes it of the files in a way that lowbit does not follow"
    if not selected:
        raise ValueError(f"config selects no layer of {type(model).__name__}")
    asked = {name for name, why in unselected.items() if why == BY_OVERRIDES}
    warn_of_floats(model, selected, asked, unselected, stacklevel=3)

    users = _users(by_name, model.all_tied_weights_keys)
    outputs: list[Output] = []
    packed_biases = {f"{name}_bias" for name in experts}
    written: set[str] = set()
    for key in tensors:  # each once, whatever in the model it becomes
        name, targets = names[key]
        of = name if targets is None else targets[0]
        if of in experts:
            if of not in written:
                matrices = experts[of]
                output = Output(f"{of}.packed_weight", matrices[0].parts[0], selected[of], by_name.get(f"{of}_bias"), of)
                outputs.append(replace(output, experts=matrices))
                written.add(of)
            continue
        if targets is not None and all(target in rows for target in targets):
            cut = known.cut(key, tensors[key], targets)
            outputs += cut
            packed_biases |= {f"{output.layer}.bias" for output in cut if output.bias is not None}
            continue
        if by_name.get(name) is not tensors[key]:
            if targets is not None or name not in state:
                outputs.append(Output(key, tensors[key]))
            continue
        weights = [user.removesuffix(".weight") for user in users[name] if user.endswith(".weight")]
        if not any(layer in selected for layer in weights):
            outputs.append(Output(key, tensors[key]))
            continue
        outputs += known.outputs_of(tensors[key], name, weights)
        packed_biases |= {f"{layer}.bias" for layer in weights if isinstance(selected.get(layer), LinearConfig)}
    dropped = {by_name[name].name for name in packed_biases if name in by_name}
    outputs = [output for output in outputs if output.config is not None or output.name not in dropped]

    left = _left(model, outputs, names, unselected)
    extra = {name for name, why in left.items() if why == _EXTRA.format(type(model).__name__)}
    if extra:
        bytes_ = sum(output.source.bytes for output in outputs if output.name in extra)
        one = len(extra) == 1
        warnings.warn(
            f"{len(extra)} {'matrix' if one else 'matrices'} of the files ({size(bytes_)}), {min(extra)} for example, "
            f"{'is' if one else 'are'} not in {type(model).__name__}, and copied as they are",
            stacklevel=3,
        )
    return outputs, left


def read_and_plan(source: Path, config: LowBitConfig) -> tuple[list[Output], dict[str, str], dict]:
    """The tensors to write, the matrices that stay float with the reasons, and config.json; reads only headers."""
    from ..hf.loading import meta_model
    from ..hf.names import names_in_model
    from ..hf.placing import place_packed
    from ..transformers import METHOD, LowBitConfig

    if not isinstance(config, LowBitConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected a lowbit.LowBitConfig")
    files, weight_map = files_of(source)
    description = read_config(source)
    method = quantization_method(description)
    if method is not None:
        back = "; lowbit.dequantize_checkpoint makes them of it" if method == METHOD else ""
        raise ValueError(f"{source} is quantized already, by the method {method!r}; expected float weights{back}")
    if (source / "adapter_config.json").exists():
        raise ValueError(
            f"{source} has adapter_config.json: weights of an adapter belong to this model; merge them into it first, or "
            "move the adapter away"
        )
    tensors = read_files(files, weight_map)
    model = meta_model(source, len(tensors))
    outputs, left = _plan(model, config, tensors, source)

    # What transformers will take the new names for.
    placed = {output.layer: (output.name, output.packed_info()) for output in outputs if output.config is not None}
    floats = {output.name for output in outputs if output.config is None}
    place_packed(model, placed, floats, torch.float32)
    found = names_in_model(model, [output.name for output in outputs])
    for output in outputs:
        expected = f"{output.layer}.packed_weight"
        if output.config is None and output.name not in tensors:  # rows of a tensor, called as in the model
            expected = output.name
        elif output.config is None:
            continue
        if found[output.name] != (expected, None):
            layer = output.layer or output.name.rpartition(".")[0]
            raise ValueError(
                f"{output.source.name} would be written as {output.name}, which transformers takes for "
                f"{found[output.name][0]}; expected {expected}. "
                f"Leave the layer float, and those in the same tensor: overrides={{{layer!r}: None}}"
            )
    return outputs, left, description


@dataclass(frozen=True)
class PlannedSize:
    """The size of a quantized checkpoint."""

    bytes: int  # of its files of weights, headers included
    packed_bytes: int
    packed_weights: int


def planned_size(source: str | os.PathLike, config: LowBitConfig, max_shard_bytes: int = MAX_SHARD_BYTES) -> PlannedSize:
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
