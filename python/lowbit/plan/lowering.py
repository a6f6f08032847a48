"""Makes a plan from recorded operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

# They register functions for operators.
from . import lowering_copies as _copies  # noqa: F401
from . import lowering_elementwise as _elementwise  # noqa: F401
from . import lowering_lowbit as _lowbit  # noqa: F401
from . import lowering_rows as _rows  # noqa: F401
from .peephole import shortened
from .plan_builder import PlanBuilder, Roles
from .plan_file import Plan
from .recording import Recording, View


@dataclass(frozen=True)
class Lowered:
    """A plan and the tensors of its weights."""

    plan: Plan
    weights: dict[int, Tensor]  # by buffer
    outputs: tuple[View, ...]


def lowered(recordings: Sequence[Recording], roles: Roles, weights: Mapping[str, Tensor]) -> Lowered:
    """The plan of recorded calls.

    Args:
        recordings: one for each of :data:`lowbit.plan.recording.CALLS`.
        weights: the state of the model by name.

    Raises:
        Unplannable: an operator has no counterpart, or depends on the length of a call.
    """
    builder = PlanBuilder(recordings, roles, weights)
    builder.run()
    return Lowered(shortened(builder.plan), builder.bound, tuple(builder.whole.results))
