"""Measures the prefix cache on disk: a long prompt in a server, and again after a restart.

    .venv/bin/python bench/serve_again.py MODEL --tokens 20000

Starts `lowbit serve` with an empty `--prefix-cache`, sends the prompt, stops the server, and starts it again with the same
directory. Prints the wall-clock and CPU seconds of both answers. If the texts differ, the exit code is 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import http_load
from serve_beside import TEXT, free_port


def complete(port: int, prompt: list[int], new: int) -> tuple[str, int]:
    """Returns the text and the number of cached tokens of the prompt."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    document = json.loads(connection.getresponse().read())
    connection.close()
    return document["choices"][0]["text"], document["usage"]["prompt_tokens_details"]["cached_tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a packed checkpoint whose context is long enough for the prompt")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    from lowbit.llm.loading import load_tokenizer
    from lowbit.machine.facts import cpu_name

    text = load_tokenizer(options.model)(TEXT.read_text(encoding="utf-8"))["input_ids"]
    prompt = (text * -(-options.tokens // len(text)))[: options.tokens]
    room, threads = -(-(options.tokens + options.new + 1) // 16) * 16, str(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(2):
            port = free_port()
            command = [Path(sys.executable).with_name("lowbit"), "serve", options.model, "--port", port, "--threads", threads]
            command += ["--max-length", room, "--timeout", 3600, "--prefix-cache", Path(scratch, "cache")]
            environment = os.environ | {"OMP_NUM_THREADS": threads}
            server = http_load.Server(list(map(str, command)), int(port), environment, Path(scratch, "log"))
            try:
                before = server.cpu_seconds()
                begin = time.perf_counter()
                written, cached = complete(int(port), prompt, options.new)
                seconds = time.perf_counter() - begin
                row = {"text": written, "cached": cached, "seconds": seconds, "cpu_seconds": server.cpu_seconds() - before}
                rows.append(row)
            finally:
                server.stop()
            print({key: value for key, value in rows[-1].items() if key != "text"}, file=sys.stderr, flush=True)
        size = sum(file.stat().st_size for file in Path(scratch, "cache").glob("*.lowbit-prefix"))
    first, again = rows
    print(f"{cpu_name()}, {options.threads} threads, {options.tokens} tokens, {options.new} new, {size / 1e6:.0f} MB of files")
    for name, row in (("computed", first), ("from disk", again)):
        print(f"{name}: {row['seconds']:.1f} s, {row['cpu_seconds']:.1f} s of CPU time, {row['cached']} tokens cached")
    return int(first["text"] != again["text"] or again["cached"] < options.tokens - 64)


if __name__ == "__main__":
    sys.exit(main())
