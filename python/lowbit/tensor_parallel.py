"""Tensor parallelism: each process computes a part of the outputs of a model's packed layers.

Start the processes with torchrun; gloo connects CPUs.

>>> import torch.distributed, lowbit.tensor_parallel
>>> torch.distributed.init_process_group("gloo")          # doctest: +SKIP
>>> model = lowbit.tensor_parallel.shard_(model)          # doctest: +SKIP

A model of transformers is cut by its own plan; ``from_pretrained(directory, tp_plan="auto")`` does both at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from . import nn
from .layers import kind_of
from .memory import give_back, in_huge_pages
from .slices import concat, slice_columns, slice_rows

# What transformers' plans call the ways to cut a layer; some have another name in earlier versions.
_LOCAL_OUTPUTS = ("colwise",)  # each rank keeps its outputs: its heads
_WHOLE_OUTPUTS = ("colwise_rep", "colwise_gather_output")
_LOCAL_INPUTS = ("rowwise",)  # each rank has inputs of its own
_WHOLE_INPUTS = ("rowwise_rep", "rowwise_split_input")
_LEFT_WHOLE = ("replicate", "embedding_rowwise", "embedding_colwise", "embedding_row")
_TWO_MATRICES = "packed_colwise"  # of experts: as _LOCAL_OUTPUTS, of gate and of up, which lie below each other
EXPERTS_TOGETHER = "moe_tp_experts"  # a module of experts: ranks' results are joined when they are summed over experts
_STYLES = (*_LOCAL_OUTPUTS, *_WHOLE_OUTPUTS, *_LOCAL_INPUTS, *_WHOLE_INPUTS)


class Part(nn.Linear):
    """A rank's part of a packed linear layer; made by :func:`shard_`.

    Attributes:
        group: of processes; None: all.
        gathers_inputs: the layer's input is spread over the ranks, and each needs all of it.
        whole: how many outputs the layer gives, those of all ranks together; None: its own only.
        inputs: of an input that every rank has whole, the part that this one uses; None: all.
        sums: the outputs of the ranks are added up.
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
        group, gathers_inputs, whole, sums: as those of :class:`Part`.
        late: whoever calls this layer joins what the ranks have: :meth:`join`.
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
        """Joins the outputs of all ranks, [..., out], as the plan says."""
        return _joined(out, self.whole, self.sums, self.group)

    def extra_repr(self) -> str:
        return f"rank {dist.get_rank(self.group)} of {dist.get_world_size(self.group)}, {super().extra_repr()}"


def _joined(out: Tensor, whole: int | None, sums: bool, group: dist.ProcessGroup | None) -> Tensor:
    if whole is not None:
        return _gathered(out, whole, group)
    if sums:
        total = out.float()  # of a type with fewer digits every sum of two ranks would be rounded
        dist.all_reduce(total, group=group)
        return total.to(out.dtype)
    return out


PARTS = (Part, ExpertsPart)


def _gathered(x: Tensor, whole: int, group: dist.ProcessGroup | None) -> Tensor:
    """Gathers the last dimension over ranks; the last ranks may have less than the others."""
    ranks, lead = dist.get_world_size(group), x.shape[:-1]
    each = _each(whole, ranks)
    own = x.reshape(-1, x.shape[-1])
    if own.shape[1] < each:
        own = torch.nn.functional.pad(own, (0, each - own.shape[1]))
    found = own.new_empty(ranks * len(own), each)
    # As bytes: not every backend knows every type. Later versions of torch have a new name for it.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(found.view(torch.uint8), own.contiguous().view(torch.uint8), group=group)
    return found.view(ranks, len(own), each).transpose(0, 1).reshape(*lead, ranks * each)[..., :whole]


