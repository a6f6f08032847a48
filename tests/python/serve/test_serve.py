"""`lowbit serve` over real HTTP: each text equals the one generated alone, errors have OpenAI's format, clients disconnect."""

import asyncio
import contextlib
import copy
import errno
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from command_line import FLOAT, LOWBIT, ONE_THREAD, PROMPT, TINY, invoke
from command_line import error as failed
from lowbit import llm
from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens
from lowbit.llm.penalties import token_logprobs
from lowbit.llm.templates import render
from needs import need_packages

need_packages("starlette", "uvicorn")

import uvicorn
from lowbit.serve.embeddings import Encoder
from lowbit.serve.model_list import LanguageModel
from lowbit.serve.routes import Limits, Server
from lowbit.serve.run import _Http, allow_connections, is_local

MAX_LENGTH = 256
PLAIN = (TINY / "plain.jinja").read_text(encoding="utf-8")
DRAWN = {
    "temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.2,
    "repetition_penalty": 1.1, "dry_multiplier": 0.5, "logit_bias": {"300": 2.5},
}  # fmt: skip
SYSTEM = "This function takes a list of names and returns a dictionary. It raises an error if a name is empty. "
TEXTS = [PROMPT, SYSTEM + "The names are", SYSTEM + "An error", "a", SYSTEM * 6 + "The list contains", "one, two, one, two,"]


class Client:
    """Requests to one server."""

    def __init__(self, port: int, key: str | None = None, model: str | None = None):
        self.named = {} if model is None else {"model": model}
        self.port, self.headers = port, {} if key is None else {"Authorization": f"Bearer {key}"}

    def send(self, path, body=None, method=None, **headers):
        """Sends a request; returns status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method or ("GET" if body is None else "POST"), path, data, self.headers | headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def get(self, path):
        status, _, body = self.send(path)
        assert status == 200, body
        return body.decode()

    def post(self, path, **body):
        status, _, found = self.send(path, self.named | body)
        assert status == 200, found
        return json.loads(found)

    def refused(self, path, body, status):
        """Sends a request; returns its error."""
        found, headers, document = self.send(path, body)
        error = json.loads(document)["error"]
        assert found == status and set(error) == {"message", "type", "param", "code"}, (found, document)
        return error, headers

    def stream(self, path, **body):
        """The chunks of a streamed answer; checks that nothing follows its end."""
        status, headers, data = self.send(path, self.named | body | {"stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), data
        *events, end, rest = data.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextlib.contextmanager
def serving(models, limits):
    """A server on a thread of this process: its port and the server."""
    server = Server(models, limits)
    own = uvicorn.Server(uvicorn.Config(server.app(), http=_Http, log_level="error", lifespan="on"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(own.serve(sockets=[listener])))
    thread.start()
    try:
        while not own.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield listener.getsockname()[1], server
    finally:
        own.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def loaded(packed):
    return load_model(packed[0]), load_tokenizer(packed[0])


def made(loaded, name="tiny", **more):
    """A separate model, because a decoder does not share its model."""
    model, tokenizer = copy.deepcopy(loaded[0]), loaded[1]
    settings = {"max_length": MAX_LENGTH, "cache": None, "at_once": 6, "rows": 64, "prefix_bytes": 1 << 24} | more
    decoder = llm.Decoder(model, settings.pop("max_length"), settings.pop("cache"))
    return LanguageModel.of(name, decoder, model, tokenizer, PLAIN, stop_tokens(model, tokenizer), **settings)


class FakeEncoder:
    max_seq_length = 8
    similarity_fn_name = "dot"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, texts, **_):
        return torch.tensor([[float(len(text)), 0.5] for text in texts]).numpy()


@pytest.fixture(scope="module")
def served(loaded):
    language = made(loaded)
    with serving([language, Encoder("encoder", FakeEncoder(loaded[1]))], Limits(waiting=200)) as (port, server):
        yield Client(port, model="tiny"), server, language


@pytest.fixture
def client(served):
    return served[0]


def alone(loaded, served, prompt, count, seed=0, stop=(), logprobs=None, **settings):
    """The library's texts, one after the other, each up to a stop string."""
    model, tokenizer = loaded
    settings |= {"logit_bias": {int(token): bias for token, bias in settings.get("logit_bias", {}).items()}}
    settings |= {"dry_breakers": llm.breakers(tokenizer)} if settings.get("dry_multiplier") else {}
    text = llm.TextUntil(tokenizer, prompt, stop)
    found = llm.generate(
        served[2].batch.decoder, prompt, count, max_length=MAX_LENGTH, seed=seed, until=text,
        stop=stop_tokens(model, tokenizer), logprobs=logprobs, **settings,
    )  # fmt: skip
    return text.finish(), found


