"""``tp_plan="auto"`` of transformers with packed layers: :func:`lowbit.tensor_parallel.shard_` cuts these.

transformers' own ways to cut a layer are for parameters, which its loader cuts while it reads them, and change with its
versions. So it is kept away from packed layers by a plan without them, and they are cut when the model is there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer

from .. import nn
from ..tensor_parallel import EXPERTS_TOGETHER, PARTS, pattern_of, shard_, styles_of
from .placing import verify_layer

# A plan without rules is an error, in later versions by its message. There this rule leaves a layer alone; in earlier ones
# it does more, so it is given to no layer.
_NO_CUT = "replicate"
_EARLIER = not hasattr(HfQuantizer, "update_parallel_plan")
_NO_LAYER = "packed by lowbit"


def take_rules(model: PreTrainedModel, layers: Collection[str]) -> dict[str, str]:
    """Takes the rules for these layers out of a model's plan, and returns them.

    Without processes to share the model nothing happens.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    plan, patterns = model.tp_plan or {}, {pattern_of(name) for name in layers}
    # What joins the ranks' experts belongs to them.
    patterns |= {above for name in patterns if plan.get(above := name.rpartition(".")[0]) == EXPERTS_TOGETHER}
    taken = {pattern: style for pattern, style in plan.items() if pattern in patterns}
    left = {pattern: style for pattern, style in plan.items() if pattern not in patterns}
    if taken:
        model._tp_plan = left | dict.fromkeys([_NO_LAYER] if _EARLIER else taken, _NO_CUT)
    return taken


def _group_of(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The processes that ``from_pretrained`` was asked to cut a model for; None: it was not, or for one."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return mesh.get_group() if mesh.size() > 1 else None


def layers_to_cut(model: PreTrainedModel, rules: dict[str, str]) -> set[str]:
    """The packed layers of a model that :func:`shard_as_asked` will cut."""
    if _group_of(model) is None:
        return set()
    return {name for name in styles_of(model, rules) if isinstance(model.get_submodule(name), nn.Packed)}


def shard_as_asked(model: PreTrainedModel, rules: dict[str, str], where: Mapping[str, str]) -> None:
    """Gives a model its rules back, and cuts its packed layers by them if ``from_pretrained`` was asked to cut it.

    Args:
        where: layer -> where its weight comes from, for errors.

    Raises:
        ValueError: as :func:`lowbit.tensor_parallel.shard_`, or the plan is the user's own, or a weight was altered.
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
        for name, layer in layers.items():  # a file that was damaged is said to be
            verify_layer(name, layer, where)
        raise


def refuse_parts(model: PreTrainedModel) -> None:
    """Raises ValueError where a model is one rank's part."""
    for name, layer in model.named_modules():
        if isinstance(layer, PARTS):
            raise ValueError(f"{name} is a part of a layer: a model that is spread over ranks cannot be saved")
