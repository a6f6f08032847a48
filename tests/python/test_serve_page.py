"""The chat page of `lowbit serve` in a browser: it asks, streams, and shows a model's text as text."""

import html
import json
import re
import subprocess

import pytest
from lowbit.llm.loading import load_model, load_tokenizer
from needs import need_packages
from test_report import browser

need_packages("starlette", "uvicorn")

from lowbit.serve.app import PAGE, Limits
from test_serve import Client, made, serving

# Asks as a user does, and leaves what was shown where --dump-dom finds it.
ASK = """<script>
window.problems = [];
addEventListener("error", event => problems.push(String(event.message)), true);
addEventListener("securitypolicyviolation", event => problems.push(event.violatedDirective));
const wait = async what => { while (!what()) await new Promise(done => setTimeout(done, 20)); };
addEventListener("load", async () => {
  await wait(() => by("model").options.length || document.querySelector(".error"));
  for (const text of ["Return <b>the</b> number", "And?"]) {
    by("temperature").value = "0";
    by("tokens").value = "8";
    by("text").value = text;
    by("form").requestSubmit();
    await wait(() => !running);
  }
  document.title = "done";
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify({
    shown: [...by("log").children].map(box => [box.className, box.textContent]), bold: document.querySelectorAll("b").length,
    problems, models: [...by("model").options].map(option => option.text), width: document.documentElement.scrollWidth,
    loaded: performance.getEntriesByType("resource").map(entry => new URL(entry.name).pathname) });
  document.body.append(result);
});
</script>"""


def look(port, profile, width):
    process = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}",
         f"--window-size={width},800", "--virtual-time-budget=20000", "--dump-dom", f"http://127.0.0.1:{port}/"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', process.stdout, re.S)[1]))


@pytest.fixture(scope="module")
def loaded(packed):
    return load_model(packed[0]), load_tokenizer(packed[0])


def test_a_conversation_in_a_browser(loaded, tmp_path, monkeypatch):
    browser()
    page = tmp_path / "page.html"
    page.write_text(PAGE.read_text(encoding="utf-8").replace("</body>", f"{ASK}</body>"), encoding="utf-8")
    monkeypatch.setattr("lowbit.serve.app.PAGE", page)
    with serving([made(loaded)], Limits()) as (port, _):
        found = look(port, tmp_path / "profile", 1000)
        client, said = Client(port), [{"role": "user", "content": "Return <b>the</b> number"}]
        expected = [["user", said[0]["content"]]]
        for following in ("And?", None):
            answer = client.post("/v1/chat/completions", messages=said, max_tokens=8, temperature=0)["choices"][0]["message"]
            expected.append(["assistant", answer["content"]])
            said += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": following}]
            expected += [["user", following]] if following else []
    assert found["shown"] == expected and found["models"] == ["tiny"] and found["bold"] == 0
    assert found["problems"] == [] and found["width"] <= 1000
    assert set(found["loaded"]) == {"/v1/models", "/v1/chat/completions"}  # nothing else, from nowhere else


def test_the_page_says_what_is_wrong(loaded, tmp_path, monkeypatch):
    browser()
    page = tmp_path / "page.html"
    page.write_text(PAGE.read_text(encoding="utf-8").replace("</body>", f"{ASK}</body>"), encoding="utf-8")
    monkeypatch.setattr("lowbit.serve.app.PAGE", page)
    with serving([made(loaded)], Limits(api_key="k")) as (port, _):
        found = look(port, tmp_path / "profile", 400)
    assert found["shown"] == [["error", "an API key is needed, and the request has none"]]
    assert found["width"] <= 500  # the narrowest window that Chromium has


def test_the_page_needs_nothing_from_elsewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|@import|url\(", text)
    assert "innerHTML" not in text