def test_each_text_equals_the_text_generated_alone(loaded, served, client):
    """Forty concurrent requests of all kinds, some of which disconnect."""
    chance, tokenizer = random.Random(1), loaded[1]
    asked = []
    for number in range(40):
        text = chance.choice(TEXTS)
        body = {"model": "tiny", "max_tokens": chance.randint(1, 20), "seed": number}
        body |= DRAWN if chance.random() < 0.7 else {"temperature": 0}
        body |= {"stop": chance.choice([["the", "\n"], ","])} if chance.random() < 0.4 else {}
        if chance.random() < 0.4:
            asked.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
        else:
            asked.append(("/v1/completions", body | {"prompt": text}))

    def ask(number):
        path, body = asked[number]
        if number % 7 == 3:  # starts reading, then disconnects
            connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=120)
            with contextlib.closing(connection):
                connection.request("POST", path, json.dumps(body | {"stream": True, "max_tokens": 100, "stop": None}))
                connection.getresponse().read(10)
            return None
        if number % 2:
            return client.post(path, **body)["choices"][0]
        chunks = client.stream(path, **body)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
        assert [each["finish_reason"] for each in choices[:-1]] == [None] * (len(choices) - 1)
        return {"text": text, "finish_reason": choices[-1]["finish_reason"]}

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(len(asked))))
    reasons = set()
    for (_, body), answer in zip(asked, answers, strict=True):
        if answer is None:
            continue
        prompt = render(tokenizer, body["messages"], PLAIN) if "messages" in body else tokenizer(body["prompt"])["input_ids"]
        settings = {name: body[name] for name in DRAWN if name in body}
        stop = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", ())
        text, found = alone(loaded, served, prompt, body["max_tokens"], body["seed"], stop, **settings)
        said = answer["text"] if "text" in answer else answer["message"]["content"]
        assert said == text, body
        assert answer["finish_reason"] == ("length" if found.stopped.startswith("max") else "stop")
        reasons.add(found.stopped)
    assert {"max_new_tokens", "until"} <= reasons
    deadline = time.monotonic() + 60
    while served[1].engine.running or served[1].engine.waiting:  # disconnected requests have freed their slots
        assert time.monotonic() < deadline
        time.sleep(0.01)
    text = client.get("/metrics")
    assert 1 <= int(re.search(r"^lowbit_canceled_requests_total (\d+)", text, re.M)[1]) <= 6


def test_several_choices_and_usage(loaded, served, client):
    prompt = loaded[1](PROMPT)["input_ids"]
    said = client.post("/v1/completions", prompt=[PROMPT, prompt[:4]], n=2, max_tokens=6, seed=5, temperature=1.0)
    expected = [alone(loaded, served, each, 6, 5 + i, temperature=1.0) for each in (prompt, prompt[:4]) for i in range(2)]
    assert [choice["text"] for choice in said["choices"]] == [text for text, _ in expected]
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2, 3] and said["object"] == "text_completion"
    new = sum(len(found.tokens) for _, found in expected)
    usage = said["usage"]
    assert usage["prompt_tokens"] == len(prompt) + 4 and usage["completion_tokens"] == new
    assert usage["total_tokens"] == len(prompt) + 4 + new and said["seed"] == 5
    *chunks, last = client.stream(
        "/v1/completions", prompt=prompt, n=2, max_tokens=6, seed=5, temperature=1.0, stream_options={"include_usage": True}
    )
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(2)]
    assert texts == [text for text, _ in expected[:2]]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == sum(len(f.tokens) for _, f in expected[:2])
    without = [client.post("/v1/completions", prompt=PROMPT, max_tokens=8, temperature=1.5) for _ in range(4)]
    assert len({each["seed"] for each in without}) == 4  # random seeds, reported so that requests can be repeated
    again = client.post("/v1/completions", prompt=PROMPT, max_tokens=8, temperature=1.5, seed=without[0]["seed"])
    assert again["choices"][0]["text"] == without[0]["choices"][0]["text"]


