"""Streams experts from a checkpoint's files: each layer has a bounded cache and reads the experts that tokens need."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..files.safetensors import Stored, files_of, read_files
from ..operators import ops

_READERS = 4  # concurrent reads, which disks serve faster than sequential ones


class StreamedExperts(nn.LinearExperts):
    """A :class:`lowbit.nn.LinearExperts` whose matrices are read from a file when they are needed.

    ``packed_weight`` is uint8 [places, bytes], the most recently used experts. Results are bitwise equal to those of the layer
    with all experts in memory.
    """

    def __init__(self, layer: nn.LinearExperts, stored: Stored, places: int, pools: Sequence[ThreadPoolExecutor]):
        """
        Args:
            layer: packed experts; its weight may be freed afterwards.
            stored: the same packed weight in a file.
            places: number of experts in memory.
            pools: an executor for reads, and one for tasks that wait for reads.
        """
        super().__init__(layer.info, layer._dtype)
        count, self._row = layer.packed_weight.shape
        self.packed_weight = torch.empty((min(places, count), self._row), dtype=torch.uint8)
        self._stored, (self._readers, self._waiter) = stored, pools
        self._file = open(stored.path, "rb", buffering=0)  # noqa: SIM115 - as long as the layer lives
        self._places: OrderedDict[int, int] = OrderedDict()  # expert -> its place, least recently used first
        self._ahead: Future[None] | None = None
        self.read_bytes = 0  # total so far
        self.follower: StreamedExperts | None = None  # the layer that will need the same experts

    def _read(self, expert: int, place: int) -> None:
        view, done = memoryview(self.packed_weight[place].numpy()), 0
        while done < self._row:
            count = os.preadv(self._file.fileno(), [view[done:]], self._stored.offset + expert * self._row + done)
            if not count:
                raise OSError(f"{self._stored.path} ended in the middle of {self._stored.name}: it was changed meanwhile")
            done += count

    def _fill(self, experts: Sequence[int]) -> None:
        """Loads these experts, at most as many as there are places, into memory."""
        missing = [expert for expert in experts if expert not in self._places]
        for expert in experts:
            if expert in self._places:
                self._places.move_to_end(expert)
        reads = []
        for expert in missing:
            full = len(self._places) == self.packed_weight.shape[0]
            place = self._places.popitem(last=False)[1] if full else len(self._places)
            self._places[expert] = place
            reads.append((expert, place))
        self.read_bytes += len(reads) * self._row
        futures = [self._readers.submit(self._read, expert, place) for expert, place in reads]
        try:
            for future in futures:
                future.result()
        except BaseException:
            wait(futures)  # otherwise they could still write to places that the next call reuses
            self._places.clear()  # a place may hold a partly read expert
            raise

    def ahead(self, experts: Sequence[int]) -> None:
        """Starts reading experts that the next call needs."""
        if len(experts) <= self.packed_weight.shape[0]:
            self._ahead = self._waiter.submit(self._fill, experts)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("experts that are read from a file cannot be compiled or exported; load the model without them")
        wanted = experts.unique().tolist()
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.num_experts:
            wrong = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise IndexError(f"there is no expert {wrong}; expected 0 to {self.num_experts - 1}")
        if self._ahead is not None:
            wait([self._ahead])  # if it failed, this call reads the experts itself
            self._ahead = None
        if self.follower is not None:
            self.follower.ahead(wanted)
        places = self.packed_weight.shape[0]
        if len(wanted) <= places:
            return self._run(x, experts, wanted)
        wanted.sort(key=lambda expert: expert not in self._places)  # experts in memory first
        rows = x.unsqueeze(-2).expand(*experts.shape, x.shape[-1])
        out = x.new_empty(*experts.shape, self.out_features)
        for begin in range(0, len(wanted), places):
            some = wanted[begin : begin + places]
            chosen = torch.isin(experts, torch.tensor(some))
            out[chosen] = self._run(rows[chosen], experts[chosen][:, None], some)[:, 0]
        return out

    def _run(self, x: Tensor, experts: Tensor, wanted: Sequence[int]) -> Tensor:
        self._fill(wanted)
        place = torch.zeros(self.num_experts, dtype=torch.int64)
        for expert in wanted:
            place[expert] = self._places[expert]
        return ops.linear_experts(x, self.packed_weight, place[experts], self.out_features)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        raise ValueError("the experts are in a file; load the model without expert_memory to read their weights")

    def _describe(self, packed_weight: Tensor) -> None:
        """Does nothing: ``packed_weight`` holds only some of the experts."""

    def _verified(self, packed_weight: Tensor) -> Any:
        return self.info  # every byte was checked when the model was loaded

    def _save_to_state_dict(self, *arguments: Any) -> None:
        raise ValueError("a model whose experts are in a file is not saved; load it without expert_memory, or copy its files")


def stream_experts(model: torch.nn.Module, directory: str | os.PathLike[str], memory: int) -> int:
    """Makes a loaded model read its experts from the checkpoint's files as needed, to save memory.

    Each layer keeps its most recently used experts, as many as ``memory`` allows; while a layer computes, those of the next
    layer are read. Results are bitwise equal.

    Args:
        model: from :func:`load_model`, with packed experts.
        directory: the checkpoint from which it was loaded.
        memory: bytes for the experts of all layers together.

    Returns:
        The number of experts per layer that are kept in memory.

    Raises:
        ValueError: the model has no packed experts, they differ from the files', or ``memory`` is less than one expert per
            layer.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.LinearExperts)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no packed experts; expected a mixture whose experts are packed")
    tensors = read_files(*files_of(Path(directory)))
    stored = {}
    for name, layer in layers.items():
        found = tensors.get(f"{name}.packed_weight")
        if found is None or found.shape != tuple(layer.packed_weight.shape):
            shape = "none" if found is None else list(found.shape)
            raise ValueError(
                f"{directory} has {shape} as {name}.packed_weight; expected {list(layer.packed_weight.shape)}, as the model"
            )
        stored[name] = found
    least = sum(layer.packed_weight.shape[1] for layer in layers.values())
    places = min(memory // least, max(layer.num_experts for layer in layers.values()))
    if places < 1:
        raise ValueError(f"memory for experts is {memory} bytes; expected at least {least}, one expert of each layer")
    pools = [ThreadPoolExecutor(count, thread_name_prefix="lowbit-experts") for count in (_READERS, 1)]
    before: dict[str, StreamedExperts] = {}
    for name, layer in layers.items():
        holder, _, leaf = name.rpartition(".")
        streamed = StreamedExperts(layer, stored[name], places, pools).eval()
        setattr(model.get_submodule(holder), leaf, streamed)
        if leaf == "down_proj" and holder in before:
            before[holder].follower = streamed
        before[holder] = streamed
    return int(places)
