"""A headless browser, controlled over a pipe by Chromium's DevTools protocol."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from needs import lacking

_PATIENCE = 120  # seconds; only for hangs

# The browser reads commands from descriptor 3 and answers on descriptor 4, independent of the pipes' numbers here.
_START = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, descriptor in enumerate(ours, 3):
    os.dup2(descriptor, number)
os.execv(sys.argv[3], sys.argv[3:])
"""

# Runs at the start and the end of the page; records errors and the positions of plots.
WATCH = """<script>
window.problems = [];
addEventListener("error", event => problems.push(String(event.message || event.target.tagName)), true);
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect());
    const inside = texts.every(t => t.left >= box.left - 1 && t.right <= box.right + 1);
    return { plot: svg.dataset.plot, left: box.left, width: box.width, height: box.height, inside,
      texts: texts.filter(t => t.width > 0 && t.height >= 6).length, paths: svg.querySelectorAll("path").length };
  });
  const ids = [...document.querySelectorAll("[id]")].map(element => element.id);
  const result = { problems, boxes, width: document.documentElement.scrollWidth, view: innerWidth,
    doubled: ids.length - new Set(ids).size,
    loaded: performance.getEntriesByType("resource").map(entry => entry.name) };
  const element = document.createElement("pre");
  element.id = "measured";
  element.textContent = JSON.stringify(result);
  document.body.append(element);
});
</script>"""


def browser() -> str:
    """The path of a Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if found is None:
        lacking("there is no chromium; scripts/need.sh test installs it")
    return found


class Page:
    """A tab. `problems` collects messages of the console, errors and violations of the content security policy."""

    def __init__(self, commands, answers):
        self._commands, self._answers, self._numbers = commands, answers, itertools.count()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters):
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while True:
            document = json.loads(b"".join(iter(lambda: self._answers.read(1), b"\0")))
            name, found = document.get("method"), document.get("params", {})
            if document.get("id") == number:
                assert "error" not in document, (method, document["error"])
                return document["result"]
            if name == "Network.requestWillBeSent":
                self.requests.append(found["request"]["url"])
            elif name in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.problems.append(json.dumps(found))

    def open(self, url: str, width: int, height: int = 800) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str):
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until an expression is true in JavaScript, where elements are true; here an element's value is an empty
        dict."""
        deadline = time.monotonic() + _PATIENCE
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} is not true after {_PATIENCE} s; problems: {self.problems}"
            time.sleep(0.01)

    def type(self, text: str) -> None:
        """Types into the focused field."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """Presses a key; modifier 8 is Shift."""
        more = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **more)
        self._call("Input.dispatchKeyEvent", type="keyUp", **more)

    def click(self, selector: str) -> None:
        """Clicks with the mouse in the middle of an element."""
        box = self.value(f"JSON.stringify(document.querySelector({selector!r}).getBoundingClientRect())")
        at = json.loads(box)
        point = {"x": at["x"] + at["width"] / 2, "y": at["y"] + at["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, **point)


@contextlib.contextmanager
def page(profile: Path):
    """A browser with one tab."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = [
        sys.executable, "-c", _START, str(theirs_in), str(theirs_out), browser(), "--headless", "--no-sandbox", "--disable-gpu",
        f"--user-data-dir={profile}", "--remote-debugging-pipe",
    ]  # fmt: skip
    with (
        os.fdopen(ours_out, "wb") as commands,
        os.fdopen(ours_in, "rb") as answers,
        subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL) as process,
    ):
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(commands, answers)
        finally:
            process.terminate()
