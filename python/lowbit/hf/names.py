"""What transformers calls the tensors of a checkpoint, and which of them are one tensor under two names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from .. import nn
from ..layers import KINDS
from ..packed import PackedInfo

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def tied_layers(model: torch.nn.Module) -> dict[str, str]:
    """Linear layers and embeddings that take their weight from another one, each with that one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        names = target.removesuffix(".weight"), source.removesuffix(".weight")
        if all(type(modules.get(name)) in KINDS for name in names):
            found[names[0]] = names[1]
    return found


def names_in_model(model, keys: Iterable[str]) -> dict[str, tuple[str, tuple[str, ...] | None]]:
    """What transformers calls the tensors of a checkpoint.

    Returns:
        For each name in the files the name in the model, and None; or, where transformers computes tensors of the model
        from several of the file or the other way round, the names of what it computes.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    names = {}
    for key in sorted(keys, key=dot_natural_key):  # in the loader's order, which some renamings rely on
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        targets = None
        if pattern is not None:
            patterns = by_pattern[pattern].target_patterns
            targets = tuple(name.replace(patterns[0], target) for target in patterns)
        names[key] = (name, targets)
    return names


def parts_of_experts(
    model, names: Mapping[str, tuple[str, tuple[str, ...] | None]]
) -> dict[str, list[list[str]]]:
    """Tensors that transformers stacks from one matrix for each expert, or from two that it puts below each other.

    Those that it makes in another way are not among them.

    Args:
        names: of a checkpoint's tensors, from :func:`names_in_model`.

    Returns:
        Name in the model -> for each expert, in their order, the names of its parts in the files.
    """
    forms, stacked = [], [("MergeModulelist", 0)]
    for transform in get_model_conversion_mapping(model):
        if isinstance(transform, WeightConverter) and len(transform.target_patterns) == 1:
            steps = [(type(step).__name__, getattr(step, "dim", None)) for step in transform.operations]
            parts = list(transform.source_patterns)
            if (steps == stacked and len(parts) == 1) or steps == [*stacked, ("Concatenate", 1)]:
                patterns = [re.compile(re.escape(part).replace(r"\*", r"(\d+)") + "$") for part in parts]
                forms.append((transform.target_patterns[0], patterns))
    found: dict[str, dict[tuple[int, int], str]] = {}
    for key, (_, targets) in names.items():
        for end, patterns in forms:
            if targets is not None and targets[0].endswith(end):
                for part, pattern in enumerate(patterns):
                    if match := pattern.search(key):
                        found.setdefault(targets[0], {})[int(match[1]), part] = key
    result = {}
    for target, keys in found.items():
        experts, many = (1 + max(place[i] for place in keys) for i in range(2))
        if len(keys) == experts * many == sum(targets == (target,) for _, targets in names.values()):
            result[target] = [[keys[expert, part] for part in range(many)] for expert in range(experts)]
    return result


def given_by(names: Mapping[str, tuple[str, tuple[str, ...] | None]]) -> set[str]:
    """The tensors of the model that a checkpoint gives it; `names` from :func:`names_in_model`."""
    return {given for name, targets in names.values() for given in (targets or (name,))}


def given_with(layer: str, info: PackedInfo) -> set[str]:
    """The bias in a packed weight, as the float model calls it: "up.bias", or of experts in one tensor "up_proj_bias"."""
    return set() if not info.has_bias else {f"{layer}.bias" if info.experts is None else f"{layer}_bias"}


def keep_names(model: PreTrainedModel) -> None:
    """Sees that packed experts are saved under the names that they have in the model.

    By itself transformers saves experts in the form that checkpoints of the architecture have, often a tensor for each; a
    packed tensor would be cut to pieces, or renamed to what no loader knows.
    """
    packed = [f"{name}.packed_weight" for name, layer in model.named_modules() if isinstance(layer, nn.LinearExperts)]
    if not packed:
        return
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # not loaded: what saving would take
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [each for each in transforms if type(each).__name__ != "PrefixChange"]

    def concerns(transform) -> bool:
        if not isinstance(transform, WeightConverter):
            return False
        back = transform.reverse_transform()
        return any(back.rename_source_key(name)[1] is not None for name in packed)

    model._weight_conversions = [transform for transform in transforms if not concerns(transform)]


def check_complete(model, given: set[str], where: Path) -> None:
    """Refuses a checkpoint that does not give the float `model` all that it needs.

    Raises:
        ValueError: it does not.
    """
    tied = model.all_tied_weights_keys
    given = given | {target for target, source in tied.items() if source in given}
    given |= {source for target, source in tied.items() if target in given}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    needed = model.state_dict().keys()
    missing = [name for name in needed if name not in given and not any(each.search(name) for each in ignored)]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        lacking = f"{where} lacks {len(missing)} of the {len(needed)} tensors of {type(model).__name__}: {shown}."
        others = getattr(model.config, "architectures", None)
        if isinstance(others, list) and others and type(model).__name__ not in others:
            raise ValueError(f"{lacking} Its config.json says that it has a {others[0]}, which is not that.")
        raise ValueError(f"{lacking} A shard, or its entry in the index, is missing: copy all files again.")
