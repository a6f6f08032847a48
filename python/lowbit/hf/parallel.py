"""Supports ``tp_plan="auto"`` of transformers: packed layers are split by :func:`lowbit.tensor_parallel.shard_`.

transformers splits parameters while loading them, in ways that change between versions. So packed layers are removed from its
plan and split after loading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer

from .. import nn
from ..tensor_parallel import EXPERTS_TOGETHER, PARTS, pattern_of, shard_, styles_of
from .placing import verify_layer

# An empty plan is an error, so it gets a rule that has no effect. In earlier versions this rule does have an effect, so there
# it is given a name that no layer has.
_NO_CUT = "replicate"
_EARLIER = not hasattr(HfQuantizer, "update_parallel_plan")
_NO_LAYER = "packed by lowbit"


def take_rules(model: PreTrainedModel, layers: Collection[str]) -> dict[str, str]:
    """Removes the rules for these layers from a model's plan and returns them; does nothing without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    plan, patterns = model.tp_plan or {}, {pattern_of(name) for name in layers}
    # Also the rule that joins the ranks' experts.
    patterns |= {above for name in patterns if plan.get(above := name.rpartition(".")[0]) == EXPERTS_TOGETHER}
    taken = {pattern: style for pattern, style in plan.items() if pattern in patterns}
    rest = {pattern: style for pattern, style in plan.items() if pattern not in patterns}
    if taken:
        model._tp_plan = rest | dict.fromkeys([_NO_LAYER] if _EARLIER else taken, _NO_CUT)
    return taken


def _group_of(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The processes over which ``from_pretrained`` splits a model; None without tensor parallelism or with one process."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return mesh.get_group() if mesh.size() > 1 else None


def layers_to_cut(model: PreTrainedModel, rules: dict[str, str]) -> set[str]:
    """The packed layers of a model that :func:`shard_as_asked` will split."""
    if _group_of(model) is None:
        return set()
    return {name for name in styles_of(model, rules) if isinstance(model.get_submodule(name), nn.Packed)}


def shard_as_asked(model: PreTrainedModel, rules: dict[str, str], where: Mapping[str, str]) -> None:
    """Restores the rules of a model and splits its packed layers by them if ``from_pretrained`` splits the model.

    Args:
        where: layer -> source of its weight, for errors.

    Raises:
        ValueError: as :func:`lowbit.tensor_parallel.shard_`, or the plan was passed by the user, or a weight was modified.
    """
    asked = getattr(model, "_device_mesh", None) is not None
    if asked and any(model.tp_plan.get(pattern, _NO_CUT) != _NO_CUT for pattern in rules):
        raise ValueError('tp_plan has rules for packed layers; expected "auto", or shard_ with a plan after loading')
    if rules:
        model._tp_plan = {pattern: style for pattern, style in model.tp_plan.items() if pattern != _NO_LAYER} | rules
    group = _group_of(model)
    if not rules or group is None:
        return
    layers = {name: model.get_submodule(name) for name in layers_to_cut(model, rules)}
    try:
        shard_(model, group, rules)
    except ValueError:
        for name, layer in layers.items():  # report a damaged file instead, if that is the cause
            verify_layer(name, layer, where)
        raise


def refuse_parts(model: PreTrainedModel) -> None:
    """Raises ValueError if a model is only one rank's part."""
    for name, layer in model.named_modules():
        if isinstance(layer, PARTS):
            raise ValueError(f"{name} is a part of a layer: a model that is spread over ranks cannot be saved")
