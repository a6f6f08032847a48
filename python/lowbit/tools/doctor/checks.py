"""Facts about this machine and this installation."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lowbit

from ... import _C
from ...machine.child import result_of
from ...machine.cpus import available_cpus, current_threads
from ...machine.facts import cpu_name, installed_version
from ...machine.memory import ReadBandwidth, huge_page_setting

PACKAGES = ("torch", "transformers", "safetensors", "executorch", "torchao")
_BANDWIDTH_BYTES = 256 << 20  # larger than most caches; takes half a second to read from slow memory
_LAYER = (4096, 4096)  # the linear layer for measuring threads
_TUNE_SECONDS = 0.5
_SECONDS = 120  # more than the process that measures threads takes on a slow board
_HUGE_PAGES = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"


def versions() -> dict[str, str | None]:
    """Versions of the packages that lowbit works with; None: not installed."""
    return {package: installed_version(package) for package in PACKAGES}


def installation() -> dict[str, Any]:
    """Facts that take no measurement."""
    return {
        "lowbit": lowbit.__version__,
        "python": platform.python_version(),
        "built_with_executorch": _C.executorch_version or None,
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "isa": lowbit.isa(),
        "threads": current_threads(),
        "cpus_allowed": available_cpus(),
    }


def active_kernels() -> dict[str, list[str]]:
    """Names of the kernels that run here, by family and width: "linear, 4 bits" or "attention"."""
    names: dict[str, list[str]] = {}
    for row in lowbit.kernels():
        if row["active"]:
            bits = row.get("bits")
            names.setdefault(row["family"] if bits is None else f"{row['family']}, {bits} bits", []).append(row["name"])
    return names


def read_bandwidth(threads: int) -> float | None:
    """Read bandwidth with this number of threads, in bytes per second; None if too little memory is free."""
    size = _BANDWIDTH_BYTES
    try:
        size = min(size, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    except (ValueError, OSError):  # not on macOS
        pass
    if size < threads << 20:
        return None
    try:
        return ReadBandwidth(size)(threads)
    except OSError:
        return None


def advised_threads() -> int | None:
    """The fastest number of threads for one token, measured with torch's operators in a process that imports torch.

    None: torch is not installed, or the process failed.
    """
    if find_spec("torch") is None:
        return None
    threads: int | None = result_of(__name__, seconds=_SECONDS)[0]
    return threads


def main() -> None:
    """Writes the result of :func:`advised_threads` to FILE as JSON."""
    threads = lowbit.tune_threads([_LAYER], seconds=_TUNE_SECONDS, apply=False).threads
    Path(sys.argv[1]).write_text(json.dumps(threads))


def examine() -> dict[str, Any]:
    """Measures the facts that docs/cli.md lists for ``lowbit doctor --json``, without torch; takes less than a second."""
    known = installation()
    return {
        **known,
        "packages": versions(),
        "kernels": active_kernels(),
        "huge_pages": huge_page_setting(),
        "read_bandwidth": read_bandwidth(min(known["threads"], known["cpus_allowed"])),
    }


def advice(facts: dict[str, Any]) -> list[str]:
    """Sentences that say what would make this machine faster."""
    sentences = []
    if facts["isa"]["cap"]:
        sentences.append(f"LOWBIT_ISA={facts['isa']['cap']} caps the instruction sets; unset it to use all of this CPU's")
    elif facts["isa"]["active"] == ["portable"]:
        sentences.append("this CPU has none of the instruction sets that lowbit has kernels for: portable C++ runs, slowly")
    if facts["huge_pages"] == "never":
        sentences.append(f"huge pages are switched off, so weights are read more slowly; switch them on: {_HUGE_PAGES}")
    if facts["advised_threads"] not in (None, facts["threads"]):
        advised = facts["advised_threads"]
        sentences.append(
            f"a token is decoded fastest with {advised} thread{'s' * (advised != 1)}; now there are {facts['threads']}: "
            f"torch.set_num_threads({advised}), or --threads {advised}; `lowbit tune MODEL` measures a model"
        )
    return sentences


if __name__ == "__main__":
    main()
