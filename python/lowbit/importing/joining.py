"""Joins tensors of a source that are one in the model: matrices concatenated by rows, and the matrices of all experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint.codes import Float, Matrix, SourceTensor, Stacked, Weights, below_each_other, recoded, values_of
from ..packed.rounding import LinearConfig

_Part = TypeVar("_Part", bound=Matrix | Weights | Float)
_REQUANTIZED_GROUP = 32  # group size of experts that are requantized because others differ
_FEW = 8  # at most this many expert numbers are listed in a message


def joined(parts: Sequence[Matrix | Weights | Float], name: str, path: Path) -> Matrix | Weights | Float:
    """Concatenates tensors by rows; matrices of different types are requantized.

    Raises:
        ValueError: the tensors differ in their number of columns.
    """
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        raise ValueError(f"{path}: the parts of {name} are {shapes}; expected the same number of columns in each")
    parts = _with_minimums(parts)
    first, sizes = parts[0], [part.shape[0] for part in parts]
    shape, total = (sum(sizes), *first.shape[1:]), sum(part.bytes for part in parts)
    if all(_form(part) == _form(first) for part in parts) and not any(map(_is_permuted, parts)):
        read_all = below_each_other([part.read for part in parts], sizes)
        if isinstance(first, Float):
            return replace(first, name=name, shape=shape, bytes=total, read=read_all)
        return replace(first, name=name, shape=(shape[0], shape[1]), bytes=total, read=read_all)
    if not all(len(part.shape) == 2 for part in parts):
        raise ValueError(f"{path}: the parts of {name} are {' and '.join(part.source for part in parts)}; expected one type")
    read = below_each_other([values_of(part) for part in parts], sizes)
    bits = max(
        part.bits if isinstance(part, Matrix) else part.config.bits if isinstance(part, Weights) else 8 for part in parts
    )
    sources = " and ".join(dict.fromkeys(part.source for part in parts))
    return Weights(name, sources, (shape[0], shape[1]), LinearConfig(min(bits + 1, 8)), read, total)


def _is_permuted(tensor: SourceTensor) -> bool:
    return isinstance(tensor, Matrix) and tensor.order is not None


def _form(tensor: SourceTensor) -> tuple[Any, ...]:
    """The properties in which matrices must agree to be joined."""
    if isinstance(tensor, Matrix):
        return (tensor.source, tensor.bits, tensor.group_size, tensor.affine, tensor.levels)
    return (tensor.source, tensor.config if isinstance(tensor, Weights) else None)


def _with_minimums(parts: Sequence[_Part]) -> Sequence[_Part]:
    """The same tensors; if only some matrices of one type have minimums, all get minimums."""
    if len({part.affine if isinstance(part, Matrix) else None for part in parts} - {None}) < 2 or not all(
        isinstance(part, Matrix) for part in parts
    ):
        return parts
    return [part if part.levels else recoded(part, part.bits, part.group_size, True) for part in parts]  # type: ignore


def stacked(experts: Sequence[Sequence[SourceTensor]], name: str, path: Path) -> Stacked | None:
    """Joins the matrices of all experts, each possibly in parts concatenated by rows, to one tensor with one kind of codes.

    Where experts differ, codes are widened, groups divided and minimums added, which changes no weight. Matrices without
    suitable codes (floats, or inputs with an act-order permutation) are requantized to 8 bits. None if these are not a
    minority.
    """
    first, many = experts[0], len(experts[0])
    for tensors in experts:
        for tensor, other in zip(tensors, first, strict=True):
            if isinstance(tensor, Stacked) or len(tensor.shape) != 2 or tensor.shape != other.shape:
                raise ValueError(f"{path}: {tensor.name} is {list(tensor.shape)}, and {other.name} {list(other.shape)}; "
                                 "expected matrices of one shape")  # fmt: skip
    parts: list[Any] = [tensor for tensors in experts for tensor in tensors]
    if all(isinstance(part, Float) for part in parts):
        return None
    alike, differ = _with_minimums(parts), None
    if any(_form(part) != _form(alike[0]) for part in alike) or any(map(_is_permuted, parts)):
        if 2 * sum(map(_is_packable, parts)) <= len(parts):
            return None
        alike, differ = _in_one_form(parts, many), describe_experts(experts)

    def of(expert: int) -> Matrix | Weights:
        matrix = joined(alike[many * expert : many * (expert + 1)], f"{name}, expert {expert}", path)
        assert not isinstance(matrix, Float)
        return matrix

    return Stacked(name, len(experts), of, sum(part.bytes for part in parts), differ)


def _is_packable(part: SourceTensor) -> bool:
    return isinstance(part, Matrix) and part.order is None


def _in_one_form(parts: Sequence[Any], many: int) -> list[Matrix | Weights]:
    """Matrices of experts, ``many`` each, with one bit width and group size: exact, or requantized to 8 bits if necessary."""
    kept = [part for part in parts if _is_packable(part)]
    requantized, k = len(kept) < len(parts), parts[0].shape[1]
    bits = 8 if requantized or any(part.levels for part in kept) else max(part.bits for part in kept)
    sizes = {part.group_size for part in kept} - {None}
    sizes |= {_REQUANTIZED_GROUP} if requantized and k > _REQUANTIZED_GROUP else set()
    group = math.gcd(*sizes) if sizes else None
    affine = any(part.affine for part in kept)
    config = LinearConfig(8, group, "affine" if affine else "symmetric")
    fitting: list[Matrix | Weights] = []
    for begin in range(0, len(parts), many):
        expert = parts[begin : begin + many]
        if all(map(_is_packable, expert)):
            fitting += [replace(recoded(part, bits, group, affine), source="") for part in expert]
        else:
            fitting += [Weights(part.name, "", part.shape, config, values_of(part), part.bytes) for part in expert]
    return fitting


def describe_experts(experts: Sequence[Sequence[SourceTensor]]) -> str:
    """Describes the types of a layer's experts: "3 experts are GPTQ, 4 bits, and expert 2 is F32"."""
    sizes = {part.group_size for parts in experts for part in parts if isinstance(part, Matrix)}

    def kind(part: SourceTensor) -> str:
        if not isinstance(part, Matrix):
            return part.source
        groups = f" in groups of {part.group_size or part.shape[1]}" if len(sizes) > 1 else ""
        return part.source + groups + (" with an act-order permutation" if part.order is not None else "")

    numbers: dict[str, list[int]] = {}
    for number, parts in enumerate(experts):
        numbers.setdefault(" and ".join(dict.fromkeys(map(kind, parts))), []).append(number)

    def several(found: list[int], name: str) -> str:
        if len(found) == 1:
            return f"expert {found[0]} is {name}"
        few = f"experts {', '.join(map(str, found))}" if len(found) <= _FEW else f"{len(found)} experts"
        return f"{few} are {name}"

    ordered = sorted(numbers.items(), key=lambda pair: -len(pair[1]))
    return ", and ".join(several(found, kind) for kind, found in ordered)
