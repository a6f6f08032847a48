"""``tp_plan="auto"`` of transformers with packed layers: :func:`lowbit.tensor_parallel.shard_` cuts these.

transformers' own ways to cut a layer are for parameters, which its loader cuts while it reads them, and change with its
versions. So it is kept away from packed layers by a plan without them, and they are cut when the model is there.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist
from transformers.quantizers import HfQuantizer

from ..tensor_parallel import Part, pattern_of, shard_

# A plan without rules is an error, in later versions by its message. There this rule leaves a layer alone; in earlier ones
# it does more, so it is given to no layer.
_NO_CUT = "replicate"
_EARLIER = not hasattr(HfQuantizer, "update_parallel_plan")
_NO_LAYER = "packed by lowbit"


def take_rules(model, layers: Collection[str]) -> dict[str, str]:
    """Takes the rules for these layers out of a model's plan, and returns them.

    Without processes to share the model nothing happens.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    patterns = {pattern_of(name) for name in layers}
    taken = {pattern: style for pattern, style in (model.tp_plan or {}).items() if pattern in patterns}
    left = {pattern: style for pattern, style in (model.tp_plan or {}).items() if pattern not in patterns}
    if taken:
        model._tp_plan = left | dict.fromkeys([_NO_LAYER] if _EARLIER else taken, _NO_CUT)
    return taken


def shard_as_asked(model, rules: dict[str, str]) -> None:
    """Gives a model its rules back, and cuts its packed layers by them if ``from_pretrained`` was asked to cut it.

    Raises:
        ValueError: as :func:`lowbit.tensor_parallel.shard_`, or the plan is the user's own.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and any(model.tp_plan.get(pattern, _NO_CUT) != _NO_CUT for pattern in rules):
        raise ValueError('tp_plan has rules for packed layers; expected "auto", or shard_ with a plan after loading')
    if rules:
        model._tp_plan = {pattern: style for pattern, style in model.tp_plan.items() if pattern != _NO_LAYER} | rules
    if mesh is None or not rules:
        return
    if mesh.ndim > 1:
        mesh = mesh["tp"]
    if mesh.size() > 1:
        shard_(model, mesh.get_group(), rules)


def refuse_parts(model) -> None:
    """Raises ValueError where a model is one rank's part."""
    for name, layer in model.named_modules():
        if isinstance(layer, Part):
            raise ValueError(f"{name} is a part of a layer: a model that is spread over ranks cannot be saved")
