"""Writes the plan of a decoder beside the weights of its checkpoint, and runs such files."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .. import _C
from ..files.replace import replacing, sync
from ..files.safetensors import Stored, files_of, read_files
from ..hf.decoding import position_limit
from ..llm.decoder import Decoder
from ..plan.plan_file import CHECKED, Buffer, Kind, Plan, to_bytes

PLAN = "lowbit.plan"  # beside the weights
_MOST_INSIDE = 1 << 20  # bytes of a weight that is stored in the plan itself


def plan_bytes(decoder: Decoder, directory: Path, stop: list[int]) -> bytes:
    """The bytes of a decoder's plan for a file in ``directory``, which has the checkpoint of its model.

    Raises:
        ValueError: the model has no plan, or weights that are not in the checkpoint.
        OSError: the checkpoint cannot be read.
    """
    if decoder.plan is None:
        raise ValueError(f"{type(decoder.model).__name__} has no plan: {decoder.plan_refusal}")
    stored = read_files(*files_of(directory))
    alike: dict[tuple[int, int], list[Stored]] = {}
    for each in stored.values():
        alike.setdefault((each.bytes, zlib.crc32(_bytes_of(each)[:CHECKED])), []).append(each)
    limit = position_limit(decoder.model.config.get_text_config())
    about = {"vocabulary": [decoder.vocabulary], "positions": [limit or decoder.max_length], "stop": stop}
    plan = Plan(about, [replace(buffer) for buffer in decoder.plan.plan.buffers], decoder.plan.plan.steps)
    for number, tensor in decoder.plan.weights.items():
        _place(plan.buffers[number], tensor, alike, directory)
    return to_bytes(plan)


def _bytes_of(stored: Stored) -> Any:
    if not stored.bytes:
        return numpy.zeros(0, numpy.uint8)
    return numpy.memmap(stored.path, numpy.uint8, "r", stored.offset, (stored.bytes,))


def _place(buffer: Buffer, tensor: Tensor, alike: dict[tuple[int, int], list[Stored]], directory: Path) -> None:
    """Finds the bytes of a weight in the checkpoint, or keeps them in the plan if there are few."""
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    checksum = zlib.crc32(content[:CHECKED])
    found = sorted(alike.get((content.size, checksum), ()), key=lambda each: each.name != buffer.name)
    for each in found:
        if numpy.array_equal(_bytes_of(each), content):
            buffer.file, buffer.offset, buffer.checksum = each.path.name, each.offset, checksum
            return
    if content.size > _MOST_INSIDE:
        raise ValueError(
            f"{directory} has no tensor with the {content.size} bytes of {buffer.name}; expected the checkpoint that the "
            "decoder's model was loaded from"
        )
    buffer.kind, buffer.content = Kind.CONSTANT, content.tobytes()


def write_plan(decoder: Decoder, path: Path, stop: list[int]) -> None:
    """Writes a decoder's plan to a file beside the weights of its model; other arguments and errors as above."""
    content = plan_bytes(decoder, path.absolute().parent, stop)
    with replacing(path, ".plan") as written, open(written, "wb") as file:
        file.write(content)
        sync(file)


class PlanStep:
    """A plan from a file with caches for one text."""

    def __init__(self, path: str, max_length: int | None, cache: str | None):
        """
        Raises:
            ValueError: the file is damaged, or the weights beside it have changed.
            OSError: a file cannot be read.
        """
        self.model = _C.PlanModel(path, torch.get_num_threads())
        self.max_length = min(2048, self.model.positions) if max_length is None else max_length
        keys, _, values = (cache or "float32").partition(",")
        self._text = self.model.begin(self.max_length, keys, values or keys)

    @property
    def recurrent(self) -> bool:
        """Whether the text cannot be cut back."""
        return bool(self._text.recurrent)

    def __call__(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Logits [1, vocabulary], float32, after tokens [1, s] that follow the first ``start`` ones."""
        self._text.cut(int(start))
        logits = torch.empty(1, self.model.vocabulary)
        self.model.feed(self._text, tokens[0].tolist(), logits.data_ptr())
        return logits
