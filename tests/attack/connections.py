"""Attacks on a server by connections: raw HTTP, clients that disconnect or are slow."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import sources
from mutants import damaged
from outcomes import HANG, OTHER, REFUSED, SAME, SECONDS, TRACEBACK, Found
from request_bodies import BODIES, structured
from service import COMPLETIONS, Service, completion, error_message, serving_packed
from sources import PROMPT


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
    with serving_packed(room, "--timeout", 60) as service:
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
            if any(status in (0, 500) or status > 200 and error_message(document) is None for status, document in answers):
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
    with serving_packed(room, "--at-once", 4, "--queue", 8, "--template", sources.TINY.with_name("plain.jinja")) as service:
        check = completion(PROMPT, 4)
        expected = service.post(COMPLETIONS, check)
        descriptors = service.descriptors()

        def leave(draw: random.Random) -> None:
            stream = draw.random() < 0.5
            body = completion(PROMPT * draw.choice((1, 30)), draw.choice((1, 30, 200)), stream=stream, n=draw.choice((1, 1, 4)))
            if draw.random() < 0.15:
                body = completion(PROMPT, 30, stream=stream, **structured(regex="[a-z ]{1,90}"))
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
    with serving_packed(room, "--timeout", 20) as service:
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
