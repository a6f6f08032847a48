"""Sends concurrent requests to an OpenAI-compatible server; returns tokens per second and seconds to the first text."""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    begin: float  # seconds by time.perf_counter, when the request was sent
    first: float  # when the first piece of text arrived
    end: float
    tokens: int  # as the server counts them


def ask(port: int, prompt: list[int], new: int) -> Answer:
    """Sends one request for `new` tokens, with a streamed answer.

    Raises:
        RuntimeError: the server refused the request or wrote another number of tokens.
    """
    body = {
        "model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,  # for llama.cpp; vLLM is started without prefix caching
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    begin, first, tokens = time.perf_counter(), 0.0, 0
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"port {port} answers {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            piece = json.loads(line[len(b"data: ") :])
            if piece.get("choices") and not first:
                first = time.perf_counter()
            if piece.get("usage"):
                tokens = piece["usage"]["completion_tokens"]
    finally:
        connection.close()
    if tokens != new:
        raise RuntimeError(f"port {port} wrote {tokens} tokens; expected {new}")
    return Answer(begin, first, time.perf_counter(), tokens)


def load(port: int, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """Sends all prompts at once, each on its own connection.

    Returns:
        New tokens of all requests per second, from the first request to the end of the last answer; the median of the seconds
        to the first text.
    """
    answers: list[Answer | Exception] = []

    def run(prompt: list[int]) -> None:
        try:
            answers.append(ask(port, prompt, new))
        except Exception as error:
            answers.append(error)

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: list[Answer] = []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        found.append(answer)
    seconds = max(answer.end for answer in found) - min(answer.begin for answer in found)
    return sum(answer.tokens for answer in found) / seconds, statistics.median(each.first - each.begin for each in found)


class Server:
    """A server in a separate process; ready after construction."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str], log: Path, patience: float = 900):
        self.port = port
        with open(log, "w") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        end = time.monotonic() + patience
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"{command[0]} does not serve; it said: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def cpu_seconds(self) -> float:
        """CPU time of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
