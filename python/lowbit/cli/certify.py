"""``lowbit certify``."""

from __future__ import annotations

import os
from pathlib import Path

import lowbit

from ..machine.cpus import default_threads
from . import options
from .models import check_threads, load, set_threads
from .output import Output


def certify(output: Output, model: options.Model, *, threads: options.Threads = None) -> None:
    """Print a digest of a packed model's logits, which is the same on every machine."""
    from .. import _C, isa
    from ..files.plan_facts import PLAN, check_settings

    file, count = model / PLAN, threads or default_threads()
    made = not file.exists()
    if made:
        _make(output, model, file, threads)
    else:
        check_threads(threads)
    plan = _C.PlanModel(os.fsencode(file), count)
    check_settings(file, plan.about)
    with output.progress("computing the logits of a fixed text"):
        certificate = f"{plan.certify():016x}"
    document = {"model": str(model), "plan": str(file), "made": made, "certificate": certificate}
    output.result(document | {"isa": isa()["active"], "threads": count}, certificate)


def _make(output: Output, model: Path, file: Path, threads: int | None) -> None:
    """Writes the plan of a packed model, with torch."""
    lowbit.load_torch()
    from .. import llm
    from ..llm.loading import is_packed, stop_tokens

    set_threads(threads)
    if not is_packed(model):
        raise ValueError(f"{model} has float weights; expected a checkpoint of lowbit quantize or lowbit import")
    loaded = load(output, model, None)
    with output.progress(f"making {file}"):
        llm.export_decoder(llm.Decoder(loaded, 64), file, stop=stop_tokens(loaded))
