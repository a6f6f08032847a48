"""lowbit.files.replace: what readers, crashes and concurrent runs see."""

import os
from pathlib import Path

import pytest
from lowbit.files import replace
from lowbit.files.replace import PartialDirectory, check_utf8, lock, replacing, sync


def test_a_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    target = tmp_path / "model.pte"
    target.write_text("old")
    events = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("replace"), replace(old, new)))
    with replacing(target, ".pte") as written:
        assert written.suffix == ".pte"
        written.write_text("new")
        assert target.read_text() == "old"
        hidden = str(written)
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]
    assert events == [hidden, "replace", str(tmp_path)]  # the bytes are synced before the name


def test_a_failure_leaves_the_target_unchanged(tmp_path):
    target = tmp_path / "model.pte"
    target.write_text("old")
    with pytest.raises(KeyError), replacing(target, ".pte") as written:
        written.write_text("half")
        raise KeyError
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_full_disk(tmp_path, fork_python):
    """The error names what was written; the system names nothing, and torch's archive writer would end the process."""
    script = """
import resource, sys, torch
from pathlib import Path
from lowbit.calibration.journal import Journal
from lowbit.exports.module import write_package
from lowbit.files.replace import replacing

def text(target):
    with replacing(target, target.suffix) as file:
        file.write_text("a" * 100_000)

def package(target):
    (target.parent / "data").mkdir()
    files = [str(target.parent / "data" / name) for name in ("a.cpp", "b.so", "c.json")]
    for file in files:
        Path(file).write_bytes(b"a" * 900)
    with replacing(target, target.suffix) as written:
        write_package(written, files)

def journal(target):
    with Journal(target, {"a": "a" * 1000}) as journal:
        journal.keep([(["one"], "gptq", torch.zeros(2000, dtype=torch.uint8))])

sys.dont_write_bytecode = True  # Python does not notice a short write, and would keep a part of a .pyc
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))  # a longer file fails as on a full disk
for write, name in ((text, "a.html"), (package, "a.pt2"), (journal, "packed")):
    try:
        write(Path(sys.argv[1], name))
    except OSError as error:
        print(error)
"""
    done = fork_python(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"[Errno 27] File too large while {tmp_path / name} was written; {kept} kept. Make room, or choose another place"
        for name, kept in (
            ("a.html", "nothing of it was"),
            ("a.pt2", "nothing of it was"),
            (".packed.calibration", "its finished layers are"),
        )
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"data", ".packed.calibration"}


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link.pte").symlink_to("real.pte")
    with replacing(tmp_path / "link.pte", ".pte") as written:
        written.write_text("new")
    assert (tmp_path / "link.pte").is_symlink() and (tmp_path / "real.pte").read_text() == "new"


def test_places_that_are_refused(tmp_path):
    (tmp_path / "directory.pte").mkdir()
    for path, error, message in (
        (tmp_path / "model.pt2", ValueError, "expected a name that ends in .pte"),
        (tmp_path / "no" / "model.pte", NotADirectoryError, "make it first"),
        (tmp_path / "directory.pte", IsADirectoryError, "expected the name of a file"),
    ):
        with pytest.raises(error, match=message), replacing(path, ".pte"):
            raise AssertionError("it was not refused")


def test_permissions_are_those_of_the_user(tmp_path, monkeypatch):
    """A directory has mkdir's permissions; the umask, which all threads share, is never changed to read it."""
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))
        with PartialDirectory(tmp_path / "new") as partial:
            partial.rehearse()
            assert not (tmp_path / "new").exists()
            partial.finish()
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o750
    finally:
        monkeypatch.undo()
        os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_replaced_file_keeps_its_permissions(mode, tmp_path):
    path = tmp_path / "m.pte"
    path.write_bytes(b"old")
    path.chmod(mode)
    with replacing(path, ".pte") as written:
        assert written.parent.stat().st_mode & 0o077 == 0  # the new file is not readable before it has its permissions
        written.write_bytes(b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == mode


def test_leftovers_of_dead_processes_are_removed(tmp_path):
    """But not files of a live process, which holds its lock, nor leftovers of other targets."""
    target, other = tmp_path / "model", tmp_path / "model2"
    left, of_another, written = (PartialDirectory(each) for each in (target, other, target))
    for directory in (left, of_another):
        (directory.path / "part").write_text("half")
        directory._unlock()  # as when a process ends
    with PartialDirectory(target) as mine:
        assert not left.path.exists()
        assert {mine.path, written.path, of_another.path} == set(tmp_path.iterdir())
        assert lock(mine.path) is None
    written.__exit__()
    assert list(tmp_path.iterdir()) == [of_another.path]


def test_a_directory_that_another_process_holds_is_left_to_it(tmp_path, monkeypatch):
    tries = []

    def held_at_first(directory):
        tries.append(directory)
        return None if len(tries) == 1 else lock(directory)

    monkeypatch.setattr(replace, "lock", held_at_first)
    with PartialDirectory(tmp_path / "model") as mine:
        assert len(tries) >= 2 and mine.path == tries[-1] != tries[0]


def test_an_open_file_is_synced_with_what_python_still_holds(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    with open(tmp_path / "file", "w") as file:
        file.write("text")
        sync(file)
    assert sizes == [4]


def test_paths_that_safetensors_cannot_have():
    check_utf8(Path("größe"))
    with pytest.raises(OSError, match=r"the path 'a\\udcff' is not UTF-8, which safetensors needs"):
        check_utf8(Path(os.fsdecode(b"a\xff")))
