"""Attacks on a server in a separate process."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import sources
from mutants import damaged, damaged_json
from outcomes import BYTES, HANG, MEMORY, OTHER, REFUSED, SAME, SECONDS, SIGNAL, TRACEBACK, TRACES, Found, last_line, memory_of
from sources import PROMPT

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
        message = _message(document)
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


def _message(document: bytes) -> str | None:
    """The message of an error in OpenAI's format, which is a printable line; None for another document."""
    try:
        message = json.loads(document)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) and message and message.isprintable() else None


@contextlib.contextmanager
def _service(room: Path, *arguments: object) -> Iterator[Service]:
    """A server with the small packed model."""
    from files import save_packed

    save_packed(room / "model")
    with Service(room, room / "model", *arguments) as service:
        yield service


# Grammars of any size n, sent as structured_outputs or as response_format.
def _schema(document: object) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": document}}}


def _structured(**value: object) -> dict:
    return {"structured_outputs": value}


def _references(n: int) -> dict:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)}
    return _schema({"$ref": "#/$defs/a0", "$defs": {**links, f"a{n}": {"type": "string"}}})


def _doubling(n: int) -> dict:
    """A schema whose expansion has 2^n parts."""
    pairs = {f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 2, "minItems": 2} for i in range(n)}
    return _schema({"$ref": "#/$defs/a0", "$defs": {**pairs, f"a{n}": {"type": "integer"}}})


def _nested(n: int, wrap: Callable[[object], object], inner: object) -> object:
    for _ in range(min(n, 400)):  # json.dumps cannot go deeper
        inner = wrap(inner)
    return inner


def _lines(n: int, form: str, last: str) -> str:
    return "\n".join([*(form.format(i, i + 1) for i in range(n)), last.format(n)])


