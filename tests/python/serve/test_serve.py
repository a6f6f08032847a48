"""`lowbit serve` over real HTTP: each text equals the one generated alone, prefixes are cached, clients disconnect."""

import contextlib
import http.client
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from command_line import PROMPT
from lowbit import llm
from lowbit.llm.loading import stop_tokens
from lowbit.llm.penalties import token_logprobs
from lowbit.llm.templates import render
from needs import need_packages

need_packages("starlette", "uvicorn")
import served_models
from lowbit.serve.routes import Limits
from served_models import CHAT, DRAWN, MAX_LENGTH, PLAIN, SYSTEM, TEXTS, client, loaded, made, served, serving  # noqa: F401


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
        client = served_models.Client(port)
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
