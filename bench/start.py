"""Measures the start of `lowbit generate`: CPU time and memory of the process when its first token is printed.

Both ways are measured on copies of the model by links: by the plan beside the weights, and by torch (LOWBIT_PLAN=0).

    python bench/start.py MODEL [--prompt TEXT] [--rounds 3]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = "from lowbit_autoload.command import main; import sys; sys.argv[0] = 'lowbit'; main()"


def start(arguments: list[str], plan: str) -> tuple[float, float]:
    """Seconds of CPU time, and MB of memory, when the first piece of the text comes."""
    environment = os.environ | {"LOWBIT_PLAN": plan}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        if not process.stdout.read(1):
            raise SystemExit(process.stderr.read().decode())
        process_files = Path(f"/proc/{process.pid}")
        times = (process_files / "stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":", 1) for line in (process_files / "status").read_text().splitlines())
        process.kill()
    seconds = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    return seconds, int(status["VmHWM"].split()[0]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default="Once")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for file in arguments.model.iterdir():
            (Path(directory) / file.name).symlink_to(file.absolute())
        command = ["generate", directory, "--prompt", arguments.prompt, "--max-new-tokens", "200"]
        subprocess.run([sys.executable, "-c", PROGRAM, *command[:-1], "1"], check=True, capture_output=True)  # writes the plan
        for name, plan in (("plan", "1"), ("torch", "0")):
            measured = [start(command, plan) for _ in range(arguments.rounds)]
            seconds, memory = (statistics.median(values) for values in zip(*measured, strict=True))
            print(f"{name}: {seconds:.2f} s of CPU time and {memory:.0f} MB until the first token")


if __name__ == "__main__":
    main()
