"""``lowbit info``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import lowbit

from .. import _C
from ..machine.facts import cpu_name
from ..machine.threads import available_cpus
from .output import Output, table


def info(output: Output) -> None:
    """Describe this installation: versions, CPU, instruction sets, kernels."""
    isa, threads = lowbit.isa(), torch.get_num_threads()
    packages = ("torch", "transformers", "executorch")
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for row in lowbit.kernels():
        counts = kernels.setdefault(row["family"], {}).setdefault(row["isa"], {"kernels": 0, "supported": 0, "active": 0})
        counts["kernels"] += 1
        counts["supported"] += row["supported"]
        counts["active"] += row["active"]
    document = {
        "lowbit": lowbit.__version__,
        "python": platform.python_version(),
        **{package: _installed(package) for package in packages},
        "built_with_executorch": _C.executorch_version or None,
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cpus_allowed": available_cpus(),
        "threads": threads,
        "isa": isa,
        "kernels": kernels,
    }
    facts = table("", "")
    facts.show_header = False
    facts.columns[1].justify = "left"
    facts.columns[1].no_wrap = False
    executorch = document["executorch"] or "not installed"
    built = f"operators for {_C.executorch_version}" if _C.executorch_version else "lowbit was built without it"
    for name, value in (
        ("lowbit", lowbit.__version__),
        ("python", document["python"]),
        ("torch", document["torch"]),
        ("transformers", document["transformers"] or "not installed"),
        ("executorch", f"{executorch}; {built}"),
        ("CPU", f"{document['cpu']}, {document['architecture']}"),
        ("instruction sets", ", ".join(isa["cpu"])),
        ("in use", ", ".join(isa["active"]) + (f" (LOWBIT_ISA={isa['cap']})" if isa["cap"] else "")),
        ("threads", f"{threads}; this process may use {available_cpus()} CPUs"),
    ):
        facts.add_row(name, value)
    counted = table("kernels", "instruction set", "all", "this CPU's", "in use", title=None)
    for family, by_isa in kernels.items():
        for name, numbers in by_isa.items():
            counted.add_row(family, name, *map(str, numbers.values()))
    output.result(document, facts, "", counted)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
