"""Compares lowbit's calibrated weights of few bits with llama.cpp's types with an importance matrix.

Both quantize the same float weights, calibrated on the same text.

llama.cpp's types are quantized by its library (`make bench-peers`) and dequantized: activations stay float. Its blocks have 256
weights. If rows are not a multiple of 256, a block continues in the next row here, where llama.cpp itself would choose a type
with more bits.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lowbit
import torch
from lowbit.calibration.capture import MeanSquares, StopRun, inputs_of
from lowbit.calibration.data import batches
from lowbit.calibration.model import evaluating
from lowbit.layers.packable import names_by_weight
from lowbit.tools.report.peers import Peer, peers
from torch import Tensor

# Modules whose source is the calibration text. Models are measured on another module.
MODULES = (
    "ast configparser csv difflib email/message fractions http/client json/decoder logging/__init__ mailbox shutil statistics "
    "tarfile typing unittest/case zipfile"
)
WIDTHS = (4, 3, 2)
TARGETS = (4.5, 3.5, 2.5)  # bits per weight of mixed widths
TYPES = ("Q4_K", "Q3_K", "IQ3_S", "Q2_K", "IQ2_S")
_BLOCK = 256


class Source(Protocol):
    """A float model and its tokenizer."""

    floats: torch.nn.Module
    tokenizer: Any


@dataclass(frozen=True)
class Candidate:
    name: str
    model: torch.nn.Module
    bytes: int
    bits: float  # bits per weight, scales included
    seconds: float  # of CPU time


def calibration_text() -> str:
    library = Path(os.__file__).parent
    return "\n\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES.split())


def calibrate(source: Source, tokens: int, config: lowbit.LowBitConfig, target: float | None = None) -> torch.nn.Module:
    """A calibrated copy of the float model, of one width or of mixed widths."""
    model = copy.deepcopy(source.floats)
    lowbit.calibrate(model, [calibration_text()], config, tokenizer=source.tokenizer, max_tokens=tokens, target_bits=target)
    return model


def packed_size(model: torch.nn.Module) -> tuple[int, float]:
    """The bytes of all packed weights, and the bits per weight."""
    sizes = {
        module.packed_weight.data_ptr(): (module.info.total_bytes, module.info.out_features * module.info.in_features)
        for module in model.modules()
        if isinstance(module, lowbit.nn.Linear | lowbit.nn.Embedding)
    }
    size = sum(each for each, _ in sizes.values())
    return size, 8 * size / sum(weights for _, weights in sizes.values())


def calibrated(source: Source, tokens: int, rotate: bool) -> Iterator[Candidate]:
    """Measures calibrated models of one width and of mixed widths."""
    rotated = ", inputs rotated" if rotate else ""
    levels = lowbit.LowBitConfig(bits=2, mapping="levels", levels="fit", rotate=rotate)
    for name, config, target in (
        *((f"{bits} bits, groups of 32", lowbit.LowBitConfig(bits=bits, rotate=rotate), None) for bits in WIDTHS),
        ("2 bits, fitted levels, groups of 32", levels, None),
        *((f"mixed widths, {target} bits", lowbit.LowBitConfig(rotate=rotate), target) for target in TARGETS),
    ):
        begin = time.process_time()
        model = calibrate(source, tokens, config, target)
        yield Candidate(f"lowbit, {name}{rotated}", model, *packed_size(model), time.process_time() - begin)


@torch.inference_mode()
def mean_squares(source: Source, tokens: int) -> dict[str, Tensor]:
    """Mean squares of the inputs of all linear layers on the calibration text."""
    inputs, _ = batches(source.floats, [calibration_text()], source.tokenizer, 512, tokens)
    linears = {name: module for name, module in source.floats.named_modules() if isinstance(module, torch.nn.Linear)}
    squares = MeanSquares()

    def take(name: str, x: Tensor) -> None:
        squares.add(name, x)
        if name == "lm_head":  # its logits are not needed
            raise StopRun

    with evaluating(source.floats), inputs_of(linears, take):
        for batch in inputs:
            with suppress(StopRun):
                source.floats(**batch)
    return squares.means()


def of_llama_cpp(source: Source, tokens: int) -> Iterator[Candidate]:
    found = {name: peer for name, peer in peers([], importance=True).items() if name.endswith(", importance")}
    squares = mean_squares(source, tokens) if found else {}
    for kind in TYPES:
        name = f"GGUF {kind}, importance"
        if name in found:
            begin = time.process_time()
            model, size, bits = dequantized(source, found[name], squares)
            title = f"llama.cpp's {kind} with importance, float activations"
            yield Candidate(title, model, size, bits, time.process_time() - begin)


def dequantized(source: Source, peer: Peer, squares: dict[str, Tensor]) -> tuple[torch.nn.Module, int, float]:
    """A copy of the float model with all matrices quantized by a peer and dequantized, its bytes, and its bits per weight."""
    model, size, weights = copy.deepcopy(source.floats), 0, 0
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }
    for names in names_by_weight(modules).values():
        weight = modules[names[0]].weight
        held, more = held_in_runs(peer, weight.detach(), next(squares[each] for each in names if each in squares))
        weight.data.copy_(held)
        size, weights = size + more, weights + weight.numel()
    return model, size, 8 * size / weights


def held_in_runs(peer: Peer, weight: Tensor, importance: Tensor) -> tuple[Tensor, int]:
    """Quantizes a matrix whose blocks may continue in the next row; returns the dequantized weights and their bytes."""
    rows = math.lcm(weight.shape[1], _BLOCK) // weight.shape[1]
    if len(weight) % rows:
        raise ValueError(f"a matrix has shape {list(weight.shape)}; expected a multiple of {_BLOCK} weights")
    held, size = peer.hold(weight.reshape(len(weight) // rows, -1).float(), importance.repeat(rows))
    return held.view_as(weight), size
