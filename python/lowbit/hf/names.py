"""Maps the tensor names of a checkpoint to those of the transformers model, and finds tied tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from .. import nn
from ..layers.packable import kind_of
from ..packed.header import PackedInfo

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def tied_layers(model: torch.nn.Module) -> dict[str, str]:
    """Linear layer or embedding -> the layer whose weight it shares."""
    modules = dict(model.named_modules(remove_duplicate=False))
    ties = {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        names = target.removesuffix(".weight"), source.removesuffix(".weight")
        if all(kind_of(modules.get(name)) is not None for name in names):
            ties[names[0]] = names[1]
    return ties


def head_layers(model: PreTrainedModel) -> set[str]:
    """The output head of a language model, and the table that it shares; none for other models."""
    head = model.get_output_embeddings()
    names = {name for name, layer in model.named_modules(remove_duplicate=False) if layer is head}
    return names | {table for name, table in tied_layers(model).items() if name in names}


def names_in_model(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, tuple[str, tuple[str, ...] | None]]:
    """Names of tensors in a checkpoint -> names in the model.

    Returns:
        Name in the files -> (name in the model, None). If transformers joins or splits this tensor: name in the files -> (its
        name after renaming, the names of the resulting tensors in the model).
    """
    names = {}
    for key, name, converter, _ in _converted(model, keys):
        targets = None
        if converter is not None:
            patterns = converter.target_patterns
            targets = tuple(name.replace(patterns[0], target) for target in patterns)
        names[key] = (name, targets)
    return names


def _converted(model: PreTrainedModel, keys: Iterable[str]) -> Iterator[tuple[str, str, WeightConverter | None, str | None]]:
    """For each tensor of a checkpoint: its name there and in the model, its converter or None, and the matching pattern."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    for key in sorted(keys, key=dot_natural_key):  # the loader's order, on which some renamings depend
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        yield key, name, None if pattern is None else by_pattern[pattern], pattern


@dataclass(frozen=True)
class Rows:
    """One band of rows of a tensor in the files; the tensor consists of ``bands`` bands of equal size."""

    key: str  # name of the tensor
    band: int
    bands: int  # 1: it is the whole tensor


def rows_of(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, list[Rows]]:
    """Tensors of the model that transformers obtains by splitting or concatenating tensors of the files by rows (q, k, v).

    Other conversions (permuted rows, bands of different sizes) are not included.

    Args:
        keys: the names of a checkpoint's tensors.

    Returns:
        Name in the model -> its rows, in order.
    """
    rows: dict[str, list[Rows]] = {}
    joined: dict[str, dict[int, Rows]] = {}
    for key, name, converter, pattern in _converted(model, keys):
        if converter is None:
            continue
        steps = converter.operations
        if len(steps) != 1 or getattr(steps[0], "num_shards_attribute", None) or getattr(steps[0], "dim", None) != 0:
            continue
        sources, targets = list(converter.source_patterns), list(converter.target_patterns)
        kind = type(steps[0]).__name__
        if kind == "Chunk" and len(sources) == 1:
            for band, target in enumerate(targets):
                rows[name.replace(targets[0], target)] = [Rows(key, band, len(targets))]
        elif kind == "Concatenate" and len(targets) == 1:
            joined.setdefault(name, {})[sources.index(pattern)] = Rows(key, 0, 1)
            if len(joined[name]) == len(sources):
                rows[name] = [piece for _, piece in sorted(joined[name].items())]
    return rows


