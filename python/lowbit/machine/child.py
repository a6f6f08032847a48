"""Runs work in a child process, so that a crash or an out-of-memory kill is a result and does not end this process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def gist(text: str) -> str:
    """The first line of a program's output that mentions an error, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\berror\b", line, re.I)]
    return (named or lines[-1:] or ["no message"])[0][:300]


def result_of(module: str, *arguments: str, seconds: float) -> tuple[Any, str]:
    """Runs ``python -m MODULE ARGUMENT... FILE`` without compiler caches.

    Args:
        module: writes a JSON document to FILE.
        seconds: time limit, after which the process and its children are killed.

    Returns:
        The document and "", or None and the reason for the failure.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        # -P: files in the current directory must not shadow libraries.
        command = [sys.executable, "-P", "-W", "ignore", "-m", module, *arguments, str(result)]
        # Temporary files of a killed process are removed with the directory.
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(Path(directory) / "cache"), "TMPDIR": directory}
        with open(Path(directory) / "log", "w+", errors="replace") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            reason = ""
            try:
                code = process.wait(seconds)
                reason = f"its process ended by {signal.Signals(-code).name}" if code < 0 else ""
            except subprocess.TimeoutExpired:
                reason = f"it was not done after {seconds:g} seconds"
            finally:
                if process.poll() is None:  # also kills the compilers that it started
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            try:
                return json.loads(result.read_text()), ""
            except (OSError, ValueError):
                log.seek(0)
                return None, reason or gist(log.read())
