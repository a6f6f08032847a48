"""The chat page of `lowbit serve` in a browser: typing, reading, scrolling, stopping; a model's text is never markup."""

import base64
import contextlib
import json
import queue
import re
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import browser, page
from lowbit.llm.loading import load_model, load_tokenizer
from needs import need_packages

need_packages("starlette", "uvicorn")

from lowbit.serve import page as served
from lowbit.serve.routes import Limits
from served_models import Client, made, serving

SHOWN = """JSON.stringify([...document.querySelectorAll('#log > div')].map(
    box => [box.className, (box.querySelector('.text') ?? box).textContent]))"""
WIDTH = "document.documentElement.scrollWidth"
DONE = "document.querySelector('#stop').disabled"
READY = "document.querySelector('#model').options.length"
BELOW = "(view => view.scrollHeight - view.scrollTop - view.clientHeight)(document.querySelector('main'))"
SIZES = pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 700)], ids=["desktop", "phone"])
BROKEN = object()  # ends the connection
END = object()  # ends an answer as a server does


@pytest.fixture(scope="module")
def loaded(packed):
    return load_model(packed[0]), load_tokenizer(packed[0])


def shown(tab):
    return [tuple(each) for each in json.loads(tab.value(SHOWN))]


def found(tab, selector, value):
    """A value for each matching element."""
    return json.loads(tab.value(f"JSON.stringify([...document.querySelectorAll({selector!r})].map(box => {value}))"))


def fill(tab, field, text):
    tab.click(field)
    tab.value(f"document.querySelector({field!r}).select()")
    tab.type(text)


def set_up(tab, **fields):
    tab.click("#settings summary")
    for field, text in fields.items():
        fill(tab, f"#{field}", text)
    tab.click("#settings summary")


def send(tab, text):
    fill(tab, "#text", text)
    tab.press("Enter", 13)


