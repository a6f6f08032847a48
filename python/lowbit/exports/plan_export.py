"""Writes the plan of a decoder beside the weights of its checkpoint, or with its weights."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ..files.replace import replacing, sync
from ..files.safetensors import Stored, files_of, read_files
from ..hf.decoding import position_limit
from ..llm.decoder import Decoder
from ..llm.plan_files import describe
from ..llm.planning import DecoderPlan
from ..plan.plan_file import CHECKED, Buffer, Kind, Plan, to_bytes

_MOST_INSIDE = 1 << 20  # bytes of a weight that is stored in the plan itself
_CACHES = ("float32", "bfloat16", "float16", "int8", "int4")  # the numbers of TextCache in plan/model.h
_ALIGNMENT = 128  # of the weights behind a plan; kAlignment in ops/aligned_memory.h


def plan_bytes(decoder: Decoder, directory: Path, stop: list[int], caches: tuple[str, ...] = ()) -> bytes:
    """The bytes of a decoder's plan for a file in ``directory``, which has the checkpoint of its model.

    Args:
        stop: tokens that end a text.
        caches: cache types for which decoders of the model were proven, besides this decoder's.

    Raises:
        ValueError: the model has no plan, has been changed, or has weights that are not in the checkpoint.
        OSError: the checkpoint cannot be read.
    """
    made = decoder.fitting_plan()
    if made is None:
        raise ValueError(f"{type(decoder.model).__name__} has no plan: {decoder.plan_refusal}")
    plan = _described(decoder, made, stop)
    plan.about |= describe(decoder, directory, caches)
    return placed_bytes(plan, made.weights, directory)


def placed_bytes(plan: Plan, weights: dict[int, Tensor], directory: Path, most_inside: int | None = None) -> bytes:
    """The bytes of a plan that takes its weights from the checkpoint in ``directory``; changes the plan's buffers.

    Args:
        weights: by number of their buffer.
        most_inside: largest weight, in bytes, that is stored in the plan if the checkpoint has it in another type; None: 1 MiB.

    Raises:
        ValueError: the checkpoint has no such weights.
        OSError: it cannot be read.
    """
    most_inside = _MOST_INSIDE if most_inside is None else most_inside
    alike: dict[tuple[int, int], list[Stored]] = {}
    for each in read_files(*files_of(directory)).values():
        alike.setdefault((each.bytes, zlib.crc32(_bytes_of(each)[:CHECKED])), []).append(each)
    for number, tensor in weights.items():
        _place(plan.buffers[number], tensor, alike, directory, most_inside)
    return to_bytes(plan)


def _described(decoder: Decoder, made: DecoderPlan, stop: list[int]) -> Plan:
    """The plan with what programs need to know; its weights have no place yet."""
    limit = position_limit(decoder.model.config.get_text_config())
    about = {"vocabulary": [decoder.vocabulary], "positions": [limit or decoder.max_length], "stop": stop}
    return Plan(about, [replace(buffer) for buffer in made.plan.buffers], made.plan.steps)


def plan_with_weights(decoder: Decoder, made: DecoderPlan, stop: list[int]) -> bytes:
    """A decoder's plan and the weights after it, for programs that have one text with the decoder's caches.

    They begin with the number of bytes of the plan; each weight is at a multiple of 128 bytes.
    """
    plan = _described(decoder, made, stop)
    keys, _, values = decoder.cache_type.partition(",")
    plan.about |= {"length": [decoder.max_length], "caches": [_CACHES.index(keys), _CACHES.index(values or keys)]}
    weights, behind = list[Any](), 0
    for number, tensor in made.weights.items():
        content, buffer = _content(tensor), plan.buffers[number]
        buffer.offset, buffer.checksum = behind, zlib.crc32(content[:CHECKED])
        padding = -content.size % _ALIGNMENT
        weights += [content, bytes(padding)]
        behind += content.size + padding
    content = to_bytes(plan)
    head = struct.pack("<Q", len(content)) + content
    return b"".join([head, bytes(-len(head) % _ALIGNMENT), *weights])


def _content(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()


def _bytes_of(stored: Stored) -> Any:
    if not stored.bytes:
        return numpy.zeros(0, numpy.uint8)
    return numpy.memmap(stored.path, numpy.uint8, "r", stored.offset, (stored.bytes,))


def _place(
    buffer: Buffer, tensor: Tensor, alike: dict[tuple[int, int], list[Stored]], directory: Path, most_inside: int
) -> None:
    """Finds the bytes of a weight in the checkpoint, or keeps them in the plan if there are few."""
    content = _content(tensor)
    checksum = zlib.crc32(content[:CHECKED])
    found = sorted(alike.get((content.size, checksum), ()), key=lambda each: each.name != buffer.name)
    for each in found:
        if numpy.array_equal(_bytes_of(each), content):
            buffer.file, buffer.offset, buffer.checksum = each.path.name, each.offset, checksum
            return
    if content.size > most_inside:
        raise ValueError(
            f"{directory} has no tensor with the {content.size} bytes of {buffer.name}; expected the checkpoint that the "
            "decoder's model was loaded from"
        )
    buffer.kind, buffer.content = Kind.CONSTANT, content.tobytes()


def write_plan(decoder: Decoder, path: Path, stop: list[int], caches: tuple[str, ...] = ()) -> None:
    """Writes a decoder's plan to a file beside the weights of its model; other arguments and errors as above."""
    write_bytes(plan_bytes(decoder, path.absolute().parent, stop, caches), path)


def write_bytes(content: bytes, path: Path) -> None:
    """Writes the bytes of a plan to a file, which is replaced in one step."""
    with replacing(path, ".plan") as written, open(written, "wb") as file:
        file.write(content)
        sync(file)


class Outline(torch.nn.Module):
    """The inputs and the output of a call of a decoder's plan."""

    def __init__(self, vocabulary: int, plan: Plan):
        super().__init__()
        self.vocabulary = vocabulary
        operands = [operand for step in plan.steps for operand in step.operands if operand is not None]
        self.dtype = next(operand.dtype for operand in operands if plan.buffers[operand.buffer].kind is Kind.OUTPUT)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        return torch.zeros(1, self.vocabulary, dtype=self.dtype)


class SessionOutline(torch.nn.Module):
    """The method that chooses, saves and loads texts: bytes of a command [n], and the number of tokens of the text in use."""

    def forward(self, command: Tensor) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)