def parts_of_experts(
    model: PreTrainedModel, names: Mapping[str, tuple[str, tuple[str, ...] | None]]
) -> dict[str, list[list[str]]]:
    """Tensors of the model that transformers stacks from one matrix per expert, or from two that it concatenates.

    Other conversions are not included.

    Args:
        names: the names of a checkpoint's tensors, from :func:`names_in_model`.

    Returns:
        Name in the model -> for each expert, in order, the names of its parts in the files.
    """
    forms, stacked = [], [("MergeModulelist", 0)]
    for transform in get_model_conversion_mapping(model):
        if isinstance(transform, WeightConverter) and len(transform.target_patterns) == 1:
            steps = [(type(step).__name__, getattr(step, "dim", None)) for step in transform.operations]
            parts = list(transform.source_patterns)
            if (steps == stacked and len(parts) == 1) or steps == [*stacked, ("Concatenate", 1)]:
                patterns = [re.compile(re.escape(part).replace(r"\*", r"(\d+)") + "$") for part in parts]
                forms.append((transform.target_patterns[0], patterns))
    parts_of: dict[str, dict[tuple[int, int], str]] = {}
    for key, (_, targets) in names.items():
        for end, patterns in forms:
            if targets is not None and targets[0].endswith(end):
                for part, pattern in enumerate(patterns):
                    if match := pattern.search(key):
                        parts_of.setdefault(targets[0], {})[int(match[1]), part] = key
    result = {}
    for target, keys in parts_of.items():
        experts, many = (1 + max(place[i] for place in keys) for i in range(2))
        if len(keys) == experts * many == sum(targets == (target,) for _, targets in names.values()):
            result[target] = [[keys[expert, part] for part in range(many)] for expert in range(experts)]
    return result


def given_by(names: Mapping[str, tuple[str, tuple[str, ...] | None]]) -> set[str]:
    """The tensors of the model that a checkpoint provides; `names` is from :func:`names_in_model`."""
    return {given for name, targets in names.values() for given in (targets or (name,))}


def given_with(layer: str, info: PackedInfo) -> set[str]:
    """The float model's name of the bias in a packed weight, such as "up.bias" or "up_proj_bias"; empty without a bias."""
    return set() if not info.has_bias else {f"{layer}.bias" if info.experts is None else f"{layer}_bias"}


def keep_names(model: PreTrainedModel) -> None:
    """Makes transformers save packed layers one by one, under their names in the model.

    By default it reverses its conversions, writing a tensor per expert, or a joint one for q, k and v. That would split, join
    or rename packed tensors, and no loader would find them.
    """
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Packed | nn.LinearExperts)]
    packed = [f"{name}.{leaf}" for name in layers for leaf in ("packed_weight", "weight")]
    if not packed:
        return
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # not loaded from a checkpoint: use the conversions that saving would use
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [transform for transform in transforms if type(transform).__name__ != "PrefixChange"]

    experts = [name for name in packed if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.LinearExperts)]

    def concerns(transform: Any) -> bool:
        if type(transform) is WeightRenaming:
            # No float checkpoint has experts in one tensor under the new name. Another version of transformers would not find
            # them and continue with random weights.
            back = transform.reverse_transform()
            return any(back.rename_source_key(name)[0] != name for name in experts)
        if not isinstance(transform, WeightConverter):
            return False
        try:
            back = transform.reverse_transform()
        except (NotImplementedError, ValueError):  # not reversible, so saving does not reverse it either
            return False
        return any(back.rename_source_key(name)[1] is not None for name in packed)

    model._weight_conversions = [transform for transform in transforms if not concerns(transform)]


def unused_by(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """The subset of a checkpoint's tensor names that the model's class ignores.

    Old checkpoints contain buffers that models now compute themselves: causal masks, positions, frequencies.
    """
    buffers = {name for name, _ in model.named_buffers()}
    leaves = {leaf for leaf in ("inv_freq", "position_ids") if any(name.endswith(leaf) for name in buffers)}
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return {
        name for name in names
        if name in buffers or name.rpartition(".")[2] in leaves or any(pattern.search(name) for pattern in patterns)
    }  # fmt: skip


def check_complete(model: PreTrainedModel, given: set[str], where: Path) -> None:
    """Raises ValueError if ``given``, the tensors of a checkpoint, lacks some that the float model needs."""
    tied = model.all_tied_weights_keys
    given = given | {target for target, source in tied.items() if source in given}
    given |= {source for target, source in tied.items() if target in given}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    needed = model.state_dict().keys()
    missing = [name for name in needed if name not in given and not any(pattern.search(name) for pattern in ignored)]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        lacking = f"{where} lacks {len(missing)} of the {len(needed)} tensors of {type(model).__name__}: {shown}."
        others = getattr(model.config, "architectures", None)
        if isinstance(others, list) and others and type(model).__name__ not in others:
            raise ValueError(
                f"{lacking} Its config.json says that it has a {others[0]}, which is not a causal language "
                "model; use the Python API."
            )
        raise ValueError(f"{lacking} A shard, or its entry in the index, is missing: copy all files again.")
