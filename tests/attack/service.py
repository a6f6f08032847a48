"""A server in a separate process, and the outcomes of its requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from outcomes import BYTES, HANG, MEMORY, OTHER, REFUSED, SAME, SECONDS, SIGNAL, TRACEBACK, TRACES, Found, last_line, memory_of

COMPLETIONS = "/v1/completions"
LOWBIT = Path(sys.executable).with_name("lowbit")
_START = 300.0  # seconds until a server listens


def completion(prompt: str, tokens: int, **more: object) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}).encode()


class Service:
    """`lowbit serve` in a process, which ends with the context."""

    def __init__(self, place: Path, *arguments: object):
        self._log, self._arguments = place / "server.log", [*map(str, arguments), "--port", "0", "--grace", "1"]

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [LOWBIT, "serve", *self._arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        began = time.monotonic()
        while (line := re.search(r"on http://127\.0\.0\.1:(\d+)/v1", self.log())) is None:
            if self.process.poll() is not None or time.monotonic() - began > _START:
                raise RuntimeError(f"the server does not start: {self.log()[-2000:]}")
            time.sleep(0.05)
        self.port, self._read, self._usual = int(line[1]), len(self.log()), 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def send(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Sends a request; returns status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def post(self, path: str, body: bytes) -> str:
        """Returns the text of a completion."""
        status, document = self.send(path, body)
        if status != 200:
            raise ValueError(f"status {status}: {document[:300]!r}")
        return str(json.loads(document)["choices"][0]["text"])

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        connection.sendall(sent)
        return connection

    def check(self) -> Found:
        """Returns a bad outcome if the server is not healthy, and restarts it."""
        found = self._state()
        if found.outcome != SAME:
            self.kill()
            self.start()
        return found

    def _state(self) -> Found:
        said = self.log()
        new, self._read = said[self._read :], len(said)
        if (code := self.process.poll()) is not None:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Found(SIGNAL if code < 0 else TRACEBACK, f"the server ended: {name}; {last_line(new)}")
        if any(trace in new for trace in TRACES):
            return Found(TRACEBACK, f"in the server's log: {last_line(new)}")
        peak = self._peak()
        self._usual = self._usual or peak
        if peak > self._usual + BYTES:
            return Found(MEMORY, f"the server takes {peak >> 20} MiB; before {self._usual >> 20}")
        try:
            status, _ = self.send("/health")
        except (OSError, http.client.HTTPException) as error:
            return Found(HANG, f"/health: {error!r}")
        return Found(SAME) if status == 200 else Found(TRACEBACK, f"/health has status {status}")

    def _peak(self) -> int:
        """Peak memory in bytes since the last call."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return int(found[1]) * 1024 if found else memory_of(self.process.pid)

    def judged(self, status: int, document: bytes, expected: Callable[[bytes], bool]) -> Found:
        """The outcome of one request."""
        state = self.check()
        if state.outcome != SAME:
            return state
        if status == 500:
            return Found(TRACEBACK, f"status 500: {document[:300]!r}")
        if status < 300:
            return Found(SAME if expected(document) else OTHER)
        message = error_message(document)
        if message is None:
            return Found(TRACEBACK, f"status {status} without OpenAI's error: {document[:300]!r}")
        return Found(REFUSED, f"{status} {message[:300]}")

    def request(self, path: str, body: bytes, expected: Callable[[bytes], bool], **headers: str) -> Found:
        """Sends a request and returns its outcome."""
        try:
            status, document = self.send(path, body, **headers)
        except (OSError, http.client.HTTPException) as error:
            state = self.check()
            return state if state.outcome != SAME else Found(HANG, f"no answer: {error!r}")
        return self.judged(status, document, expected)


def error_message(document: bytes) -> str | None:
    """The message of an error in OpenAI's format, which is a printable line; None for another document."""
    try:
        message = json.loads(document)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) and message and message.isprintable() else None


@contextlib.contextmanager
def serving_packed(room: Path, *arguments: object) -> Iterator[Service]:
    """A server with the small packed model."""
    from files import save_packed

    save_packed(room / "model")
    with Service(room, room / "model", *arguments) as service:
        yield service
