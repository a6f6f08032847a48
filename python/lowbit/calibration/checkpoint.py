"""Calibrates a checkpoint block by block and writes a packed one; an interrupted run can be continued."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint import MAX_SHARD_BYTES, CheckpointSummary, PlannedSize, planned_size, quantize_checkpoint
from ..files.config_json import CONFIG
from ..files.replace import resolve_new_directory
from ..files.safetensors import files_of, read_files
from ..layers.packable import put_linears
from .data import MOST_TOKENS, Inputs, batches
from .journal import Journal, digest
from .model import check_method, evaluating, run
from .packing import Kept
from .result import Calibration
from .selection import has_blocks
from .widths import Item, Option, assign, check_bits, config_of, extremes, measure_losses, options_of, whole_bits, within

if TYPE_CHECKING:
    from ..hf.config import LowBitConfig

CalibrationProgress = Callable[[str, int, int, str], None]


def calibrate_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    config: LowBitConfig,
    text: str,
    method: str = "auto",
    *,
    target_bytes: int | None = None,
    target_bits: float | None = None,
    window: int = 512,
    max_tokens: int = MOST_TOKENS,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: CalibrationProgress | None = None,
) -> tuple[CheckpointSummary, Calibration]:
    """Quantizes a checkpoint as :func:`lowbit.quantize_checkpoint`, with layers from :func:`lowbit.calibrate`.

    Weights are mapped from the source's files, and each finished layer is written immediately. So memory holds one float
    block, the moments of its inputs, and three hidden states per token. An interrupted run continues if source, config,
    text and method are the same: until the target is complete, finished layers are in a hidden directory
    ``.NAME.calibration`` next to it.

    Args:
        source, target, config, max_shard_bytes: as for :func:`lowbit.quantize_checkpoint`; the source needs a tokenizer.
        text: the calibration text; except for language models, each line is a separate text.
        method, window, max_tokens: as for :func:`lowbit.calibrate`.
        target_bytes: mixed precision per layer: largest size of the target's weight files. Layers named by the config's
            overrides or ``embedding_bits`` keep their widths; ``bits`` and ``group_size`` are not used for other layers.
        target_bits: mixed precision per layer, for this mean number of bits per quantized weight, scales included.
        progress: called as ``progress(step, done, total, detail)``, for one step after the other.

    Raises:
        OSError, ValueError: as both functions; a target that cannot be met; a model without a list of blocks.
    """
    from ..hf.from_pretrained import mapped_model
    from ..llm.loading import load_tokenizer

    check_method(method)
    if target_bytes is not None and target_bits is not None:
        raise ValueError("target_bytes and target_bits are both given; expected one of them")
    source, target = Path(source), Path(target).absolute()
    place = resolve_new_directory(target)
    planned = planned_size(source, config, max_shard_bytes)  # checks the files
    files = files_of(source)[0]
    tokenizer = load_tokenizer(source)
    model = mapped_model(source, len(read_files(files)))
    generates = getattr(model, "can_generate", lambda: False)()
    data = [text] if generates else [line for line in map(str.strip, text.splitlines()) if line]
    inputs, _ = batches(model, data, tokenizer, window, max_tokens)
    if method != "importance" and not has_blocks(model, config):
        raise ValueError(
            f"{type(model).__name__} has no list of blocks with layers to quantize, which {method} goes through; expected "
            "the method importance"
        )
    budget = None if target_bytes is None and target_bits is None else [target_bytes, target_bits]
    settings = f"{method}, window {window}, {max_tokens} tokens"
    identity = _identity(source, files, text, [config.to_dict(), budget], settings)
    with Journal(place, identity) as journal:
        if journal.changes:
            warnings.warn(
                f"an earlier run for {target} had another {' and '.join(journal.changes)}; its layers were removed",
                stacklevel=2,
            )
        if budget is not None:
            config = _with_widths(model, inputs, config, budget, source, max_shard_bytes, planned, journal, progress)
        result: list[Calibration] = []

        def calibrated() -> Mapping[str, torch.Tensor]:
            settings = {"tokenizer": tokenizer, "window": window, "max_tokens": max_tokens}
            result.append(_run(model, data, config, method, journal, progress, settings))
            return {name: packed for name, (_, packed) in journal.packed.items()}

        summary = quantize_checkpoint(
            source,
            target,
            config,
            max_shard_bytes=max_shard_bytes,
            packed=calibrated,
            progress=None if progress is None else lambda done, total, name: progress("writing", done, total, name),
        )
    return summary, result[0]


def _run(
    model: Any,
    data: list[str],
    config: LowBitConfig,
    method: str,
    journal: Journal,
    progress: CalibrationProgress | None,
    settings: dict[str, Any],
) -> Calibration:
    """Calibrates the layers that are not in the journal, and stores each in the journal as soon as it is finished."""
    resumed = len(journal.packed)

    def report(done: int, total: int, name: str) -> None:
        if progress is not None:
            earlier = f" ({resumed} layers are from an earlier run)" if resumed else ""
            progress("calibrating", done, total, f"{name}{earlier}")

    kept = Kept(dict(journal.packed), journal.keep)
    result = run(model, data, config, method, progress=report, kept=kept, **settings)
    result.resumed = resumed
    return result


def _identity(source: Path, weights: list[Path], text: str, config: list[Any], method: str) -> dict[str, str]:
    """Digests of all that the layers of a run depend on; a later run with the same identity reuses them."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", CONFIG)
    return {
        "source": digest([*weights, *(source / name for name in names if (source / name).exists())]),
        "text": digest([text.encode()]),
        "config": json.dumps(config, sort_keys=True),
        "method": method,
        # Versions may differ in the last bits of sums, and lowbit's methods change.
        **{name: import_module(name).__version__ for name in ("lowbit", "transformers", "torch")},
    }


