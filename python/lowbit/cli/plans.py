"""Models that run without torch, by the plan beside their weights, and how they get one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.plan_files import PLAN, NoPlan, PlannedModel, open_planned
from ..machine.cpus import default_threads
from .models import MTP, check_draft, check_threads
from .output import Output

if TYPE_CHECKING:
    from ..llm.plan_decoder import PlanDecoder

_PLANS = "LOWBIT_PLAN"  # environment variable; 0: no plans


def open_model(output: Output, path: Path, threads: int | None, cache: str | None) -> PlannedModel:
    """Opens a packed checkpoint, or the import of a GGUF file, with its plan.

    Raises:
        NoPlan: it has none that can be used, or plans are switched off.
    """
    if os.environ.get(_PLANS, "1") == "0":
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


def open_with_draft(
    output: Output, path: Path, threads: int | None, cache: str | None, draft: Path | None
) -> tuple[PlannedModel, PlannedModel | None]:
    """Opens a model and its draft model, both with their plans.

    Raises:
        NoPlan: one has none, or the draft is the model's own head, which needs torch.
    """
    if draft == MTP:
        raise NoPlan("", stale=False)
    model = open_model(output, path, threads, cache)
    return model, None if draft is None else open_model(output, draft, threads, model.cache)


def draft_decoder(draft: PlannedModel, model: PlannedModel, max_length: int) -> PlanDecoder:
    """The decoder of a draft model; raises ValueError as :func:`lowbit.cli.models.check_draft`."""
    check_draft(draft.directory, draft.tokenizer, draft.plan.positions, model.tokenizer, model.directory, max_length)
    return draft.decoder(max_length)


def keep_plan(output: Output, path: Path, decoder: Any, stop: Iterable[int], caches: tuple[str, ...] | None) -> None:
    """Writes a decoder's plan beside the weights of its model, if it has one; never an error.

    Args:
        decoder: any step; those without a plan are left alone.
        stop: tokens that end a text.
        caches: further cache types of the plan; None: no plan is to be written.
    """
    from ..exports.plan_export import write_plan
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
    except (OSError, ValueError) as error:
        output.note(f"{path / PLAN} is not written: {error}")
    else:
        output.note(f"{path / PLAN} is written: the next run starts without torch")


def missing(output: Output, reason: NoPlan) -> tuple[str, ...] | None:
    """Prints why a plan is not used; returns the cache types for :func:`keep_plan`."""
    if str(reason):
        output.note(str(reason))
    return reason.caches if reason.stale else None
