"""Measures the start of the program: what a process needs until its first token, transcription or embedding.

    python bench/start.py MODEL [--gguf FILE --llama PYTHON] [--threads 1] [--prompt TEXT] [--rounds 3]
    python bench/start.py WHISPER --audio FILE
    python bench/start.py ENCODER --embed

MODEL is a packed model (`lowbit import FILE MODEL`), PYTHON an interpreter with llama-cpp-python (`make bench-peers` builds
one). lowbit runs two copies of the model, made of links: by the plan, and by torch (LOWBIT_PLAN=0). With --gguf the
table also has the speed of prefill and decode, as bench/plan.py measures it.
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
from pathlib import Path

from lowbit.tools.perf.start_cost import LOWBIT, until_first_output

# llama.cpp's library through its thinnest Python wrapper, which does no more than generate.
LLAMA = """
import sys
from llama_cpp import Llama
file, prompt, threads = sys.argv[1:]
model = Llama(file, n_ctx=2048, n_threads=int(threads), n_threads_batch=int(threads), verbose=False)
for piece in model.create_completion(prompt, max_tokens=200, temperature=0.0, stream=True):
    print(piece["choices"][0]["text"], end="", flush=True)
"""


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()) if file.is_file())


def speeds(arguments: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Tokens per second in prefill and decode, by the names of bench/plan.py."""
    import plan

    settings = argparse.Namespace(**vars(arguments), new=48, pte=[], operators=False)
    settings.model, settings.gguf = str(settings.model), str(settings.gguf)
    rows = plan.measure(settings, arguments.threads)
    return {name: (1e3 * len(plan.PROMPT) / prompt, 1e3 / token) for name, token, prompt, _ in rows}


def embedded(process: subprocess.Popen[bytes]) -> object:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", type=Path, help="the file that MODEL was imported from")
    parser.add_argument("--llama", default=sys.executable, help="a Python with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", default="Once")
    parser.add_argument("--audio", type=Path)
    parser.add_argument("--embed", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    threads = str(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        for file in arguments.model.iterdir():
            (Path(directory) / file.name).symlink_to(file.absolute())
        what, wait = "token", {}
        command = ["generate", directory, "--prompt", arguments.prompt, "--max-new-tokens", "200"]
        if arguments.audio is not None:
            what, command = "segment", ["transcribe", directory, str(arguments.audio)]
        elif arguments.embed:
            what, wait, command = "embedding", {"wait": embedded}, ["serve", directory, "--port", "0"]
        lowbit = [sys.executable, "-c", LOWBIT, *command, "--threads", threads]
        until_first_output(lowbit, **wait)  # writes the plan
        programs = {
            f"lowbit {command[0]}, by plan": (arguments.model, lowbit, {}, "plan"),
            f"lowbit {command[0]}, by torch": (arguments.model, lowbit, {"LOWBIT_PLAN": "0"}, "eager"),
        }
        if arguments.gguf:
            llama = [arguments.llama, "-c", LLAMA, str(arguments.gguf), arguments.prompt, threads]
            programs["llama.cpp"] = (arguments.gguf, llama, {}, "llama.cpp")
        costs = {
            name: [until_first_output(command, environment, **wait) for _ in range(arguments.rounds)]
            for name, (_, command, environment, _) in programs.items()
        }
        measured = speeds(arguments) if arguments.gguf else {}
    rows = {
        "Model on disk, MB": lambda name: f"{size_of(programs[name][0]) / 1e6:.0f}",
        f"CPU time to the first {what}, s": lambda name: f"{median(costs[name], 'cpu_seconds'):.2f}",
        f"Time to the first {what}, s": lambda name: f"{median(costs[name], 'seconds'):.2f}",
        "Memory, MB": lambda name: f"{median(costs[name], 'memory_bytes') / 1e6:.0f}",
    }
    if measured:
        rows["Prefill of 128, tokens/s"] = lambda name: f"{measured[programs[name][3]][0]:.0f}"
        rows["Decode, tokens/s"] = lambda name: f"{measured[programs[name][3]][1]:.1f}"
    print("| Program |", " | ".join(rows), "|")
    print("|---|" + "---|" * len(rows))
    for name in programs:
        print(f"| {name} |", " | ".join(cell(name) for cell in rows.values()), "|")
    print(f"\nThreads: {threads} of {os.cpu_count()} CPUs; medians of {arguments.rounds}. Mapped weights count as memory.")


def median(costs: list[dict[str, float]], name: str) -> float:
    """The median of a figure over the rounds."""
    return statistics.median(cost[name] for cost in costs)


if __name__ == "__main__":
    main()