GRAMMARS: list[Callable[[int], dict]] = [
    lambda n: _structured(grammar="root ::= r0\n" + _lines(n, "r{0} ::= r{1}", 'r{0} ::= "a"')),
    lambda n: _structured(grammar="root ::= r0\n" + _lines(n, "r{0} ::= r{1} r{1}", 'r{0} ::= "a"')),
    lambda n: _structured(grammar="start: r0\n" + _lines(n, 'r{0}: r{1} | "b" r{1}', 'r{0}: "a"')),
    lambda n: _structured(grammar="start: r0\n" + _lines(n, 'r{0}: r{1}? "b"*', "r{0}: r0?")),
    lambda n: _structured(grammar="start: R0\n" + _lines(n, "R{0}: R{1} R{1}", "R{0}: /[a-z]+/")),
    lambda n: _structured(grammar="root ::= " + "(" * n + '"a"' + ")" * n),
    lambda n: _structured(grammar="root ::= " + "(" * n + '"a"' + ")*" * n),
    lambda n: _structured(grammar=f'root ::= "a"{{{n}}}'),
    lambda n: _structured(grammar=f'root ::= ("a"{{0,{n}}} "b"{{0,{n}}}){{0,{n}}}'),
    lambda n: _structured(grammar="root ::= " + " | ".join(f'"t{i}"' for i in range(n))),
    lambda n: _structured(grammar='root ::= root root | "a" | ' + " ".join(["root"] * n)),
    lambda n: _structured(grammar='root ::= root "a"' + '\nx ::= y\ny ::= x' * min(n, 2)),
    lambda n: _structured(grammar='root ::= "' + "\\\\" * n + '"'),
    lambda n: _structured(grammar="root ::= [" + "a-z" * n + "]+"),
    lambda n: _structured(grammar="start: " + "/a/ " * n),
    lambda n: _structured(grammar="%" * n),
    lambda n: _structured(grammar="start: /(" + "a|" * n + "b)+/"),
    lambda n: _structured(grammar="\n" * n + f"start: A\nA: /.{{{n}}}/"),
    lambda n: _structured(regex="(" * n + "a" + ")" * n),
    lambda n: _structured(regex="(" * n + "a" + ")*" * n),
    lambda n: _structured(regex="(a|aa|aaa)+" * min(n, 300) + "$"),
    lambda n: _structured(regex=f"a{{{n}}}"),
    lambda n: _structured(regex=f"(([ab]{{{n}}}){{{n}}}){{{n}}}"),
    lambda n: _structured(regex=f".*a.{{{n}}}"),
    lambda n: _structured(regex=f"(?i)\\p{{L}}{{1,{n}}}\\w*\\d{{{n}}}"),
    lambda n: _structured(regex="|".join(f"x{i}" for i in range(n))),
    lambda n: _structured(regex="(?=a)" * min(n, 100) + "a(?!b)\\1"),
    lambda n: _structured(regex="[" + "\\U0001F600-\\U0001F64F" * min(n, 200) + "]"),
    lambda n: _structured(choice=[f"text {i}" for i in range(n)]),
    lambda n: _structured(choice=["a" * n + str(i) for i in range(min(n, 20))]),
    lambda n: _structured(choice=["a" * i for i in range(1, min(n, 900))]),
    lambda n: _structured(choice=["\ud83d\ude00" * n, "\0", "\u202e", '"' * n]),
    _references,
    lambda n: _doubling(min(n, 300)),
    lambda n: _schema({"$ref": "#"} if n % 2 else {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    lambda n: _schema({"$ref": "https://example.com/" + "a" * n}),
    lambda n: _schema({"$ref": "#/" + "a/" * n}),
    lambda n: _schema(_nested(n, lambda inner: {"type": "array", "items": inner}, {"type": "null"})),
    lambda n: _schema(_nested(n, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]}, True)),
    lambda n: _schema(_nested(n, lambda inner: {"anyOf": [inner, {"type": "integer"}]}, {"type": "string"})),
    lambda n: _schema(_nested(n, lambda inner: {"allOf": [inner, {"minLength": n}]}, {"type": "string"})),
    lambda n: _schema(_nested(min(n, 12), lambda inner: {"oneOf": [inner, inner]}, {"const": 1})),
    lambda n: _schema({"enum": [f"text {i}" for i in range(n)]}),
    lambda n: _schema({"enum": [i / 7 for i in range(n)]}),
    lambda n: _schema({"const": _nested(n, lambda inner: [inner], 1)}),
    lambda n: _schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}),
    lambda n: _schema({"properties": {f"p{i}": {} for i in range(n)}, "required": [f"p{n - i}" for i in range(n)]}),
    lambda n: _schema({"type": "string", "minLength": n, "maxLength": n * n}),
    lambda n: _schema({"type": "array", "minItems": n, "maxItems": 2**n if n < 60 else n, "items": {"type": "array"}}),
    lambda n: _schema({"type": "integer", "minimum": -(10 ** min(n, 300)), "multipleOf": 7}),
    lambda n: _schema({"type": "number", "exclusiveMinimum": 10.0 ** -min(n, 300), "maximum": 1e308}),
    lambda n: _schema({"type": "string", "pattern": "^(a+)+" * min(n, 500) + "$"}),
    lambda n: _schema({"patternProperties": {f"^a{{{i}}}": {"type": "integer"} for i in range(n)}}),
    lambda n: _schema({"type": ["string"] * n, "format": "uuid" if n % 2 else "x" * n}),
    lambda n: _schema({"allOf": [{"properties": {f"a{i}": {"anyOf": [{}, {"minimum": i}]}}} for i in range(n)]}),
    lambda n: _schema({"anyOf": [{"pattern": f"{i}+"} for i in range(n)]}),
    lambda n: _schema({"unevaluatedProperties": False, "dependentSchemas": {str(i): {} for i in range(n)}}),
    lambda n: _schema([{}] * n),
    lambda n: {"response_format": {"type": "json_object", "schema": {"title": "a" * n}}},
    lambda n: {"structured_outputs": {"json": json.dumps({"enum": list(range(n))})}},
]  # fmt: skip


@contextlib.contextmanager
def grammars(room: Path, quick: bool) -> Iterator:
    with _service(room) as service:
        service.post(COMPLETIONS, completion(PROMPT, 4, **_structured(regex="a+")))  # it imports llguidance

        def case(number: int, draw: random.Random, place: Path) -> Found:
            size = int(math.exp(draw.uniform(0, math.log(200 if quick else 30_000))))
            body = completion(PROMPT, 6, seed=0, **GRAMMARS[number % len(GRAMMARS)](size))
            (place / "body").write_bytes(body)
            return service.request(COMPLETIONS, body, lambda document: True)

        yield case


