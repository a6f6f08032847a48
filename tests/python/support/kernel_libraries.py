"""Kernel libraries that tests build, and a Python that loads them."""

import subprocess
import sys
from pathlib import Path

import lowbit

ROOT = Path(__file__).parents[3]


def build_project(project: str, directory: Path) -> Path:
    """Builds a CMake project of the checkout with the installed package; returns the build directory."""
    cmake = Path(sys.executable).parent / "cmake"  # the virtual environment's, if it has one
    cmake = cmake if cmake.exists() else "cmake"
    for command in (
        [cmake, "-S", ROOT / project, "-B", directory, f"-DCMAKE_PREFIX_PATH={lowbit.cmake_prefix_path}"],
        [cmake, "--build", directory, "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return directory


def run_checked(fork_python, script, *arguments, isa=None) -> str:
    done = fork_python(script, *arguments, isa=isa)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


USE = """
import ctypes, sys, torch, lowbit

def rows(name=None):
    return [row for row in lowbit.kernels() if (row["name"] == name if name else row["library"])]
"""