def _with_widths(
    model: Any,
    inputs: list[Inputs],
    config: LowBitConfig,
    budget: list[Any],
    source: Path,
    max_shard_bytes: int,
    planned: PlannedSize,
    journal: Journal,
    progress: CalibrationProgress | None,
) -> LowBitConfig:
    """The config with widths that meet the target."""
    from ..transformers import LowBitConfig

    known = journal.widths()
    if known is not None:
        return LowBitConfig(**known)
    target_bytes, target_bits = budget
    put_linears(model, config.select(model, experts=False))
    floats = planned.bytes - planned.packed_bytes
    estimate = target_bits if target_bytes is None else 8 * (target_bytes - floats) / planned.packed_weights
    reference_bits = whole_bits(estimate)
    items = options_of(model, config)

    def size(options: list[Option]) -> int:
        return planned_size(source, config_of(config, items, options), max_shard_bytes).bytes

    # Checked before measurements, which take time.
    if target_bytes is None:
        check_bits(items, target_bits)
    else:
        _check_bytes(items, target_bytes, size)
    with evaluating(model):
        report = None if progress is None else lambda done, total: progress("measuring layers", done, total, "")
        measure_losses(model, inputs, items, reference_bits, report)
    options = within(items, target_bits) if target_bytes is None else _within_bytes(items, target_bytes, size)
    chosen = config_of(config, items, options)
    journal.keep_widths(chosen.to_dict())
    return chosen


Size = Callable[[list[Option]], int]  # bytes of the weight files with these options


def _ends(items: list[Item], size: Size) -> tuple[int, int]:
    smallest, largest = (size([pick(item.options, key=lambda option: option.bytes) for item in items]) for pick in (min, max))
    return smallest, largest


def _check_bytes(items: list[Item], target_bytes: int, size: Size) -> None:
    smallest, largest = _ends(items, size)
    if not smallest <= target_bytes <= largest:
        raise ValueError(
            f"{target_bytes} bytes cannot be reached; the weight files of this model take {smallest} to {largest} bytes"
        )


def _within_bytes(items: list[Item], target_bytes: int, size: Size) -> list[Option]:
    # File headers grow by a few bytes with the numbers in them.
    fixed = _ends(items, size)[0] - extremes(items)[0]
    room = max(target_bytes - fixed, extremes(items)[0])
    while True:
        options = assign(items, room)
        over = size(options) - target_bytes
        if over <= 0:
            return options
        room = max(room - over, extremes(items)[0])
