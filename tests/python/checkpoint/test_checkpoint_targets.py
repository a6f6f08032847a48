"""quantize_checkpoint: targets, and the files left after a failure."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import CONFIG, load, refuse, save_model
from lowbit import inspect_checkpoint, quantize_checkpoint
from lowbit.checkpoint import quantizing

pytestmark = pytest.mark.first


@pytest.fixture
def source(tmp_path):
    return save_model(tmp_path / "source")


def test_a_target_that_is_there(source, tmp_path):
    target = tmp_path / "packed"
    target.mkdir()
    (target / "mine").write_text("precious")
    refuse(source, target, OSError, f"{target} has 1 files", "empty or not there yet")
    assert (target / "mine").read_text() == "precious"
    refuse(source, source, OSError, "expected a directory that is empty")
    refuse(source, target / "mine", OSError, "is a file")
    refuse(source, tmp_path / "no" / "packed", OSError, f"{tmp_path / 'no'} is not a directory; make it first")
    (target / "mine").unlink()
    quantize_checkpoint(source, target, CONFIG)  # an empty directory is fine
    load(target)


def test_a_target_that_is_a_symbolic_link(source, tmp_path):
    place, link, dangling = tmp_path / "place", tmp_path / "link", tmp_path / "dangling"
    place.mkdir(mode=0o750)
    link.symlink_to("place")
    dangling.symlink_to("place-to-be")
    for name, real in ((link, place), (dangling, tmp_path / "place-to-be")):
        summary = quantize_checkpoint(source, name, CONFIG)
        assert summary.target == name and name.is_symlink() and not real.is_symlink()
        assert (real / "config.json").exists() and inspect_checkpoint(name) == summary.entries
    assert place.stat().st_mode & 0o777 == 0o750
    assert len(list(tmp_path.iterdir())) == 5
    (tmp_path / "around").symlink_to("around")
    refuse(source, tmp_path / "around", OSError, "is a symbolic link to itself")
    (tmp_path / "lost").symlink_to("no/such")
    refuse(source, tmp_path / "lost", OSError, f"{tmp_path / 'no'} is not a directory; make it first")


def no_weights_are_read(monkeypatch):
    def read(*arguments):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(quantizing, "write_output", read)


def test_a_target_that_cannot_be_replaced(source, tmp_path, monkeypatch):
    no_weights_are_read(monkeypatch)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    with monkeypatch.context() as context:
        context.setattr("os.path.ismount", lambda path: str(path) == str(mounted))
        refuse(source, mounted, OSError, f"{mounted} is a mount point", f"a directory in it, such as {mounted}/packed")
    # ismount does not see a bind mount of the same file system, but the rename fails.
    rename = os.rename

    def busy(old, new):
        if str(new) == str(mounted):
            raise OSError(errno.EBUSY, "Device or resource busy", str(old))
        rename(old, new)

    with monkeypatch.context() as context:
        context.setattr("os.rename", busy)
        refuse(source, mounted, OSError, f"{mounted} cannot be replaced by a new directory: Device or resource busy")
    refuse(source, Path("/sys/packed"), OSError, "/sys cannot be written: ")  # not even by root


MOUNTED = """
import os, sys
import lowbit
from checkpoints import CONFIG

source, mounted = sys.argv[1:]
for target in (mounted, mounted + "/packed"):
    try:
        lowbit.quantize_checkpoint(source, target, CONFIG)
    except OSError as error:
        print(error)
print(os.listdir(mounted))
"""


@pytest.mark.more
def test_a_disk_that_is_mounted_there(source, tmp_path, monkeypatch):
    """A small disk, which the second run would fill."""
    (tmp_path / "mounted").mkdir()
    mount = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$4" "$1"'
    tried = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"this kernel allows no user to mount a disk: {tried.stderr[:200]}")  # not installable on CI
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", tmp_path / "mounted", sys.executable, MOUNTED, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    first, second, left = done.stdout.splitlines() or [done.stderr] * 3
    assert f"{tmp_path / 'mounted'} is a mount point, which no new directory can replace" in first
    assert "B free; the packed checkpoint takes " in second and left == "[]"


def test_a_last_step_that_fails_keeps_the_work(source, tmp_path, monkeypatch):
    target, rename = tmp_path / "packed", os.rename

    def fail(old, new):
        # After the rehearsal, another process writes to the target.
        if str(new) == str(target) and (Path(old) / "config.json").exists():
            target.mkdir()
            (target / "theirs").touch()
        rename(old, new)

    monkeypatch.setattr("os.rename", fail)
    with pytest.raises(OSError, match="could not be replaced: .* The complete result is in ") as caught:
        quantize_checkpoint(source, target, CONFIG)
    kept = Path(str(caught.value).rpartition(" ")[2].rstrip("'"))
    assert sorted(tmp_path.iterdir()) == sorted([source, target, kept]) and not kept.name.startswith(".")
    monkeypatch.undo()
    quantize_checkpoint(source, tmp_path / "again", CONFIG)
    assert inspect_checkpoint(kept) == inspect_checkpoint(tmp_path / "again")


def test_leftovers_of_dead_runs_are_removed(source, tmp_path):
    """The next run to the same target removes the directory of a killed run; that of a live run stays."""
    target = tmp_path / "packed"
    other = tmp_path / ".packed-of-another-machine-1234.partial"
    other.mkdir()
    script = """
