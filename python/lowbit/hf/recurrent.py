"""Runs recurrent layers of transformers over a decoder's states: linear attention, Mamba-2, short convolutions.

These layers call a few functions of their module: ``causal_conv1d_fn``, and a scan over a whole text. While a decoder uses a
model, these functions are replaced by methods from here, which start from a state and update it. The rest of each layer's
``forward``, which differs between models (gates, norms, multipliers), remains transformers' code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators.cache_layout import states_of
from ..operators.recurrence import state_shape
from .rebinding import with_globals
from .unsupported import Unsupported

_CONV = "causal_conv1d_fn"
_TAPS = "_lowbit_taps"  # buffer of a mixer: the weight of its convolution, [taps, channels]
# Arguments that have no effect here, or that a decoder passes to attention.
_HARMLESS = frozenset(
    ("caches", "start", "chunk_size", "output_final_state", "return_final_states", "use_cache", "position_ids")
    + (
        "position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "cache_position",
    )
    + ("logits_to_keep",)
)


class States:
    """The states of a model's recurrent layers during a call."""

    def __init__(self) -> None:
        self.caches: Any = None
        self.start: Tensor | None = None

    def give(self, caches: Any, start: Tensor) -> None:
        self.caches, self.start = caches, start

    def clear(self) -> None:
        """Drops all tensors at the end of a call."""
        self.caches = self.start = None


def _check_others(others: dict[str, Any]) -> None:
    for name, argument in others.items():
        if argument is not None and argument is not False and name not in _HARMLESS:
            raise Unsupported(f"its recurrent layers have {name}, which the decoder does not support")


class Mixer:
    """Makes a recurrent layer run over a decoder's states, until :meth:`end`."""

    def __init__(self, module: torch.nn.Module, states: States):
        self.module, self.states, self.layer = module, states, module.layer_idx
        self._taken = 0  # number of states used so far in the current call
        self._own: list[Tensor] = []  # states of this layer
        function = inspect.unwrap(type(module).forward)  # what is around it serves accelerate's hooks and older callers
        replaced = {name: replace(self) for name, replace in _FUNCTIONS.items() if name in function.__globals__}
        own = with_globals(function, replaced)

        def forward(*arguments: Any, **more: Any) -> Any:
            self._taken, self._own = 0, []
            try:
                return own(module, *arguments, **more)
            finally:
                self._own = []  # keeps no tensor alive after the call

        for child in module.children():
            if isinstance(child, torch.nn.Conv1d):
                module.register_buffer(_TAPS, child.weight.detach()[:, 0].t().contiguous(), persistent=False)
        module.forward = forward

    def end(self) -> None:
        del self.module.forward
        if _TAPS in self.module._buffers:
            delattr(self.module, _TAPS)

    def run(self, shape: tuple[int, ...], dtype: torch.dtype, call: Callable[..., Tensor], tensors: list[Tensor]) -> Tensor:
        """Returns ``call(tensors, state, start)`` with the layer's next state, for each text separately."""
        number, self._taken = self._taken, self._taken + 1
        caches, start = self.states.caches, self.states.start
        if hasattr(caches, "note_state"):
            return call(tensors, caches.note_state(self.layer, number, shape, dtype), start)
        if not hasattr(caches, "parts"):
            if number == 0:
                self._own = states_of([caches[self.layer]])
            return call(tensors, self._own[number], start)
        outputs = []
        for part in caches.parts:
            own = [tensor[:, part.begin : part.end].contiguous() for tensor in tensors]
            outputs.append(call(own, states_of([part.layers[self.layer]])[number], part.start))
        return torch.cat(outputs, dim=1)

    def conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Tensor:
        """Replaces ``causal_conv1d_fn``: [batch, channels, positions] -> the same shape."""
        _check_others(others)
        if activation not in (None, "silu", "swish"):
            raise Unsupported(f"its convolution has the activation {activation}; the decoder's has silu or none")
        taps = self.module.get_buffer(_TAPS)
        x = hidden_states.to(taps.dtype).transpose(1, 2)
        x = x if x.stride(-1) == 1 else x.contiguous()

        def call(tensors: list[Tensor], state: Tensor, start: Tensor) -> Tensor:
            return torch.ops.lowbit.short_conv(tensors[0], taps, bias, state, start, activation is not None)

        shape = (x.shape[0], taps.shape[0] - 1, x.shape[2])
        return self.run(shape, x.dtype, call, [x]).transpose(1, 2).to(hidden_states.dtype)

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Replaces ``torch_chunk_gated_delta_rule``."""
        _check_others(others)
        epsilon, scale = 1e-6 if use_qk_l2norm_in_kernel else 0.0, query.shape[-1] ** -0.5

        def call(tensors: list[Tensor], state: Tensor, start: Tensor) -> Tensor:
            return torch.ops.lowbit.linear_attention(*tensors, state, start, scale, epsilon)

        tensors = [*_rows(query, key, value), g.float().contiguous(), beta.float().contiguous()]
        return self.run(_state_shape(query, value), torch.float32, call, tensors), None

    def mamba2(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")), **others: Any,
    ) -> Tensor:  # fmt: skip
        """Replaces ``mamba2_chunk_scan``, which is linear attention with B as keys and C as queries."""
        _check_others(others)
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
        x = hidden_states.float()

        def call(tensors: list[Tensor], state: Tensor, start: Tensor) -> Tensor:
            return torch.ops.lowbit.linear_attention(*tensors, None, state, start, 1.0, 0.0)

        tensors = [*_rows(C.float(), B.float(), x * dt[..., None]), (A.float() * dt).contiguous()]
        out = self.run(_state_shape(C, x), torch.float32, call, tensors)
        return out if D is None else out + D[..., None] * x


def _rows(*tensors: Tensor) -> Iterator[Tensor]:
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _state_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    return state_shape(q.shape[0], v.shape[2], q.shape[3], v.shape[3])


_FUNCTIONS: dict[str, Callable[[Mixer], Callable[..., Any]]] = {
    _CONV: lambda mixer: mixer.conv,
    "torch_chunk_gated_delta_rule": lambda mixer: mixer.delta_rule,
    "chunk_kimi_delta_attention": lambda mixer: mixer.delta_rule,
    "mamba2_chunk_scan": lambda mixer: mixer.mamba2,
}
_UNKNOWN = ("mamba_selective_scan",)  # scans for which lowbit has no operator


def find(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers of a model that a :class:`Mixer` can run."""
    for module in model.modules():
        if not type(module).__module__.startswith("transformers.models.") or not hasattr(module, "layer_idx"):
            continue
        function = inspect.unwrap(type(module).forward)
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        # A module with its own forward, as set by accelerate's hooks, does not run the class's forward.
        if _CONV in names and not any(name in names for name in _UNKNOWN) and "forward" not in vars(module):
            yield module
