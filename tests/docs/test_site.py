"""The documentation site in a real browser, on a desktop and a phone: nothing overflows, nothing is fetched (`make docs`)."""

import functools
import html
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import WATCH, browser

ROOT = Path(__file__).parents[2]
# One of each kind: prose and code, plots, options, wide tables, long signatures, a notebook.
PAGES = ("index", "choosing_bits", "cli", "bench", "arm_cost", "api/quantize", "first_steps")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A copy, in which a test script can be added next to a page."""
    return Path(shutil.copytree(ROOT / "build" / "site", tmp_path_factory.mktemp("docs") / "site"))


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    """The address of the served copy: from files, the theme's search would fetch a script."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def look(site: Path, address: str, page: str, width: int, height: int) -> dict:
    """Measurements of a page in a browser window of this size."""
    watched = site / f"{page}-watched.html"
    text = (site / f"{page}.html").read_text(encoding="utf-8")
    watched.write_text(text.replace("<head>", f"<head>{WATCH}"), encoding="utf-8")
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars",
        f"--user-data-dir={site.parent / f'profile-{width}'}", f"--window-size={width},{height}", "--dump-dom",
        f"{address}/{page}-watched.html",
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    watched.unlink()
    assert process.returncode == 0 and ":CONSOLE" not in process.stderr, process.stderr
    return json.loads(html.unescape(re.search(r'<pre id="measured">(.*?)</pre>', process.stdout, re.S)[1]))


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "phone"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_in_a_browser(site, address, page, width, height):
    seen = look(site, address, page, width, height)
    assert seen["problems"] == [] and seen["doubled"] == 0
    assert seen["view"] == width and seen["width"] <= width  # wider elements scroll by themselves
    assert seen["loaded"] and all(name.startswith((address, "data:")) for name in seen["loaded"])


def test_all_pages_are_there_and_fetch_nothing(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25 and all((site / f"{page}.html").is_file() for page in PAGES)
    for page in pages:
        source = page.read_text(encoding="utf-8")
        assert re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="?(?:https?:)?//[^" >]*', source) == [], page


def test_every_document_is_on_the_site(site):
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert documents <= {path.stem for path in site.glob("*.html")}
    assert os.listdir(site / "plots") and not list(site.rglob("*.py"))
    assert ">Bloom<wbr>For<wbr>CausalLM<" in (site / "models.html").read_text(
        encoding="utf-8"
    )  # so that a phone can break long names


def test_pages_of_documents_outside_docs(site):
    """The site contains the documents themselves, and links to them stay on the site."""
    for page, source in {
        "changes": "CHANGELOG.md",
        "contributing": "CONTRIBUTING.md",
        "cpp": "examples/cpp/README.md",
        "security": "SECURITY.md",
    }.items():
        heading = (ROOT / source).read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
        assert heading in html.unescape((site / f"{page}.html").read_text(encoding="utf-8"))
    assert 'href="cpp.html"' in (site / "export.html").read_text(encoding="utf-8")
    assert 'href="boards.html#run-without-python-on-a-board"' in (site / "cpp.html").read_text(encoding="utf-8")
    assert [path for path in (ROOT / "docs").rglob("*.md") if len(path.read_text(encoding="utf-8").splitlines()) < 3] == []


def test_what_can_be_installed():
    """There is no package named lowbit to install yet: one page explains this, and one repeats an error."""
    named = [
        path.name
        for path in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"))
        if re.search(r"pip install ['\"]?lowbit\b(?!-)", path.read_text(encoding="utf-8"))
    ]
    assert sorted(named) == ["errors.md", "python.md"]