@contextlib.contextmanager
def multipart(room: Path, quick: bool) -> Iterator:
    sources.helper("speech_models").tiny_whisper(room / "whisper")
    border = b"0123456789abcdef"
    fields = {"language": "en", "response_format": "json", "temperature": "0"}
    head = b'--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    whole = b"".join(head % (border, name.encode(), value.encode()) for name, value in fields.items())
    hot = [(0, len(whole) + 110)]
    whole += (
        b'--%s\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n' % border
    )
    whole += sources.wav(0.3) + b"\r\n--%s--\r\n" % border
    hot.append((len(whole) - 40, len(whole)))
    kind = f"multipart/form-data; boundary={border.decode()}"
    path = "/v1/audio/transcriptions"
    with Service(room, room / "whisper") as service:
        status, expected = service.send(path, whole, **{"Content-Type": kind})
        assert status == 200, expected

        def case(number: int, draw: random.Random, place: Path) -> Found:
            body, named = damaged(whole, draw, hot), kind
            if draw.random() < 0.2:
                changed = damaged(kind.encode(), draw).decode("latin-1")
                named = re.sub(r"[\x00-\x1f\x7f]", "?", changed).strip()  # must be valid HTTP; the part http sends invalid HTTP
            if draw.random() < 0.05:
                part = head % (border, b"x" * draw.randrange(1, 3000), b"1")
                body = part * draw.choice((10, 1000, 20_000)) + whole
            (place / "body").write_bytes(body)
            (place / "type").write_text(named)
            return service.request(path, body, lambda document: document == expected, **{"Content-Type": named})

        yield case


