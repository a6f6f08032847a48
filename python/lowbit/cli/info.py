"""``lowbit info``."""

from __future__ import annotations

import lowbit

from ..machine.facts import installed_version
from .output import Output, facts_table, table


def info(output: Output) -> None:
    """Describe this installation: versions, CPU, instruction sets, kernels."""
    from ..tools.doctor.checks import installation

    packages = ("torch", "transformers", "executorch")
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for row in lowbit.kernels():
        counts = kernels.setdefault(row["family"], {}).setdefault(row["isa"], {"kernels": 0, "supported": 0, "active": 0})
        counts["kernels"] += 1
        counts["supported"] += row["supported"]
        counts["active"] += row["active"]
    known = installation()
    document = {**known, **{package: installed_version(package) for package in packages}, "kernels": kernels}
    executorch, built, isa = document["executorch"] or "not installed", known["built_with_executorch"], known["isa"]
    facts = facts_table([
        ("lowbit", known["lowbit"]),
        ("python", known["python"]),
        ("torch", document["torch"] or "not installed"),
        ("transformers", document["transformers"] or "not installed"),
        ("executorch", f"{executorch}; {f'operators for {built}' if built else 'lowbit was built without it'}"),
        ("CPU", f"{known['cpu']}, {known['architecture']}"),
        ("instruction sets", ", ".join(isa["cpu"])),
        ("in use", ", ".join(isa["active"]) + (f" (LOWBIT_ISA={isa['cap']})" if isa["cap"] else "")),
        ("threads", f"{known['threads']}; this process may use {known['cpus_allowed']} CPUs"),
    ])  # fmt: skip
    counted = table("kernels", "instruction set", "all", "this CPU's", "in use")
    for family, by_isa in kernels.items():
        for name, numbers in by_isa.items():
            counted.add_row(family, name, *map(str, numbers.values()))
    output.result(document, facts, "", counted)
