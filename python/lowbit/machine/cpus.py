"""The CPUs that this process may use."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from .. import _C


def default_threads() -> int:
    """The number of threads of a program without torch: ``OMP_NUM_THREADS``, or the number of fast cores that it may use."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if given.isdecimal() and 1 <= int(given) <= 1024:
        return int(given)
    return min(_C.default_threads(), available_cpus())


def current_threads() -> int:
    """The number of threads that this process runs models on: torch's if it has loaded torch."""
    torch = sys.modules.get("torch")
    return default_threads() if torch is None else int(torch.get_num_threads())


def available_cpus() -> int:
    """The number of CPUs that affinity and control groups allow this process to use (rounded up)."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        count = os.cpu_count() or 1
    limit = _cgroup_cpus(Path("/"))
    return count if limit is None else max(1, min(count, math.ceil(limit)))


def _cgroup_cpus(root: Path) -> float | None:
    """The CPU quota of this process's control groups (version 1 or 2), in CPUs; None: unlimited."""
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()  # a name may be in any encoding
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "sys/fs/cgroup" / controllers, _quota_v1
        else:
            continue
        group = Path(path.lstrip("/"))
        # A container may see its own group as the root although its path exists only outside.
        limits += [read(base / parent) for parent in (group, *group.parents)]
    return min((limit for limit in limits if limit is not None), default=None)


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if quota < 0 else quota / period
