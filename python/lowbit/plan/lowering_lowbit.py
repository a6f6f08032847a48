"""Lowers lowbit's operators; C++ has the same operands in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import pooling as _pooling  # noqa: F401  registers an operator
from .plan_builder import LOWERINGS, PlanBuilder, lowers
from .plan_file import Buffer, Kind, Op, Slot
from .recording import Call, Unplannable, View

_OURS = torch.ops.lowbit


def _simple(operator: Any, op: Op, tensors: Sequence[str], integers: Sequence[str] = (), numbers: Sequence[str] = ()) -> None:
    def lower(to: PlanBuilder, call: Call) -> None:
        a = call.arguments
        to.step(op, [*(a[name] for name in tensors), *call.results], [a[n] for n in integers], [a[n] for n in numbers])

    LOWERINGS[operator.default] = lower


_simple(_OURS.linear, Op.LINEAR, ["x", "packed_weight"], ["out_features"])
_simple(_OURS.linear_experts, Op.LINEAR_EXPERTS, ["x", "packed_weights", "experts"], ["out_features"])
_simple(_OURS.embedding, Op.EMBEDDING, ["indices", "packed_weight"], ["embedding_dim"])
_simple(_OURS.activate, Op.ACTIVATE, ["x", "gate"], ["activation"])
_simple(_OURS.rms_norm, Op.RMS_NORM, ["x", "weight"], [], ["epsilon", "weight_offset"])
_simple(_OURS.layer_norm, Op.LAYER_NORM, ["x", "weight", "bias"], [], ["epsilon"])
_simple(_OURS.rotary, Op.ROTARY, ["q", "k", "cos", "sin"], ["heads_dim", "layout", "round_once"])
_simple(_OURS.masked_attention, Op.MASKED_ATTENTION, ["q", "k", "v", "bounds"], [], ["scale", "softcap"])
_simple(torch.ops.lowbit_plan.pool, Op.POOL, ["x", "ranges"], ["mode"])


@lowers(_OURS.linears.default)
def _linears(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    to.step(Op.LINEARS, [a["x"], *a["packed_weights"], *call.results], a["out_features"])


def _cache(to: PlanBuilder, view: View) -> tuple[int, int]:
    number = view.storage - to.roles.inputs
    if not 0 <= number < len(to.roles.caches):
        raise Unplannable("its attention uses caches that the decoder did not make")
    to.buffer(view.storage)
    return to.roles.caches[number]


@lowers(_OURS.attention.default)
def _attention(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    (layer, slot), (other, values) = _cache(to, a["k_cache"]), _cache(to, a["v_cache"])
    if layer != other:
        raise Unplannable("its attention has caches of several layers")
    if a["start"].storage != to.roles.start:
        if a["softcap"] or a["sinks"] is not None:
            raise Unplannable("its attention over fixed caches has a soft cap or sinks")
        numbers = [layer, slot, values, a["window"]]
        to.step(Op.FIXED_ATTENTION, [a["q"], a["k"], a["v"], a["start"], *call.results], numbers, [a["scale"]])
        return
    if (slot, values) != (Slot.KEYS, Slot.VALUES):
        raise Unplannable("its attention does not use the cache of keys as keys and that of values as values")
    if not any(b.kind is Kind.CACHE and (b.index, b.slot) == (layer, Slot.HELD) for b in to.plan.buffers):
        to.plan.buffers.append(Buffer(Kind.CACHE, index=layer, slot=Slot.HELD))  # of a text whose caches hold only a window
    to.step(Op.ATTENTION, [a["q"], a["k"], a["v"], a["sinks"], *call.results], [layer, a["window"]], [a["scale"], a["softcap"]])


def _state(to: PlanBuilder, arguments: dict[str, Any]) -> tuple[int, int]:
    if arguments["start"].storage != to.roles.start:
        raise Unplannable("its layers start at another position than the text")
    return _cache(to, arguments["state"])


@lowers(_OURS.short_conv.default)
def _short_conv(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    to.step(Op.SHORT_CONV, [a["x"], a["weight"], a["bias"], *call.results], [*_state(to, a), a["silu"]])


@lowers(_OURS.linear_attention.default)
def _linear_attention(to: PlanBuilder, call: Call) -> None:
    a = call.arguments
    tensors = [a["q"], a["k"], a["v"], a["decay"], a["beta"], *call.results]
    to.step(Op.LINEAR_ATTENTION, tensors, _state(to, a), [a["scale"], a["norm_epsilon"]])
