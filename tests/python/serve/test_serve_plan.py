"""`lowbit serve` by the plan beside a model's weights: the answers are those of torch, which it does not import."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_line import PROGRAM, PROMPT, UNICODE
from lowbit import llm
from lowbit.exports.plan_export import write_plan
from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens
from lowbit.llm.plan_files import PLAN, open_planned
from needs import need_packages

need_packages("starlette", "uvicorn", "llguidance")

from lowbit.serve.model_list import LanguageModel
from lowbit.serve.routes import Limits
from served_models import DRAWN, SYSTEM, TEXTS, TOOLS, WITH_TOOLS, Client, port_of, serving
from test_chat import PLAIN

LENGTH = 256
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{UNICODE} </s>?"}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REQUESTS = [
    (COMPLETE, {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}),
    (COMPLETE, {"prompt": f"{SYSTEM} {UNICODE}", "max_tokens": 12, **DRAWN, "seed": 5, "n": 3, "logprobs": 2}),
    (COMPLETE, {"prompt": SYSTEM * 6, "max_tokens": 8, "echo": True, "logprobs": 3, "temperature": 0}),
    (COMPLETE, {"prompt": [SYSTEM + "one, two, one,", SYSTEM + "The"], "max_tokens": 30, "temperature": 0.3, "stop": ["a"]}),
    (COMPLETE, {"prompt": [5, 9, 300, 301], "max_tokens": 5, "stream": True}),
    (COMPLETE, {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[a-c]{3}x"}}),
    (COMPLETE, {"prompt": "a", "max_tokens": 9, "structured_outputs": {"grammar": 'start: "b" | "b" <s> "c"'}}),
    (CHAT, {"messages": TALK, "max_tokens": 40, "response_format": AS_SCHEMA}),
    (CHAT, {"messages": TALK, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "temperature": 0.9, "seed": 1}),
    (CHAT, {"messages": TALK, "max_tokens": 30, "tools": TOOLS, "tool_choice": "required"}),
    (CHAT, {"messages": TALK, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}),
    ("/tokenize", {"content": f"{UNICODE} </s>"}), ("/detokenize", {"tokens": [1, 2, 300, 2000, 77]}),
]  # fmt: skip
ENDED = re.compile(rb'"(id|created)": ?("[^"]*"|\d+)')  # the fields that differ between two answers to a request


def write(directory, model, cache=None):
    decoder = llm.Decoder(model, LENGTH, cache)
    write_plan(decoder, directory / PLAN, stop_tokens(model, load_tokenizer(directory)))
    return decoder


def both(directory, cache=None):
    """Two language models of a directory: by torch, and by its plan; and their decoders for drafts."""
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    write(directory, model, cache).release()
    planned = open_planned(directory, 1, cache)
    stop = stop_tokens(model, tokenizer)
    assert planned.stop == stop
    for decoder, settings, reader in (
        (llm.Decoder(model, LENGTH, cache), model, tokenizer),
        (planned.decoder(LENGTH), planned.model, planned.tokenizer),
    ):
        yield LanguageModel.of("tiny", decoder, settings, reader, WITH_TOOLS, stop, at_once=4, rows=64, prefix_bytes=1 << 22)


@pytest.fixture(scope="module")
def directory(packed, tmp_path_factory):
    target = tmp_path_factory.mktemp("planned") / "model"
    shutil.copytree(packed[0], target)
    (target / "chat_template.jinja").write_text(PLAIN)
    return target


def answers(model, together):
    """The answers to all requests, one after another, or several at a time."""
    with serving([model], Limits()) as (port, _):
        client = Client(port)

        def answer(request):
            path, body = request
            status, _, data = client.send(path, body if "token" in path else {"seed": 2} | body)
            assert status == 200, data
            return ENDED.sub(b"", data).decode()

        if not together:
            return [answer(request) for request in REQUESTS * 2]  # the second time with copied prefixes
        with ThreadPoolExecutor(6) as pool:
            return [re.sub('"cached_tokens": ?[0-9]+', "", each) for each in pool.map(answer, REQUESTS)]


@pytest.mark.parametrize(("cache", "together"), [(None, False), ("int8,int4", False), (None, True)])
def test_each_answer_is_that_of_torch(directory, tmp_path, cache, together):
    found = []
    for name, model in zip(("torch", "plan"), both(directory, cache), strict=True):
        if not together:
            model.batch.prefix_cache = llm.PrefixCache(tmp_path / name, model.batch.decoder)
            model.batch.speculate(3)
        found.append(answers(model, together))
    assert found[0] == found[1]
    if not together:  # both ways write the same files, so each reads those of the other
        assert (
            {path.name: path.read_bytes() for path in (tmp_path / "torch").iterdir()}
            == {path.name: path.read_bytes() for path in (tmp_path / "plan").iterdir()}
            != {}
        )


def test_a_draft_model_by_its_plan(directory):
    made = list(both(directory))
    bodies = [{"prompt": text, "max_tokens": 20, "seed": 3, "temperature": 0.5} for text in TEXTS]
    found = []
    for model, draft in zip(made, (llm.Decoder(load_model(directory), LENGTH), made[1].batch.decoder), strict=True):
        if draft is model.batch.decoder:
            draft = open_planned(directory, 1, None).decoder(LENGTH)
        model.batch.speculate(3, draft)
        with serving([model], Limits()) as (port, _):
            texts = [Client(port).post(COMPLETE, **body)["choices"] for body in bodies]
            accepted = re.findall(r"^lowbit_(?:guessed|accepted)_tokens_total .*", Client(port).get("/metrics"), re.M)
            found.append((texts, accepted))
    assert found[0] == found[1] and not any(line.endswith(" 0.0") for line in found[0][1])


def test_neither_torch_nor_transformers_is_imported(directory, tmp_path):
    """With a grammar, a draft model, prefixes on disk; and without a plan, torch is used and writes one."""
    write(directory, load_model(directory)).release()
    body = {"prompt": SYSTEM * 4, "max_tokens": 8, "temperature": 0, "structured_outputs": {"regex": "[a-z ]+"}}
    said = []
    for number in range(2):
        if number:
            (directory / PLAN).unlink()
        command = ["serve", directory, "--port", 0, "--max-length", LENGTH, "--draft", directory, "--prefix-cache", tmp_path]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LOWBIT_PLAN": "1"}
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, command)], stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                port, lines = port_of(process)
                answer = Client(port).post(COMPLETE, **body)
                said.append((lines[:-1], answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
                said[-1] += (process.stderr.read(),)
            finally:
                process.kill()
    (first, expected, cached, imported), (second, found, later, others) = said
    assert first == [] and imported == "ended\n\n" and cached == 0
    assert others == "ended\ntorch transformers\n" and found == expected and later >= 64
    assert any(line == f"{directory / PLAN} is written: the next run starts without torch\n" for line in second)
    assert json.dumps(found) and (directory / PLAN).exists()
