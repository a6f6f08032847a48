"""Mixture-of-experts layers with packed weights in vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from ..machine.memory import give_back, in_huge_pages
from ..operators import ops
from ..packed.rounding import quantize_tensor
from ..packed.slices import slice_of_rank
from .linear import listed
from .model_facts import PACKED, ServedModel

_LEAVES = ("gate_up_proj", "down_proj")
# Name of a matrix in transformers, or in some vLLM models after renaming -> 0 for the first matrix, 1 for the second.
_MATRICES = {"gate_up_proj": 0, "w13": 0, "down_proj": 1, "w2": 1}
_ACTIVATIONS = {
    MoEActivation.SILU: functional.silu,
    MoEActivation.GELU: functional.gelu,
    MoEActivation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}


class PackedExpertsMethod(FusedMoEMethodBase):
    """Loads and runs the experts of a layer, like :class:`PackedMethod`. With several ranks, their inner width is split.

    The layer gets ``_lowbit_experts``, the two matrices of all experts, each uint8 [experts, bytes].
    """

    def __init__(self, model: ServedModel, layer: RoutedExperts, prefix: str, holder: str):
        """
        Args:
            prefix, holder: the names of the module in vLLM and in transformers.
        """
        super().__init__(layer.moe_config)
        self.model, self.prefix, self.holder = model, prefix, holder
        self.gate = model.gates.get(holder) if layer.activation == MoEActivation.SWIGLUOAI else None
        wrong = None
        numbers = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
        known = layer.activation in _ACTIVATIONS or self.gate is not None
        if not known or any(number is not None for number in numbers):
            wrong = f"the activation {layer.activation.value}"
        elif self.moe.has_bias and not model.packed:
            wrong = "biases, to quantize while they are loaded"
        elif layer.apply_router_weight_on_input:
            wrong = "weights of the router that multiply the inputs"
        elif self.moe.use_ep or self.moe.dp_size > 1 or self.moe.is_sequence_parallel:
            wrong = "their whole matrices on different ranks (expert, data or sequence parallel)"
        elif self.moe.is_lora_enabled:
            wrong = "adapters (--enable-lora)"
        if wrong:
            raise ValueError(f"{prefix} has experts with {wrong}, which lowbit does not support in vLLM")

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None  # only needed for vLLM's kernels

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        layer._lowbit_loaded = [{}, {}]  # expert -> its first matrix, and expert -> its second
        layer._lowbit_halves = {}
        for name in ("w13_weight", "w2_weight"):
            parameter = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            parameter.weight_loader = partial(self._load, layer)
            layer.register_parameter(name, parameter)
        for which, leaf in enumerate(_LEAVES if self.gate else ()):  # vLLM's gpt-oss looks for parameters
            parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
            parameter.weight_loader = partial(self._load_parameter, layer, which)
            layer.register_parameter(f"packed_{leaf}", parameter)
        layer.load_weights = partial(self._load_weights, layer)

    def _load_weights(self, layer: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        for name, loaded in weights:
            leaf, _, kind = name.rpartition(".")
            if kind == PACKED and leaf in _MATRICES:
                self._take_packed(layer, _MATRICES[leaf], loaded)
                yield name
            elif loaded.numel():  # otherwise a guard (files/safetensors.py)
                yield from type(layer).load_weights(layer, [(name, loaded)])

    def _load_parameter(self, layer: torch.nn.Module, which: int, _: Any, loaded: Tensor) -> None:
        self._take_packed(layer, which, loaded)

    def _take_packed(self, layer: torch.nn.Module, which: int, loaded: Tensor) -> None:
        expected = [self.moe.num_experts, *self._shape(which)]
        shape = list(ops.info_of_experts(loaded, verified=True).shape)
        if shape != expected:
            raise ValueError(f"{self.prefix} has experts of shape {shape}; vLLM expects {expected}")
        layer._lowbit_loaded[which] = {number: self._cut(which, one) for number, one in enumerate(loaded)}
        if self.moe.tp_size > 1:
            give_back(loaded)  # verifying the checksum has read all of it

    def _load(
        self, layer: torch.nn.Module, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
        return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        """Quantizes a float matrix when it is complete: "w1" and "w3" (gate and up) are joined."""
        which, whole = int(shard_id == "w2"), loaded_weight
        if which == 0:
            halves = layer._lowbit_halves.setdefault(expert_id, {})
            halves[shard_id] = loaded_weight
            if len(halves) < 2:
                return True if return_success else None
            whole = torch.cat([halves["w1"], halves["w3"]])
            del layer._lowbit_halves[expert_id]
        shape, expected = list(whole.shape), self._shape(which)
        if shape != expected:
            raise ValueError(f"{self.prefix} has a matrix of shape {shape}; vLLM expects {expected}")
        config = self.model.selected[f"{self.holder}.{_LEAVES[which]}"]
        layer._lowbit_loaded[which][expert_id] = self._cut(which, quantize_tensor(whole, config))
        return True if return_success else None

    def _inner(self) -> int:
        """The inner width of all ranks together."""
        return int(self.moe.intermediate_size)

    def _shape(self, which: int) -> list[int]:
        return [self.moe.hidden_dim, self._inner()] if which else [2 * self._inner(), self.moe.hidden_dim]

    def _cut(self, which: int, packed: Tensor) -> Tensor:
        """This rank's part: rows of gate and up, or inputs of the second matrix."""
        rank, ranks, inner = self.moe.tp_rank, self.moe.tp_size, self._inner()
        if ranks == 1:
            return packed
        interleaved = 2 if self.gate else 1  # gpt-oss interleaves the rows of gate and up; other models stack the two matrices
        try:
            if inner % ranks:
                raise ValueError(f"their inner width is {inner}")
            if which:
                return slice_of_rank(packed, rank, inner // ranks, inputs=True)
            return slice_of_rank(packed, rank, interleaved * inner // ranks, matrices=2 // interleaved)
        except ValueError as error:
            raise ValueError(f"{self.prefix} has experts that cannot be shared by {ranks} ranks: {error}") from error

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not hasattr(layer, "_lowbit_loaded"):
            return
        del layer.w13_weight, layer.w2_weight, layer._lowbit_halves
        layer._lowbit_experts = []
        for leaf in _LEAVES if self.gate else ():
            delattr(layer, f"packed_{leaf}")
        for name, loaded in zip(_LEAVES, layer._lowbit_loaded, strict=True):
            missing = [number for number in range(self.moe.num_experts) if number not in loaded]
            if missing:
                raise ValueError(f"{self.prefix} got no {name} from the files{listed(missing, 'experts')}")
            matrices = [loaded[number] for number in range(self.moe.num_experts)]
            layer._lowbit_experts.append(in_huge_pages(torch.stack(matrices)))
        del layer._lowbit_loaded

    def apply(
        self, layer: torch.nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Runs the experts on x [tokens, hidden] with the weights and ids [tokens, e] of each token's experts."""
        first, second = layer._lowbit_experts
        experts = topk_ids.long()
        both = ops.linear_experts(x, first, experts, 2 * self.moe.intermediate_size_per_partition)
        # In place, because allocating memory would cost more than the arithmetic.
        if self.gate:
            inner = _clamped(both, *self.gate)
        else:
            gate, up = both.chunk(2, -1)
            inner = _ACTIVATIONS[layer.activation](gate).mul_(up)
        outputs = ops.linear_experts(inner, second, experts[..., None], self.moe.hidden_dim)[..., 0, :]
        return outputs.to(topk_weights.dtype).mul_(topk_weights[..., None]).sum(-2).to(x.dtype)


def _clamped(both: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation of gpt-oss; gate and up are interleaved."""
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    gate.mul_(torch.sigmoid(gate * alpha))
    return up.add_(1).mul_(gate)
