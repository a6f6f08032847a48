"""Plans of vision towers: a call of the tower as one call of C++.

A plan has the sizes of one call, so only towers that take images [n, channels, height, width] of few sizes have plans; each
image is a call. Towers over patches of images of any size run with transformers' code. Making a plan takes about as long as
two images, because the plan and the tower's own code each compute one, and the results are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ..hf import masked
from ..hf.encoder_plan import replica
from ..hf.shared_inputs import SharedInput, observed
from ..plan.lowering import lowered
from ..plan.model_parts import ModelParts, check_hooks, state_of
from ..plan.plan_builder import Roles
from ..plan.recording import CALLS, Unplannable, reason_of, record
from ..plan.running import Caches, Planned

_LOG = logging.getLogger(__name__)
_NAMES = ("vision_tower", "vision_model", "visual")  # a model's vision tower
_FIRST = ""  # stands for the name of a positional argument
_MOST_SIZES = 4
# Hidden states may differ from those of the tower's own convolutions and attention by rounding errors, which quantized
# activations amplify.
_LIMIT = 0.05


def _call(tower: torch.nn.Module, arguments: Mapping[str, Any]) -> Any:
    named = {name: value for name, value in arguments.items() if name != _FIRST}
    return tower(*([arguments[_FIRST]] if _FIRST in arguments else []), **named)


class _Plan:
    """The plan of a tower's calls of one size."""

    def __init__(self, tower: torch.nn.Module, arguments: Mapping[str, Any], images: str):
        """
        Args:
            arguments: the arguments of a call; all but the images are the same in every call.
            images: the name of the images among the arguments.

        Raises:
            Unplannable: there is no plan; the message says why.
            Exception: whatever the tower raises.
        """
        check_hooks(tower)
        arguments = {**arguments, images: arguments[images].clone()}  # a tensor of its own
        with observed(tower) as groups:
            expected, self._structure = _pytree.tree_flatten(_call(tower, arguments))
        if not all(isinstance(each, Tensor) and each.is_floating_point() for each in expected):
            raise Unplannable("its results are not floats")
        masked.register()
        own = replica(tower)
        for module in own.modules():
            if (config := getattr(module, "config", None)) is not None:
                config._attn_implementation = masked.ATTENTION
        own_layer = dict(zip(tower.modules(), own.modules(), strict=True))
        for group in groups:
            SharedInput([own_layer[layer] for layer in group])

        def run() -> list[Tensor]:
            # Copies, because a result may be a view, or the same tensor as another.
            results = _pytree.tree_leaves(_call(own, arguments))
            return [each.clone(memory_format=torch.contiguous_format) for each in results]

        made = lowered([record(run, [arguments[images]], computing=False)] * len(CALLS), Roles(1, []), state_of(own))
        self._planned, self._no_caches = Planned(made), Caches([], {})
        found = self._run(arguments[images])
        for one, two in zip(found, expected, strict=True):
            difference = float((one - two).float().norm() / two.float().norm())
            if not difference <= _LIMIT:
                raise Unplannable(f"its results differ by {difference:.2g} of their size; rounding is below {_LIMIT:g}")
        self.first: Any = _pytree.tree_unflatten(found, self._structure)  # the results of this call, taken once

    def _run(self, images: Tensor) -> list[Tensor]:
        return self._planned.run([images.contiguous()], 1, [(0, CALLS[0][0], 0, self._no_caches)])

    def __call__(self, images: Tensor) -> Any:
        return _pytree.tree_unflatten(self._run(images), self._structure)


class PlannedTower:
    """The vision tower of an image-text model. In :meth:`active` its calls run by plans, where there are any."""

    def __init__(self, model: Any):
        body = getattr(model, "model", model)
        self._tower: Any = next((each for name in _NAMES if (each := getattr(body, name, None)) is not None), None)
        self._plans: dict[Any, _Plan] = {}  # by size
        self._parts: ModelParts | None = None
        self.plan_refusal: str | None = None if self._tower is not None else "it has no vision tower of a known name"
        self.calls = 0  # calls that ran by a plan

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the model's calls of its tower run by plans."""
        if self.plan_refusal is not None or "forward" in vars(self._tower):
            yield
            return
        if self._parts is None or not self._parts.are_unchanged():
            self._plans.clear()
            self._parts = ModelParts(self._tower)
        self._tower.forward = self._forward
        try:
            yield
        finally:
            vars(self._tower).pop("forward", None)

    def _forward(self, *values: Any, **arguments: Any) -> Any:
        del self._tower.forward  # plans are recorded from the tower's own forward
        try:
            found = self._by_plans({**dict(zip([_FIRST], values)), **arguments}) if len(values) < 2 else None
            return self._tower(*values, **arguments) if found is None else found
        finally:
            self._tower.forward = self._forward

    def _by_plans(self, arguments: dict[str, Any]) -> Any:
        """The results of a call; None if it has no plan."""
        floats = [name for name, value in arguments.items() if isinstance(value, Tensor) and value.is_floating_point()]
        if len(floats) != 1 or (torch.is_grad_enabled() and not torch.is_inference_mode_enabled()):
            return None
        dims = arguments[floats[0]].dim()
        if dims != 4:
            self.plan_refusal = f"its images have {dims} dimensions; expected [n, channels, height, width]"
            return None
        count = len(arguments[floats[0]])

        def part(value: Any, i: int) -> Any:
            return value[i : i + 1] if isinstance(value, Tensor) and value.dim() and len(value) == count else value

        parts = [{name: part(value, i) for name, value in arguments.items()} for i in range(count)]
        results = [self._one(each, floats[0]) for each in parts]
        if not results or self.plan_refusal is not None:
            return None
        self.calls += 1
        flat = [_pytree.tree_leaves(each) for each in results]
        return _pytree.tree_unflatten([torch.cat(each) for each in zip(*flat)], _pytree.tree_structure(results[0]))

    def _one(self, arguments: dict[str, Any], images: str) -> Any:
        """The results of one image; None if it has no plan."""
        if self.plan_refusal is not None:
            return None
        size = tuple((name, _key(value, name == images)) for name, value in arguments.items())
        if size in self._plans:
            return self._plans[size](arguments[images])
        try:
            if len(self._plans) == _MOST_SIZES:
                raise Unplannable(f"its images have more than {_MOST_SIZES} sizes")
            self._plans[size] = plan = _Plan(self._tower, arguments, images)
            first, plan.first = plan.first, None
            return first
        except Exception as reason:  # the tower's own code works as well, so nothing is lost
            self._plans.clear()
            self.plan_refusal = reason_of(reason)
            _LOG.info("the vision tower runs by transformers' code: %s", self.plan_refusal)
            return None


def _key(value: Any, is_image: bool) -> Any:
    """The key of a plan: the sizes of images, and the values of all other arguments."""
    if not isinstance(value, Tensor):
        return repr(value)
    return value.dtype, tuple(value.shape), None if is_image else tuple(value.flatten().tolist())
