"""Tensor parallelism: each process computes part of the outputs of a model's packed layers.

Start the processes with torchrun, and use the gloo backend for CPUs.

>>> import torch.distributed, lowbit.tensor_parallel
>>> torch.distributed.init_process_group("gloo")          # doctest: +SKIP
>>> model = lowbit.tensor_parallel.shard_(model)          # doctest: +SKIP

Models of transformers are split by their own plan; ``from_pretrained(directory, tp_plan="auto")`` loads and splits in one go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import nn
from .layers.packable import kind_of
from .layers.replacing import take_place
from .machine.memory import give_back, in_huge_pages
from .packed.slices import slice_of_rank

# Names of styles in transformers' plans. Some have another name in earlier versions.
_LOCAL_OUTPUTS = ("colwise",)  # each rank keeps its outputs: its heads
_WHOLE_OUTPUTS = ("colwise_rep", "colwise_gather_output")
_LOCAL_INPUTS = ("rowwise",)  # each rank's inputs are the previous layer's local outputs
_WHOLE_INPUTS = ("rowwise_rep", "rowwise_split_input")
_NOT_SPLIT = ("replicate", "embedding_rowwise", "embedding_colwise", "embedding_row")
_STACKED = "packed_colwise"  # for experts: _LOCAL_OUTPUTS of gate and up, which are stacked in one matrix
EXPERTS_TOGETHER = "moe_tp_experts"  # a module of experts: ranks are joined after the sum over experts
_STYLES = (*_LOCAL_OUTPUTS, *_WHOLE_OUTPUTS, *_LOCAL_INPUTS, *_WHOLE_INPUTS)


class LinearPart(nn.Linear):
    """A rank's part of a packed linear layer; made by :func:`shard_`.

    Attributes:
        group: the processes of the model; None: all.
        gathers_inputs: gather the layer's input, which is distributed over the ranks, first.
        whole: number of outputs of all ranks together, if they are gathered; None: they are not.
        inputs: the slice of the input that this rank uses; None: all of it.
        sums: sum the outputs of all ranks.
    """

    def __init__(
        self,
        packed_weight: Tensor,
        dtype: torch.dtype,
        input_order: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None,
        gathers_inputs: bool = False,
        whole: int | None = None,
        inputs: slice | None = None,
        sums: bool = False,
    ):
        super().__init__(packed_weight, dtype, input_order)
        self.group, self.gathers_inputs, self.whole, self.inputs, self.sums = group, gathers_inputs, whole, inputs, sums

    def forward(self, x: Tensor) -> Tensor:
        if self.gathers_inputs:
            x = _gathered(x, self.in_features, self.group)
        if self.inputs is not None:
            x = x[..., self.inputs]
        return _joined(super().forward(x), self.whole, self.sums, self.group)

    def extra_repr(self) -> str:
        return f"rank {dist.get_rank(self.group)} of {dist.get_world_size(self.group)}, {super().extra_repr()}"


class ExpertsPart(nn.LinearExperts):
    """A rank's part of packed experts, the same part of each expert; made by :func:`shard_`.

    Attributes:
        group, gathers_inputs, whole, sums: as in :class:`LinearPart`.
        late: the calling module joins the ranks' outputs later, by :meth:`join`.
    """

    def __init__(
        self,
        packed_weight: Tensor,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup | None,
        gathers_inputs: bool = False,
        whole: int | None = None,
        sums: bool = False,
        late: bool = False,
    ):
        super().__init__(packed_weight, dtype)
        self.group, self.gathers_inputs, self.whole, self.sums, self.late = group, gathers_inputs, whole, sums, late

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        if self.gathers_inputs:
            x = _gathered(x, self.in_features, self.group)
        out = super().forward(x, experts)
        return out if self.late else self.join(out)

    def join(self, out: Tensor) -> Tensor:
        """The outputs of all ranks, gathered or summed as the plan says."""
        return _joined(out, self.whole, self.sums, self.group)

    def extra_repr(self) -> str:
        return f"rank {dist.get_rank(self.group)} of {dist.get_world_size(self.group)}, {super().extra_repr()}"


def _joined(out: Tensor, whole: int | None, sums: bool, group: dist.ProcessGroup | None) -> Tensor:
    if whole is not None:
        return _gathered(out, whole, group)
    if sums:
        total = out.float()  # in a narrower dtype every partial sum would be rounded
        dist.all_reduce(total, group=group)
        return total.to(out.dtype)
    return out


PARTS = (LinearPart, ExpertsPart)


def _gathered(x: Tensor, whole: int, group: dist.ProcessGroup | None) -> Tensor:
    """Gathers the last dimension over ranks, [..., whole]; the last ranks may have fewer elements than the first."""
    ranks, lead = dist.get_world_size(group), x.shape[:-1]
    width = _outputs_per_rank(whole, ranks)
    local = x.reshape(-1, x.shape[-1])
    if local.shape[1] < width:
        local = torch.nn.functional.pad(local, (0, width - local.shape[1]))
    gathered = local.new_empty(ranks * len(local), width)
    # Gathered as bytes, because not every backend supports every dtype. Later versions of torch rename the function.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(gathered.view(torch.uint8), local.contiguous().view(torch.uint8), group=group)
    return gathered.view(ranks, len(local), width).transpose(0, 1).reshape(*lead, ranks * width)[..., :whole]


def _outputs_per_rank(count: int, ranks: int) -> int:
    """Outputs per rank: `count` divided evenly if possible, otherwise in whole panels of 16."""
    if count % ranks == 0:
        return count // ranks
    panels = -(-count // (16 * ranks)) * 16
    return panels if panels * (ranks - 1) < count else -(-count // ranks)


def _replicated_heads(attention: torch.nn.Module, rows: int, ranks: int) -> int | None:
    """The number of KV heads if a layer gives keys or values and its heads must be replicated over ranks; else None."""
    queries = getattr(getattr(attention, "config", None), "num_attention_heads", None)
    groups = getattr(attention, "num_key_value_groups", 1)
    if not isinstance(queries, int) or not isinstance(groups, int) or groups < 2 or queries % groups:
        return None
    heads = queries // groups  # fewer than query heads, so the query layer has more rows
    widths = [getattr(attention, name, None) for name in ("head_dim", "v_head_dim")]
    has_kv = rows in [heads * width for width in widths if isinstance(width, int)]
    return heads if has_kv and ranks > heads and ranks % heads == 0 and queries % ranks == 0 else None


def _head_of(attention: torch.nn.Module, rows: int) -> int | None:
    """Outputs per head; None if the layer is not known to have heads."""
    head = getattr(attention, "head_dim", None)
    if head is None and hasattr(attention, "head_size"):  # GPT-NeoX: queries, keys and values of a head are adjacent
        queries = getattr(getattr(attention, "config", None), "num_attention_heads", None)
        head = rows // queries if isinstance(queries, int) else None
    return head if isinstance(head, int) and head > 0 else None


def _cut(
    name: str, layer: nn.Linear, style: str, exact: bool, parent: torch.nn.Module, group: dist.ProcessGroup | None
) -> LinearPart:
    """This rank's part of a linear layer.

    Raises:
        ValueError: the ranks cannot share its heads, outputs, inputs or groups.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, inputs = layer.out_features, layer.in_features
    local_inputs, dtype, order = style in _LOCAL_INPUTS, layer._dtype, layer.input_order
    if local_inputs and inputs % ranks:
        raise ValueError(f"{name} has {inputs} inputs, which {ranks} ranks cannot share evenly")
    if (local_inputs or style in _WHOLE_INPUTS) and not exact:
        if order is not None:
            raise ValueError(f"{name} has an act-order permutation, which {ranks} ranks cannot share; use exact=True")
        count = _inputs_per_rank(name, inputs, layer.info.group_size, ranks)
        # Only the slice that begins at 0 keeps the bias, so the sum contains it once.
        packed = slice_of_rank(layer.packed_weight, rank, count, inputs=True)
        local = None if local_inputs else slice(rank * count, (rank + 1) * count)
        return LinearPart(in_huge_pages(packed), dtype, group=group, sums=True, inputs=local)
    local_outputs = style in _LOCAL_OUTPUTS
    if local_outputs and (heads := _replicated_heads(parent, rows, ranks)):
        packed = slice_of_rank(layer.packed_weight, rank * heads // ranks, rows // heads)
        return LinearPart(in_huge_pages(packed), dtype, order, group=group)
    head = _head_of(parent, rows)
    if local_outputs and rows % ranks:
        raise ValueError(f"{name} has {rows} outputs, which {ranks} ranks cannot share evenly")
    if local_outputs and head and rows % head == 0 and rows // ranks % head:
        raise ValueError(f"{name} has {rows // head} heads of {head} outputs, which {ranks} ranks cannot share evenly")
    count = _outputs_per_rank(rows, ranks)
    if count * (ranks - 1) >= rows:
        raise ValueError(f"{name} has {rows} outputs, too few for {ranks} ranks")
    packed, whole = slice_of_rank(layer.packed_weight, rank, count), None if local_outputs else rows
    return LinearPart(in_huge_pages(packed), dtype, order, group=group, gathers_inputs=local_inputs, whole=whole)


def _inputs_per_rank(name: str, inputs: int, group_size: int | None, ranks: int) -> int:
    count = -(-inputs // ranks)
    if inputs % ranks or count % (group_size or count):
        raise ValueError(f"{name} has {inputs} inputs in groups of {group_size}, which {ranks} ranks cannot share evenly")
    return count


def _cut_experts(
    name: str, layer: nn.LinearExperts, style: str, exact: bool, late: bool, group: dist.ProcessGroup | None
) -> ExpertsPart:
    """This rank's part of each expert; raises as :func:`_cut`."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, inputs = layer.out_features, layer.in_features
    matrices = 2 if style == _STACKED else 1
    local, by_inputs = style in (*_LOCAL_OUTPUTS, _STACKED), False
    if local and rows % (matrices * ranks):
        raise ValueError(f"{name} has {rows // matrices} outputs, which {ranks} ranks cannot share evenly")
    if not local and inputs % ranks:
        raise ValueError(f"{name} has {inputs} inputs, which {ranks} ranks cannot share evenly")
    if not local and not exact:
        by_inputs, count = True, _inputs_per_rank(name, inputs, layer.info.group_size, ranks)
    else:
        count = rows // matrices // ranks if local else _outputs_per_rank(rows, ranks)
        if count * (ranks - 1) >= rows:
            raise ValueError(f"{name} has {rows} outputs, too few for {ranks} ranks")
    parts = [slice_of_rank(one, rank, count, inputs=by_inputs, matrices=matrices) for one in layer.packed_weight]
    packed = in_huge_pages(torch.stack(parts))
    if local:
        return ExpertsPart(packed, layer._dtype, group=group)
    if exact:
        return ExpertsPart(packed, layer._dtype, group=group, gathers_inputs=True, whole=rows, late=late)
    return ExpertsPart(packed, layer._dtype, group=group, sums=True, late=late)


def _join_late(part: ExpertsPart, holder: torch.nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    return part.join(out)


def shard_(
    model: torch.nn.Module, group: dist.ProcessGroup | None = None, plan: Mapping[str, str] | None = None, exact: bool = True
) -> torch.nn.Module:
    """Splits the packed linear layers and experts of a model over the ranks of a group, in place.

    Call it on every rank with the same model, then call the model on every rank with the same inputs: each gets the whole
    result. Weights stay mapped from files until they are split and are released one by one, so a rank's memory holds its
    part, one matrix, and the looked-up rows of embedding tables, which are not split. If an attention layer has fewer KV
    heads than there are ranks, KV heads are replicated.

    Args:
        model: has :class:`lowbit.nn.Linear` or :class:`lowbit.nn.LinearExperts` layers; a model of transformers, or any
            model with a ``plan``. Every expert is split; there is no expert parallelism.
        group: the processes that share the model; None: all. ``torch.distributed`` must be initialized.
        plan: a dict from qualified names, with ``*`` for numbers, to styles of transformers: "colwise",
            "colwise_gather_output", "rowwise", "rowwise_split_input"; for experts "colwise", "packed_colwise" (two stacked
            matrices) and "rowwise"; "moe_tp_experts" for a module of experts whose result is a weighted sum of the outputs of
            a "rowwise" layer. None: ``model.tp_plan``.
        exact: split all layers by outputs, so that each rank sees the whole input: the results of packed layers are then
            bitwise equal for any number of ranks. False: split "rowwise" layers by inputs, so that one sum over the ranks
            replaces two gathers. This needs less communication, but each rank quantizes its activations separately, so
            results depend on the number of ranks.

    Returns:
        The model.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        ValueError: the model has no plan, or the ranks cannot share the heads, outputs, inputs or groups of a layer evenly.
            The model is then unchanged.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("torch.distributed is not initialized; call init_process_group, in processes of torchrun")
    plan = getattr(model, "tp_plan", None) if plan is None else plan
    if not plan:
        raise ValueError(f"{type(model).__name__} has no plan for tensor parallelism; pass one")
    modules = dict(model.named_modules(remove_duplicate=False))
    parts, sharing = _cut_all(modules, styles_of(model, plan), exact, group)
    if not parts:
        raise ValueError(f"{type(model).__name__} has no packed layer that its plan names")
    for name, part in parts.items():
        take_place(part, modules[name])
        model.set_submodule(name, part)
        if isinstance(part, ExpertsPart) and part.late:
            modules[name.rpartition(".")[0]].register_forward_hook(partial(_join_late, part))
    for name, groups in sharing.items():
        modules[name].num_key_value_groups = groups
    return model


def _cut_all(
    modules: Mapping[str, torch.nn.Module], styles: Mapping[str, str], exact: bool, group: dist.ProcessGroup | None
) -> tuple[dict[str, LinearPart | ExpertsPart], dict[str, int]]:
    """This rank's part of each packed layer that a plan names. The modules are not changed.

    Returns:
        Layer name -> its part; and name of an attention layer with replicated KV heads -> query heads per KV head on a rank.

    Raises:
        ValueError: as :func:`shard_`.
    """
    ranks = dist.get_world_size(group)
    parts: dict[str, LinearPart | ExpertsPart] = {}
    sharing: dict[str, int] = {}
    for name, style in styles.items():
        layer, above = modules[name], name.rpartition(".")[0]
        if isinstance(layer, PARTS):
            raise ValueError(f"{name} is a part already")
        if isinstance(layer, nn.Linear):
            if style not in _STYLES:
                raise ValueError(f"{name} is to be cut as {style!r}; lowbit cuts packed layers as {', '.join(_STYLES)}")
            parent = modules[above]
            parts[name] = _cut(name, layer, style, exact, parent, group)
            give_back(layer.packed_weight)  # verifying the checksum has read all of it
            if style in _LOCAL_OUTPUTS and _replicated_heads(parent, layer.out_features, ranks):
                sharing[above] = parent.config.num_attention_heads // ranks
        elif isinstance(layer, nn.LinearExperts):
            known = (*_LOCAL_OUTPUTS, _STACKED, *_LOCAL_INPUTS)
            if style not in known:
                raise ValueError(f"{name} is to be cut as {style!r}; lowbit cuts packed experts as {', '.join(known)}")
            late = styles.get(above) == EXPERTS_TOGETHER
            parts[name] = _cut_experts(name, layer, style, exact, late, group)
            give_back(layer.packed_weight)
        elif isinstance(layer, nn.Packed):
            raise ValueError(f"{name} is a packed {type(layer).__name__}; lowbit cuts linear layers and experts")
        elif style == EXPERTS_TOGETHER and not any(isinstance(child, nn.LinearExperts) for child in layer.children()):
            raise ValueError(f"{name} is float; {ranks} ranks can share packed experts only: quantize it")
        elif kind_of(layer) is not None and style in (*_LOCAL_OUTPUTS, *_LOCAL_INPUTS):
            raise ValueError(f"{name} is float; {ranks} ranks can share packed layers only: quantize it")
    return parts, sharing


def styles_of(model: torch.nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The modules that a plan splits: qualified name -> style."""
    names = (name for name, _ in model.named_modules(remove_duplicate=False))
    styles = {name: plan.get(pattern_of(name)) for name in names}
    return {name: style for name, style in styles.items() if style is not None and style not in _NOT_SPLIT}


def pattern_of(name: str) -> str:
    """The pattern of a qualified name as plans write it: "layers.*.mlp" for "layers.3.mlp"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
