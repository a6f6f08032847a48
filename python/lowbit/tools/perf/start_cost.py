"""What a program needs until its first output: time, CPU time and memory of the process, by Linux's /proc."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# `lowbit`, also where its script is not in PATH.
LOWBIT = "from lowbit_autoload.command import main; import sys; sys.argv[0] = 'lowbit'; main()"


def until_first_output(
    command: Sequence[str],
    environment: Mapping[str, str] = {},
    wait: Callable[[subprocess.Popen[bytes]], Any] = lambda process: process.stdout.read(1),  # type: ignore[union-attr]
) -> dict[str, Any]:
    """Runs a command until it writes to stdout, or until ``wait`` returns something true, and kills it then.

    Returns:
        ``seconds``, ``cpu_seconds`` and ``memory_bytes``, the largest resident memory; mapped files are a part of it.

    Raises:
        RuntimeError: it wrote nothing; the message ends with its stderr.
        OSError: it cannot be started, or there is no /proc.
    """
    Path("/proc/self/status").stat()
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | dict(environment)
    ) as process:
        assert process.stderr is not None
        first = wait(process)
        seconds = time.perf_counter() - begin
        if not first:
            raise RuntimeError(f"{command[0]} wrote nothing: {process.stderr.read().decode(errors='replace')[-300:]}")
        files = Path(f"/proc/{process.pid}")
        times = (files / "stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":", 1) for line in (files / "status").read_text().splitlines())
        process.kill()
    return {
        "seconds": seconds,
        "cpu_seconds": (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
        "memory_bytes": 1024 * int(status["VmHWM"].split()[0]),
    }
