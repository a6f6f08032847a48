"""``tp_plan="auto"`` of transformers with packed layers, which :func:`lowbit.tensor_parallel.shard_` splits.

transformers splits parameters while it loads them, in ways that change with its versions. So packed layers are removed from
its plan, and split after loading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer

from .. import nn
from ..tensor_parallel import EXPERTS_TOGETHER, PARTS, pattern_of, shard_, styles_of
from .placing import verify_layer

# A plan without rules is an error. In later versions this rule does nothing to a layer; in earlier ones it does, so there it
# gets the name of no layer.
_NO_CUT = "replicate"
_EARLIER = not hasattr(HfQuantizer, "update_parallel_plan")
_NO_LAYER = "packed by lowbit"


def take_rules(model: PreTrainedModel, layers: Collection[str]) -> dict[str, str]:
    """Removes the rules for these layers from a model's plan, and returns them; does nothing without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    plan, patterns = model.tp_plan or {}, {pattern_of(name) for name in layers}
    # The rule that joins the ranks' experts, too.
    patterns |= {above for name in patterns if plan.get(above := name.rpartition(".")[0]) == EXPERTS_TOGETHER}
    taken = {pattern: style for pattern, style in plan.items() if pattern in patterns}
    rest = {pattern: style for pattern, style in plan.items() if pattern not in patterns}
    if taken:
        model._tp_plan = rest | dict.fromkeys([_NO_LAYER] if _EARLIER else taken, _NO_CUT)
    return taken


def _group_of(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The processes that ``from_pretrained`` splits a model over; None without tensor parallelism, or for one process."""
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
    """Restores the rules of a model, and splits its packed layers by them if ``from_pretrained`` splits the model.

    Args:
        where: layer -> source of its weight, for errors.

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
        for name, layer in layers.items():  # if a file was damaged, the error says that instead
            verify_layer(name, layer, where)
        raise


def refuse_parts(model: PreTrainedModel) -> None:
    """Raises ValueError if a model holds one rank's part."""
    for name, layer in model.named_modules():
        if isinstance(layer, PARTS):
            raise ValueError(f"{name} is a part of a layer: a model that is spread over ranks cannot be saved")
