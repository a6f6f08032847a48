"""``lowbit list`` and ``lowbit rm``: the models that were downloaded from a hub."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from ..files.untrusted import printable
from .output import Output, size, table


def list_(output: Output) -> None:
    """List the models that were downloaded from a hub, with size and date."""
    from ..files.hub import snapshots

    found, problems = snapshots()
    for problem in problems:
        output.warn(problem)
    shown = table("model", "revision", "branches, tags", "kind", "bytes", "date", texts=[1, 2, 3])
    for each in found:
        date = datetime.fromtimestamp(each.modified).strftime("%Y-%m-%d %H:%M")
        refs = printable(", ".join(each.refs))
        shown.add_row(each.name, each.revision[:12], refs, printable(each.kind), size(each.bytes), date)
    output.result({"models": list(map(asdict, found))}, *([shown] if found else ["no model was downloaded"]))


def rm(
    output: Output,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="hf:org/model, or hf:org/model@revision, as lowbit list shows them.", show_default=False
        ),
    ],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """Remove models that were downloaded from a hub, with their imports and plans, from huggingface_hub's cache."""
    from ..files.hub import removal_of

    removals = [(name, *removal_of(name)) for name in dict.fromkeys(names)]  # all are checked before one is removed
    if not yes:
        if output.as_json or not sys.stdin.isatty():
            raise typer.BadParameter("required with --json, or without a terminal to ask on", param_hint="--yes")
        said = ", ".join(f"{name} ({size(count)})" for name, count, _ in removals)
        if not typer.confirm(f"Remove {said}?", err=True):
            raise typer.Exit(1)
    freed: dict[str, int] = {}
    for name, _, _ in removals:
        freed[name] = 0
        with suppress(FileNotFoundError):  # an earlier name has removed it
            freed[name], remove = removal_of(name)  # computed again, because revisions share files
            remove()
    document = {"removed": list(freed), "bytes": sum(freed.values())}
    output.result(document, *(f"removed: {name}, {size(count)}" for name, count in freed.items()))