def test_logprobs_and_echo(loaded, served, client):
    tokenizer = loaded[1]
    prompt = tokenizer(PROMPT)["input_ids"]
    text, found = alone(loaded, served, prompt, 5, logprobs=3)
    body = {"prompt": prompt, "max_tokens": 5, "logprobs": 3, "temperature": 0}
    (choice,) = client.post("/v1/completions", **body)["choices"]
    said = choice["logprobs"]
    assert choice["text"] == text and said["tokens"] == [tokenizer.decode([token]) for token in found.tokens]
    assert said["token_logprobs"] == [each.logprob for each in found.logprobs]
    assert said["top_logprobs"][0] == {tokenizer.decode([token]): value for token, value in found.logprobs[0].top}
    (echoed,) = client.post("/v1/completions", **body, echo=True)["choices"]
    shown = tokenizer.decode(prompt, skip_special_tokens=True)
    assert echoed["text"] == shown + text
    with torch.no_grad():
        logits = served[2].batch.decoder.all_logits(torch.tensor([prompt]), torch.tensor([0]))[0]
    expected = [None] + [token_logprobs(row, token, 0).logprob for row, token in zip(logits, prompt[1:])]
    assert echoed["logprobs"]["token_logprobs"] == expected + said["token_logprobs"]
    assert echoed["logprobs"]["text_offset"][len(prompt)] == len(shown)
    (only,) = client.post("/v1/completions", **body | {"max_tokens": 0}, echo=True)["choices"]
    assert only["text"] == shown and only["logprobs"]["token_logprobs"] == expected
    chunks = client.stream("/v1/completions", **body, echo=True)
    streamed = [value for c in chunks if c["choices"][0]["logprobs"] for value in c["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == echoed["logprobs"]["token_logprobs"]

    body = {"messages": [{"role": "user", "content": "Return"}], "max_tokens": 4, "temperature": 0}
    (choice,) = client.post("/v1/chat/completions", **body, logprobs=True, top_logprobs=2)["choices"]
    ids = render(tokenizer, body["messages"], PLAIN)
    text, found = alone(loaded, served, ids, 4, logprobs=2)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    for one, each in zip(choice["logprobs"]["content"], found.logprobs, strict=True):
        assert (one["token"], one["logprob"]) == (tokenizer.decode([each.token]), each.logprob)
        assert bytes(one["bytes"]).decode() == one["token"] and len(one["top_logprobs"]) == 2
    chunks = client.stream("/v1/chat/completions", **body, logprobs=True, top_logprobs=2)
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""} and deltas[-1]["delta"] == {}
    assert [o for d in deltas if d["logprobs"] for o in d["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_logprobs_of_tokens_with_one_text(served, client, monkeypatch):
    """Parts of characters are one text: completions have an entry for each text, the likeliest one's, chats for each token."""
    monkeypatch.setattr(type(served[2]), "piece", lambda model, token: "\ufffd")
    body = {"max_tokens": 1, "temperature": 0}
    (choice,) = client.post("/v1/completions", prompt=PROMPT, logprobs=3, **body)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": choice["logprobs"]["token_logprobs"][0]}]
    message = {"role": "user", "content": PROMPT}
    (choice,) = client.post("/v1/chat/completions", messages=[message], logprobs=True, top_logprobs=3, **body)["choices"]
    (content,) = choice["logprobs"]["content"]
    assert [each["token"] for each in content["top_logprobs"]] == ["\ufffd"] * 3
    assert len({each["logprob"] for each in content["top_logprobs"]}) == 3


def test_a_long_prompt_does_not_stop_other_texts(loaded):
    """While it is read in pieces, a running text gets a token with each piece, and a short prompt starts."""
    model = made(loaded, rows=16, prefix_bytes=0)
    order = []
    long_, short = (loaded[1](text)["input_ids"] for text in (SYSTEM * 8, "one, two"))
    run = model.batch.decoder.run_texts

    def text(name, tokens, count):
        return llm.batch.Text(
            tokens, count, on_token=lambda token: order.append(name), on_end=lambda result: order.append(name.upper())
        )

    model.batch.add(text("a", short, 30))
    model.batch.step()
    model.batch.add(text("b", long_, 2))
    model.batch.step()
    model.batch.add(text("c", short[::-1], 3))
    model.batch.decoder.run_texts = lambda texts: order.append(sum(len(each[1]) for each in texts)) or run(texts)
    try:
        while model.batch.step():
            pass
    finally:
        model.batch.decoder.run_texts = run
    assert len(long_) > 100 and order.index("C") < order.index("b")
    until = order[: order.index("b")]
    assert until.count("a") > len(long_) // 16 and max(each for each in until if isinstance(each, int)) <= 16 + 2


def test_a_prefix_of_a_canceled_text_is_computed_again(loaded):
    """Another text that was waiting to copy its prefix computes the prefix itself."""
    model = made(loaded, rows=16, prefix_bytes=0)
    tokens = loaded[1](SYSTEM * 4)["input_ids"]
    ends = {}
    texts = [llm.batch.Text([*tokens, last], 4, on_end=lambda end, last=last: ends.update({last: end})) for last in (5, 6, 7)]
    for text in texts:
        model.batch.add(text)
    for _ in range(3):
        model.batch.step()
    model.batch.remove(texts[0])
    while model.batch.step():
        pass
    assert set(ends) == {6, 7}
    for last, end in ends.items():
        assert end.tokens == llm.generate(model.batch.decoder, [*tokens, last], 4).tokens
        assert 16 <= end.cached_tokens < len(tokens)


def test_speculative_decoding_changes_no_text(loaded, served):
    """Sequential requests, which use guesses, and concurrent ones, which use them some of the time."""
    model = made(loaded)
    model.batch.speculate(4)
    bodies = [
        {"prompt": text, "max_tokens": count, "seed": 3, **settings}
        for text, count in ((TEXTS[5] * 4, 40), (PROMPT, 30), (SYSTEM, 12))
        for settings in ({"temperature": 0}, {"temperature": 0.7, "repetition_penalty": 1.1})
    ]
    expected = []
    for body in bodies:
        settings = {name: body[name] for name in ("temperature", "repetition_penalty") if name in body}
        expected.append(alone(loaded, served, loaded[1](body["prompt"])["input_ids"], body["max_tokens"], 3, **settings)[0])
    with serving([model], Limits()) as (port, _), ThreadPoolExecutor(6) as pool:
        client = Client(port)
        for answers in (
            [client.post("/v1/completions", **body) for body in bodies],
            list(pool.map(lambda body: client.post("/v1/completions", **body), bodies)),
        ):
            assert [answer["choices"][0]["text"] for answer in answers] == expected
        found = {
            name: int(count) for name, count in re.findall(r"^lowbit_(\w+)_tokens_total (\d+).0$", client.get("/metrics"), re.M)
        }
    assert 0 < found["accepted"] < found["guessed"]


def test_a_prefix_is_cached(loaded, served, client):
    messages = [{"role": "user", "content": SYSTEM}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    first = client.post("/v1/chat/completions", **body)
    answer = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    second = client.post("/v1/chat/completions", **body)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 2 > 16
    ids = render(loaded[1], messages, PLAIN)
    assert second["choices"][0]["message"]["content"] == alone(loaded, served, ids, 8)[0]


def test_the_prefix_cache_has_a_limit(loaded):
    most = 5 * made(loaded).batch.decoder.new_caches(64).nbytes // 2  # room for two and a half texts
    model = made(loaded, prefix_bytes=most)
    made_ = [loaded[1](begin + SYSTEM * 3)["input_ids"][:60] for begin in ("", "def ", "class ", "for ")]
    for tokens in made_:
        model.batch.add(llm.batch.Text(tokens, 2))
        while model.batch.step():
            pass
        kept = [each for each, _ in model.batch.beginnings()]
        assert model.batch.kept_bytes == sum(each.nbytes for each in kept) <= most
    assert len(kept) == 2 and kept[-1].tokens[:60] == made_[-1]
    longer = llm.batch.Text([*kept[-1].tokens, 5], 2)
    model.batch.add(longer)
    while model.batch.step():
        pass
    assert longer.result.cached_tokens == len(kept[-1].tokens)
    assert not any(each is kept[-1] for each, _ in model.batch.beginnings())  # the longer text is kept


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


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


def test_tokens_models_and_embeddings(loaded, served, client):
    tokenizer = loaded[1]
    ids = tokenizer(PROMPT)["input_ids"]
    for name in ("content", "prompt"):
        assert client.post("/tokenize", model="tiny", **{name: PROMPT}) == {"tokens": ids, "count": len(ids)}
    assert client.post("/tokenize", model="tiny", messages=CHAT["messages"])["tokens"] == render(
        tokenizer, CHAT["messages"], PLAIN
    )
    assert client.post("/detokenize", model="tiny", tokens=ids)["content"] == tokenizer.decode(ids)
    cards = json.loads(client.get("/v1/models"))["data"]
    assert [card["id"] for card in cards] == ["tiny", "encoder"] and cards[0]["max_model_len"] == MAX_LENGTH
    assert json.loads(client.get("/v1/models/tiny")) == cards[0]
    found = client.post("/v1/embeddings", model="encoder", input=["abc", "a"])
    assert [each["embedding"] for each in found["data"]] == [[3.0, 0.5], [1.0, 0.5]]
    assert found["usage"]["prompt_tokens"] == len(tokenizer("abc")["input_ids"]) + len(tokenizer("a")["input_ids"])
    (one,) = client.post("/v1/embeddings", model="encoder", input="abc", encoding_format="base64")["data"]
    assert one["embedding"] == "AABAQAAAAD8="  # 3.0 and 0.5 as float32, the smaller byte first
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    whole = [{"role": "user", "content": "ab"}]
    texts = [client.post("/v1/chat/completions", model="tiny", messages=m, max_tokens=4, temperature=0) for m in (parts, whole)]
    assert texts[0]["choices"][0] == texts[1]["choices"][0]


def test_metrics(client):
    before = client.get("/metrics")
    said = client.post("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=3)
    client.refused("/v1/completions", {"model": "none", "prompt": "a"}, 404)
    after = client.get("/metrics")

    def value(text, name):
        return float((re.search(rf"^{re.escape(name)} (.*)$", text, re.M) or [0, 0])[1])

    for name, grown in (
        ("lowbit_new_tokens_total", said["usage"]["completion_tokens"]),
        ("lowbit_prompt_tokens_total", said["usage"]["prompt_tokens"]),
        ("lowbit_request_seconds_count", 1),
        ("lowbit_time_to_first_token_seconds_count", 1),
        ('lowbit_requests_total{path="/v1/completions",status="404"}', 1),
        ('lowbit_requests_total{path="/v1/completions",status="200"}', 1),
    ):
        assert value(after, name) - value(before, name) == grown, name
    for line in after.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) lowbit_\w+ .+|lowbit_\w+({.*})? [0-9.e+-]+", line), line
    counts = [int(count) for count in re.findall(r"^lowbit_request_seconds_bucket.* (\d+).0$", after, re.M)]
    assert counts == sorted(counts) and counts[-1] == value(after, "lowbit_request_seconds_count")


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


SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["list", "dict"]}, "empty": {"type": "boolean"}},
    "required": ["name", "empty"], "additionalProperties": False,
}  # fmt: skip


def test_a_text_fits_its_schema(served, client):
    need_packages("llguidance")
    for seed in range(4):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 150, "temperature": 1.0, "seed": seed}
        (choice,) = client.post("/v1/chat/completions", **body, response_format=form)["choices"]
        found = json.loads(choice["message"]["content"])
        assert choice["finish_reason"] == "stop" and found["name"] in ("list", "dict") and isinstance(found["empty"], bool)
    form["json_schema"]["schema"] = {"type": "object", "unevaluatedProperties": {"contentEncoding": 5}, "type ": 1, "not": 5}
    error, _ = client.refused("/v1/chat/completions", body | {"response_format": form}, 400)
    assert error["code"] == "unsupported_schema" and error["param"] == "response_format"


TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": {
        "type": "object", "properties": {"town": {"$ref": "#/$defs/town"}}, "required": ["town"], "additionalProperties": False,
        "$defs": {"town": {"enum": ["Oslo", "Rome"]}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
WITH_TOOLS = "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments.town }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tooled(loaded):
    model = made(loaded)
    model.template = WITH_TOOLS
    with serving([model], Limits()) as (port, _):
        yield Client(port), model


def of_stream(chunks):
    """The message of a stream's only choice, and its finish reason."""
    message = {"content": ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            message.setdefault("tool_calls", []).append({key: call[key] for key in ("type", "function")})
            assert call["index"] == len(message["tool_calls"]) - 1 and call["id"]
    return message, chunks[-1]["choices"][0]["finish_reason"]


def test_a_forced_call_of_a_tool(loaded, tooled):
    need_packages("llguidance")
    client, _ = tooled
    named = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        body = CHAT | {"max_tokens": 120, "temperature": 1.0, "seed": seed, "tools": TOOLS, "parallel_tool_calls": False}
        for choice in ("required", named):
            (answer,) = client.post("/v1/chat/completions", **body, tool_choice=choice)["choices"]
            assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
            (call,) = answer["message"]["tool_calls"]
            assert call["type"] == "function" and call["function"]["name"] in ("weather", "now")[: 1 + (choice == "required")]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {} if call["function"]["name"] == "now" else arguments["town"] in ("Oslo", "Rome")
            message, reason = of_stream(client.stream("/v1/chat/completions", **body, tool_choice=choice))
            assert message == {"content": "", "tool_calls": [{key: call[key] for key in ("type", "function")}]}
            assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', None, ["now"]),
        ('I ask. <tool_call>{"name": "now", "arguments": {}}</tool_call><tool_call>{"name": "weather", "arguments": '
         '{"town": "Rome"}}</tool_call>', "I ask. ", ["now", "weather"]),
        ('{"name": "weather", "parameters": {"town": "Oslo"}}', None, ["weather"]),
        ('[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', None, ["now", "now"]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ("[1, 2] is a list", "[1, 2] is a list", []), ("a < b <tool_call", "a < b <tool_call", []),
        ('<tool_call>{"name": </tool_call>', '<tool_call>{"name": </tool_call>', []), ("[]", "[]", []),
    ],
)  # fmt: skip
def test_calls_of_tools_in_a_text(tooled, text, content, names):
    """The grammar allows only this text."""
    need_packages("llguidance")
    body = CHAT | {"max_tokens": 200, "tools": TOOLS, "structured_outputs": {"choice": [text]}}
    (answer,) = tooled[0].post("/v1/chat/completions", **body)["choices"]
    calls = answer["message"].get("tool_calls", [])
    assert answer["message"]["content"] == content and [call["function"]["name"] for call in calls] == names
    assert answer["finish_reason"] == ("tool_calls" if names else "stop")
    message, reason = of_stream(tooled[0].stream("/v1/chat/completions", **body))
    assert (message["content"] or None, reason) == (content, answer["finish_reason"])
    assert [call["function"] for call in message.get("tool_calls", [])] == [call["function"] for call in calls]
    plain = tooled[0].post("/v1/chat/completions", **body | {"tool_choice": "none"})["choices"][0]
    assert plain["message"] == {"role": "assistant", "content": text, "refusal": None}  # as without tools


def test_a_conversation_with_tools(loaded, tooled):
    client, model = tooled
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
    said = [
        {"role": "user", "content": "How warm?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "4 degrees"},
    ]  # fmt: skip
    expected = loaded[1]("weather now How warm?weatherOslo4 degrees")["input_ids"]
    answer = client.post("/v1/chat/completions", messages=said, tools=TOOLS, max_tokens=3)
    assert answer["usage"]["prompt_tokens"] == len(expected)
    without = client.post("/v1/chat/completions", messages=said, tools=TOOLS, tool_choice="none", max_tokens=3)
    assert without["usage"]["prompt_tokens"] == len(loaded[1]("How warm?weatherOslo4 degrees")["input_ids"])


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"tools": [{}]}, r"tools\[0\].type is missing; expected a value", "tools"),
        ({"tools": 5}, "tools is 5; expected an array", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, r"tools\[0\].function.para",
         "tools"),
        ({"tool_choice": "required"}, "tool_choice requires a call, but the request has no tools", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice is 'x'; expected none,",
         "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 5}]}]}, r"messages\[0\].tool_calls\[0\].id is 5; exp",
         "messages"),
        ({"structured_outputs": {"regex": "a("}}, "the regular expression is not supported: ", "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: x"}}, "the grammar is not supported: ", "structured_outputs"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml is 'x'; expected no such name", "structured_outputs"),
        ({"structured_outputs": 5}, "structured_outputs is 5; expected an object", "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs and response_format", "structured_outputs"),
    ],
)  # fmt: skip
def test_invalid_tools_and_grammars(tooled, more, message, param):
    need_packages("llguidance")
    error, _ = tooled[0].refused("/v1/chat/completions", CHAT | more, 400)
    assert re.match(message, error["message"]) and error["param"] == param and "\n" not in error["message"], error


