"""Facts about the machine for a page of measurements, and how busy other programs kept it meanwhile."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import lowbit

from ... import _C
from ...files.untrusted import one_line
from ...machine.cpus import available_cpus
from ...machine.facts import cpu_name, installed_version
from ...machine.memory import huge_page_setting

_CPUS = Path("/sys/devices/system/cpu")
_BUSY_LOAD = 0.5  # load average before the run above which the machine counts as busy
_BUSY_SHARE = 0.1  # the same for the fraction of CPU time of other programs or virtual machines


def _read(path: Path) -> str | None:
    """The text of a small system file; None if it does not exist."""
    try:
        return one_line(path.read_text(errors="replace").strip("\0\n "), 100)
    except OSError:
        return None


def total_memory() -> int | None:
    """Bytes of memory of the machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def free_memory() -> int | None:
    """Bytes available to programs without swapping; None if unknown."""
    with suppress(OSError, AttributeError):
        text = Path("/proc/meminfo").read_text()
        return int(re.search(r"^MemAvailable: *(\d+) kB", text, re.M)[1]) * 1024  # type: ignore[index]
    return total_memory()


def cache_bytes() -> int | None:
    """Bytes of the first CPU's last-level cache; None if unknown."""
    sizes = [_read(path / "size") or "" for path in sorted((_CPUS / "cpu0" / "cache").glob("index*"))]
    found = [re.fullmatch(r"(\d+)K", text) for text in sizes]
    return max((int(match[1]) * 1024 for match in found if match), default=None)


def _board() -> str | None:
    """The name of a board or a phone."""
    name = _read(Path("/proc/device-tree/model"))
    if name is None and hasattr(sys, "getandroidapilevel"):
        name = platform.android_ver().device if hasattr(platform, "android_ver") else None
    return name or None


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return platform.system()


def _clusters() -> list[dict[str, int]]:
    """CPUs by their highest frequency, the fastest first."""
    texts = [_read(path) for path in _CPUS.glob("cpu[0-9]*/cpufreq/cpuinfo_max_freq")]
    counted = Counter(int(text) // 1000 for text in texts if text and text.isdigit())
    return [{"cpus": counted[mhz], "mhz": mhz} for mhz in sorted(counted, reverse=True)]


def facts() -> dict[str, Any]:
    """The parts ``machine``, ``isa`` and ``versions`` of the figures."""
    isa = lowbit.isa()
    governors = sorted({text for path in _CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor") if (text := _read(path))})
    absent = {row["isa"] for row in lowbit.kernels() if not row["supported"] and row["vendor"] is None}
    return {
        "machine": {
            "cpu": one_line(cpu_name(), 100),
            "board": _board(),
            "architecture": platform.machine(),
            "cpus": os.cpu_count() or 1,
            "cpus_allowed": available_cpus(),
            "clusters": _clusters(),
            "governor": ", ".join(governors) or None,
            "memory_bytes": total_memory(),
            "cache_bytes": cache_bytes(),
            "huge_pages": huge_page_setting(),
            "system": _system(),
            "kernel": f"{platform.system()} {platform.release()}",
        },
        "isa": {"active": isa["active"], "cap": isa["cap"], "absent": sorted(absent)},
        "versions": {
            "lowbit": lowbit.__version__,
            "compiler": _C.compiler,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": installed_version("transformers"),
        },
    }


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def _system_seconds() -> tuple[float, float] | None:
    """CPU seconds since boot of all programs, and those stolen by other virtual machines; None if unknown."""
    try:
        fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return None
    user, nice, system, _, _, irq, softirq, steal = [*fields, *[0] * 8][:8]
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks, steal / ticks


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Yields the part ``load`` of the figures, the CPU use of other programs, which is complete when the context ends.

    Time of this process and of its ended children is not counted.
    """
    load: dict[str, Any] = {"before": _load()}
    begin, own, all_ = time.perf_counter(), os.times(), _system_seconds()
    yield load
    seconds, own_now, all_now = time.perf_counter() - begin, os.times(), _system_seconds()
    others = stolen = None
    if all_ is not None and all_now is not None and seconds > 0:
        used = sum(own_now[:4]) - sum(own[:4])
        others = max(0.0, all_now[0] - all_[0] - used) / seconds
        stolen = (all_now[1] - all_[1]) / seconds
    load |= {"after": _load(), "others_cpus": others, "stolen_cpus": stolen}
    taken = (others or 0.0) + (stolen or 0.0)
    load["busy"] = (load["before"] or 0.0) > _BUSY_LOAD or taken > _BUSY_SHARE * (os.cpu_count() or 1)
