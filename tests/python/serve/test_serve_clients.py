"""Clients of `lowbit serve` that stall, send slowly or disconnect: others get answers, and resources are freed."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_line import LOWBIT, ONE_THREAD, TINY
from lowbit import llm
from lowbit.llm.loading import load_model, load_tokenizer
from needs import need_packages

need_packages("starlette", "uvicorn", "prometheus_client")

from lowbit.serve.engine import Engine
from lowbit.serve.errors import ApiError
from lowbit.serve.events import Events
from lowbit.serve.routes import Limits, Server
from served_models import Client, made, serving

BODY = {"prompt": "a", "max_tokens": 3, "temperature": 0}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 80\r\n\r\n"


class PanicException(BaseException):
    """Like the exception of Rust libraries."""

    __module__ = "pyo3_runtime"


@pytest.fixture(scope="module")
def loaded(packed):
    return load_model(packed[0]), load_tokenizer(packed[0])


@pytest.fixture(scope="module")
def model(loaded):
    return made(loaded)


@contextlib.contextmanager
def running(batches=()):
    engine = Engine(batches, 50)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def connect(stack, port, sent=b""):
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    connection.settimeout(60)
    connection.sendall(sent if isinstance(sent, bytes) else sent.encode())
    return connection


def answer(connection):
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())["error"]


@pytest.mark.parametrize("error", [ValueError("x"), PanicException("x"), SystemExit()])
def test_an_error_in_a_task_does_not_end_the_engine(error):
    def fail():
        raise error

    with running() as engine:
        engine._queue(fail)
        with pytest.raises(Exception, match="x|SystemExit"):
            engine.call(fail).result(60)
        assert engine.call(lambda: 5).result(60) == 5 and engine.alive


def test_a_stopped_engine_refuses_tasks(model, monkeypatch):
    engine = Engine([model.batch], 50)
    engine.start()
    engine.stop()
    for alive in (False, True):  # as another thread may have seen it just earlier
        monkeypatch.setattr(Engine, "alive", alive)
        with pytest.raises(ApiError, match="the server is shutting down"):
            engine.add(model.batch, [llm.batch.Text([5], 2)])
        with pytest.raises(ApiError, match="the server is shutting down"):
            engine.call(lambda: 5).result(60)
        engine.remove(model.batch, [])
    assert not model.batch.waiting and engine.waiting == 0


@pytest.mark.parametrize("error", [ValueError("x"), PanicException("x")])
def test_a_text_that_fails_does_not_affect_others(loaded, error):
    """Not even if its callback fails."""
    model = made(loaded, prefix_bytes=0)
    ends, errors, done = [], [], threading.Event()

    def fail(*_):
        raise error

    def told(failure):
        errors.append(failure)
        raise RuntimeError("the reader has gone")

    with running([model.batch]) as engine:
        bad = [llm.batch.Text([5, 6], 4, until=fail, on_error=told), llm.batch.Text([5, 6], 2, on_end=fail, on_error=told)]
        good = llm.batch.Text([5, 6], 20, on_end=lambda end: (ends.append(end), done.set()), on_error=errors.append)
        engine.add(model.batch, [*bad, good])
        assert done.wait(60)
        assert engine.call(lambda: 1).result(60) == 1 and engine.waiting == engine.running == 0 == len(engine._open)
    assert [type(each) for each in errors] == [type(error) if isinstance(error, Exception) else RuntimeError] * 2
    assert ends[0].tokens == llm.generate(model.batch.decoder, [5, 6], 20).tokens


def test_half_a_head_after_an_answer(model, monkeypatch):
    monkeypatch.setattr("lowbit.serve.run._SILENT", 0.3)
    with serving([model], Limits()) as (port, _), contextlib.ExitStack() as stack:
        for sent in (b"GET /he", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "):
            connection = connect(stack, port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.read() == b'{"status":"ok"}'
            connection.sendall(sent)
            assert connection.recv(1) == b""
        assert Client(port).post("/v1/completions", **BODY)["choices"]


def test_a_slow_body_after_its_answer(model, monkeypatch):
    monkeypatch.setattr("lowbit.serve.run._SILENT", 0.3)
    with serving([model], Limits()) as (port, _), contextlib.ExitStack() as stack:
        connection = connect(stack, port, HEAD.replace("completions", "nothing").replace("80", "8000"))
        assert answer(connection)[0] == 404
        deadline = time.monotonic() + 60
        with pytest.raises(OSError):  # closed
            while time.monotonic() < deadline:
                connection.sendall(b" ")
                time.sleep(0.05)


@pytest.mark.parametrize("path", ["/detokenize", "/nothing"])
def test_a_body_with_two_lengths_ends_its_connection(model, path):
    """A proxy that uses Content-Length would take data after the last chunk as part of the body."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n"
    hidden = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serving([model], Limits()) as (port, _), contextlib.ExitStack() as stack:
        connection = connect(stack, port, head + "0\r\n\r\n" + hidden)
        assert answer(connection)[0] in (400, 404)
        assert connection.recv(1000) == b""


