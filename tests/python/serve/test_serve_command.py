"""The command `lowbit serve`: its process, prefixes on disk, and refusals."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from command_line import FLOAT, LOWBIT, ONE_THREAD, PROMPT, TINY, invoke
from command_line import error as failed
from lowbit import llm
from needs import need_packages

need_packages("starlette", "uvicorn")
from lowbit.serve.routes import Limits
from lowbit.serve.run import is_local
from served_models import SYSTEM, Client, loaded, made, port_of, serving  # noqa: F401


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
            port, _ = port_of(process)
            client = Client(port, "k")
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