def _each(count: int, ranks: int) -> int:
    """Outputs per rank: `count` divided evenly if possible, otherwise in whole panels of 16."""
    if count % ranks == 0:
        return count // ranks
    panels = -(-count // (16 * ranks)) * 16
    return panels if panels * (ranks - 1) < count else -(-count // ranks)


def _shared_heads(attention: torch.nn.Module, rows: int, ranks: int) -> int | None:
    """How many heads a layer gives keys or values of, where several ranks, as many for each, have the same head; None: it
    is another layer, or has heads for all ranks."""
    queries = getattr(getattr(attention, "config", None), "num_attention_heads", None)
    groups = getattr(attention, "num_key_value_groups", 1)
    if not isinstance(queries, int) or not isinstance(groups, int) or groups < 2 or queries % groups:
        return None
    heads = queries // groups  # queries have more, so a layer of theirs has more rows
    widths = [getattr(attention, name, None) for name in ("head_dim", "v_head_dim")]
    ours = rows in [heads * width for width in widths if isinstance(width, int)]
    return heads if ours and ranks > heads and ranks % heads == 0 and queries % ranks == 0 else None


def _head_of(attention: torch.nn.Module, rows: int) -> int | None:
    """Outputs per head; None if the layer has no known heads."""
    head = getattr(attention, "head_dim", None)
    if head is None and hasattr(attention, "head_size"):  # GPT-NeoX: a head's queries, keys and values are in a row
        queries = getattr(getattr(attention, "config", None), "num_attention_heads", None)
        head = rows // queries if isinstance(queries, int) else None
    return head if isinstance(head, int) and head > 0 else None


def _cut(
    name: str, layer: nn.Linear, style: str, exact: bool, parent: torch.nn.Module, group: dist.ProcessGroup | None
) -> Part:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, inputs = layer.out_features, layer.in_features
    local_inputs, dtype, order = style in _LOCAL_INPUTS, layer._dtype, layer.input_order
    if local_inputs and inputs % ranks:
        raise ValueError(f"{name} has {inputs} inputs, which {ranks} ranks cannot share evenly")
    if (local_inputs or style in _WHOLE_INPUTS) and not exact:
        if order is not None:
            raise ValueError(f"{name} has an act-order permutation, which {ranks} ranks cannot share; use exact=True")
        each, size = -(-inputs // ranks), layer.info.group_size
        if inputs % ranks or each % (size or each):
            raise ValueError(f"{name} has {inputs} inputs in groups of {size}, which {ranks} ranks cannot share evenly")
        mine = slice(rank * each, (rank + 1) * each)
        packed = slice_columns(layer.packed_weight, mine.start, mine.stop)
        # A slice that does not begin at 0 has no bias, so the sum has it once.
        return Part(in_huge_pages(packed), dtype, group=group, sums=True, inputs=None if local_inputs else mine)
    local = style in _LOCAL_OUTPUTS
    if local and (heads := _shared_heads(parent, rows, ranks)):
        width, mine = rows // heads, rank * heads // ranks
        packed = slice_rows(layer.packed_weight, mine * width, (mine + 1) * width)
        return Part(in_huge_pages(packed), dtype, order, group=group)
    head = _head_of(parent, rows)
    if local and rows % ranks:
        raise ValueError(f"{name} has {rows} outputs, which {ranks} ranks cannot share evenly")
    if local and head and rows % head == 0 and rows // ranks % head:
        raise ValueError(f"{name} has {rows // head} heads of {head} outputs, which {ranks} ranks cannot share evenly")
    each = _each(rows, ranks)
    if each * (ranks - 1) >= rows:
        raise ValueError(f"{name} has {rows} outputs, too few for {ranks} ranks")
    packed = slice_rows(layer.packed_weight, rank * each, min(rows, (rank + 1) * each))
    return Part(in_huge_pages(packed), dtype, order, group=group, gathers_inputs=local_inputs, whole=None if local else rows)


def _cut_experts(
    name: str, layer: nn.LinearExperts, style: str, exact: bool, late: bool, group: dist.ProcessGroup | None
) -> ExpertsPart:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, inputs, size = layer.out_features, layer.in_features, layer.info.group_size
    matrices = 2 if style == _TWO_MATRICES else 1
    local = style in (*_LOCAL_OUTPUTS, _TWO_MATRICES)
    if local and rows % (matrices * ranks):
        raise ValueError(f"{name} has {rows // matrices} outputs, which {ranks} ranks cannot share evenly")
    if not local and inputs % ranks:
        raise ValueError(f"{name} has {inputs} inputs, which {ranks} ranks cannot share evenly")
    each = rows // matrices // ranks if local else _each(rows, ranks)
    if not local and not exact:
        each = inputs // ranks
        if each % (size or each):
            raise ValueError(f"{name} has {inputs} inputs in groups of {size}, which {ranks} ranks cannot share evenly")
    elif each * (ranks - 1) >= rows:
        raise ValueError(f"{name} has {rows} outputs, too few for {ranks} ranks")

    def own(packed: Tensor) -> Tensor:
        if not local and not exact:
            return slice_columns(packed, rank * each, (rank + 1) * each)
        firsts = [number * rows // matrices + rank * each for number in range(matrices)]
        return concat([slice_rows(packed, first, min(rows, first + each)) for first in firsts])

    packed = in_huge_pages(torch.stack([own(one) for one in layer.packed_weight]))
    if local:
        return ExpertsPart(packed, layer._dtype, group=group)
    if exact:
        return ExpertsPart(packed, layer._dtype, group=group, gathers_inputs=True, whole=rows, late=late)
    return ExpertsPart(packed, layer._dtype, group=group, sums=True, late=late)


def _join_late(part: ExpertsPart, holder: torch.nn.Module, inputs: tuple, out: Tensor) -> Tensor:
    return part.join(out)


def shard_(
    model: torch.nn.Module, group: dist.ProcessGroup | None = None, plan: Mapping[str, str] | None = None, exact: bool = True
) -> torch.nn.Module:
    """Cuts the packed linear layers and experts of a model, in place, so that each rank of a group keeps and computes its part.

    Every rank calls it with the same model, and then the model with the same inputs; each gets the whole result. What
    is loaded from files stays mapped until it is cut, and is then given back, matrix by matrix: a rank's memory is its
    part, one matrix, and of the tables of embeddings, which stay whole, what it has looked up. Where an attention has
    fewer KV heads than there are ranks, several ranks have the same one.

    Args:
        model: with :class:`lowbit.nn.Linear` layers or :class:`lowbit.nn.LinearExperts`; of transformers, or any with a
            ``plan``. Every expert is cut; none is on one rank alone.
        group: of processes that share the model; None: all. ``torch.distributed`` must be initialized.
        plan: qualified names, ``*`` in the place of numbers, to transformers' names of how to cut: "colwise",
            "colwise_gather_output", "rowwise", "rowwise_split_input"; experts "colwise", or "packed_colwise" where the
            rows of two matrices lie below each other, and "rowwise"; "moe_tp_experts" the module of experts, if its result
            is a sum of what a "rowwise" layer gives, each times a number. None: the model's own (``model.tp_plan``).
        exact: all layers are cut by their outputs, so that each sees its whole input: every number that a packed layer
            gives has the same bits with any number of ranks. False: "rowwise" layers are cut by their inputs, and a sum
            over the ranks takes the place of two gathers: less to send, but each rank quantizes its own activations, so
            results depend on the number of ranks.

    Returns:
        The model.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        ValueError: the model has no plan, or a layer cannot be cut so: heads, outputs, inputs or groups that the ranks
            cannot share evenly. The model is then unchanged.
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
        nn.take_place(part, modules[name])
        model.set_submodule(name, part)
        if isinstance(part, ExpertsPart) and part.late:
            modules[name.rpartition(".")[0]].register_forward_hook(partial(_join_late, part))
    for name, groups in sharing.items():
        modules[name].num_key_value_groups = groups
    return model


def _cut_all(
    modules: Mapping[str, torch.nn.Module], styles: Mapping[str, str], exact: bool, group: dist.ProcessGroup | None
) -> tuple[dict[str, Part | ExpertsPart], dict[str, int]]:
    """This rank's part of each packed layer that a plan names; the modules stay as they are. And for each attention whose
    KV heads are replicated over ranks: how many of a rank's query heads use one KV head.

    Raises:
        ValueError: as :func:`shard_`.
    """
    ranks = dist.get_world_size(group)
    parts: dict[str, Part | ExpertsPart] = {}
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
            give_back(layer.packed_weight)  # all of it was read, for the checksum
            if style in _LOCAL_OUTPUTS and _shared_heads(parent, layer.out_features, ranks):
                sharing[above] = parent.config.num_attention_heads // ranks
        elif isinstance(layer, nn.LinearExperts):
            known = (*_LOCAL_OUTPUTS, _TWO_MATRICES, *_LOCAL_INPUTS)
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
    """The modules that a plan cuts, by name, with their styles."""
    names = (name for name, _ in model.named_modules(remove_duplicate=False))
    styles = {name: plan.get(pattern_of(name)) for name in names}
    return {name: style for name, style in styles.items() if style is not None and style not in _LEFT_WHOLE}


def pattern_of(name: str) -> str:
    """A qualified name in the form of plans: "layers.3.mlp" gives "layers.*.mlp"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