# A request of each endpoint of chats; the small model's template has no tools.
_SAID = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_USED = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}, {"type": "text", "text": "c"}]},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": PROMPT}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "b"},
]
BODIES: list[tuple[str, dict]] = [
    ("/v1/chat/completions", {"messages": [_SAID, {"role": "assistant", "tool_calls": [_CALL]}], "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {"messages": [_SAID], "continue_final_message": True, "chat_template_kwargs": {}, "max_tokens": 2},
    ),
    ("/v1/messages", {"messages": [_SAID, *_USED], "system": "d", "stop_sequences": ["e"], "max_tokens": 2, "stream": True}),
    ("/v1/messages", {"messages": [_SAID, {"role": "assistant", "content": "d"}], "max_tokens": 2, "top_k": 3, "seed": 1}),
    ("/v1/messages/count_tokens", {"messages": [_SAID, *_USED], "system": [{"type": "text", "text": "d"}]}),
    ("/v1/responses", {"input": _ITEMS, "instructions": "d", "max_output_tokens": 2, "metadata": {"a": "b"}, "stream": True}),
    ("/v1/responses", {"input": PROMPT, "text": {"format": {"type": "text"}}, "max_output_tokens": 2, "store": False}),
]


@contextlib.contextmanager
def requests(room: Path, quick: bool) -> Iterator:
    with _service(room, "--template", sources.TINY.with_name("plain.jinja")) as service:
        for path, body in BODIES:
            status, document = service.send(path, json.dumps(body).encode())
            assert status == 200, document

        def case(number: int, draw: random.Random, place: Path) -> Found:
            path, whole = BODIES[number % len(BODIES)]
            body = damaged_json(json.dumps(whole).encode(), draw)
            (place / "body").write_bytes(body)
            return service.request(path, body, lambda document: True)

        yield case


def _exchange(service: Service, sent: bytes, draw: random.Random) -> bytes:
    """Sends data in two pieces, then closes if no answer comes; returns everything until the server closes."""
    received = bytearray()
    with contextlib.closing(service.connect()) as connection:
        with contextlib.suppress(ConnectionError):  # the server stopped reading
            cut = draw.randrange(len(sent) + 1)
            for piece in (sent[:cut], sent[cut:]):
                connection.sendall(piece)
        for seconds in (0.3, SECONDS):
            connection.settimeout(seconds)
            try:
                while data := connection.recv(1 << 16):
                    received += data
                break
            except ConnectionError:
                break
            except TimeoutError:
                if seconds == SECONDS:
                    raise
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
    return bytes(received)


def _answers(received: bytes) -> list[tuple[int, bytes]]:
    """Returns status and body of each response."""
    found, rest = [], received
    while rest:
        match = re.match(rb"HTTP/1\.[01] (\d{3})[^\r\n]*\r\n(.*?)\r\n\r\n", rest, re.S)
        if match is None:
            found.append((0, rest))
            break
        rest = rest[match.end() :]
        size = re.search(rb"(?i)^content-length: *(\d+)", match[2], re.M)
        length = int(size[1]) if size else 0 if match[1] == b"100" else len(rest)
        found.append((int(match[1]), rest[:length]))
        rest = rest[length:]
    return found


@contextlib.contextmanager
def raw_http(room: Path, quick: bool) -> Iterator:
    with _service(room, "--timeout", 60) as service:
        body = completion(PROMPT, 2)
        expected = service.post(COMPLETIONS, body)
        line, host, size = b"POST /v1/completions HTTP/1.1\r\n", b"Host: 127.0.0.1\r\n", b"Content-Length: %d\r\n" % len(body)
        close = b"Connection: close\r\n"
        usual = line + host + close + size + b"\r\n" + body
        hidden = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        chunked = b"Transfer-Encoding: chunked\r\n"

        def chunks(form: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
            return line + host + close + chunked + b"\r\n" + form % len(body) + b"\r\n" + body + b"\r\n" + end

        # Request heads, most of them invalid, by a number n.
        kinds: list[Callable[[int], bytes]] = [
            lambda n: usual,
            lambda n: line + host + size + chunked + b"\r\n0\r\n\r\n" + hidden,
            lambda n: line + host + chunked + size + b"\r\n0\r\n\r\n" + hidden,
            lambda n: line + host + size + b"Content-Length: 0\r\n\r\n" + body + hidden,
            lambda n: line + host + b"Content-Length: 0, %d\r\n\r\n" % n + hidden,
            lambda n: line + host + b"Content-Length: +%d\r\n\r\n" % len(body) + body,
            lambda n: line + host + b"Content-Length: -%d\r\n\r\n" % n + body,
            lambda n: line + host + b"Content-Length: 0x%x\r\n\r\n" % len(body) + body,
            lambda n: line + host + b"Content-Length: " + b"9" * n + b"\r\n\r\n" + body,
            lambda n: line + host + b"Content-Length : %d\r\n\r\n" % len(body) + body,
            lambda n: line + host + b"Transfer-Encoding : chunked\r\n" + size + b"\r\n0\r\n\r\n" + hidden,
            lambda n: line + host + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + hidden,
            lambda n: line + host + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + hidden,
            lambda n: line + host + b"Transfer-Encoding:\x0bchunked\r\n" + size + b"\r\n0\r\n\r\n" + hidden,
            lambda n: line + host + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: cow\r\n\r\n0\r\n\r\n" + hidden,
            lambda n: line + host + b"X: 1\r\n Transfer-Encoding: chunked\r\n" + size + b"\r\n" + body,
            lambda n: line + host + b"X: a\nTransfer-Encoding: chunked\r\n" + size + b"\r\n" + body + hidden,
            lambda n: chunks(b"%x"), lambda n: chunks(b"%x;a=" + b"b" * n), lambda n: chunks(b"0" * (n % 30) + b"%x"),
            lambda n: chunks(b"0x%x"), lambda n: chunks(b"-%x"), lambda n: chunks(b"%x "), lambda n: chunks(b"f" * n + b"%x"),
            lambda n: chunks(b"%x", b"0\r\nX: y\r\n" * 2 + b"\r\n"),
            lambda n: chunks(b"%x", b"0\r\n" + b"X: y\r\n" * n + b"\r\n"),
            lambda n: chunks(b"%x", b"1\r\n" * n),
            lambda n: line + host + close + chunked + b"\r\n" + b"1\r\n \r\n" * n + b"0\r\n\r\n",
            lambda n: line + host + b"X: " + b"a" * (n * 10) + b"\r\n" + size + b"\r\n" + body,
            lambda n: line + host + b"X: a\r\n" * n + size + close + b"\r\n" + body,
            lambda n: line + host + b"a" * n + b": b\r\n" + size + close + b"\r\n" + body,
            lambda n: b"POST /" + b"a" * (n * 10) + b" HTTP/1.1\r\n" + host + close + size + b"\r\n" + body,
            lambda n: b"POST /" + b"%2e%2e/" * n + b" HTTP/1.1\r\n" + host + close + size + b"\r\n" + body,
            lambda n: b"GET /v1/models/" + b"%00%ff%c0/" * (n % 99) + b" HTTP/1.1\r\n" + host + close + b"\r\n",
            lambda n: usual.replace(b" HTTP", b"/" * (n % 9 + 1) + b" HTTP", 1),
            lambda n: usual.replace(b"POST", (b"GET", b"PUT", b"DELETE", b"OPTIONS", b"TRACE")[n % 5]),
            lambda n: b"GET /?" + b"&a=b" * n + b" HTTP/1.1\r\n" + host + close + b"\r\n",
            lambda n: b"A" * n, lambda n: b"\r\n" * n + usual, lambda n: b"\0" * n,
            lambda n: usual.replace(b"HTTP/1.1", b"HTTP/1.0"), lambda n: usual.replace(b"HTTP/1.1", b"HTTP/%d.9" % (n % 99)),
            lambda n: usual.replace(b"POST", b"P" * n), lambda n: usual.replace(host, b""),
            lambda n: usual.replace(host, host * 2),
            lambda n: usual.replace(host, b"Host: \r\n"), lambda n: usual.replace(host, b"Host: [::1" + b":" * n + b"\r\n"),
            lambda n: usual.replace(host, b"Host: evil.example\r\n"), lambda n: usual.replace(b"\r\n", b"\n"),
            lambda n: usual.replace(b"/v1", b"http://127.0.0.1/v1"), lambda n: usual.replace(b"/v1/completions", b"*"),
            lambda n: b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n" + host + close + b"\r\n",
            lambda n: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", lambda n: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * n,
            lambda n: line + host + b"Expect: 100-continue\r\n" + close + size + b"\r\n" + body,
            lambda n: line + host + b"Expect: " + b"2" * n + b"\r\n" + close + size + b"\r\n" + body,
            lambda n: usual.replace(close, b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: YQ==\r\n"),
            lambda n: usual.replace(close, b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"),
            lambda n: usual.replace(close, b"Content-Encoding: gzip\r\n"),
            lambda n: usual.replace(close, b"Range: bytes=0-9\r\n"),
            lambda n: usual.replace(close, b"Content-Type: \xff\xfe\r\n"),
            lambda n: usual.replace(close, b"Authorization: \xe9\r\n"),
            lambda n: usual.replace(close, b"Origin: \xff\r\n"),
            lambda n: usual.replace(close, b"Cookie: " + b"a=b;" * n + b"\r\n"),
            lambda n: usual.replace(close, b"") * (n % 20 + 1), lambda n: hidden * (n % 300 + 1),
            lambda n: usual[: -n % len(usual)],
        ]  # fmt: skip

        def case(number: int, draw: random.Random, place: Path) -> Found:
            size = int(math.exp(draw.uniform(0, math.log(100_000))))
            sent = (
                kinds[number % len(kinds)](size) if draw.random() < 0.6 else damaged(usual, draw, [(0, len(usual) - len(body))])
            )
            (place / "sent").write_bytes(sent)
            try:
                received = _exchange(service, sent, draw)
            except TimeoutError:
                state = service.check()
                return state if state.outcome != SAME else Found(HANG, "no answer, and the connection stays open")
            state = service.check()
            if state.outcome != SAME:
                return state
            answers = _answers(received)
            if any(status in (0, 500) or status > 200 and _message(document) is None for status, document in answers):
                return Found(TRACEBACK, f"{answers[:2]}"[:400])
            ambiguous = sent.count(hidden) == 1 and sent != hidden
            if ambiguous and any(b'"list"' in document for status, document in answers if status == 200):
                return Found(OTHER, f"the request in a body was answered: {answers}"[:400])
            good = [document for status, document in answers if status == 200]
            if not good:
                return Found(REFUSED, f"{[status for status, _ in answers]}")
            if sent == usual and json.loads(good[0])["choices"][0]["text"] != expected:
                return Found(OTHER, f"{good[0]!r}"[:400])
            return Found(SAME)

        yield case


def _reset(connection: socket.socket) -> None:
    """Closes a connection by a reset, so that the other side gets an error at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _request(path: str, body: bytes, more: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%sContent-Length: %d\r\n\r\n" % (path.encode(), more, len(body)) + body


def _idle(service: Service, descriptors: int) -> Found:
    """Whether the requests of disconnected clients have ended."""
    for _ in range(600):
        status, document = service.send("/metrics")
        open_ones = re.findall(r"^lowbit\w*(?:running|waiting)_(?:texts|inputs) ([1-9].*)$", document.decode(), re.M)
        if status == 200 and not open_ones and service.descriptors() <= descriptors + 2:
            return Found(SAME)
        time.sleep(0.1)
    return Found(HANG, f"a minute after all clients have gone: texts {open_ones}, {service.descriptors()} descriptors")


@contextlib.contextmanager
def disconnects(room: Path, quick: bool) -> Iterator:
    with _service(room, "--at-once", 4, "--queue", 8, "--template", sources.TINY.with_name("plain.jinja")) as service:
        check = completion(PROMPT, 4)
        expected = service.post(COMPLETIONS, check)
        descriptors = service.descriptors()

        def leave(draw: random.Random) -> None:
            stream = draw.random() < 0.5
            body = completion(PROMPT * draw.choice((1, 30)), draw.choice((1, 30, 200)), stream=stream, n=draw.choice((1, 1, 4)))
            if draw.random() < 0.15:
                body = completion(PROMPT, 30, stream=stream, **_structured(regex="[a-z ]{1,90}"))
            path = COMPLETIONS
            if draw.random() < 0.4:
                path, chat = draw.choice(BODIES)
                body = json.dumps(chat | {"stream": stream} if "count" not in path else chat).encode()
            request = _request(path, body)
            connection = service.connect()
            with contextlib.suppress(OSError):
                connection.sendall(request[: draw.choice((len(request), len(request), draw.randrange(len(request))))])
                if stream:
                    connection.settimeout(draw.uniform(0, 0.3) + 1e-3)
                    for _ in range(draw.randrange(4)):
                        connection.recv(draw.choice((1, 4096)))
                time.sleep(draw.choice((0, 0, draw.uniform(0, 0.2))))
                if draw.random() < 0.2:
                    connection.shutdown(draw.choice((socket.SHUT_WR, socket.SHUT_RD)))
            _reset(connection) if draw.random() < 0.6 else connection.close()

        def case(number: int, draw: random.Random, place: Path) -> Found:
            seeds = [draw.random() for _ in range(6)]
            clients = [threading.Thread(target=leave, args=(random.Random(seed),)) for seed in seeds]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            state = service.check()
            if state.outcome != SAME:
                return state
            if (found := _idle(service, descriptors)).outcome != SAME:
                return found
            text = service.post(COMPLETIONS, check)
            return Found(SAME) if text == expected else Found(OTHER, f"{text!r}; expected {expected!r}")

        yield case


@contextlib.contextmanager
def slow_clients(room: Path, quick: bool) -> Iterator:
    """Clients that send or read one byte per second: others are answered meanwhile, and these are disconnected."""
    hold = 2.0 if quick else 50.0
    with _service(room, "--timeout", 20) as service:
        check = completion(PROMPT, 4)
        expected = service.post(COMPLETIONS, check)
        descriptors = service.descriptors()
        body = completion(PROMPT, 200, stream=True)
        request = _request(COMPLETIONS, body)

        def case(number: int, draw: random.Random, place: Path) -> Found:
            heads = [service.connect(request[: draw.randrange(60)]) for _ in range(draw.choice((5, 60, 300)))]
            bodies = [service.connect(request[: draw.randrange(len(request) - 200, len(request))]) for _ in range(40)]
            readers = [service.connect(request) for _ in range(8)]
            everybody, began, wrong = [*heads, *bodies, *readers], time.monotonic(), ""
            try:
                while time.monotonic() - began < hold and not wrong:
                    for connection in draw.sample([*heads, *bodies], 20):
                        with contextlib.suppress(OSError):
                            connection.send(draw.choice((b"a", b" ", b"\r\n")))
                    for connection in readers:
                        connection.settimeout(0.01)
                        with contextlib.suppress(OSError):
                            connection.recv(1)
                    text = service.post(COMPLETIONS, check)
                    wrong = "" if text == expected else f"{text!r}; expected {expected!r}"
                    time.sleep(1)
                stay = 0 if quick else sum(map(_waits, heads))
            except (OSError, ValueError) as error:
                state = service.check()
                return state if state.outcome != SAME else Found(HANG, f"another client got no answer: {error!r}")
            finally:
                for connection in everybody:
                    connection.close()
            if wrong:
                return Found(OTHER, wrong)
            if stay:
                return Found(HANG, f"{stay} of {len(heads)} connections without a head are open after {hold} seconds")
            state = service.check()
            return state if state.outcome != SAME else _idle(service, descriptors)

        yield case


def _waits(connection: socket.socket) -> bool:
    """Whether the other side has neither answered nor closed it. Bytes of such a client may end a head by chance."""
    connection.settimeout(0.001)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    except OSError:
        pass
    return False
