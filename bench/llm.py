"""Compares lowbit, llama.cpp and torch in bfloat16 on language models with random weights, and with the memory bandwidth.

    make bench-llm          measures llama-3.2-1b; prints the tables, writes build/bench/llm.{json,md}
    make bench-llm DOC=1    the same, written to docs/measurements/llm.json and the section "Speed" of docs/measurements/llm.md
    python3 bench/llm.py [--shapes NAME...] [OPTION...]

Each library runs in a separate process. All modes take turns in every round, with a prompt and then greedy decoding; a figure
is the median over the rounds. The read bandwidth is measured before and after every turn, because other virtual machines take
some of it at times. A missing library is listed as absent.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llm_peers

BEGIN, END = "<!-- speed: written by bench/llm.py -->", "<!-- end of speed -->"
PAUSE = 0.05  # seconds for the threads of the last turn to stop spinning
PREPARE_SECONDS, TURN_SECONDS = 1800, 600  # a process that takes longer has failed


class Failed(Exception):
    """A library failed, or is absent."""


class Process:
    """One library's process."""

    def __init__(self, name: str, shape: str, options: dict[str, Any], directory: str):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, name, shape, options, directory)
        self.process = context.Process(target=llm_peers.serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.description = self._receive(PREPARE_SECONDS)

    def call(self, method: str, *arguments) -> Any:
        time.sleep(PAUSE)
        self.connection.send((method, arguments))
        return self._receive(TURN_SECONDS)

    def _receive(self, seconds: float) -> Any:
        if not self.connection.poll(seconds):
            self.end()
            raise Failed(f"no answer in {seconds} s")
        try:
            state, result = self.connection.recv()
        except EOFError:
            self.process.join(5)
            raise Failed(f"its process ended ({self.process.exitcode})") from None
        if state != "ok":
            self.end()
            raise Failed(result if state == "absent" else f"failed: {result}")
        return result

    def end(self) -> None:
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def compare(shape: str, options: argparse.Namespace, say) -> dict[str, Any]:
    """All modes of all libraries on one shape."""
    prompt = [random.Random(0).randrange(1000) for _ in range(options.prompt)]
    shared = {
        "bits": options.bits,
        "group_size": options.group_size,
        "modes": options.modes,
        "threads": options.threads,
        "prompt": prompt,
        "new": options.new,
        "max_length": -(-(options.prompt + options.new + 1) // 16) * 16,
    }
    result: dict[str, Any] = {"shape": shape, "libraries": {}, "absent": {}, "modes": [], "read_bandwidth": {}}
    processes: dict[str, Process] = {}
    with tempfile.TemporaryDirectory(dir=options.output.parent) as directory:
        for name in options.libraries:
            try:
                processes[name] = Process(name, shape, shared, directory)
                result["libraries"][name] = processes[name].description
                say(f"{shape}: {name} is ready: {processes[name].description['prepared']}")
            except Failed as error:
                say(f"absent: {name}: {error}")
                result["absent"][name] = str(error)
    turns = [(name, mode) for name, process in processes.items() for mode in process.description["modes"]]
    samples: dict[tuple, list[dict[str, float]]] = {}
    roofs: dict[int, list[float]] = {}
    memory = processes["lowbit"]
    for number in range(options.rounds):
        say(f"{shape}: round {number + 1} of {options.rounds}")
        for threads in options.threads:
            before = memory.call("read_bandwidth", threads)
            for name, mode in list(turns):
                try:
                    first, tokens = processes[name].call("turn", mode, threads)
                except Failed as error:
                    if name == "lowbit":
                        raise
                    say(f"absent: {name}: {error}")
                    result["absent"][name] = str(error)
                    turns = [turn for turn in turns if turn[0] != name]
                    continue
                after = memory.call("read_bandwidth", threads)
                token, roof = statistics.median(tokens), (before + after) / 2
                share = processes[name].description["bytes_per_token"] / token / roof
                samples.setdefault((name, mode, threads), []).append({"first": first, "token": token, "share": share})
                roofs.setdefault(threads, []).append(before)
                before = after
    for (name, mode, threads), values in samples.items():
        median = {key: statistics.median(value[key] for value in values) for key in values[0]}
        entry = {
            "library": name,
            "mode": mode,
            "threads": threads,
            "decode_tokens_per_second": 1 / median["token"],
            "share_of_bandwidth": median["share"],
            "prefill_tokens_per_second": options.prompt / median["first"],
            "seconds_to_first_token": median["first"],
            "samples": values,
        }
        if name == "lowbit":
            entry["parts"] = processes[name].call("parts", mode, threads)
        result["modes"].append(entry)
    result["read_bandwidth"] = {str(threads): statistics.median(values) for threads, values in roofs.items()}
    for process in processes.values():
        process.end()
    return result


def tables(results: dict[str, Any]) -> str:
    """The section "Speed" of docs/measurements/llm.md."""
    settings, machine = results["settings"], results["machine"]
    options = results["command"].partition("--output docs/measurements/llm")[2].strip()
    make = "make bench-llm DOC=1" + (f" BENCH='{options}'" if options else "")
    lines = [
        "## Speed",
        "",
        f"Written by `{make}` (`{results['command']}`), {results['date']}.",
        f"Machine: {machine['cpu']}, {machine['cpus']} CPUs usable, {machine['isa']}, {machine['system']}.",
        "",
        f"Random weights in each shape; a prompt of {settings['prompt']} tokens, then {settings['new']} tokens",
        "decoded greedily, by a loop in Python for every library. Each library runs in its own process; all take turns in",
        f"{settings['rounds']} rounds; the figures are medians. Share of the bandwidth: bytes of weights per token,",
        "times tokens per second, divided by the read bandwidth measured before and after the turn with the same",
        "number of threads (`ops/read_bandwidth.h`).",
    ]
    for result in results["shapes"]:
        lines += ["", f"### {result['shape']}", ""]
        for name, library in result["libraries"].items():
            megabytes = library["bytes_per_token"] / 1e6
            lines.append(f"* {name} ({library['version']}): {library['note']}; {megabytes:.0f} MB of weights a token")
        lines += [f"* {name}: absent: {reason}" for name, reason in result["absent"].items()]
        for threads in settings["threads"]:
            read = result["read_bandwidth"][str(threads)] / 1e9
            lines += ["", f"{threads} thread{'s' * (threads > 1)}; memory read at {read:.1f} GB/s (median):", ""]
            lines += ["| Library, mode | Decode, tokens/s | Share of the bandwidth | Prefill, tokens/s | First token, s |"]
            lines += ["|---" * 5 + "|"]
            ours = [mode for mode in result["modes"] if mode["threads"] == threads]
            for mode in ours:
                lines.append(
                    f"| {mode['library']}, {mode['mode']} | {mode['decode_tokens_per_second']:.1f} "
                    f"| {100 * mode['share_of_bandwidth']:.0f} % | {mode['prefill_tokens_per_second']:.0f} "
                    f"| {mode['seconds_to_first_token']:.2f} |"
                )
    return "\n".join(lines) + "\n"


def insert(text: str, section: str) -> str:
    """A document with its section between the markers replaced, or added at the end."""
    section = f"{BEGIN}\n{section}{END}"
    if BEGIN not in text:
        return (text.rstrip() + "\n\n" if text else "# Measurements: language models\n\n") + section + "\n"
    head, _, rest = text.partition(BEGIN)
    return head + section + rest.partition(END)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-3.2-1b"], metavar="NAME")
    parser.add_argument("--libraries", nargs="+", default=list(llm_peers.LIBRARIES), choices=list(llm_peers.LIBRARIES))
    parser.add_argument("--modes", nargs="+", default=["plan", "eager", "aot"], help="of lowbit")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--output", type=Path, default=Path("build/bench/llm"), help="without .json and .md")
    options = parser.parse_args()
    if "lowbit" not in options.libraries:
        parser.error("--libraries needs lowbit, which measures the bandwidth")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for torch's float weights too
    os.environ["HF_HUB_OFFLINE"] = "1"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)

    shapes = [compare(shape, options, say) for shape in options.shapes]

    import lowbit  # not earlier: the processes set torch's memory options before they import it
    from lowbit.machine.cpus import available_cpus
    from lowbit.machine.facts import cpu_name

    results = {
        "command": " ".join(["python3", "bench/llm.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": {
            "cpu": cpu_name(),
            "cpus": available_cpus(),
            "isa": ", ".join(lowbit.isa()["active"]),
            "system": platform.platform(),
        },
        "settings": {
            name: getattr(options, name) for name in ("bits", "group_size", "prompt", "new", "rounds", "threads", "modes")
        },
        "shapes": shapes,
        "seconds": time.monotonic() - begin,
    }
    options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    section = tables(results)
    document = options.output.with_suffix(".md")
    before = document.read_text(encoding="utf-8") if document.exists() else ""
    document.write_text(insert(before, section), encoding="utf-8")
    print(section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