def test_a_template_without_tools(client):
    error, _ = client.refused("/v1/chat/completions", CHAT | {"model": "tiny", "tools": TOOLS}, 400)
    assert error["message"] == "the chat template of tiny has no tools; expected a request without them"


def test_texts_fit_their_grammar(served, client):
    need_packages("llguidance")
    for form, pattern in (
        ({"regex": "[a-f]{3,5}-[0-9]"}, "[a-f]{3,5}-[0-9]"), ({"grammar": 'start: "yes" | "no" /[!?]/'}, "yes|no[!?]"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"), ({"choice": ["left", 'r"ight']}, 'left|r"ight'),
        ({"json": SCHEMA}, "(?s){.*}"),
    ):  # fmt: skip
        for seed in range(3):
            body = {"prompt": "a", "max_tokens": 200, "temperature": 1.0, "seed": seed, "structured_outputs": form}
            (choice,) = client.post("/v1/completions", **body)["choices"]
            assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop", (form, choice)


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


def test_documents_in_order(client):
    """The fake encoder embeds a text as its length and 0.5; its similarity is the product."""
    body = {"model": "encoder", "query": "ab", "documents": ["a", "abc", "ab"]}
    found = client.post("/v1/rerank", **body)
    assert [(each["index"], each["relevance_score"]) for each in found["results"]] == [(1, 6.25), (2, 4.25), (0, 2.25)]
    (best,) = client.post("/v1/rerank", **body, top_n=1, return_documents=True)["results"]
    assert best == {"index": 1, "relevance_score": 6.25, "document": {"text": "abc"}}
    error, _ = client.refused("/v1/rerank", body | {"documents": "a"}, 400)
    assert error["message"] == "documents is 'a'; expected an array"
    error, _ = client.refused("/v1/rerank", body | {"query": None}, 400)
    assert error["message"] == "query is missing; expected a value"


def test_addresses_of_this_machine():
    assert all(map(is_local, ("127.0.0.1", "localhost", "::1", "127.8.8.8")))
    assert not any(map(is_local, ("0.0.0.0", "::", "192.168.1.10", "example.org")))


def test_the_command(packed, tmp_path, monkeypatch):
    """In a separate process, which starts quickly by a plan: it prints its address, finishes the running text, and exits."""
    monkeypatch.setenv("LOWBIT_PLAN", "1")
    model = shutil.copytree(packed[0], tmp_path / "model")
    written = invoke("generate", model, "--prompt", PROMPT, "--max-new-tokens", 1)
    assert "is written: the next run starts without torch" in written.stderr
    options = ("--port", "0", "--api-key", "k", "--threads", "1", "--max-length", "256", "--template", TINY / "plain.jinja")
    command = [LOWBIT, "serve", model, *options]
    with subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD
    ) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"on http://127.0.0.1:(\d+)/v1", line):
                    break
            assert match, lines
            client = Client(int(match[1]), "k")
            (card,) = json.loads(client.get("/v1/models"))["data"]
            assert card["id"] == model.name and card["chat"]
            body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(client.post, "/v1/completions", **body)
                while "lowbit_running_texts 1" not in client.get("/metrics"):
                    assert not running.done()
                    time.sleep(0.005)
                process.send_signal(signal.SIGTERM)
                assert running.result()["usage"]["completion_tokens"] == 100
            assert process.wait(60) == 0
            assert process.stderr.read() == "ended\n" and process.stdout.read() == ""
        finally:
            process.kill()


