"""The chat page of `lowbit serve` in a browser: a user types, reads, stops; a model's text is shown as text."""

import json
import re
from urllib.parse import urlsplit

import pytest
from browser import browser, page
from lowbit.llm.loading import load_model, load_tokenizer
from needs import need_packages

need_packages("starlette", "uvicorn")

from lowbit.serve.app import PAGE, Limits
from test_serve import Client, made, serving

SHOWN = "JSON.stringify([...document.querySelectorAll('#log > div')].map(box => [box.className, box.textContent]))"
WIDTH = "document.documentElement.scrollWidth"
DONE = "document.querySelector('#stop').disabled"


@pytest.fixture(scope="module")
def loaded(packed):
    return load_model(packed[0]), load_tokenizer(packed[0])


def shown(tab):
    return [tuple(each) for each in json.loads(tab.value(SHOWN))]


def fill(tab, field, text):
    tab.click(field)
    tab.value(f"document.querySelector({field!r}).select()")
    tab.type(text)


def test_a_conversation_in_a_browser(loaded, tmp_path):
    browser()
    with serving([made(loaded)], Limits()) as (port, _), page(tmp_path / "profile") as tab:
        tab.open(f"http://127.0.0.1:{port}/", 1000)
        tab.wait("document.querySelector('#model').options.length")
        fill(tab, "#temperature", "0")
        fill(tab, "#tokens", "8")
        expected, said = [], []
        for text, send in (("Return <b>the</b> number", True), ("And?\nWhy?", False)):
            first, *more = text.split("\n")
            fill(tab, "#text", first)
            for line in more:
                tab.press("Enter", 13, modifiers=8)
                tab.type(line)
            if send:
                tab.click("#send")
            else:
                tab.press("Enter", 13)
            tab.wait(f"document.querySelectorAll('#log > div').length === {len(expected) + 2} && {DONE}")
            said.append({"role": "user", "content": text})
            body = {"messages": said, "max_tokens": 8, "temperature": 0}
            answer = Client(port).post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
            expected += [("user", text), ("assistant", answer)]
            said.append({"role": "assistant", "content": answer})
            assert shown(tab) == expected
        models = "[...document.querySelector('#model').options].map(option => option.text).join()"
        assert tab.value(models) == "tiny"
        assert tab.value("document.querySelectorAll('b').length") == 0 and tab.value(WIDTH) <= 1000
        tab.click("#new")
        assert shown(tab) == []
    assert tab.problems == []
    asked = [urlsplit(url) for url in tab.requests if not url.startswith("data:")]
    assert {url.netloc for url in asked} == {f"127.0.0.1:{port}"}
    assert [url.path for url in asked] == ["/", "/v1/models", "/v1/chat/completions", "/v1/chat/completions"]


def test_a_text_is_stopped_in_a_browser(loaded, tmp_path):
    """What there is stays, and the server writes no more of it."""
    browser()
    model = made(loaded, max_length=1024)
    model.stop = frozenset()  # it goes on
    with serving([model], Limits()) as (port, server), page(tmp_path / "profile") as tab:
        tab.open(f"http://127.0.0.1:{port}/", 1000)
        tab.wait("document.querySelector('#model').options.length")
        fill(tab, "#tokens", "900")
        fill(tab, "#text", "Return")
        tab.press("Enter", 13)
        tab.wait("document.querySelector('.assistant')?.textContent")
        assert server.engine.running == 1
        tab.click("#stop")
        tab.wait(DONE)
        (_, text), (kind, answer) = shown(tab)
        assert (text, kind) == ("Return", "assistant") and answer
        while server.engine.running:
            pass
        assert "lowbit_canceled_requests_total 1" in Client(port).get("/metrics")


def test_the_page_says_what_is_wrong(loaded, tmp_path):
    browser()
    with serving([made(loaded)], Limits(api_key="k")) as (port, _), page(tmp_path / "profile") as tab:
        tab.open(f"http://127.0.0.1:{port}/", 360)
        tab.wait("document.querySelector('.error')")
        assert shown(tab) == [("error", "an API key is needed, and the request has none")]
        assert tab.value(WIDTH) <= 360
        fill(tab, "#key", "k")
        tab.press("Tab", 9)  # leaves the field
        tab.wait("document.querySelector('#model').options.length")


def test_the_page_needs_nothing_from_elsewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|@import|url\(", text)
    assert "innerHTML" not in text