class Script:
    """A server with the real page and answers that a test writes piece by piece while the browser reads."""

    def __init__(self, cards):
        self.cards = cards
        self.recordings: list[bytes] = []  # forms
        self.bodies: list[dict] = []
        self._answers: list[queue.Queue] = []
        self.left = threading.Event()  # a reader has disconnected

    def answer(self, number, *pieces):
        """Sends texts, whole events, or the end of answer `number`."""
        while len(self._answers) <= number:
            time.sleep(0.01)
        for piece in pieces:
            self._answers[number].put(piece)

    def handler(script):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def reply(self, kind, data, **headers):
                self.send_response(200)
                for name, value in ({"Content-Type": kind, "Content-Length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                if self.path == "/":
                    self.reply("text/html; charset=utf-8", served.PAGE.encode(), **served.HEADERS)
                else:
                    self.reply("application/json", json.dumps({"data": script.cards}).encode())

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/audio/transcriptions":
                    script.recordings.append(body)
                    self.reply("application/json", json.dumps({"text": f"Said <b>{len(script.recordings)}</b>."}).encode())
                    return
                pieces: queue.Queue = queue.Queue()
                script.bodies.append(json.loads(body))
                script._answers.append(pieces)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                while (piece := pieces.get()) is not BROKEN:
                    if isinstance(piece, str):
                        piece = {"choices": [{"delta": {"content": piece}, "finish_reason": None}]}
                    data = "[DONE]" if piece is END else json.dumps(piece)
                    try:
                        self.wfile.write(f"data: {data}\n\n".encode())
                    except OSError:
                        script.left.set()
                        return
                    if piece is END:
                        return

        return Handler


@contextlib.contextmanager
def scripted(tmp_path, width=1000, height=800, model="a model", cards=()):
    """A script and a tab with its page; afterwards checks that the page had no problems."""
    browser()
    script = Script([{"id": model, "chat": True}, *cards])
    with ThreadingHTTPServer(("127.0.0.1", 0), script.handler()) as server, page(tmp_path / "profile") as tab:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab.open(f"http://127.0.0.1:{server.server_port}/", width, height)
        tab.wait(READY)
        yield script, tab
        assert tab.problems == [] and tab.value(WIDTH) <= width
        asked = [url for url in tab.requests if not url.startswith(("data:", "blob:"))]
        expected = ["/", "/v1/models"] + ["/v1/audio/transcriptions"] * len(script.recordings)
        expected += ["/v1/chat/completions"] * len(script.bodies)
        assert asked == [f"http://127.0.0.1:{server.server_port}{path}" for path in expected]
        server.shutdown()


def ends(reason="stop", tokens=3):
    """The last events of an answer."""
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return {"choices": [{"delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": usage}, END


def test_a_conversation_in_a_browser(loaded, tmp_path):
    browser()
    with serving([made(loaded)], Limits()) as (port, _), page(tmp_path / "profile") as tab:
        tab.open(f"http://127.0.0.1:{port}/", 1000)
        tab.wait(READY)
        assert tab.value("document.querySelector('#locked').offsetParent === null")  # no key is needed
        set_up(tab, temperature="0", tokens="8")
        expected, said = [], []
        for text, click in (("Return <b>the</b> number", True), ("And?\nWhy?", False)):
            first, *more = text.split("\n")
            fill(tab, "#text", first)
            for line in more:
                tab.press("Enter", 13, modifiers=8)
                tab.type(line)
            if click:
                tab.click("#send")
            else:
                tab.press("Enter", 13)
            tab.wait(f"document.querySelectorAll('#log > div').length === {len(expected) + 2} && {DONE}")
            said.append({"role": "user", "content": text})
            body = {"messages": said, "max_tokens": 8, "temperature": 0}
            choice = Client(port).post("/v1/chat/completions", **body)["choices"][0]
            answer = choice["message"]["content"]
            expected += [("user", text), ("assistant", "".join(answer.split()))]
            said.append({"role": "assistant", "content": answer})
            assert [(kind, text if kind == "user" else "".join(text.split())) for kind, text in shown(tab)] == expected
            *cut, rate = found(tab, ".assistant:last-child > :not(.text)", "box.textContent")
            assert len(cut) == (choice["finish_reason"] == "length") and re.fullmatch(r"\d tokens?(, \d+\.\d tokens/s)?", rate)
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
    """The text so far stays, and the server stops generating."""
    browser()
    model = made(loaded, max_length=1024)
    model.stop = frozenset()  # endless text
    with serving([model], Limits()) as (port, server), page(tmp_path / "profile") as tab:
        tab.open(f"http://127.0.0.1:{port}/", 1000)
        tab.wait(READY)
        set_up(tab, tokens="900")
        send(tab, "Return")
        tab.wait("document.querySelector('.assistant .text')?.textContent")
        assert server.engine.running == 1
        tab.click("#stop")
        tab.wait(DONE)
        (_, text), (kind, answer) = shown(tab)
        assert (text, kind) == ("Return", "assistant") and answer
        assert tab.value("document.querySelector('.cut').textContent") == "Stopped."
        while server.engine.running:
            pass
        assert "lowbit_canceled_requests_total 1" in Client(port).get("/metrics")


def test_the_page_asks_for_a_key(loaded, tmp_path):
    browser()
    with serving([made(loaded)], Limits(api_key="k")) as (port, _), page(tmp_path / "profile") as tab:
        tab.open(f"http://127.0.0.1:{port}/", 360)
        tab.wait("document.querySelector('.error')")
        assert shown(tab) == [("error", "an API key is needed, and the request has none")]
        assert tab.value(WIDTH) <= 360
        fill(tab, "#key", "k")
        tab.press("Tab", 9)  # moves the focus out of the field
        tab.wait(READY)
        assert shown(tab) == []


@SIZES
def test_the_end_stays_in_view(tmp_path, width, height):
    with scripted(tmp_path, width, height) as (script, tab):
        lines = "".join(f"Line {number} of an answer that is longer than the window.\n\n" for number in range(30))
        for turn in range(3):
            send(tab, f"Question {turn}")
            script.answer(turn, *lines.splitlines(keepends=True), f"End {turn}")
            tab.wait(f"document.querySelector('#log').textContent.endsWith('End {turn}')")
            tab.wait(f"{BELOW} < 2")
            script.answer(turn, *ends())
            tab.wait(DONE)
            tab.wait(f"{BELOW} < 2")  # including the elements below the answer
            bottom = tab.value("[...document.querySelectorAll('.note')].at(-1).getBoundingClientRect().bottom")
            assert bottom <= tab.value("document.querySelector('#form').getBoundingClientRect().top")

        # After scrolling up, the view stays; at the end it follows again.
        send(tab, "More")
        script.answer(3, lines, "Here")
        tab.wait(f"document.querySelector('#log').textContent.endsWith('Here') && {BELOW} < 2")
        tab.value("document.querySelector('main').scrollTop -= 300")
        tab.wait("!following")
        at = tab.value("document.querySelector('main').scrollTop")
        script.answer(3, lines, "There")
        tab.wait("document.querySelector('#log').textContent.endsWith('There')")
        tab.wait(f"{BELOW} > 600")
        assert tab.value("document.querySelector('main').scrollTop") == at
        tab.value("document.querySelector('main').scrollTop = 1e9")
        tab.wait(f"following && {BELOW} < 2")
        script.answer(3, lines, *ends())
        tab.wait(f"{DONE} && {BELOW} < 2")


def test_a_new_conversation_during_an_answer(tmp_path):
    with scripted(tmp_path) as (script, tab):
        set_up(tab, system="Be <b>brief</b>.")
        send(tab, "Old question")
        script.answer(0, "Old answer")
        tab.wait("document.querySelector('#log').textContent.endsWith('Old answer')")
        tab.click("#new")
        assert shown(tab) == [] and tab.value(DONE)
        send(tab, "New question")
        script.answer(1, "New")
        tab.wait("document.querySelector('#log').textContent.endsWith('New')")
        while not script.left.wait(0.01):
            script.answer(0, " goes on")
        assert not tab.value(DONE)  # the end of the old answer does not end the new one
        script.answer(1, " answer", *ends())
        tab.wait(DONE)
        assert shown(tab) == [("user", "New question"), ("assistant", "New answer")]
        send(tab, "Last question")
        script.answer(2, "x", *ends())
        tab.wait(DONE)
        system = {"role": "system", "content": "Be <b>brief</b>."}
        new = [{"role": "user", "content": "New question"}, {"role": "assistant", "content": "New answer"}]
        assert [body["messages"] for body in script.bodies] == [
            [system, {"role": "user", "content": "Old question"}],
            [system, new[0]],
            [system, *new, {"role": "user", "content": "Last question"}],
        ]


def test_markdown(tmp_path):
    text = (
        "# Title\n\nOne *two* **three** `a<b` ~~four~~ &lt;&#65;&unknown;\nnext line\n\n- x\n  1. y\n- [x] z\n\n"
        "```python\nif a < b:\n    print('<b>')\n```\n\n> quoted\n\n| a | b |\n|---|--:|\n| 1 | 2<br>3 |\n\n"
        "[site](https://example.org/?a=1&amp;b) and [later][l]\n\n***\n\n[l]: https://example.net"
    )
    with scripted(tmp_path) as (script, tab):
        send(tab, "*Not* a `markup`")
        script.answer(0, *text, *ends())  # a character at a time
        tab.wait(DONE)
        outline = tab.value("document.querySelector('.text').innerHTML")
        assert shown(tab)[0] == ("user", "*Not* a `markup`")

    def link(href, text):
        return f'<a href="{href}" title="{href}" target="_blank" rel="noopener noreferrer">{text}</a>'

    expected = (
        "<h1>Title</h1><p>One <em>two</em> <strong>three</strong> <code>a&lt;b</code> <s>four</s> "
        "&lt;A&amp;unknown;<br>next line</p>"
        '<ul><li><span>x</span><ol start="1"><li><span>y</span></li></ol></li>'
        '<li><input type="checkbox" disabled=""><span>z</span></li></ul>'
        "<pre><code>if a &lt; b:\n    print('&lt;b&gt;')</code></pre><blockquote><p>quoted</p></blockquote>"
        '<table><thead><tr><th>a</th><th style="text-align: right;">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td style="text-align: right;">2<br>3</td></tr></tbody></table>'
        f"<p>{link('https://example.org/?a=1&amp;b', 'site')} and {link('https://example.net', 'later')}</p><hr>"
    )
    assert outline == expected


GIVE = """((data, name, type) => {
  const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0)), files = new DataTransfer();
  files.items.add(new File([bytes], name, { type }));
  const input = document.querySelector("#files");
  input.files = files.files;
  input.dispatchEvent(new Event("change"));
})"""


def give(tab, data, name, kind):
    """Chooses a file as a user does in the browser's dialog."""
    tab.value(f"{GIVE}({', '.join(map(json.dumps, (base64.b64encode(data).decode(), name, kind)))})")


def png(width, height):
    """An image of one color."""
    rows = (b"\0" + b"\x20\x40\x80" * width) * height
    chunks = (b"IHDR" + struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(rows), b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


PENDING = "document.querySelectorAll('#attached img, #attached audio').length"


@SIZES
def test_images(tmp_path, width, height):
    cards = [{"id": "seeing", "chat": True, "images": True}]
    with scripted(tmp_path, width, height, "blind", cards) as (script, tab):
        attach = "document.querySelector('#attach').offsetParent !== null"
        assert not tab.value(attach)  # the first model takes no images
        tab.value("document.querySelector('#model').selectedIndex = 1")
        tab.value("document.querySelector('#model').dispatchEvent(new Event('change'))")
        assert tab.value(attach)
        small, large = png(40, 30), png(2000, 1500) + bytes(1 << 20)
        for number, (data, name, kind) in enumerate([(small, "a.png", "image/png"), (large, "b.png", "image/png")], 1):
            give(tab, data, name, kind)
            tab.wait(f"{PENDING} === {number}")
        give(tab, b"no image", "c.tiff", "image/tiff")
        tab.wait("document.querySelector('.error')")
        assert shown(tab)[0][1].startswith("c.tiff: ")
        give(tab, small, "d.png", "image/png")
        tab.wait(f"{PENDING} === 3")
        tab.click("#attached button:last-child")  # takes it back
        assert tab.value(PENDING) == 2
        send(tab, "What <b>is</b> it?")
        script.answer(0, "Two", *ends())
        tab.wait(f"{DONE} && {PENDING} === 0")
        assert shown(tab) == [("user", "What <b>is</b> it?"), ("assistant", "Two")]
        sizes = json.loads(tab.value("JSON.stringify([...document.querySelectorAll('.user img')].map("
                                     "image => [image.naturalWidth, image.naturalHeight]))"))  # fmt: skip
        assert sizes[0] == [40, 30] and 1 << 20 < sizes[1][0] * sizes[1][1] <= 2100000  # the browser shows both
        # An image without a text; after an error it comes back.
        give(tab, small, "a.png", "image/png")
        tab.wait(f"{PENDING} === 1")
        tab.click("#send")
        script.answer(1, {"error": {"message": "busy"}})
        tab.wait(f"{DONE} && {PENDING} === 1")
        assert shown(tab)[2:] == [("error", "busy")]
        tab.click("#send")
        script.answer(2, "One", *ends())
        tab.wait(f"{DONE} && document.querySelectorAll('.user img').length === 3")
        first, second = script.bodies[2]["messages"][0]["content"], script.bodies[2]["messages"][2]["content"]
        assert [part["type"] for part in first] == ["image_url", "image_url", "text"] and first[2][
            "text"
        ] == "What <b>is</b> it?"
        url = f"data:image/png;base64,{base64.b64encode(small).decode()}"
        assert first[0]["image_url"] == {"url": url} and second == [{"type": "image_url", "image_url": {"url": url}}]
        assert first[1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
        assert script.bodies[0]["messages"][0]["content"] == first and len(script.bodies[1]["messages"]) == 3
        tab.click("#new")
        assert tab.value(PENDING) == 0


def test_recordings(tmp_path):
    with scripted(tmp_path, cards=[{"id": "hearing", "recordings": True}]) as (script, tab):
        assert tab.value("document.querySelector('#files').accept") == "audio/*,video/*"
        fill(tab, "#text", "He said:")
        give(tab, b"RIFF sound", "a.wav", "audio/wav")
        text = "document.querySelector('#text').value"
        tab.wait(f"{text}.includes('1')")
        assert tab.value(text) == "He said: Said <b>1</b>." and tab.value(PENDING) == 1
        (form,) = script.recordings
        assert b'name="model"\r\n\r\nhearing\r\n' in form and b'filename="a.wav"' in form and b"RIFF sound" in form
        give(tab, png(4, 4), "a.png", "image/png")
        tab.wait("document.querySelector('.error')")
        assert shown(tab) == [("error", "a.png: this model takes no images.")]
        tab.click("#send")
        script.answer(0, "Yes", *ends())
        tab.wait(DONE)
        assert script.bodies[0]["messages"] == [{"role": "user", "content": "He said: Said <b>1</b>."}]
        assert tab.value("document.querySelectorAll('.user audio').length") == 1
        assert tab.value("document.querySelector('.user audio').src.startsWith('blob:')")
        tab.problems[:] = [each for each in tab.problems if "media" not in each.lower()]  # the audio is not a real recording


HOSTILE = """<script>document.title = 'run'</script>
<img src="http://127.0.0.1:9/i.png" onerror="document.title = 'run'"> <svg onload="document.title='run'"></svg>

![image](http://127.0.0.1:9/p.png) ![](javascript:document.title='run') ![d](data:text/html,x)

[a](javascript:document.title='run') [b](JaVaScRiPt&colon;document.title='run') [c](&#106;avascript:document.title='run')
[d](data:text/html,<script>1</script>) <javascript:document.title='run'> [e](//127.0.0.1:9/e) [f](vbscript:x "onclick=x")

<iframe src="http://127.0.0.1:9/"></iframe>
<link rel="stylesheet" href="http://127.0.0.1:9/s.css"><style>* { display: none }</style>
<form action="http://127.0.0.1:9/"><button id="send">x</button></form>
<base href="http://127.0.0.1:9/"> <div class="error" id="log">

```"onmouseover="document.title='run'
</code></pre><script>document.title = 'run'</script>
```
"""


def test_hostile_texts_and_names(tmp_path):
    """They are not executed or loaded, and cannot imitate parts of the page."""
    name = "<img src=x onerror=\"document.title='run'\">"
    deep = "> " * 5000 + "deep", "- " * 200 + "list", "[" * 5000, "*a **b " * 3000
    with scripted(tmp_path, model=name) as (script, tab):
        for turn, text in enumerate((HOSTILE, *deep)):
            send(tab, text if turn == 0 else "next")
            script.answer(turn, text, *ends())
            tab.wait(DONE)
        assert script.bodies[0]["model"] == name and found(tab, "#model option", "box.text") == [name]
        assert tab.value("document.title") == "lowbit"
        assert found(tab, "main :is(script, img, svg, iframe, link, style, form, base, button, object)", "box.tagName") == []
        assert found(tab, "main a", "box.getAttribute('href')") == ["http://127.0.0.1:9/p.png"]
        attributes = {name for names in found(tab, "#log *", "box.getAttributeNames()") for name in names}
        assert attributes == {"class", "href", "rel", "target", "title"}
        seen = "".join(text for kind, text in shown(tab) if kind == "assistant")
        assert "<script>document.title = 'run'</script>" in seen and "deep" in seen and "list" in seen


def test_a_truncated_answer_says_so(tmp_path):
    error = {"error": {"message": "the <b>engine</b> ended", "type": "server_error", "param": None, "code": None}}
    with scripted(tmp_path) as (script, tab):
        for number, last in enumerate((ends(), ends("length", 512), ends("length", 100), (error, END), (BROKEN,))):
            send(tab, "Go on")
            script.answer(number, "a", *last)
            tab.wait(DONE)
        assert found(tab, ".assistant", "box.querySelector('.cut')?.textContent ?? null") == [
            None,
            "Cut off: it has 512 tokens, the most that the settings allow.",
            "Cut off: the model's context is full.",
            "Cut off by an error: the <b>engine</b> ended",
            "Cut off by an error: the connection ended before the answer did",
        ]
        # Without an answer, the question returns to its field and is not in the conversation.
        send(tab, "Unanswered")
        script.answer(5, BROKEN)
        tab.wait(DONE)
        assert shown(tab)[-1] == ("error", "the connection ended before the answer did")
        assert tab.value("document.querySelector('#text').value") == "Unanswered"
        tab.click("#send")
        script.answer(6, *ends(tokens=0))
        tab.wait(DONE)
        assert [message["content"] for message in script.bodies[6]["messages"]] == ["Go on", "a"] * 5 + ["Unanswered"]


def test_the_page_needs_nothing_from_elsewhere():
    files = {path.name: path.read_text(encoding="utf-8") for path in Path(served.__file__).with_name("web").iterdir()}
    own = "".join(text for name, text in files.items() if not name.startswith("marked."))
    assert not re.search(r"(src|href)=\"(?!data:|\w+(\.umd)?\.js\")|https?://|@import|url\(", own)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\son\w+=", own)
    assert "unsafe" not in served.HEADERS["Content-Security-Policy"] and served.PAGE.count("<script") == 3
    version = re.search(r"marked v([\d.]+) - a markdown parser", files["marked.umd.js"])[1]
    notice = (Path(__file__).parents[3] / "NOTICE").read_text(encoding="utf-8")
    assert f"marked {version} from npm" in notice and "MIT" in files["marked.LICENSE"]