import signal, sys, time
from lowbit.files.replace import PartialDirectory
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
partial = PartialDirectory(Path(sys.argv[1]))
(partial.path / "half").touch()
print(partial.path, flush=True)
time.sleep(300)
"""
    command = [sys.executable, "-c", script, str(target)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, living = (Path(run.stdout.readline().strip()) for run in runs)
        runs[0].send_signal(signal.SIGHUP)
        assert runs[0].wait(60) == -signal.SIGHUP and dead.exists()
        quantize_checkpoint(source, target, CONFIG)
        assert sorted(tmp_path.iterdir()) == sorted([source, target, living, other])
        assert (living / "half").exists()
    finally:
        for run in runs:
            run.kill()
            run.wait()
            run.stdout.close()


def test_no_room(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refuse(source, tmp_path / "packed", OSError, "1.00 kB free; the packed checkpoint takes ")


@pytest.mark.more
def test_the_disk_fills_up(source, tmp_path, run_python):
    # A file size limit makes a write fail in the middle, like a full disk.
    script = """
import os, resource, sys, lowbit
from lowbit import transformers
source, target = sys.argv[1:]
sys.dont_write_bytecode = True  # Python does not notice a short write, and would keep a part of a .pyc
for limit in (0, 1000, 60_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        lowbit.quantize_checkpoint(source, target, lowbit.LowBitConfig())
    except OSError as error:
        print("failed", error.errno, error)
    assert os.listdir(os.path.dirname(target)) == [os.path.basename(source)], limit
"""
    process = run_python(script, source, tmp_path / "packed")
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stdout.splitlines() if line.startswith("failed ")]
    assert len(lines) == 3
    for line in lines:
        assert line.startswith(f"failed {errno.EFBIG} ") and f"while {tmp_path / 'packed'} was written" in line
        assert "nothing of it was kept" in line


def test_an_error_in_the_middle(source, tmp_path):
    def fail(done, total, name):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "packed", CONFIG, progress=fail)
    assert list(tmp_path.iterdir()) == [source]


KILLED = """
import sys, shutil
from pathlib import Path
import torch
torch.set_num_threads(1)
import lowbit
from checkpoints import assert_same_model, killed_at, load
from lowbit import LowBitConfig, quantize_checkpoint

source, base = map(Path, sys.argv[1:])
config = LowBitConfig(scale="absmax")
quantize_checkpoint(source, base / "whole", config)
whole = load(base / "whole")
outcomes = []
moment, killed = 0, True
while killed:
    moment += 1
    place = base / f"{moment}"
    place.mkdir()
    ticks = []
    killed = killed_at(
        moment,
        lambda: quantize_checkpoint(source, place / "packed", config, max_shard_bytes=40_000,
                                    progress=lambda *_: [tick() for tick in ticks]),
        ticks.append,
    )
    for found in place.iterdir():
        try:
            model = load(found)
        except (OSError, ValueError):
            outcomes.append((found.name == "packed", "refused"))
            continue
        assert_same_model(model, whole)
        outcomes.append((found.name == "packed", "whole"))
    if not killed:
        assert (place / "packed").exists() and len(list(place.iterdir())) == 1
    shutil.rmtree(place)
print(len(outcomes), sorted(set(outcomes)))
"""


@pytest.mark.more
def test_killed_after_every_band(tmp_path, run_python):
    """After SIGKILL there is no model, or a complete one. test_crashes.py tests all other moments."""
    source = save_model(tmp_path / "source")
    process = run_python(KILLED, source, tmp_path)
    assert process.returncode == 0, process.stderr
    count, outcomes = process.stdout.splitlines()[-1].split(" ", 1)
    assert int(count) > 20
    assert outcomes == str([(False, "refused"), (True, "whole")])