@pytest.mark.parametrize(
    "sent",
    [
        "GARBAGE\r\n\r\n", "GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "GET /health HTTP/1.1\r\nA: " + "a" * 100_000,
        "POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n", "\x16\x03\x01\x02",
        "POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    ],
)  # fmt: skip
def test_malformed_http_gets_an_error_of_the_api(model, sent):
    with serving([model], Limits()) as (port, _), contextlib.ExitStack() as stack:
        connection = connect(stack, port, sent)
        connection.shutdown(socket.SHUT_WR)
        status, error = answer(connection)
        assert status == 400 and (error["code"], error["type"]) == ("invalid_http", "invalid_request_error")
        assert connection.recv(1) == b""


def test_idle_connections_make_room(model, monkeypatch):
    monkeypatch.setattr("lowbit.serve.run._CONNECTIONS", 8)
    with serving([model], Limits()) as (port, server), contextlib.ExitStack() as stack:
        half = "POST /detokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 60\r\n\r\n{"
        bodies = [connect(stack, port, half) for _ in range(6)]
        while server.gate.busy < 6:
            time.sleep(0.01)
        idle = [connect(stack, port, "GET /he") for _ in range(2)]
        assert Client(port).post("/v1/completions", **BODY)["choices"]  # instead of the first idle one
        status, error = answer(idle[0])
        assert status == 503 and error["code"] == "too_many_connections"
        more = [connect(stack, port, half) for _ in range(2)]
        assert answer(idle[1])[0] == 503
        while server.gate.busy < 8:
            time.sleep(0.01)
        last = connect(stack, port)  # no other is idle
        assert answer(last)[0] == 503
        for connection in [*bodies, *more]:
            connection.close()


def test_incomplete_bodies_make_room(model):
    with serving([model], Limits(requests=4)) as (port, server), contextlib.ExitStack() as stack:
        half = [connect(stack, port, HEAD + "{") for _ in range(4)]
        while len(server.gate.bodies) < 4:
            time.sleep(0.01)
        for _ in range(2):
            assert Client(port).post("/v1/completions", **BODY)["choices"]
        status, error = answer(half[0])  # was evicted to make room
        assert (status, error["code"]) == (503, "too_many_requests") and "expected at most 4" in error["message"]
        half[1].sendall(json.dumps(BODY)[1:].ljust(79).encode())
        response = http.client.HTTPResponse(half[1])
        response.begin()
        assert response.status == 200


def test_a_body_must_arrive_at_a_minimum_rate(model):
    with serving([model], Limits(body_seconds=0.4, body_rate=1000)) as (port, server), contextlib.ExitStack() as stack:
        connection = connect(stack, port, HEAD + "{")
        status, error = answer(connection)
        assert status == 408 and error["message"] == "the body is not complete after 0.401 seconds"
        connection = connect(stack, port, HEAD.replace("80", "8000"))
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(answer, connection)
            with contextlib.suppress(OSError):
                while not found.done():
                    connection.sendall(b" ")  # would take minutes
                    time.sleep(0.02)
            assert found.result()[0] == 408
        assert not server.gate.bodies and not server.gate.busy


def test_a_stream_is_an_open_request_until_it_ends(loaded):
    model = made(loaded)
    started, go = threading.Event(), threading.Event()
    run = model.batch.decoder.run_texts
    model.batch.decoder.run_texts = lambda texts: (run(texts), started.set(), go.wait(60))[0]
    with serving([model], Limits(requests=1)) as (port, server), ThreadPoolExecutor(1) as pool:
        client = Client(port)
        stream = pool.submit(client.stream, "/v1/completions", **BODY)
        assert started.wait(60)
        error, _ = client.refused("/v1/completions", BODY, 503)
        assert error["code"] == "too_many_requests"
        go.set()
        assert stream.result()
        while server.gate.busy:
            time.sleep(0.01)
        assert client.post("/v1/completions", **BODY)["choices"]


def play(events, seconds, reads, end=None):
    """Messages for a reader of a stream that stops after two messages until ``reads`` is set."""
    sent, server = [], Server([], Limits())

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        if len(sent) == 2:
            await reads.wait()
        sent.append(message)

    async def run():
        response = Events(events(), lambda: server.gate._time(seconds), lambda: sent.append("gone"), lambda: None)
        playing = asyncio.ensure_future(response({"type": "http", "method": "POST"}, receive, send))
        if end is not None:
            await asyncio.sleep(0.05)
            end(server)
        await asyncio.sleep(0.2)
        reads.set()
        await playing

    asyncio.run(run())
    return [each if each == "gone" else each.get("body", b"").decode() for each in sent]


async def endless():
    while True:
        yield {"text": "a"}
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("seconds", "end", "said"), [(0.1, None, "the answer took too long"), (60, Server.end, "the server is shutting down")]
)
def test_a_reader_that_stalls_gets_the_error_and_the_end(seconds, end, said):
    head, first, *rest = play(endless, seconds, asyncio.Event(), end)
    assert (head, first) == ("", 'data: {"text": "a"}\n\n')
    assert json.loads(rest[0].removeprefix("data: "))["error"]["message"].startswith(said)
    assert rest[1:] == ["data: [DONE]\n\n"]


