"""Finds and runs the programs that arm_cost.py needs, and names missing ones."""

import pathlib
import re
import shutil
import subprocess
import sys

PACKAGES = {
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "cc": "gcc",
    "cmake": "cmake",
    "ninja": "ninja-build",
}
OLDEST_LLVM = 17  # the first version with models of all four cores


def tool(name: str) -> str:
    beside = pathlib.Path(sys.executable).parent / name  # a virtual environment has cmake and ninja in its bin
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        sys.exit(f"arm_cost: {name} is missing (Debian: apt-get install {PACKAGES[name]})")
    return path


def run(command: list, what: str, text: str | None = None, environment: dict | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], check=False, capture_output=True, text=True, input=text, env=environment
    )
    if done.returncode != 0:
        sys.exit(f"arm_cost: {what} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def version(name: str) -> str:
    return run([tool(name), "--version"], name).splitlines()[0]


def llvm() -> tuple[str, str, str]:
    """llvm-mc and llvm-mca of the newest installed LLVM, and its version; distributions append the major version to the
    names."""
    found = {}
    for suffix in ["", *(f"-{major}" for major in range(OLDEST_LLVM, 100))]:
        mc, mca = shutil.which(f"llvm-mc{suffix}"), shutil.which(f"llvm-mca{suffix}")
        if mc and mca and (match := re.search(r"LLVM version (\d+)\.(\d+)\.(\d+)", run([mca, "--version"], mca))):
            found[tuple(map(int, match.groups()))] = mc, mca
    numbers = max(found, default=(0,))
    if numbers[0] < OLDEST_LLVM:
        sys.exit(
            f"arm_cost: needs llvm-mc and llvm-mca of LLVM {OLDEST_LLVM} or newer, the newest found is "
            f"{'.'.join(map(str, numbers)) if found else 'none'} (Debian: scripts/need.sh arm-cost)"
        )
    return *found[numbers], ".".join(map(str, numbers))
