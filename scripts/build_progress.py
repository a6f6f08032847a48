"""Runs a build and shows its progress: a line for each compiled file, and the output if it fails.

    build_progress.py LOG COMMAND...

The whole output goes to LOG. The exit status is the command's.
"""

import os
import pathlib
import re
import subprocess
import sys
import time

STEP = re.compile(r"\[(\d+)/(\d+)\] Building CXX object (?:\S*?\.dir/)?(\S+)\.o(?:bj)?$")
CPU_SECONDS = 200  # for all files, on a CPU of 2020


def main(log: pathlib.Path, command: list[str]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    minutes = CPU_SECONDS / cores / 60
    print(
        f"Building lowbit: about {minutes:.1f} minutes on {cores} core(s), less if ccache has the files; log: {log}", flush=True
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    pipe = subprocess.PIPE
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace") as build,
    ):
        for line in build.stdout or ():
            file.write(line)
            if step := STEP.search(line.strip()):
                number, count, source = step.groups()
                print(f"[{number:>{len(count)}} of {count}] {time.monotonic() - start:4.0f} s  {source}", flush=True)
    if build.returncode != 0:
        sys.stdout.write(log.read_text(encoding="utf-8"))
    return build.returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("expected: build_progress.py LOG COMMAND...")
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2:]))
