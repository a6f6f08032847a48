"""The tensors of a checkpoint to write: floats are copied, matrices packed some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..files.safetensors import ORDER_SUFFIX, PACKED_SUFFIX, Stored, Writer
from ..files.tensors import check_numbers
from ..levels import FIT, sampled_rows
from ..packed.header import PackedInfo
from ..packed.matrix import PLANES_VERSION
from ..packed.rounding import table_of
from ..packed.row_bands import Bands, rows_of_band
from .codes import Float, Matrix, Nearness, SourceTensor, Stacked, Weights, pack_rows, requantize_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BAND_WEIGHTS = 1 << 21  # weights packed at a time: enough for many threads, little memory


@dataclass(frozen=True)
class Output:
    """A tensor to write as ``name``; ``tensor.name`` is its name in the source, or that of its first part."""

    tensor: SourceTensor
    name: str
    bias: Float | None = None
    layer: str = ""  # name of the layer in the model, if packed
    activation_bits: int = 8  # at least; the tensor may have a config with more

    @property
    def packed(self) -> bool:
        return not isinstance(self.tensor, Float)

    def order(self) -> Output | None:
        """The act-order permutation, written as a separate tensor; None without one."""
        order = self.tensor.order if isinstance(self.tensor, Matrix) else None
        if order is None:
            return None
        order = order.int()
        read = lambda begin, end: order[begin:end]  # noqa: E731
        name = self.name.removesuffix(PACKED_SUFFIX) + ORDER_SUFFIX
        return Output(Float(self.tensor.name, self.tensor.source, "I32", (len(order),), read, order.nbytes), name)

    def info(self) -> PackedInfo | None:
        """The header of a packed weight; None: not packed."""
        if isinstance(self.tensor, Float):
            return None
        info = self.tensor.info(self.bias is not None)
        return info if self.activation_bits == 8 else replace(info, activation_bits=16, version=PLANES_VERSION)

    def stored(self, path: Path) -> Stored:
        """The tensor as it will be in this file."""
        tensor, info = self.tensor, self.info()
        if isinstance(tensor, Float):
            return Stored(self.name, path, tensor.dtype, tensor.shape, 0, tensor.bytes)
        assert info is not None
        shape = tuple(size for size in (info.experts, info.total_bytes) if size is not None)
        return Stored(self.name, path, "U8", shape, 0, math.prod(shape))


def bands_of(shape: tuple[int, ...], whole_panels: bool = False) -> Iterator[tuple[int, int]]:
    """The rows [begin, end) of each band of a tensor."""
    n, k = (*shape, 1)[0], max(1, math.prod(shape[1:]))  # a shape of [] has one element
    rows = rows_of_band(k, _BAND_WEIGHTS) if whole_panels else max(1, _BAND_WEIGHTS // k)
    for begin in range(0, n, rows):
        yield begin, min(begin + rows, n)


def has_values(tensor: Float) -> bool:
    """Whether any element is not zero."""
    return any(bool(tensor.read(begin, end).any()) for begin, end in bands_of(tensor.shape))


def write_output(output: Output, writer: Writer, done: Callable[[int], None], nearness: Nearness | None = None) -> None:
    """Writes a tensor.

    Args:
        done: called with the number of bytes of the source after each band.
        nearness: the errors of packed weights are added to it; None: they are not computed.

    Raises:
        ValueError: a tensor has a NaN, or a matrix an infinity.
    """
    tensor, bias = output.tensor, output.bias
    n = tensor.shape[0] if tensor.shape else 1
    if isinstance(tensor, Float):
        for begin, end in bands_of(tensor.shape):
            values = tensor.read(begin, end).contiguous().view(-1).view(torch.uint8)
            if n * len(values) != (end - begin) * tensor.bytes:
                raise AssertionError(f"{tensor.name}: rows {begin} to {end} have {len(values)} bytes of {tensor.bytes}")
            check_numbers(tensor.name, tensor.dtype, values)
            writer.write(values.numpy())
            done(len(values))
        return
    info = output.info()
    assert info is not None  # because the tensor is packed
    if isinstance(tensor, Stacked):
        for number in range(tensor.experts):
            values = None if bias is None else bias.read(number, number + 1)[0]
            _write_matrix(info, tensor.of(number), values, nearness, writer, done)
    else:
        _write_matrix(info, tensor, None if bias is None else bias.read(0, n), nearness, writer, done)


def _write_matrix(
    info: PackedInfo,
    tensor: Matrix | Weights,
    bias: torch.Tensor | None,
    nearness: Nearness | None,
    writer: Writer,
    done: Callable[[int], None],
) -> None:
    """Packs and writes a matrix in bands of rows, whose panels together are those of the whole matrix."""
    n, table = tensor.shape[0], None
    if isinstance(tensor, Weights) and tensor.config.mapping == "levels":
        tensor, table = _with_table(tensor)
    bands = Bands(info, table)
    start = writer.write(bytes(bands.header_bytes))
    for begin, end in bands_of(tensor.shape, True):
        rows, part = tensor.read(begin, end), None if bias is None else bias[begin:end]
        try:
            if isinstance(tensor, Matrix):
                packed = pack_rows(tensor, rows, part, nearness)
            else:
                packed = requantize_rows(tensor, rows, part, nearness)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{tensor.label}, rows {begin} to {end - 1}: {error}") from error
        writer.write(bands.add(packed).numpy())
        done(tensor.bytes * end // n - tensor.bytes * begin // n)
        del rows, packed  # free them before the next band is allocated
    writer.write_at(start, bands.header())


def _with_table(tensor: Weights) -> tuple[Weights, tuple[int, ...]]:
    """The matrix with one table of levels for all bands."""
    config, (n, k) = tensor.config, tensor.shape
    sampled = sampled_rows(n, k) if config.levels == FIT else range(1)
    table = table_of(config, config.as_rounded(torch.cat([tensor.read(row, row + 1) for row in sampled])))
    return replace(tensor, config=replace(config, levels=table)), table


def place_outputs(model: PreTrainedModel, outputs: Iterable[Output], advice: str = "") -> None:
    """Puts the packed layers of a checkpoint into its model on the meta device.

    Args:
        advice: appended to an error, with "{layer!r}" for the layer.

    Raises:
        ValueError: transformers would load a tensor to another layer than its own.
    """
    from ..hf.names import names_in_model
    from ..hf.placing import place_packed

    outputs = list(outputs)
    infos = {output.layer: (output.name, output.info()) for output in outputs}
    packed = {layer: (name, info) for layer, (name, info) in infos.items() if info is not None}
    floats = {output.name for output in outputs if not output.packed}
    place_packed(model, packed, floats, torch.float32, {output.layer for output in outputs if output.order() is not None})
    names = names_in_model(model, [output.name for output in outputs])
    for output in outputs:
        # A float whose name is not that of its source is a part of a tensor, and named as in the model.
        if not output.packed and (output.name == output.tensor.name or output.name.endswith(ORDER_SUFFIX)):
            continue
        expected = f"{output.layer}.packed_weight" if output.packed else output.name
        if names[output.name] != (expected, None):
            raise ValueError(
                f"{output.tensor.name} would be written as {output.name}, which transformers takes for "
                f"{names[output.name][0]}; expected {expected}"
                + advice.format(layer=output.layer or output.name.rpartition(".")[0])
            )
