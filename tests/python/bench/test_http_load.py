"""bench/http_load.py with a server that gives known answers: what it counts and what it refuses."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from http_load import Server, ask, load

TOKENS = 5


class Writer(BaseHTTPRequestHandler):
    """Streams a piece for each token in OpenAI's format. A prompt that begins with 0 gets one token less, one with 1 an error.
    Answers wait until as many prompts as `together` counts have come."""

    together = threading.Barrier(1)

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = asked["prompt"][0]
        self.send_response(400 if first == 1 else 200)
        self.end_headers()
        if first == 1:
            self.wfile.write(b"no such model")
            return
        Writer.together.wait(30)
        count = asked["max_tokens"] - (first == 0)
        pieces = [{"choices": [{"text": "x"}]} for _ in range(count)]
        pieces.append({"choices": [], "usage": {"completion_tokens": count}})
        for piece in pieces:
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture(scope="module")
def port():
    with ThreadingHTTPServer(("127.0.0.1", 0), Writer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_requests_are_in_flight_together(port, monkeypatch):
    monkeypatch.setattr(Writer, "together", threading.Barrier(4))  # requests one after the other would time out
    rate, first = load(port, [[i, 3] for i in range(2, 6)], TOKENS)
    assert 0 < first < 4 * TOKENS / rate  # the first text comes before the last answer ends


def test_an_answer_has_its_times_and_tokens(port):
    answer = ask(port, [2], TOKENS)
    assert answer.tokens == TOKENS and answer.begin < answer.first < answer.end


@pytest.mark.parametrize("first, wrong", [(0, "wrote 4 tokens; expected 5"), (1, "answers 400: no such model")])
def test_a_short_answer_and_a_refusal_are_errors(port, first, wrong):
    with pytest.raises(RuntimeError, match=f"port {port} {wrong}"):
        load(port, [[2], [first]], TOKENS)


def test_a_server_that_exits_gives_the_reason(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such checkpoint')"]
    with pytest.raises(RuntimeError, match="does not serve; it said: no such checkpoint"):
        Server(command, 1, {}, tmp_path / "log")
