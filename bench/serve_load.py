"""Load test of a server with disconnecting clients: checks every text, measures tokens per second and memory.

    .venv/bin/python bench/serve_load.py --users 1 8 32 --requests 100
    .venv/bin/python bench/serve_load.py --users 32 --rounds 5 --requests 2000 --distinct 200 --longest 16    # ten thousand
    .venv/bin/python bench/serve_load.py --port 8080 --users 8     # a running server: figures only, texts are not compared

Each user sends one request after the other: prompts with or without a shared prefix, greedy or sampled, streamed or not. Some
clients disconnect before the answer or after some pieces of a stream. Without --port the script starts `lowbit serve` on the
model, and compares each text with the library's text for the same request alone. The exit code is 1 if a text differs, if a
text still runs or waits after a round, if the server has more threads or open files after the last round than after the first,
or if its memory grew by more than a tenth from the second round to the last.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
HELD_OUT = ROOT / "examples" / "tiny_llama" / "heldout.txt"


@dataclass
class Round:
    """Results of the users of a round."""

    requests: int = 0
    gone: int = 0
    refused: int = 0
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)  # seconds to the first piece of streams
    wrong: list[str] = field(default_factory=list)
    texts: list[tuple[dict, str]] = field(default_factory=list)  # requests and their texts
    lock: threading.Lock = field(default_factory=threading.Lock)


def body_of(chance: random.Random, text: str, longest: int) -> dict:
    """A request whose prompt is a piece of the text, usually after one of three shared prefixes."""
    begin = chance.choice([0, 200, 400])
    at = chance.randrange(len(text) - 400)
    prompt = chance.choice([text[begin : begin + 150], ""]) + text[at : at + chance.choice([20, 80, 300])]
    drawn = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "seed": chance.randrange(2**31)}
    return {
        "prompt": prompt, "max_tokens": chance.randint(1, longest), "stream": chance.random() < 0.6,
        **(drawn if chance.random() < 0.5 else {"temperature": 0}),
    }  # fmt: skip


def ask(port: int, body: dict, pieces: int | None, into: Round) -> None:
    """Sends a request, again if the queue is full, and records the answer.

    Args:
        pieces: the client disconnects after this many pieces of a stream, with 0 before any answer; None: it stays.
    """
    sent = body | {"stream_options": {"include_usage": True}} if body["stream"] else body
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        begin, first, text, tokens, left = time.perf_counter(), None, "", 0, pieces
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(sent), {"Content-Type": "application/json"})
            if left == 0:
                with into.lock:
                    into.requests, into.gone = into.requests + 1, into.gone + 1
                return
            response = connection.getresponse()
            if response.status == 429:
                response.read()
                with into.lock:
                    into.refused += 1
                time.sleep(0.2)
                continue
            if response.status != 200:
                raise RuntimeError(f"port {port} answers {response.status}: {response.read(500)!r}")
            if not body["stream"]:
                document = json.loads(response.read())
                text, tokens = document["choices"][0]["text"], document["usage"]["completion_tokens"]
            else:
                for line in response:
                    if not line.startswith(b"data: {"):
                        continue
                    document = json.loads(line[6:])
                    for choice in document["choices"]:
                        first = first or time.perf_counter()
                        text += choice["text"]
                    if left is not None and (left := left - 1) == 0:
                        break
                    tokens = (document.get("usage") or {}).get("completion_tokens", tokens)
        with into.lock:
            into.requests += 1
            into.tokens += tokens
            if first:
                into.firsts.append(first - begin)
            if left == 0:
                into.gone += 1
            else:
                into.texts.append((body, text))
        return


def idle(port: int) -> bool:
    """Whether no text runs or waits, after at most a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            found = connection.getresponse().read().decode()
        if re.search(r"^lowbit_running_texts 0.0$", found, re.M) and re.search(r"^lowbit_waiting_texts 0.0$", found, re.M):
            return True
        time.sleep(0.1)
    return False


def play(port: int, users: int, requests: int, longest: int, seed: int, distinct: int) -> tuple[Round, float]:
    """Runs a round of `requests` requests, some of them distinct, by concurrent users; returns results and seconds."""
    text, into, errors = HELD_OUT.read_text(encoding="utf-8"), Round(), []
    numbers = iter(range(requests))

    def use() -> None:
        try:
            while True:
                with into.lock:
                    number = next(numbers, None)
                if number is None or errors:
                    return
                body = body_of(random.Random(number % distinct), text, longest)
                chance = random.Random(seed * 1_000_003 + number)
                ask(port, body, None if chance.random() > 0.15 else chance.randrange(4 if body["stream"] else 1), into)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(users)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return into, time.perf_counter() - begin


