"""``lowbit bench --publish``: measures this machine and writes a page of docs/perf and its figures as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...files.untrusted import one_line
from ...machine.child import result_of
from .machine_facts import facts, watched
from .speed_page import SCHEMA, rehearse, write

__all__ = ["SHAPES", "figures", "publish"]

SECONDS = 570.0  # total; the promised ten minutes include the start of processes
SHAPES = ("qwen3-0.6b", "llama-3.2-1b")  # of the 0.5B and the 1B class
_KERNEL_SECONDS = 0.3  # fraction of the time for kernels


def figures(
    threads: int, seconds: float = SECONDS, shapes: tuple[str, ...] = SHAPES, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measures kernels and models, each in a separate process; failures are listed in ``not_reached``.

    Args:
        threads: the largest number of threads; kernels are also measured with one.
        seconds: time limit; a shorter one means fewer rounds.
        shapes: the shapes of the models.
        progress: called with what is measured next.

    Returns:
        A document that :func:`lowbit.tools.perf.speed_page.check` accepts.
    """
    end = time.perf_counter() + seconds
    known = facts()
    not_reached = [
        {"what": f"kernels for {name}", "why": "this CPU does not have these instructions"} for name in known["isa"]["absent"]
    ]
    parts: dict[str, Any] = {}

    def measure(part: str, share: float) -> None:
        if progress is not None:
            progress(part)
        left = end - time.perf_counter()
        document, reason = result_of(
            "lowbit.tools.perf.measure_speed", part, str(threads), str(left * share), seconds=max(1.0, left)
        )
        reason = reason or document.pop("reason", "")
        if reason:
            not_reached.append({"what": part, "why": one_line(reason, 300)})
            return
        not_reached.extend(each for each in document.pop("not_reached") if each not in not_reached)
        parts[part] = document

    with watched() as load:
        measure("kernels", _KERNEL_SECONDS)
        for at, shape in enumerate(shapes):
            measure(shape, 0.9 / (len(shapes) - at))
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": seconds - (end - time.perf_counter()),
        "threads": threads,
        **known,
        "load": load,
        "kernels": parts.get("kernels"),
        "models": [parts[shape] for shape in shapes if shape in parts],
        "not_reached": not_reached,
    }


def publish(directory: Path, threads: int, progress: Callable[[str], None] | None = None) -> tuple[dict[str, Any], Path, Path]:
    """Measures, and writes the page and its figures, replacing those of the same machine.

    Returns:
        The figures, and the paths of the page and the JSON file.

    Raises:
        OSError: the directory cannot be written, which is tested first.
    """
    rehearse(directory)
    document = figures(threads, progress=progress)
    return document, *write(document, directory)
