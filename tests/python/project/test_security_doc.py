"""SECURITY.md names the tests of its promises: they exist and run."""

import re
from pathlib import Path

from makefiles import rules

ROOT = Path(__file__).parents[3]


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 5 and all(re.search(r"`\w+\.(py|cpp)`", re.split(r"(?<!\\)\|", row)[3]) for row in rows)
    for name in set(re.findall(r"`(\w+\.(?:py|cpp))`", text)):
        found = [path for path in (ROOT / "tests").rglob(name) if "build" not in path.parts]
        assert len(found) == 1, name
        if name.endswith("_test.cpp"):
            assert name in (ROOT / "tests/cpp/CMakeLists.txt").read_text(encoding="utf-8")


def test_the_makefile_has_the_commands():
    assert set(re.findall(r"`make ([\w-]+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))) <= set(rules())


def test_nothing_runs_code_of_a_checkpoint():
    sources = list((ROOT / "python").rglob("*.py"))
    assert len(sources) > 50
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert "trust_remote_code=True" not in text and not re.search(r"^\s*(import|from) (pickle|dill|joblib)\b", text, re.M)
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, path
