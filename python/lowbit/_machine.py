"""What the machine is called, for whatever prints measurements."""

import platform
import subprocess
from pathlib import Path


def cpu_name() -> str:
    """What the CPU calls itself; at least its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    for command in (["lscpu"], ["sysctl", "-n", "machdep.cpu.brand_string"]):
        try:
            text = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        except OSError:
            continue
        for line in text.splitlines():
            if command != ["lscpu"] or line.startswith("Model name:"):
                return line.split(":", 1)[-1].strip()
    return platform.processor() or platform.machine()