def test_prefixes_on_disk(loaded, tmp_path):
    """A second server reads the first one's files; the text is the same."""
    body = {"prompt": loaded[1](SYSTEM * 6)["input_ids"], "max_tokens": 5, "temperature": 0}
    answers = []
    for _ in range(2):
        model = made(loaded, prefix_bytes=0)
        model.batch.prefix_cache = llm.PrefixCache(tmp_path / "cache", model.batch.decoder)
        with serving([model], Limits()) as (port, _):
            answers.append(Client(port).post("/v1/completions", **body))
    assert answers[0]["choices"] == answers[1]["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, (len(body["prompt"]) - 1) // 64 * 64] and cached[1] >= 64


def test_a_full_disk_for_prefixes(loaded, tmp_path, monkeypatch, recwarn):
    """The answer is the same; the server warns once that it cannot store prefixes."""
    body = {"prompt": loaded[1](SYSTEM * 6)["input_ids"], "max_tokens": 5, "temperature": 0}
    model = made(loaded, prefix_bytes=0)
    model.batch.prefix_cache = llm.PrefixCache(tmp_path / "cache", model.batch.decoder)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with serving([model], Limits()) as (port, _):
        monkeypatch.setattr("lowbit.llm.prefixes._write_file", fail)
        answers = [Client(port).post("/v1/completions", **body)]
        while model.batch._active:  # the next call may still copy from an ended text
            time.sleep(0.01)
        answers.append(Client(port).post("/v1/completions", **body))
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    said = [str(each.message) for each in recwarn if "prefix cache" in str(each.message)]
    assert len(said) == 1 and said[0].endswith("is not written to: No space left on device; the text is the same without it")
    assert not list((tmp_path / "cache").glob("*.lowbit-prefix"))


def test_what_the_command_refuses(packed, tmp_path):
    several = invoke("serve", packed[0], tmp_path, "--draft", FLOAT)
    assert failed(several) == "--draft is for one model; found 2: start a server for each"
    result = invoke("serve", packed[0], "--draft", FLOAT, "--guesses", 0)
    assert result.exit_code == 2 and "expected 1 or more with --draft" in result.stderr
    same = tmp_path / packed[0].name
    same.mkdir()
    assert failed(invoke("serve", packed[0], same)).startswith(f"two models have the name {packed[0].name}")
    result = invoke("serve", packed[0], "--prefix-memory", "much")
    assert result.exit_code == 2 and "expected a size" in " ".join(result.stderr.split())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert failed(invoke("serve", packed[0], "--port", port)).startswith(f"cannot listen on 127.0.0.1, port {port}: ")
    assert "has no config.json" in failed(invoke("serve", FLOAT.parent))
