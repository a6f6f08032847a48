"""`lowbit quantize --calibrate` resumes a killed or stopped run, and reuses only results that are still valid."""

import functools
import itertools
import json
import os
import re
import shutil
import signal

import lowbit
import pytest
import torch
from calibration_files import make, packed_of, save, source, text, words  # noqa: F401
from checkpoints import change_tensors
from command_line import document, documented_keys, error, invoke
from lowbit.calibration import blocks, distilling
from lowbit.calibration import model as calibration
from lowbit.calibration.checkpoint import _identity, calibrate_checkpoint
from lowbit.calibration.journal import Journal
from lowbit.cli import output
from reference import random_packed

pytestmark = pytest.mark.more

STEPS = 8  # of tuning: enough to change the layers


def killed_after(layers: int, arguments: list[str], run_python):
    script = f"""
import functools, os, signal
import torch
from lowbit.calibration import blocks, journal
from lowbit.cli import main
torch.set_num_threads(1)  # as here: the sums of a matrix product may have other bits with other threads
blocks.tuned = functools.partial(blocks.tuned, steps={STEPS})
keep, calls = journal.Journal.keep, 0
def killed(*arguments):
    global calls
    calls += 1
    result = keep(*arguments)
    if calls == {layers}:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
journal.Journal.keep = killed
main()
"""
    result = run_python(script, *arguments)
    assert result.returncode == -signal.SIGKILL, (result.returncode, result.stderr)


# Results kept before the kill: the table, which is also the head, and then layers or blocks in order.
@pytest.mark.parametrize("method, budget, kept, resumed", [("gptq", [], 9, 10), ("tuned", ["--target-bits", "6"], 2, 9)])
def test_a_killed_run_resumes(method, budget, kept, resumed, source, text, tmp_path, run_python, monkeypatch):
    monkeypatch.setattr(blocks, "tuned", functools.partial(blocks.tuned, steps=STEPS))
    options = ["--calibrate", text, "--method", method, *budget]
    expected = document(invoke("quantize", source, tmp_path / "whole", *options, "--json"))
    assert expected["resumed_layers"] == 0 and set(expected) == documented_keys("quantize")
    killed_after(kept, ["quantize", source, tmp_path / "out", *options], run_python)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.calibration").is_dir()
    said = document(invoke("quantize", source, tmp_path / "out", *options, "--json"))
    assert said["resumed_layers"] == resumed  # the table and the head are two of them
    assert said["methods"] == expected["methods"]
    for name in sorted(os.listdir(tmp_path / "whole")):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_a_stopped_distilled_run_resumes(source, text, tmp_path, monkeypatch):
    """Stopped after the learning, when all layers have been written a second time."""
    monkeypatch.setattr(distilling, "STEPS", 8)
    config = lowbit.LowBitConfig(bits=2, levels="fit")
    _, whole = calibrate_checkpoint(source, tmp_path / "whole", config, text.read_text(), "distilled")
    assert set(whole.methods.values()) == {"distilled"}
    keep = Journal.keep

    def stopped(journal, layers):
        result = keep(journal, layers)
        if layers[0][1] == "distilled":
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Journal, "keep", stopped)
    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(source, tmp_path / "out", config, text.read_text(), "distilled")
    monkeypatch.setattr(Journal, "keep", keep)
    monkeypatch.setattr(distilling, "distilled", None)  # nothing is learned again
    _, again = calibrate_checkpoint(source, tmp_path / "out", config, text.read_text(), "distilled")
    assert again.methods == whole.methods and again.resumed == len(whole.methods) + 1  # and the table
    for name in sorted(os.listdir(tmp_path / "whole")):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_the_tables_of_an_encoder_are_taken_up(tmp_path, monkeypatch):
    """Stopped after the first layers, when the tables are finished: gradients are not computed again."""
    source = save(make("bert"), tmp_path / "source")
    arguments = lowbit.LowBitConfig(bits=3, overrides={"*pooler*": None}), words(2000), "gptq"
    calibrate_checkpoint(source, tmp_path / "whole", *arguments)
    keep = Journal.keep

    def stopped(journal, layers):
        result = keep(journal, layers)
        if any(name.startswith("encoder.") for name in layers[0][0]):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Journal, "keep", stopped)
    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(source, tmp_path / "out", *arguments)
    monkeypatch.setattr(Journal, "keep", keep)
    asked = []
    monkeypatch.setattr(calibration, "moments_of_tables", lambda model, inputs, names: asked.append(set(names)) or {})
    _, again = calibrate_checkpoint(source, tmp_path / "out", *arguments)
    assert asked == [set()] and again.resumed == 3 + 1  # words, positions and kinds, and a layer
    for name in sorted(os.listdir(tmp_path / "whole")):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("change", ["text", "source", "config", "method", "damage"])