def test_a_reader_that_never_reads_is_disconnected(monkeypatch):
    monkeypatch.setattr("lowbit.serve.events._LAST_WORDS", 0.05)
    assert play(endless, 0.05, asyncio.Event())[2:] == ["gone"]


def test_a_timeout_before_the_first_event():
    async def silent():
        await asyncio.sleep(60)
        yield {}

    server, sent = Server([], Limits()), []

    async def run():
        async def send(message):
            sent.append(message)

        async def receive():
            await asyncio.Event().wait()

        response = Events(silent(), lambda: server.gate._time(0.05), lambda: None, lambda: None)
        await response({"type": "http", "method": "POST"}, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 504 and b"took too long" in sent[1]["body"]


@pytest.mark.more
def test_requests_after_the_grace_period(packed):
    """Running and waiting requests, streams and incomplete bodies get status 503 or its event; the server exits without a
    traceback."""
    options = ("--port", "0", "--grace", "0", "--threads", "1", "--at-once", "1", "--template", TINY / "plain.jinja")
    command = list(map(str, [LOWBIT, "serve", packed[0], *options]))
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD) as process,
        contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool,
    ):  # fmt: skip
        try:
            line = next(line for line in process.stderr if "/v1" in line)
            client = Client(int(line.partition("127.0.0.1:")[2].partition("/")[0]))
            body = BODY | {"max_tokens": 10000, "ignore_eos": True, "n": 4}
            asked = [pool.submit(client.send, "/v1/completions", body | {"stream": stream}) for stream in (False, True, False)]
            half = connect(stack, client.port, HEAD + "{")
            while "lowbit_waiting_texts 11.0" not in client.get("/metrics"):
                assert not any(each.done() for each in asked)
                time.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            for number, each in enumerate(asked):
                status, _, found = each.result()
                if number == 1 and status == 200:
                    *_, event, done, rest = found.decode().split("\n\n")
                    assert (done, rest) == ("data: [DONE]", "")
                    found = event.removeprefix("data: ")
                else:
                    assert status == 503, found
                assert json.loads(found)["error"]["code"] == "shutting_down"
            status, error = answer(half)
            assert (status, error["code"]) == (503, "shutting_down")
            assert process.wait(60) == 0
            assert process.stderr.read() == "ended\n"
        finally:
            process.kill()
