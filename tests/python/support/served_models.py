"""Models behind a real HTTP server on a thread of the test's process, a client, and texts for them."""

import asyncio
import contextlib
import copy
import http.client
import json
import re
import socket
import threading
import time

import pytest
import torch
from command_line import PROMPT, TINY
from lowbit import llm
from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens
from needs import need_packages

need_packages("starlette", "uvicorn")
import uvicorn
from lowbit.serve.embeddings import Encoder
from lowbit.serve.model_list import LanguageModel
from lowbit.serve.routes import Limits, Server
from lowbit.serve.run import _Http

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


def port_of(process):
    """The port of a started `lowbit serve`, and the lines that it has printed up to the one with its address."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if match := re.search(r"on http://127.0.0.1:(\d+)/v1", line):
            return int(match[1]), lines
    raise AssertionError(lines)


class FakeEncoder:
    max_seq_length = 8
    similarity_fn_name = "dot"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getitem__(self, index):
        return None  # a module without a transformer

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


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


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
