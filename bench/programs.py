"""Compares lowbit-run with llama-simple, the shortest program of llama.cpp, on the same GGUF file: one thread, greedy tokens.

    python bench/programs.py MODEL --gguf FILE --run build/lowbit-run --simple LLAMA_SIMPLE [--rounds 5]

MODEL is a packed model (`lowbit import FILE MODEL`). After `make bench-peers` this builds LLAMA_SIMPLE:

    LLAMA=build/bench-peers/vendor/llama.cpp LIBRARIES=.venv/lib/python3.11/site-packages/llama_cpp/lib
    g++ -O2 -I$LLAMA/include -I$LLAMA/ggml/include $LLAMA/examples/simple/simple.cpp -o llama-simple \\
      -L$LIBRARIES -lllama -lggml -lggml-base -Wl,-rpath,$PWD/$LIBRARIES

The programs take turns; the table has medians. Times are CPU times, which other programs change least. A program's prefill
and decode are differences between runs with a longer prompt and with more new tokens, so its start is not a part of them.
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

PROMPT = "The capital of France is"
LONG = PROMPT + " the city of Paris, and the capital of Spain is" * 11
NEW = 64


def cost(command: list[str], environment: dict[str, str]) -> tuple[float, int, str]:
    """CPU seconds, peak memory in bytes, and the text of a whole process."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | environment) as process:
        text = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss, text


def stripped_size(program: Path) -> int:
    """Bytes of a program and of its libraries that are not the system's, without symbols."""
    libraries = re.findall(r"=> (/\S+)", subprocess.check_output(["ldd", program], text=True))
    files = [program, *(Path(library) for library in libraries if not library.startswith(("/lib", "/usr/lib")))]
    with tempfile.TemporaryDirectory() as directory:
        for i, file in enumerate(files):
            subprocess.run(["strip", "-o", f"{directory}/{i}", file], check=True)
        return sum(file.stat().st_size for file in Path(directory).iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--simple", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    prefill = len(tokenizer.encode(LONG)) - len(tokenizer.encode(PROMPT))
    needed = [arguments.model / "lowbit.plan", arguments.model / "lowbit.tokens", *arguments.model.glob("model*.safetensors")]

    def run(prompt: str, new: int) -> tuple[float, int, str]:
        settings = ["--max-length", "512", "--cache", "float16", "--threads", "1"]
        return cost([str(arguments.run), str(arguments.model), "-p", prompt, "--max-new-tokens", str(new), *settings], {})

    def simple(prompt: str, new: int) -> tuple[float, int, str]:
        command = [str(arguments.simple), "-m", str(arguments.gguf), "-n", str(new), prompt]
        return cost(command, {"OMP_THREAD_LIMIT": "1"})  # it has no option for threads

    programs = {"lowbit-run": (run, arguments.run, needed), "llama-simple": (simple, arguments.simple, [arguments.gguf])}
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in programs}
    for turn in range(arguments.rounds + 1):
        for name, (start, _, _) in programs.items():
            (first, memory, _), (prompt, _, _), (tokens, whole, text) = start(PROMPT, 1), start(LONG, 1), start(PROMPT, NEW + 1)
            if turn == 0:  # it also warms up
                print(f"{name}: {text!r}")
            else:
                taken[name].append((first, memory, whole, prefill / (prompt - first), NEW / (tokens - first)))
    print("\n| Measure |", " | ".join(programs), "|")
    print("|---" * (len(programs) + 1) + "|")
    rows = {
        "program and libraries, stripped, MB": lambda name: f"{stripped_size(programs[name][1]) / 1e6:.1f}",
        "model on disk, MB": lambda name: f"{sum(file.stat().st_size for file in programs[name][2]) / 1e6:.1f}",
        "CPU time to the first token, s": lambda name: f"{median(taken[name], 0):.3f}",
        "peak memory at the first token, MB": lambda name: f"{median(taken[name], 1) / 1e6:.0f}",
        f"peak memory after {NEW} more, MB": lambda name: f"{median(taken[name], 2) / 1e6:.0f}",
        "prefill, tokens per second": lambda name: f"{median(taken[name], 3):.0f}",
        "decode, tokens per second": lambda name: f"{median(taken[name], 4):.1f}",
    }
    for row, cell in rows.items():
        print(f"| {row} |", " | ".join(map(cell, programs)), "|")


def median(rounds: list[tuple[float, ...]], i: int) -> float:
    return statistics.median(figures[i] for figures in rounds)


if __name__ == "__main__":
    main()
