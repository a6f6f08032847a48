"""bench/serve_load.py with some hundred requests instead of ten thousand: all texts are right, and nothing leaks."""

import os
import sys
import time
from pathlib import Path

import pytest
from lowbit.llm.loading import load_model, load_tokenizer
from needs import need_packages

need_packages("starlette", "uvicorn")

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from lowbit.serve.routes import Limits
from serve_load import Alone, held, idle, leaks, play
from served_models import Client, made, serving


@pytest.mark.more
def test_hundreds_of_requests_many_of_them_disconnecting(packed):
    model = made((load_model(packed[0]), load_tokenizer(packed[0])), max_length=512, prefix_bytes=1 << 20)
    alone, rows = Alone(packed[0], 512), []
    with serving([model], Limits(waiting=8)) as (port, server):
        for number in range(2):
            seen, _ = play(port, 12, 150, 6, number, distinct=60)
            assert seen.requests == 150 and len(seen.texts) + seen.gone == 150 and seen.gone > 5
            wrong = [body for body, text in seen.texts if alone.text(body) != text]
            assert not wrong, wrong[0]
            assert idle(port) and server.engine.running == server.engine.waiting == 0
            deadline = time.monotonic() + 60  # the last connections may not be closed yet
            while rows and leaks([*rows, held(os.getpid())]) and time.monotonic() < deadline:
                time.sleep(0.05)
            rows.append(held(os.getpid()))
        assert leaks(rows) == []
        assert model.batch.kept_bytes <= 1 << 20
        assert Client(port).post("/v1/completions", prompt="a", max_tokens=2, temperature=0)["choices"]


def held_as(*changes):
    row = {"memory_now_mib": 100.0, "files": 20, "threads": 9}
    return [row | change for change in changes]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (held_as({}, {}, {"memory_now_mib": 109.0}), []),
        (held_as({"memory_now_mib": 50.0}, {}, {}), []),  # growth during the first requests
        (held_as({}, {"files": 21}), ["21 files after the last round, 20 after the first"]),
        (held_as({}, {"threads": 19}, {"threads": 10}), ["10 threads after the last round, 9 after the first"]),
        (held_as({}, {}, {"memory_now_mib": 120.0}), ["120 MiB after the last round, 100 after the second"]),
    ],
)
def test_leaks_are_found(rows, found):
    assert leaks(rows) == found
