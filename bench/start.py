"""Measures the start of the program: CPU time and memory of the process at its first token, transcription or embedding.

Both ways are measured on copies of the model by links: by the plan beside the weights, and by torch (LOWBIT_PLAN=0).

    python bench/start.py MODEL [--prompt TEXT] [--rounds 3]
    python bench/start.py WHISPER --audio FILE
    python bench/start.py ENCODER --embed
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

PROGRAM = "from lowbit_autoload.command import main; import sys; sys.argv[0] = 'lowbit'; main()"


def start(arguments: list[str], plan: str, wait: Callable[[subprocess.Popen], object]) -> tuple[float, float]:
    """Seconds of CPU time, and MB of memory, of the program when ``wait`` returns."""
    environment = os.environ | {"LOWBIT_PLAN": plan}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        if not wait(process):
            raise SystemExit(process.stderr.read().decode())
        process_files = Path(f"/proc/{process.pid}")
        times = (process_files / "stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":", 1) for line in (process_files / "status").read_text().splitlines())
        process.kill()
    seconds = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    return seconds, int(status["VmHWM"].split()[0]) / 1000


def printed(process: subprocess.Popen) -> object:
    """Waits for the first byte of the output."""
    return process.stdout.read(1)


def embedded(process: subprocess.Popen) -> object:
    """Waits for a server, and for the embedding of a text."""
    for line in process.stderr:
        if match := re.search(rb"on (http://\S+/v1)", line):
            url = match[1].decode()
            break
    else:
        return None
    with urllib.request.urlopen(f"{url}/models") as response:
        model = json.load(response)["data"][0]["id"]
    body = json.dumps({"model": model, "input": "A short text."}).encode()
    request = urllib.request.Request(f"{url}/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["data"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default="Once")
    parser.add_argument("--audio", type=Path)
    parser.add_argument("--embed", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for file in arguments.model.iterdir():
            (Path(directory) / file.name).symlink_to(file.absolute())
        what, wait = "token", printed
        command = ["generate", directory, "--prompt", arguments.prompt, "--max-new-tokens", "200"]
        if arguments.audio is not None:
            what, command = "segment", ["transcribe", directory, str(arguments.audio)]
        elif arguments.embed:
            what, wait, command = "embedding", embedded, ["serve", directory, "--port", "0"]
        start(command, "1", wait)  # writes the plan
        for name, plan in (("plan", "1"), ("torch", "0")):
            measured = [start(command, plan, wait) for _ in range(arguments.rounds)]
            seconds, memory = (statistics.median(values) for values in zip(*measured, strict=True))
            print(f"{name}: {seconds:.2f} s of CPU time and {memory:.0f} MB until the first {what}")


if __name__ == "__main__":
    main()
