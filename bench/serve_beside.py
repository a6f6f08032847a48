"""Compares `lowbit serve` and llama.cpp's `llama-server` on the weights of one GGUF file, over HTTP, in turns.

    lowbit import MODEL.gguf MODEL.lowbit
    .venv/bin/python bench/serve_beside.py MODEL.lowbit MODEL.gguf --llama-server llama-server

Both servers run all the time, but only one has requests at a time. All users send one request at once: a prompt that no earlier
request had, with a streamed answer of a given length. The table has medians over the rounds: wall-clock tokens per second,
milliseconds to the first text, and milliseconds of CPU time per token, including the prompts. Brackets have the median of the
rounds' ratios to llama-server, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import http_load

TEXT = Path(__file__).parents[1] / "examples" / "tiny_llama" / "heldout.txt"
THEIRS, OURS = "llama-server", "lowbit serve"


@dataclass
class Figures:
    """Figures of a server with a number of users, one value per round."""

    rate: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


FIGURES = {"rate": "tokens per second", "first": "ms to the first text", "cpu": "ms of CPU time a token"}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(options: argparse.Namespace, scratch: Path) -> dict[str, http_load.Server]:
    """Starts both servers, with as many slots as the largest number of users."""
    threads, most = str(options.threads), str(max(options.users))
    room = -(-(options.prompt + options.new + 1) // 256) * 256
    (scratch / "model").symlink_to(options.model.resolve())  # so that both servers have the same model name
    theirs = [options.llama_server, "--model", options.gguf, "--threads", threads, "--threads-batch", threads]
    theirs += ["--parallel", most, "--ctx-size", room * max(options.users), "--cache-ram", "0"]
    ours = [Path(sys.executable).with_name("lowbit"), "serve", scratch / "model", "--threads", threads, "--at-once", most]
    ours += ["--max-length", room, *options.more.split()]
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    servers = {}
    try:
        for name, command in ((THEIRS, theirs), (OURS, ours)):
            port = free_port()
            full = [*map(str, command), "--host", "127.0.0.1", "--port", port]
            servers[name] = http_load.Server(full, int(port), environment, scratch / f"{name}.log")
    except BaseException:
        for server in servers.values():
            server.stop()
        raise
    return servers


def prompts(model: Path, length: int) -> list[list[int]]:
    """Pieces of a text that start at different tokens, in the same random order in every run."""
    from lowbit.llm.loading import load_tokenizer

    tokens = load_tokenizer(model)(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    found = [tokens[at : at + length] for at in range(len(tokens) - length)]
    random.Random(0).shuffle(found)
    return found


def table(found: dict[tuple[str, int], Figures], users: list[int]) -> str:
    lines = []
    for name, what in FIGURES.items():
        heads = " | ".join(f"{count} user{'s' if count > 1 else ''}" for count in users)
        lines += [f"| {what} | {heads} |", "|---" * (len(users) + 1) + "|"]
        for server in (THEIRS, OURS):
            cells = []
            for count in users:
                own, theirs = (getattr(found[each, count], name) for each in (server, THEIRS))
                cell = f"{statistics.median(own):.{0 if statistics.median(own) >= 100 else 1}f}"
                if server != THEIRS:
                    cell += f" ({statistics.median(a / b for a, b in zip(own, theirs, strict=True)):.2f})"
                cells.append(cell)
            lines.append(f"| {server} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the GGUF file, imported by `lowbit import`")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=48, help="new tokens of each request")
    parser.add_argument("--threads", type=int, default=1, help="threads of each server")
    parser.add_argument("--more", default="", help="further options of lowbit serve, in one string")
    parser.add_argument("--output", type=Path, help="JSON of all rounds")
    options = parser.parse_args()
    from lowbit.machine.facts import cpu_name

    left = iter(prompts(options.model, options.prompt))
    found = {(name, count): Figures() for name in (THEIRS, OURS) for count in options.users}
    with tempfile.TemporaryDirectory() as scratch:
        servers = start(options, Path(scratch))
        try:
            for turn in range(-1, options.rounds):  # the first is not counted
                for count in options.users:
                    for name, server in servers.items():
                        before = server.cpu_seconds()
                        rate, first = http_load.load(server.port, [next(left) for _ in range(count)], options.new)
                        cpu = server.cpu_seconds() - before
                        if turn >= 0:
                            row = found[name, count]
                            row.rate.append(rate)
                            row.first.append(1e3 * first)
                            row.cpu.append(1e3 * cpu / (count * options.new))
                        print(f"round {turn + 1}, {count} users, {name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
        finally:
            for server in servers.values():
                server.stop()
    print(f"{cpu_name()}, threads of each server: {options.threads}, {options.prompt} tokens a prompt, {options.new} new\n")
    print(table(found, options.users))
    if options.output is not None:
        rows = [{"server": name, "users": count, **vars(row)} for (name, count), row in found.items()]
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
