"""bench/answers.py: a whole run on examples/tiny_llama, what it keeps, and its table."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lowbit.tools.report.peers import Peer
from lowbit.tools.tasks import Problem

sys.path.append(str(Path(__file__).parents[3] / "bench"))
import answers

MODEL = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"


@pytest.fixture
def run(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{answers.BEGIN}old\n{answers.END}after\n", encoding="utf-8")

    def run(*rows, prompts=3, kept=False):
        options = f"--only {MODEL} --prompts {prompts} --problems 2 --functions 0 --tokens 24 --calibration-tokens 128"
        places = ["--directory", tmp_path / "kept", "--document", page]
        monkeypatch.setattr(
            sys, "argv", ["answers.py", *options.split(), "--rows", *rows, *["--kept"] * kept, *map(str, places)]
        )
        answers.main()
        return page.read_text(encoding="utf-8")

    def problems(task, count):
        return {task: [Problem(lambda answer: task == "json", 2, text="def f(")] * count}

    monkeypatch.setattr(answers, "NEW", 20)
    monkeypatch.setattr(answers.weights, "calibration_text", lambda: "def f(x):\n    return x + 1\n" * 50)
    monkeypatch.setattr(answers, "make_problems", problems)  # all JSON is right, all else wrong
    return run


def test_a_run_and_its_continuation(run, tmp_path, monkeypatch, capsys):
    def hold(weight, importance):
        assert (importance > 0).all()
        return weight.clone(), weight.numel() // 2

    monkeypatch.setattr(answers, "peers", lambda bits, importance: {"GGUF Q8_0": Peer(hold)})
    one_bit = answers.Row("1 bit", partial(answers.to_nearest, bits=1))
    peers = [row for row in answers.ROWS if row.name in ("llama.cpp's Q8_0", "llama.cpp's Q4_0")]
    monkeypatch.setattr(answers, "ROWS", (*answers.ROWS[:2], one_bit, *peers))
    text = run("lowbit", "1 bit", "llama.cpp")
    assert "not installed (make bench-peers): GGUF Q4_0" in capsys.readouterr().out
    assert "Only these rows have been measured" in text  # Q4_0 has not
    assert text.startswith(f"before\n{answers.BEGIN}") and text.endswith(f"{answers.END}after\n") and "old" not in text
    rows = {line.split(" | ")[0]: [cell.strip(" |") for cell in line.split(" | ")] for line in text.splitlines()}
    assert rows["| Weights"][3:7] == [
        "Equal, 16 tokens, %",
        "Equal, 64 tokens, %",
        "Equal, 256 tokens, %",
        "Median of equal tokens",
    ]
    assert rows["| float32"][1:7] == ["32.00", "", "", "", "", ""]
    assert rows["| llama.cpp's Q8_0"][1:7] == ["4.00", "0.0000", *["100 ± 0"] * 3, "20"]  # this peer keeps the weights
    eight, one = rows["| lowbit, 8 bits"], rows["| 1 bit"]
    assert 8 < float(eight[1]) < 10 and 0 < float(eight[2]) < 0.1 < float(one[2])
    assert one[3:6] == ["0 ± 0"] * 3 and float(one[6]) < 16
    kept = json.loads((tmp_path / "kept" / "model" / "1_bit.json").read_text(encoding="utf-8"))
    assert len(kept["places"]) == 3 and kept["scores"] == {"json": [2, 2]}
    assert rows["| float32"][7:] == ["0 ± 0", "100 ± 0", "0 ± 0"] and one[7:] == ["", "100 ± 0", ""]  # not asked in vain

    measured, calls = answers.measure, []
    monkeypatch.setattr(answers, "measure", lambda source, row: calls.append(row.name) or measured(source, row))
    (tmp_path / "kept" / "model" / "1_bit.json").unlink()
    assert "| 1 bit |" not in run("lowbit", "1 bit", "llama.cpp", kept=True) and calls == []
    assert run("lowbit", "1 bit", "llama.cpp") == text and calls == ["1 bit"]
    assert run("lowbit", "1 bit", "llama.cpp", kept=True) == text
    calls.clear()
    assert run("1 bit", prompts=2) != text and calls == ["float32", "1 bit"]  # other settings


def test_kv_caches_judge_the_cache_alone(run):
    caches = [row for row in answers.ROWS if row.cache is not None]
    assert [row.cache for row in caches] == ["int8", "int8,int4", "int4"]
    cells = run("KV cache int4").splitlines()[-4].split(" | ")
    assert cells[:2] == ["| float32, KV cache int4", "32.00"] and float(cells[2]) > 1e-4


def test_errors_and_medians():
    found = {"bits": 4.5, "kld": 0.25, "places": [None, 10, 70, None], "scores": {"json": [3, 4]}}
    assert answers.cells("row", found, ["json"]) == [
        "row", "4.50", "0.2500", "75 ± 22", "75 ± 22", "50 ± 25", "163", "75 ± 22"
    ]  # fmt: skip


def test_calibrated_rows_rotate(monkeypatch):
    asked = []
    monkeypatch.setattr(answers.weights, "calibrate", lambda *given: asked.append(given) or torch.nn.Identity())
    monkeypatch.setattr(answers.weights, "packed_size", lambda model: (1, 2.0))

    class Source:
        settings = type("Settings", (), {"calibration_tokens": 128})

    for row in answers.ROWS:
        if row.name.endswith("calibrated"):
            assert row.make(Source)[1] == 2.0
    assert {given[:2] for given in asked} == {(Source, 128)}
    assert [(given[2].bits, given[2].rotate, given[3]) for given in asked] == [
        (4, True, None), (3, True, None), (2, True, None), (4, True, 4.5), (4, True, 3.5), (4, True, 2.5)
    ]  # fmt: skip
