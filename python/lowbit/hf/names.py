"""What transformers calls the tensors of a checkpoint, and which of them are one tensor under two names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from ..layers import KINDS

if TYPE_CHECKING:
    import torch


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


def given_by(names: Mapping[str, tuple[str, tuple[str, ...] | None]]) -> set[str]:
    """The tensors of the model that a checkpoint gives it; `names` from :func:`names_in_model`."""
    return {given for name, targets in names.values() for given in (targets or (name,))}


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
        raise ValueError(
            f"{where} lacks {len(missing)} of the {len(needed)} tensors of {type(model).__name__}: {shown}. A shard, "
            "or its entry in the index, is missing: copy all files again."
        )
