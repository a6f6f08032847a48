"""`make attack` detects tracebacks, signals, hangs and excessive memory, prints how to repeat the case, and keeps its files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ATTACK = Path(__file__).parents[2] / "attack" / "run.py"


def test_planted_defects_are_detected(tmp_path):
    command = [sys.executable, ATTACK, "--only", "planted", "--seed", "5", "--keep", tmp_path, "--table", tmp_path / "table"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    head, _, row = (tmp_path / "table").read_text().splitlines()
    counts = dict(zip(head.split(" | ")[1:-1], row.split(" | ")[1:-1], strict=True))
    assert counts == {
        "Cases": "16", "Refused": "2", "Same result": "1", "Other result": "1", "Traceback": "7", "Signal": "2", "Hang": "1",
        "Memory": "2",
    }  # fmt: skip
    named = dict(re.findall(r"--only planted --seed 5 --case (\d+): ([a-z ]+): ", done.stdout))
    kept = {path.name for path in tmp_path.iterdir()} - {"table"}
    assert kept == {f"planted-5-{number}" for number in named} and len(named) == 13
    assert {"traceback", "signal", "hang", "memory", "other result"} == set(named.values())
    assert "ZeroDivisionError" in (tmp_path / "planted-5-6" / "stderr").read_text()


def test_good_outcomes_alone_pass(tmp_path):
    command = [sys.executable, ATTACK, "--only", "planted", "--case", "2", "--keep", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "| planted | 1 | 1 | 0 |" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(ATTACK.parent)
    import files
    import outcomes

    return files, outcomes


def test_an_undamaged_file_must_give_the_same_result(tmp_path, modules):
    """Otherwise no case of a part could; an import records when its source was changed."""
    files, outcomes = modules
    trees = []
    for number, time in enumerate((1, 2, 2)):
        record = {"files": [{"name": "a.gguf", "bytes": 5 + number // 2, "mtime_ns": time}]}
        (tmp_path / "lowbit_import.json").write_text(json.dumps(record))
        trees.append(outcomes.tree(tmp_path))
    assert trees[0] == trees[1] != trees[2]
    files.must_be_same(outcomes.Found(outcomes.SAME))
    with pytest.raises(RuntimeError, match="a whole file gives: "):
        files.must_be_same(outcomes.Found(outcomes.OTHER))