class Alone:
    """The library's texts for requests, one after the other."""

    def __init__(self, model: Path, max_length: int):
        import torch
        from lowbit import llm
        from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens

        torch.set_num_threads(1)  # faster next to other programs; the texts are the same
        self._llm, loaded, self._tokenizer = llm, load_model(model), load_tokenizer(model)
        self._decoder, self._stop = llm.Decoder(loaded, max_length), stop_tokens(loaded, self._tokenizer)
        self._texts: dict[str, str] = {}

    def text(self, body: dict) -> str:
        key = json.dumps(body)
        if key not in self._texts:
            self._texts[key] = self._write(body)
        return self._texts[key]

    def _write(self, body: dict) -> str:
        prompt = self._tokenizer(body["prompt"])["input_ids"]
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        text = self._llm.TextUntil(self._tokenizer, prompt)
        self._llm.generate(
            self._decoder, prompt, body["max_tokens"], seed=body.get("seed", 0), stop=self._stop, until=text,
            **{name: body[name] for name in names if name in body},
        )  # fmt: skip
        return text.finish()


def held(process: int) -> dict[str, float]:
    """Current and peak memory in MiB, open files and threads of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    sizes = {name: int(re.search(rf"{key}:\s+(\d+)", status)[1]) for name, key in (("now", "VmRSS"), ("most", "VmHWM"))}
    counts = {
        name: len(list(Path(f"/proc/{process}/{folder}").iterdir())) for name, folder in (("files", "fd"), ("threads", "task"))
    }
    return {f"memory_{name}_mib": size / 1024 for name, size in sizes.items()} | counts


def held_at_rest(process: int) -> dict[str, float]:
    """As :func:`held`, after the last connections are closed; waits at most a second."""
    found = []
    for _ in range(20):
        time.sleep(0.05)
        found.append(held(process))
    return min(found, key=lambda each: each["files"])


def leaks(rows: list[dict]) -> list[str]:
    """Messages about resources of which a server has more at the end."""
    found = []
    for name in ("files", "threads"):
        first, last = rows[0][name], rows[-1][name]
        if last > first:
            found.append(f"{last} {name} after the last round, {first} after the first")
    if len(rows) > 2 and rows[-1]["memory_now_mib"] > 1.1 * rows[1]["memory_now_mib"]:
        found.append(
            f"{rows[-1]['memory_now_mib']:.0f} MiB after the last round, {rows[1]['memory_now_mib']:.0f} after the second"
        )
    return found


@contextlib.contextmanager
def serving(model: Path, max_length: int, at_once: int):
    """Starts `lowbit serve`: its port and its process."""
    command = [
        Path(sys.executable).with_name("lowbit"), "serve", model, "--port", "0", "--max-length", max_length,
        "--at-once", at_once, "--prefix-memory", "16MiB", "--threads", os.environ.get("OMP_NUM_THREADS", "1"),
    ]  # fmt: skip
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"on http://127.0.0.1:(\d+)/v1", line):
                    yield int(match[1]), process.pid
                    break
            else:
                raise RuntimeError("".join(lines))
        finally:
            process.terminate()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a packed checkpoint; default: examples/tiny_llama, packed to 4 bits")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=100, help="of each round")
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds for each number of users; memory should not grow after the second"
    )
    parser.add_argument(
        "--distinct", type=int, default=500, help="distinct requests of a round; the library computes each once"
    )
    parser.add_argument("--longest", type=int, default=48, help="new tokens of a request, at most")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--port", type=int, help="port of a running server")
    parser.add_argument("--output", type=Path, help="JSON of all figures")
    options = parser.parse_args()
    rows: list[dict] = []

    def rounds(port: int, process: int | None, alone: Alone | None) -> None:
        for users in options.users:
            for number in range(options.rounds):
                seen, seconds = play(port, users, options.requests, options.longest, number, options.distinct)
                wrong = [body for body, text in seen.texts if alone is not None and alone.text(body) != text]
                row = {
                    "users": users, "round": number, "requests": seen.requests, "gone": seen.gone, "refused": seen.refused,
                    "compared": len(seen.texts) if alone else 0, "wrong": len(wrong),
                    "idle": None if process is None else idle(port), "seconds": seconds,
                    "tokens_per_second": seen.tokens / seconds,
                    "first_text_seconds": statistics.median(seen.firsts) if seen.firsts else None,
                } | ({} if process is None else held_at_rest(process))  # fmt: skip
                rows.append(row)
                print(json.dumps(row), flush=True)
                if wrong:
                    print(f"differs from the text alone: {json.dumps(wrong[0])}", file=sys.stderr)

    if options.port is not None:
        rounds(options.port, None, None)
    else:
        model = options.model
        if model is None:
            import lowbit

            model = ROOT / "build" / "serve_load" / "tiny-4bit"
            if not model.exists():
                model.parent.mkdir(parents=True, exist_ok=True)
                lowbit.quantize_checkpoint(ROOT / "examples" / "tiny_llama" / "model", model, lowbit.LowBitConfig(bits=4))
        with serving(model, 512, options.at_once) as (port, process):
            rounds(port, process, Alone(model, 512))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    more = [] if options.port is not None else leaks(rows)
    for each in more:
        print(f"leak in the server: {each}", file=sys.stderr)
    return int(bool(more) or any(row["wrong"] or row["idle"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
