"""Models that run without torch, by the plan beside their weights, and how they get one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..files.plan_facts import PLAN, are_allowed
from ..files.plan_facts import NoPlan as NoPlan
from ..llm.plan_files import PlannedModel, open_planned
from ..machine.cpus import default_threads
from ..machine.facts import free_memory
from .models import check_threads
from .output import Output, describe

# Heads of models that write no text, although their model_type may have a causal language model, too (BERT).
_OTHER = re.compile("For(MaskedLM|SequenceClassification|TokenClassification|QuestionAnswering)$")
_SHORT = 64  # tokens of the text with which a decoder is proven; plans are for texts of any length


def open_model(output: Output, path: Path, threads: int | None, cache: str | None) -> PlannedModel:
    """Opens a packed checkpoint, or the import of a GGUF file, with its plan.

    Raises:
        NoPlan: it has none that can be used, or plans are switched off.
    """
    if not are_allowed():
        raise NoPlan("", stale=False)
    given = path
    if path.suffix == ".gguf" and path.is_file():
        from ..files.gguf_cache import cache_of, is_current

        if not is_current(path):
            raise NoPlan("")
        path = cache_of(path)
    found = open_planned(path, threads or default_threads(), cache)
    check_threads(threads)
    if path is not given:
        output.note(f"{given} was imported before: {path}")
    return found


def keep_plan(output: Output, path: Path, decoder: Any, stop: Iterable[int], caches: tuple[str, ...] | None) -> None:
    """Writes a decoder's plan and its tokenizer's tables beside the weights of its model, if it has a plan; never an error.

    Args:
        decoder: any step; those without a plan are left alone.
        stop: tokens that end a text.
        caches: further cache types of the plan; None: no plan is to be written.
    """
    from ..exports.plan_export import write_plan
    from ..exports.token_file import write_tokens
    from ..hf.decoding import position_limit
    from ..llm import Decoder
    from ..llm.loading import is_packed

    if caches is None or not isinstance(decoder, Decoder) or decoder.plan is None or not is_packed(path):
        return
    # Without a limit the plan would have the positions of this run.
    if not os.access(path, os.W_OK) or position_limit(decoder.model.config.get_text_config()) is None:
        return
    try:
        write_plan(decoder, path / PLAN, list(stop), caches)
        write_tokens(decoder.model, path / PLAN, list(stop))
    except (OSError, ValueError) as error:
        output.note(f"{path / PLAN} is not written: {error}")
    else:
        output.note(f"{path / PLAN} is written: the next run starts without torch")


def make_plan(output: Output, path: Path) -> None:
    """Writes the plan of a packed model that a command has just written, so that its first run needs no torch.

    Models without a plan, and models that would take more than half of the free memory, are left alone; never an error.
    """
    from ..files.config_json import read_config
    from ..files.safetensors import files_of
    from ..hf.from_pretrained import causal_model_types
    from ..llm import Decoder
    from ..llm.loading import is_packed, load_model, stop_tokens
    from ..speech.planned_speech import open_transcriber

    try:
        size = sum(os.path.getsize(file) for file in files_of(path)[0])
        config, embeds = read_config(path), (path / "modules.json").is_file()
        kind, classes = config.get("model_type"), config.get("architectures") or []
        known = embeds or kind == "whisper" or (kind in causal_model_types() and not any(map(_OTHER.search, classes)))
        if not are_allowed() or not known or not is_packed(path) or 2 * size > (free_memory() or 0):
            return
        with output.progress(f"making {path / PLAN}"):
            if kind == "whisper":
                open_transcriber(path, note=output.note)
            elif embeds:
                from ..serve.embeddings import load

                load(path.name, path, note=output.note)
            else:
                model = load_model(path)
                keep_plan(output, path, Decoder(model, _SHORT), stop_tokens(model), ())
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        output.note(f"{path / PLAN} is not written: {describe(error)}")


def missing(output: Output, reason: NoPlan) -> tuple[str, ...] | None:
    """Prints why a plan is not used; returns the cache types for :func:`keep_plan`."""
    if str(reason):
        output.note(str(reason))
    return reason.caches if reason.stale else None
