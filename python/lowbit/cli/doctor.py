"""``lowbit doctor``."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from .output import Output, facts_table, size, table


def doctor(
    output: Output,
    *,
    fast: Annotated[bool, typer.Option("--fast", help="Only examine this machine, in a second; try nothing.")] = False,
) -> None:
    """Examine this machine, and try every way to run a model; takes a minute or two."""
    from ..tools.doctor.checks import advice, advised_threads, examine
    from ..tools.doctor.surfaces import SURFACES, try_surface

    with output.progress("measuring this machine"):
        facts = examine()
    facts["advised_threads"] = None
    if fast:
        advised = advice(facts)
        document = {**facts, "advice": advised, "surfaces": [], "works": None}
        faster = [f"faster: {sentence}" for sentence in advised]
        output.result(document, _facts(facts), "", _kernels(facts["kernels"]), *faster)
        return
    with output.progress("measuring threads"):
        facts["advised_threads"] = advised_threads()
    surfaces = []
    for name in SURFACES:
        with output.progress(f"trying {name}"):
            surfaces.append(try_surface(name))
    broken = [surface.name for surface in surfaces if surface.state == "broken"]
    advised = advice(facts)
    document = {**facts, "advice": advised, "surfaces": [vars(surface) for surface in surfaces], "works": not broken}
    tried = table("tried on a tiny layer", "", "seconds", texts=[1])
    for surface in surfaces:
        took = "" if surface.state == "missing" else f"{surface.seconds:.1f}"
        tried.add_row(surface.name, "not installed" if surface.state == "missing" else surface.state, took)
    remarks = [
        line
        for surface in surfaces
        if surface.state != "works"
        for line in (f"{surface.name}: {surface.reason}", f"  remedy: {surface.remedy}")
    ]
    remarks += [f"faster: {sentence}" for sentence in advised]
    if broken:
        named = " and ".join(filter(None, (", ".join(broken[:-1]), broken[-1])))
        remarks.append(f"{named} {'does' if len(broken) == 1 else 'do'} not work.")
    else:
        remarks.append("Everything that is installed works.")
    output.result(document, _facts(facts), "", _kernels(facts["kernels"]), "", tried, "", *remarks)
    if broken:
        raise typer.Exit(1)


def _facts(facts: dict[str, Any]) -> Any:
    """The table of facts about this machine."""
    isa, bandwidth = facts["isa"], facts["read_bandwidth"]
    packages = [f"{name} {version or '-'}" for name, version in facts["packages"].items()]
    pages: dict[str | None, str] = {
        "madvise": "on request: weights from quantize_ use them",
        "always": "for all programs",
        "never": "switched off",
        None: "not available on this system",
    }
    built = facts["built_with_executorch"]
    rows = (
        ("lowbit", f"{facts['lowbit']}, Python {facts['python']}"),
        ("packages", ", ".join(packages)),
        ("built for", f"executorch {built}" if built else "torch alone, without executorch"),
        ("CPU", f"{facts['cpu']}, {facts['architecture']}"),
        ("instruction sets", ", ".join(isa["active"]) + (f" (LOWBIT_ISA={isa['cap']})" if isa["cap"] else "")),
        ("memory", "not measured" if bandwidth is None else f"read at {size(bandwidth)}/s"),
        ("huge pages", pages.get(facts["huge_pages"], facts["huge_pages"])),
        (
            "threads",
            f"{facts['threads']}; this process may use {facts['cpus_allowed']} CPU{'s' * (facts['cpus_allowed'] != 1)}; "
            f"fastest for one token: {facts['advised_threads'] or 'not measured'}",
        ),
    )
    return facts_table(rows)


def _kernels(kernels: dict[str, list[str]]) -> Any:
    """The table of kernels that this machine uses; bit widths with the same kernels share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for use, names in kernels.items():
        family, _, bits = use.partition(", ")
        # Drop family and bits from names (linear_a8w4_1x16_neondot), as they have separate columns.
        short = ", ".join(re.sub(r"^(linear_a8w\d|embedding_w\d|quantize|attention)_", "", name) for name in names)
        rows.setdefault((family, short), []).append(bits.removesuffix(" bits"))
    shown = table("kernels", "bits", "that run here", texts=[2])
    for (family, short), widths in rows.items():
        shown.add_row(family, _span(widths), short)
    return shown


def _span(bits: list[str]) -> str:
    """Bit widths as text: "1-8", "4", "2, 4"; empty for families without bit widths."""
    if len(bits) > 2 and [int(width) for width in bits] == list(range(int(bits[0]), int(bits[0]) + len(bits))):
        return f"{bits[0]}-{bits[-1]}"
    return ", ".join(bits)
