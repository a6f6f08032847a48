"""Progress of a long command whose output is a file."""

import re
import time

import pytest
from command_line import FLOAT, TINY, invoke
from gguf_files import file_bytes
from importing_files import METADATA, tensors
from lowbit.cli import output


@pytest.fixture
def quick(monkeypatch):
    """One line per millisecond instead of one per minute."""
    monkeypatch.setattr(output, "LINE_SECONDS", 0.001)


def test_durations():
    assert [output._duration(s) for s in (0.4, 99, 100, 3000, 5999, 6000, 7260)] == [
        "0 s", "99 s", "2 min", "50 min", "1 h 40 min", "1 h 40 min", "2 h 1 min"
    ]  # fmt: skip


def told(unit, calls) -> list[str]:
    """The lines printed for a step that makes these calls and then waits for two more lines."""
    lines = []
    with output._lines(lines.append, "a step", unit) as advance:
        for call in calls:
            advance(*call)
        count = len(lines)
        while len(lines) < count + 2:
            time.sleep(0.001)
    return lines


def test_lines_of_a_step(quick):
    assert re.fullmatch(r"a step: \d+ s", told(None, [])[-1])  # also if nothing is reported
    line = told("layers", [(0, 40, "first"), (10, 40, "a\x1b[2Jb")])[-1]
    assert re.fullmatch(r"a step: \d+ s, 10 of 40 layers, 25 %, about \d+ s left: a\\x1b\[2Jb", line), line
    line = told("bytes", [(0, 4_000_000), (1_000_000, 4_000_000)])[-1]
    assert re.match(r"a step: \d+ s, 1\.00 MB of 4\.00 MB, 25 %", line), line


def test_there_is_a_line_a_minute_at_most():
    assert output.LINE_SECONDS == 60
    lines = []
    with output._lines(lines.append, "a step", "layers") as advance:
        for done in range(1000):
            advance(done, 1000)
    assert lines == []


@pytest.mark.more
@pytest.mark.parametrize(
    "command, expected",
    [
        (("quantize", FLOAT, "OUT"), r"quantizing .*: \d+ s, .* of .* %"),
        (("eval", FLOAT, "--text", TINY / "heldout.txt"), r".*heldout\.txt, \w+: \d+ s, \d+ of \d+ tokens, \d+ %"),
        (
            ("eval", FLOAT, "--text", TINY / "heldout.txt", "--bits", "8,4", "--window", 64, "--stride", 32),
            r"8 bits, 2 of 3: perplexity \d+\.\d+ in \d+\.\d s",
        ),
    ],
)
def test_commands(command, expected, tmp_path, quick):
    result = invoke(*[tmp_path / "out" if each == "OUT" else each for each in command])
    assert result.exit_code == 0, result.stderr
    assert any(re.match(expected, line) for line in result.stderr.splitlines()), result.stderr


@pytest.mark.more
def test_an_export_reports_its_steps(executorch, packed, tmp_path, quick):
    result = invoke("export", packed[0], "--to", "pte", "--output", tmp_path / "m.pte", "--max-length", 64)
    assert result.exit_code == 0, result.stderr
    steps = re.findall(r"^exporting to \S+: \d+ s, (\d) of 2 steps, \d+ %.*: (\w+)", result.stderr, re.M)
    assert ("0", "making") in steps


def test_an_import_reports_its_steps(tmp_path, quick):
    """Opening a file can take longer than reading its weights."""
    (tmp_path / "m.gguf").write_bytes(file_bytes(METADATA, tensors()))
    begin = time.perf_counter()
    result = invoke("import", tmp_path / "m.gguf", tmp_path / "out")
    took = time.perf_counter() - begin
    assert result.exit_code == 0, result.stderr
    steps = re.findall(r"^opening \S+: \d+ s, (\d) of 5 steps, (\d+) %.*: (\w+ the \w+)", result.stderr, re.M)
    assert ("4", "80", "writing the tokenizer") in steps
    assert re.search(r"^importing \S+m\.gguf \.\.\.$", result.stderr, re.M)
    # The reported time is that of the whole command, not only of reading the weights.
    assert took - 0.5 < float(re.search(r"written in (\d+\.\d) s", result.stdout)[1]) < took + 0.1