def test_results_of_an_earlier_run_are_only_used_if_nothing_changed(change, source, text, tmp_path, monkeypatch):
    copied = shutil.copytree(source, tmp_path / "source")
    shutil.copy(text, tmp_path / "text.txt")
    options = ["quantize", copied, tmp_path / "out", "--calibrate", tmp_path / "text.txt"]
    keep, layers_kept = Journal.keep, []

    def stopped(journal, layers):
        result = keep(journal, layers)
        layers_kept.append(layers)
        if len(layers_kept) == 4:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Journal, "keep", stopped)
    assert invoke(*options).exit_code != 0 and len(layers_kept) == 4
    monkeypatch.setattr(Journal, "keep", keep)
    assert (tmp_path / ".out.calibration").is_dir() and not (tmp_path / "out").exists()
    if change == "text":
        (tmp_path / "text.txt").write_text(words(1199))
    elif change == "source":
        change_tensors(copied / "model.safetensors", lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    elif change == "damage":
        file = sorted((tmp_path / ".out.calibration").glob("*.packed"))[1]
        damaged = bytearray(file.read_bytes())
        damaged[100] ^= 1
        file.write_bytes(damaged)
    more = {"config": ["--bits", 3], "method": ["--method", "importance"]}.get(change, [])
    result = invoke(*options, *more, "--json")
    assert result.exit_code == 0, result.stderr
    # The first complete layer is still valid: table and head.
    assert json.loads(result.stdout)["resumed_layers"] == (2 if change == "damage" else 0)
    warnings = [line for line in result.stderr.splitlines() if line.startswith("lowbit: warning: ")]
    if change == "damage":
        assert warnings == []
    else:
        assert len(warnings) == 1 and f"had another {change}; its layers were removed" in warnings[0]
    assert invoke(*[*options[:2], tmp_path / "whole", *options[3:]], *more).exit_code == 0
    ours, theirs = packed_of(tmp_path / "out"), packed_of(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("package", ["lowbit", "torch", "transformers"])
def test_layers_of_another_version_are_not_used(source, monkeypatch, package):
    def identity():
        return _identity(source, [], "text", [], "gptq")

    before = identity()
    assert identity() == before
    monkeypatch.setattr(f"{package}.__version__", "0.0.0")
    assert [name for name, value in identity().items() if value != before[name]] == [package]


def test_two_runs_for_one_target(source, text, tmp_path):
    with Journal(tmp_path / "out", {"source": "another"}):
        assert "in use: another run calibrates" in error(invoke("quantize", source, tmp_path / "out", "--calibrate", text))


def layer(number: int):
    return [([f"layer {number}"], "gptq", random_packed(20, 64, 4, 32, "symmetric", seed=number))]


# torch reports that memory is exhausted as a RuntimeError.
@pytest.mark.parametrize("error", [RuntimeError("not enough memory"), ValueError("NaN"), KeyboardInterrupt()])
def test_an_error_leaves_the_finished_layers(error, tmp_path):
    with pytest.raises(type(error)), Journal(tmp_path / "out", {"source": "a"}) as journal:
        journal.keep(layer(0))
        raise error
    with Journal(tmp_path / "out", {"source": "a"}) as journal:
        assert list(journal.packed) == ["layer 0"]
    assert not os.listdir(tmp_path)


def test_a_journal_without_layers_is_removed(tmp_path):
    with pytest.raises(ValueError), Journal(tmp_path / "out", {"source": "a"}):
        raise ValueError("a target that cannot be met")
    assert not os.listdir(tmp_path)


def test_a_journal_that_cannot_be_read_is_unlocked(tmp_path):
    (tmp_path / ".out.calibration" / "a directory").mkdir(parents=True)
    for _ in range(2):  # a remaining lock would fail the second time
        with pytest.raises(OSError, match="a directory"):
            Journal(tmp_path / "out", {}).__enter__()


def test_a_kill_while_a_journal_is_taken_up_loses_nothing(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path / "out", {}) as journal:
        journal.keep(layer(0))
        raise KeyboardInterrupt
    with open(tmp_path / ".out.calibration" / "layers.jsonl", "ab") as log:
        log.write(b'[{"layers": ["lay')  # as after a kill in the middle of a line

    def killed(*arguments):
        raise KeyboardInterrupt

    # However the log is rewritten, the kill comes before the new bytes.
    for owner, name in ((os, "replace"), (os, "fsync")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, killed)
            Journal(tmp_path / "out", {}).__enter__()
    with Journal(tmp_path / "out", {}) as journal:
        assert list(journal.packed) == ["layer 0"]


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), ValueError("the text is odd")])
def test_a_run_that_ends_early_says_how_to_resume(ending, source, text, tmp_path, monkeypatch):
    keep = Journal.keep

    def stopped(journal, layers):
        keep(journal, layers)
        raise ending

    monkeypatch.setattr(Journal, "keep", stopped)
    result = invoke("quantize", source, tmp_path / "out", "--calibrate", text)
    how = "stopped" if isinstance(ending, KeyboardInterrupt) else "ended by an error"
    kept = tmp_path / ".out.calibration"
    assert f"{how}: the finished layers are kept in {kept}; the same command goes on from there\n" in result.stderr
    assert result.exit_code != 0
    # A concurrent run, or one that has not started, has no effect.
    shutil.rmtree(kept)
    monkeypatch.setattr(Journal, "keep", lambda journal, layers: (_ for _ in ()).throw(ending))
    assert "goes on" not in invoke("quantize", source, tmp_path / "out", "--calibrate", text).stderr


def test_a_log_names_the_layer_and_its_share(source, text, tmp_path, monkeypatch):
    """With one line per millisecond instead of one per minute."""
    monkeypatch.setattr(output, "LINE_SECONDS", 0.001)
    result = invoke("quantize", source, tmp_path / "out", "--calibrate", text)
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith(f"calibrating: {source}: ")]
    # Before the first layer is reported, a line has only the time.
    lines = list(itertools.dropwhile(lambda line: re.fullmatch(r".*: \d+ s", line), lines))
    layer = r"model\.layers\.\d\.(self_attn|mlp)\.\w+|model\.embed_tokens|the float model's run over the text"
    found = [re.fullmatch(rf".*: \d+ s, (\d+) of 22 layers, (\d+) %(, about \d+ s left)?: ({layer})", line) for line in lines]
    assert all(found) and found, lines
    shares = [int(each[2]) for each in found]
    assert shares == sorted(shares) and any(each[3] for each in found)
