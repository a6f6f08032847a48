"""`lowbit serve`: errors in OpenAI's format, keys and hosts, limits of requests and connections."""

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_line import PROMPT
from needs import need_packages

need_packages("starlette", "uvicorn")
from lowbit.serve.routes import Limits
from lowbit.serve.run import allow_connections
from served_models import CHAT, Client, client, loaded, made, served, serving  # noqa: F401


@pytest.mark.parametrize(
    ("path", "body", "status", "message", "param", "code"),
    [
        ("/v1/completions", b'{"prompt": ', 400, "the body is not JSON: EOF while parsing a value", None, "invalid_json"),
        ("/v1/completions", b"[1]", 400, "the body is an array; expected an object", None, None),
        ("/v1/completions", {"model": "gpt-4", "prompt": "x"}, 404, "there is no model 'gpt-4'; expected tiny or encoder",
         "model", "model_not_found"),
        ("/v1/completions", {"model": "encoder", "prompt": "x"}, 400, "the model encoder makes embeddings", "model", None),
        ("/v1/completions", {"prompt": [3] * 256}, 400, "prompt has 256 tokens; expected fewer than the 256", "prompt",
         "context_length_exceeded"),
        ("/v1/completions", {"prompt": [2048]}, 400, "prompt has a token 2048; expected 0 to 2047", "prompt", None),
        ("/v1/completions", {"prompt": []}, 400, "prompt is an array; expected 1 to 16 entries, not 0", "prompt", None),
        ("/v1/completions", {}, 400, "prompt is missing; expected a value", "prompt", None),
        ("/v1/completions", {"prompt": ["a"] * 17}, 400, "prompt is an array; expected 1 to 16 entries, not", "prompt", None),
        ("/v1/completions", {"prompt": "a", "n": 17}, 400, "n is 17; expected less", "n", None),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, 400, "best_of is 3; expected 1, as n", "best_of", None),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature is -1; expected gr", "temperature", None),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature is 'hot'; expected a number",
         "temperature", None),
        ("/v1/completions", b'{"prompt": "a", "top_p": NaN}', 400, "the body is not JSON: expected value", None,
         "invalid_json"),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 2.5}, 400, "presence_penalty is 2.5; expected less",
         "presence_penalty", None),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0; expected 1 or more without echo",
         "max_tokens", None),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens is 1.5; expected a whole number",
         "max_tokens", None),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, r"stop\[0\] is ''; expected a", "stop", None),
        ("/v1/completions", {"prompt": "a", "stop": 5}, 400, "stop is 5; expected an array", "stop", None),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs is 21; expected less", "logprobs", None),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias.x is 'x'; expected", "logit_bias", None),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias.1 is 101; expected less",
         "logit_bias", None),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5000": 1}}, 400, "logit_bias has token 5000; expected 0 to 2047",
         "logit_bias", None),
        ("/v1/completions", {"prompt": "a", "stream": 1}, 400, "stream is 1; expected true or false", "stream", None),
        ("/v1/completions", {"prompt": "a", "temprature": 1}, 400, "there is no parameter temprature", "temprature",
         "unknown_parameter"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported", "suffix", "unsupported_parameter"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs is 2; expected logprobs true", "top_logprobs",
         None),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, 400, "response_format.type is 'xml'; expected",
         "response_format", None),
        ("/v1/chat/completions", {"messages": []}, 400, "messages is an array; expected 1 to 4096 entries, not 0",
         "messages", None),
        ("/v1/chat/completions", {"messages": ["x"]}, 400, r"messages\[0\] is 'x'; expected an object", "messages", None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         r"messages\[0\].content\[0\].type is 'image'; expected 'text'", "messages", None),
        ("/v1/embeddings", {"input": "a", "model": "tiny"}, 400, "the model tiny writes texts", "model", None),
        ("/v1/embeddings", {"input": "a"}, 400, "model is missing; expected one of tiny, encoder", "model", None),
        ("/v1/embeddings", {"input": [], "model": "encoder"}, 400, "input is an array; expected 1 to", "input", None),
        ("/v1/embeddings", {"input": "a", "model": "encoder", "dimensions": 5}, 400, "dimensions is 5; expected at most 2",
         "dimensions", None),
        ("/v1/embeddings", {"input": ["a", ""], "model": "encoder"}, 400, r"input\[1\] is ''; expected a", "input", None),
        ("/v1/embeddings", {"input": ["a"] * 2049, "model": "encoder"}, 400, "input is an array; expected 1 to 2048 entr",
         "input", None),
        ("/v1/embeddings", {"input": [["a"]], "model": "encoder"}, 400, r"input\[0\]\[0\] is 'a'; exp", "input", None),
        ("/v1/embeddings", {"input": [2048], "model": "encoder"}, 400, "input has a token 2048; expected 0 to 2047", "input",
         None),
        ("/v1/embeddings", {"input": [5] * 9, "model": "encoder"}, 400, "input has 9 tokens; expected at most the 8",
         "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": ["a", "word " * 9], "model": "encoder"}, 400, r"input\[1\] has \d+ tokens; expected",
         "input", "context_length_exceeded"),
        ("/v1/embeddings", {"input": "a", "model": "encoder", "encoding_format": "hex"}, 400, "encoding_format is 'hex'; exp",
         "encoding_format", None),
        ("/v1/embeddings", {"input": "a", "model": "encoder", "prompt_name": "query"}, 400,
         "prompt_name is 'query'; expected none: the model has no prompts", "prompt_name", None),
        ("/v1/embeddings", {"input": "a", "model": "encoder", "temperature": 1}, 400, "there is no parameter temperature",
         "temperature", "unknown_parameter"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "model": "tiny"}, 400, "the model tiny writes texts", "model", None),
        ("/v1/rerank", {"query": "word " * 9, "documents": ["a"], "model": "encoder"}, 400, r"query has \d+ tokens; expec",
         "query", "context_length_exceeded"),
        ("/v1/rerank", {"query": "a", "documents": [{"texts": "a"}], "model": "encoder"}, 400, r"documents\[0\] is an obj",
         "documents", None),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0, "model": "encoder"}, 400, "top_n is 0; expected greater",
         "top_n", None),
        ("/detokenize", {"tokens": [5000], "model": "tiny"}, 400, "tokens has 5000; expected token ids from 0 to 2047",
         "tokens", None),
        ("/tokenize", {"model": "tiny"}, 400, "content is missing; expected a text", "content", None),
        ("/tokenize", {"model": "tiny", "a\x1b[2J\0\u202e": 1}, 400,
         re.escape(r"there is no parameter a\x1b[2J\x00\u202e; expected"), "a\x1b[2J\0\u202e", "unknown_parameter"),
        ("/v1/nothing", {}, 404, "there is no POST /v1/nothing", None, "not_found"),
    ],
)  # fmt: skip
def test_errors_have_one_format(client, path, body, status, message, param, code):
    if isinstance(body, dict) and path.startswith("/v1/c"):
        body = {"model": "tiny"} | body
    elif isinstance(body, bytes):
        body = body.replace(b'{"prompt": "a"', b'{"model": "tiny", "prompt": "a"')
    error, _ = client.refused(path, body, status)
    assert re.match(message, error["message"]) and (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "invalid_request_error"
    assert json.loads(client.get("/health")) == {"status": "ok"}


COMPLETE, CHAT_PATH, SPEECH = "/v1/completions", "/v1/chat/completions", "/v1/audio/transcriptions"


@pytest.mark.parametrize(
    ("method", "path", "status", "message", "code"),
    [
        ("POST", f"{CHAT_PATH}/", 404, f"there is no POST {CHAT_PATH}/; docs/serving.md", "not_found"),
        ("POST", "/tokenize/", 404, "there is no POST /tokenize/; docs", "not_found"),
        ("GET", "/health/", 404, "there is no GET /health/; docs", "not_found"),
        ("GET", f"{COMPLETE}/", 404, f"there is no GET {COMPLETE}/; docs", "not_found"),
        ("HEAD", "/nothing/", 404, None, None),
        ("POST", "//", 404, "there is no POST //; docs", "not_found"),
        ("POST", "/v1/a%0Ab%FF?c", 404, "there is no POST /v1/a%0Ab%FF; docs", "not_found"),
        ("GET", COMPLETE, 405, f"the method is GET; {COMPLETE} expects POST", "method_not_allowed"),
        ("HEAD", COMPLETE, 405, None, None),
        ("OPTIONS", CHAT_PATH, 405, f"the method is OPTIONS; {CHAT_PATH} expects POST", "method_not_allowed"),
        ("DELETE", SPEECH, 405, f"the method is DELETE; {SPEECH} expects POST", "method_not_allowed"),
        ("POST", "/v1/models", 405, "the method is POST; /v1/models expects GET or HEAD", "method_not_allowed"),
        ("HEAD", "/v1/models", 200, None, None),
        ("HEAD", "/v1/models/other", 404, None, None),
        ("GET", "/v1/models/other/", 404, "there is no model 'other/'; expected tiny or encoder", "model_not_found"),
        ("GET", "/v1/models/", 404, "there is no model ''; expected tiny or encoder", "model_not_found"),
    ],
)
def test_wrong_paths_and_methods(client, method, path, status, message, code):
    found, headers, document = client.send(path, {"model": "tiny", "prompt": "a"} if method == "POST" else None, method)
    assert (found, headers["content-type"]) == (status, "application/json"), document
    expected = {"GET", "HEAD"} if path.startswith("/v1/models") else {"POST"}
    assert set((headers["allow"] or "").split(", ")) == (expected if status == 405 else {""})
    if message is None:
        assert method == "HEAD" and document == b""
        return
    error = json.loads(document)["error"]
    assert error["message"].startswith(message) and error["code"] == code, error
    assert (error["type"], error["param"]) == ("invalid_request_error", "model" if code == "model_not_found" else None)


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=a", "text/plain", "application/json; charset=\xff", ""])
def test_types_of_bodies(client, kind):
    """An endpoint of JSON parses any body as JSON, as clients often omit the type; a form has to say that it is one."""
    headers = {"Content-Type": kind}
    assert client.send("/tokenize", {"model": "tiny", "content": PROMPT}, **headers)[0] == 200
    for path in ("/tokenize", SPEECH):
        status, got, document = client.send(path, b'--a\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny', **headers)
        assert (status, got["content-type"]) == (400, "application/json"), document
        assert set(json.loads(document)["error"]) == {"message", "type", "param", "code"}


def test_a_key_a_host_and_a_page_of_another_site(loaded):
    with serving([made(loaded)], Limits(api_key="s3cret", hosts=("127.0.0.1", "localhost"))) as (port, _):
        keyed, other, none = Client(port, "s3cret"), Client(port, "s3cre"), Client(port)
        assert keyed.post("/tokenize", content="a")["count"] and none.get("/health") and none.get("/")
        for client, found in ((other, "another one"), (none, "none")):
            error, headers = client.refused("/tokenize", {"content": "a"}, 401)
            assert error["code"] == "invalid_api_key" and error["message"].endswith(found)
            assert error["type"] == "authentication_error" and headers["www-authenticate"] == "Bearer"
            assert client.send("/metrics")[0] == client.send("/v1/models")[0] == 401
        status, _, body = keyed.send("/v1/models", Host=f"evil.example:{port}")
        assert status == 403 and json.loads(body)["error"]["code"] == "wrong_host"
        status, _, body = keyed.send("/tokenize", {"content": "a"}, Origin="http://evil.example")
        assert status == 403 and json.loads(body)["error"]["code"] == "wrong_origin"
        assert keyed.send("/tokenize", {"content": "a"}, Origin=f"http://127.0.0.1:{port}")[0] == 200


def test_limits_of_queue_time_and_body(loaded):
    model = made(loaded, at_once=1)
    started, go = threading.Event(), threading.Event()
    run = model.batch.decoder.run_texts
    model.batch.decoder.run_texts = lambda texts: (started.set(), go.wait(60), run(texts))[-1]
    with serving([model], Limits(waiting=1, timeout=1.0, body_bytes=2000)) as (port, server), ThreadPoolExecutor(3) as pool:
        client = Client(port)
        body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        first = pool.submit(client.send, "/v1/completions", body)
        assert started.wait(60)
        second = pool.submit(client.send, "/v1/completions", body | {"stream": True})
        while not server.engine.waiting:
            time.sleep(0.01)
        for more in ({}, {"stream": True}):
            error, headers = client.refused("/v1/completions", body | more, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full") and int(headers["retry-after"]) >= 1
        assert "expected at most 1" in error["message"]
        error, _ = client.refused("/v1/completions", body | {"prompt": "a" * 3000}, 413)
        assert error["message"] == "the body has more than 2000 bytes; expected fewer"
        status, _, data = first.result()
        assert status == 504 and "took too long" in json.loads(data)["error"]["message"]
        status, _, data = second.result()  # nothing was sent yet, so the answer may have an error status
        assert status == 504
        go.set()
        while server.engine.running or server.engine.waiting:
            time.sleep(0.01)
        assert client.post("/v1/completions", **body)["usage"]["completion_tokens"] == 3


def test_a_failing_model_ends_only_its_own_requests(loaded):
    model = made(loaded)
    run = model.batch.decoder.run_texts
    with serving([model], Limits()) as (port, server):
        client = Client(port)
        model.batch.decoder.run_texts = lambda texts: 1 / 0
        error, _ = client.refused("/v1/completions", {"prompt": "a"}, 500)
        assert (error["type"], error["message"]) == (
            "server_error", "the model failed with ZeroDivisionError; the server's log has the traceback"
        )  # fmt: skip
        model.batch.decoder.run_texts = lambda texts: [row * float("nan") for row in run(texts)]
        error, _ = client.refused("/v1/completions", {"prompt": "a", "stream": True}, 500)
        assert error["message"].startswith("the model's logits are not finite")
        model.batch.decoder.run_texts = run
        assert client.post("/v1/completions", prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert server.engine.running == server.engine.waiting == 0


def test_a_thousand_connections(loaded):
    """Silent connections do not block a request; a thousand concurrent requests get answers or one sentence."""
    allow_connections()
    with serving([made(loaded)], Limits(waiting=20, requests=50)) as (port, _), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(1000)]
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0, "seed": 1}
        expected = Client(port).post("/v1/completions", **body)["choices"]
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        for each in silent:
            each.sendall(head.encode() + data)
        found = {200: 0, 429: 0, 503: 0}
        for each in silent:
            each.settimeout(300)
            response = http.client.HTTPResponse(each)
            response.begin()
            document = json.loads(response.read())
            found[response.status] += 1
            if response.status == 200:
                assert document["choices"] == expected
            else:
                assert document["error"]["message"].endswith("send the request again later") and response.headers["retry-after"]
        assert sum(found.values()) == 1000 and found[200] >= 20, found
        assert Client(port).post("/v1/completions", **body)["choices"] == expected


def test_connections_without_a_request_are_closed(loaded, monkeypatch):
    monkeypatch.setattr("lowbit.serve.run._SILENT", 0.2)
    with serving([made(loaded)], Limits()) as (port, _):
        for begin in (b"", b"GET /health HTTP/1.1\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(begin)
                connection.settimeout(60)
                assert connection.recv(1) == b""
        assert Client(port).get("/health")


def test_a_body_that_does_not_arrive(loaded):
    with serving([made(loaded)], Limits(timeout=0.2)) as (port, _), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 408
        assert json.loads(response.read())["error"]["message"] == "the body is not complete after 0.2 seconds"
