"""Progress of `make demo` during compilation: scripts/build_progress.py."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts/build_progress.py"
COMPILE = "print('  Running command', flush=True); print('[%d/12] Building CXX object CMakeFiles/lowbit.dir/kernels/isa.cpp.o')"


def run(log: Path, code: str) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, log, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_line_for_each_file_and_no_other_output(tmp_path):
    log = tmp_path / "build/install.log"
    done = run(log, COMPILE % 3)
    first, step = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == ""
    assert first.startswith("Building lowbit: about ") and first.endswith(f"; log: {log}")
    assert step.split()[:4] == ["[", "3", "of", "12]"] and step.split()[5:] == ["s", "kernels/isa.cpp"]
    assert log.read_text().splitlines()[0] == "  Running command"


def test_a_build_that_fails_shows_all_its_output(tmp_path):
    done = run(tmp_path / "log", "import sys; print('no compiler'); sys.exit(3)")
    assert done.returncode == 3
    assert done.stdout.splitlines()[1:] == ["no compiler"]
