"""Possible disk contents after a kill or a power failure at any moment of a recorded run.

strace records the system calls that change files below a directory. Replaying the first n of them gives the state after a kill.
After a power failure, only changes covered by an fsync are certain: the file's fsync for its bytes, the directory's fsync for
names. Any of the others may be missing, in any order, and missing bytes may be zeros. File systems promise more, but POSIX does
not (Pillai et al., All File Systems Are Not Created Equal, OSDI 2014).
"""

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_CALLS = (
    "open,openat,creat,close,dup,dup2,dup3,write,pwrite64,writev,pwritev,pwritev2,lseek,ftruncate,truncate,fallocate,"
    "rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,symlink,symlinkat,fsync,fdatasync,"
    "sync_file_range,sendfile,copy_file_range,splice,mmap"
)
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+|\?)(?: .*)?$", re.S)
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')

DIRECTORY = "directory"  # marks a directory in a tree


@dataclass
class Change:
    """A change of names in a directory or of a file's bytes, which may or may not reach the disk."""

    of: int  # inode of the changed directory or file
    kind: str  # "name", "move", "remove", "write", "size"
    name: str = ""
    inode: int = 0
    source: tuple[int, str] = (0, "")
    at: int = 0
    data: bytes = b""


@dataclass
class Recording:
    """Changes below a directory, and the inodes synced between them."""

    root: Path
    directories: set[int] = field(default_factory=lambda: {0})
    initial: dict[int, object] = field(default_factory=lambda: {0: {}})  # names to inodes, or bytes
    events: list[Change | int] = field(default_factory=list)  # an int: this inode was synced

    def __post_init__(self):
        for path in sorted(self.root.rglob("*")):
            inode = len(self.initial)
            parent = self._look_up(self.initial, path.parent)
            self.initial[parent][path.name] = inode
            if path.is_dir():
                self.directories.add(inode)
                self.initial[inode] = {}
            else:
                self.initial[inode] = path.read_bytes()
        self._now = {inode: dict(v) if isinstance(v, dict) else v for inode, v in self.initial.items()}

    def _look_up(self, inodes, path: Path) -> int:
        inode = 0
        for part in path.relative_to(self.root).parts:
            inode = inodes[inode][part]
        return inode

    def find(self, path: Path) -> int | None:
        try:
            return self._look_up(self._now, path)
        except (KeyError, TypeError):
            return None

    def change(self, change: Change) -> None:
        self.events.append(change)
        if change.kind == "name" and change.inode not in self._now:
            self._now[change.inode] = {} if change.inode in self.directories else b""
            self.initial[change.inode] = {} if change.inode in self.directories else b""
        if change.kind in ("name", "move", "remove"):
            _apply(self._now, change)

    def new_inode(self, directory: bool) -> int:
        inode = len(self.initial)
        if directory:
            self.directories.add(inode)
        return inode


def _certain_with(change: Change) -> tuple[int, ...]:
    """Inodes whose fsync makes a change certain; a rename reaches the disk completely or not at all."""
    return (change.of, change.source[0]) if change.kind == "move" else (change.of,)


def _apply(inodes: dict, change: Change) -> None:
    if change.kind == "name":
        inodes[change.of][change.name] = change.inode
    elif change.kind == "move":
        directory, name = change.source
        if inodes[directory].get(name) == change.inode:
            del inodes[directory][name]
        inodes[change.of][change.name] = change.inode
    elif change.kind == "remove" and inodes[change.of].get(change.name) == change.inode:
        del inodes[change.of][change.name]


def _content(before: bytes, writes: list[Change]) -> bytes:
    content = bytearray(before)
    for change in writes:
        if change.kind == "size":
            del content[change.at :]
            content.extend(bytes(max(0, change.at - len(content))))
        else:
            content.extend(bytes(max(0, change.at - len(content))))
            content[change.at : change.at + len(change.data)] = change.data
    return bytes(content)


def record(script: Path, arguments: list, roots: list[Path], log: Path, **environment) -> list[Recording]:
    """Runs a Python script under strace; returns its changes below each of the directories."""
    recordings = [Recording(root) for root in roots]
    command = ["strace", "-f", "--seccomp-bpf", "-xx", "-s", str(1 << 26), "-e", f"trace={_CALLS}", "-o", log]
    done = subprocess.run(
        [*command, sys.executable, script, *arguments], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with open(log) as file:
        _read(file, recordings)
    for recording in recordings:  # the replayed changes give the actual state
        assert tree_after(recording, recording.events) == tree_of(recording.root), recording.root
    return recordings


def _read(lines, recordings: list[Recording]) -> None:
    unfinished: dict[str, str] = {}
    descriptors: dict[int, list] = {}  # [path, position, recording, inode, whether it appends], of one process
    for line in lines:
        line = line.rstrip("\n")
        process = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            unfinished[process] = line.removesuffix("<unfinished ...>")
            continue
        resumed = re.match(r"^\d+ +<\.\.\. \w+ resumed>(.*)$", line, re.S)
        if resumed:
            line = unfinished.pop(process) + resumed[1]
        match = _LINE.match(line)
        if match:
            _, call, text, result = match.groups()
            if result != "?" and not result.startswith("-"):
                _one(call, text, int(result, 0), descriptors, recordings)


def _one(call: str, text: str, result: int, descriptors: dict, recordings: list[Recording]) -> None:
    strings = []
    for string, cut in _STRING.findall(text):
        assert not cut, f"{call} was cut"
        strings.append(bytes.fromhex(string.replace("\\x", "")))
    numbers = [part.strip() for part in _STRING.sub("", text).split(",")]

    def full(at: int) -> Path:
        """The path in the string with this number, relative to the call's directory descriptor if it has one."""
        path = Path(strings[at].decode(errors="surrogateescape"))
        if path.is_absolute():
            return path
        relative = [int(number) for number in numbers if number.isdigit()] if call.endswith("at") else []
        if relative and relative[at] in descriptors:
            return descriptors[relative[at]][0] / path
        return Path.cwd() / path

    def place(path: Path):
        for recording in recordings:
            if path != recording.root and path.is_relative_to(recording.root):
                return recording, recording.find(path.parent)
        return None, None

    if call in ("open", "openat", "creat"):
        path = full(0)
        found = next((r for r in recordings if path.is_relative_to(r.root)), None)
        inode = found.find(path) if found else None
        writes = "O_WRONLY" in text or "O_RDWR" in text or call == "creat"
        if found and inode is None:
            recording, parent = place(path)
            assert "O_CREAT" in text and parent is not None, text
            inode = recording.new_inode(False)
            recording.change(Change(parent, "name", path.name, inode))
        elif found and writes and "O_TRUNC" in text:
            found.change(Change(inode, "size", at=0))
        descriptors[result] = [path, 0, found, inode, "O_APPEND" in text]
    elif call in ("dup", "dup2", "dup3"):
        if int(numbers[0]) in descriptors:
            descriptors[result] = descriptors[int(numbers[0])]
    elif call == "close":
        descriptors.pop(int(numbers[0]), None)
    elif call in ("mkdir", "mkdirat"):
        recording, parent = place(full(0))
        if recording:
            recording.change(Change(parent, "name", full(0).name, recording.new_inode(True)))
    elif call in ("rename", "renameat", "renameat2"):
        old, new = full(0), full(1)
        recording, parent = place(new)
        if recording:
            origin, directory = place(old)
            assert origin is recording, f"{old} came from elsewhere"
            inode = recording.find(old)
            recording.change(Change(parent, "move", new.name, inode, (directory, old.name)))
    elif call in ("unlink", "unlinkat", "rmdir"):
        recording, parent = place(full(0))
        if recording:
            recording.change(Change(parent, "remove", full(0).name, recording.find(full(0))))
    elif call in ("link", "linkat", "symlink", "symlinkat", "truncate"):
        assert place(full(len(strings) - 1))[0] is None, f"{call} is not known here"
    elif call == "mmap":
        if "MAP_SHARED" in text and "PROT_WRITE" in text and numbers[4].isdigit():
            assert descriptors.get(int(numbers[4]), [0, 0, None])[2] is None, "a file is written through a mapping"
    else:
        file = descriptors.get(int(numbers[0])) if numbers[0].isdigit() else None
        if call in ("sendfile", "copy_file_range", "splice"):
            target = int(numbers[0 if call == "sendfile" else 2])
            file = descriptors.get(target)
        if file is None or file[2] is None:
            return
        _, position, recording, inode, appends = file
        if call == "lseek":
            file[1] = result
        elif call in ("fsync", "fdatasync"):
            recording.events.append(inode)
        elif call == "ftruncate":
            recording.change(Change(inode, "size", at=int(numbers[1])))
        elif call in ("write", "writev"):
            if appends:
                written = [c for c in recording.events if isinstance(c, Change) and c.of == inode]
                position = len(_content(recording.initial[inode], written))
            recording.change(Change(inode, "write", at=position, data=b"".join(strings)[:result]))
            file[1] = position + result
        elif call in ("pwrite64",):
            recording.change(Change(inode, "write", at=int(numbers[-1]), data=b"".join(strings)[:result]))
        elif call == "sendfile" and result:
            start = int(re.search(r"\[(\d+)\]", text)[1])
            with open(descriptors[int(numbers[1])][0], "rb") as source:
                source.seek(start)
                recording.change(Change(inode, "write", at=position, data=source.read(result)))
            file[1] = position + result
        else:
            assert not result, f"{call} is not known here"


def tree_of(root: Path) -> dict[str, object]:
    """Everything below a directory, by relative path: bytes, or DIRECTORY."""
    return {str(path.relative_to(root)): DIRECTORY if path.is_dir() else path.read_bytes() for path in root.rglob("*")}


def tree_after(recording: Recording, changes) -> dict[str, object]:
    """The same if only these changes have reached the disk."""
    inodes = {i: dict(v) if isinstance(v, dict) else v for i, v in recording.initial.items()}
    writes: dict[int, list[Change]] = {}
    for change in changes:
        if isinstance(change, Change):
            if change.kind in ("write", "size"):
                writes.setdefault(change.of, []).append(change)
            else:
                _apply(inodes, change)
    tree: dict[str, object] = {}

    def walk(inode: int, path: str) -> None:
        for name, child in inodes[inode].items():
            if child in recording.directories:
                tree[path + name] = DIRECTORY
                walk(child, f"{path}{name}/")
            else:
                tree[path + name] = _content(recording.initial[child], writes.get(child, []))

    walk(0, "")
    return tree


def make(tree: dict[str, object], root: Path) -> None:
    root.mkdir(parents=True)
    for path in sorted(tree):
        if tree[path] is DIRECTORY:
            (root / path).mkdir(parents=True)
        else:
            (root / path).write_bytes(tree[path])


def uncertain(events: list) -> list[int]:
    """Indices of changes that no fsync has made certain."""
    found: list[int] = []
    for at, event in enumerate(events):
        if isinstance(event, Change):
            found.append(at)
        else:
            found = [i for i in found if event not in _certain_with(events[i])]
    return found


def killed(recording: Recording) -> Iterator[dict[str, object]]:
    """States after a kill following every change, and in the middle of every write."""
    for end in range(len(recording.events) + 1):
        done = recording.events[:end]
        yield tree_after(recording, done)
        if end < len(recording.events) and isinstance(last := recording.events[end], Change) and len(last.data) > 1:
            half = last.data[: len(last.data) // 2]
            yield tree_after(recording, [*done, Change(last.of, "write", at=last.at, data=half)])


def without_power(recording: Recording, most: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Possible states after a power failure following every change: all of them if at most `most` changes are uncertain;
    otherwise each change missing alone, each present alone, all up to any moment, and random subsets."""
    seen = set()
    for end in range(len(recording.events) + 1):
        open_ones = uncertain(recording.events[:end])
        count = len(open_ones)
        if count <= most:
            choices = set(itertools.product((False, True), repeat=count))
        else:
            choices = {tuple(i < cut for i in range(count)) for cut in range(count + 1)}
            for one in range(count):
                choices |= {tuple((i == one) is there for i in range(count)) for there in (True, False)}
            draw = random.Random(f"{seed} {end}")
            choices |= {tuple(draw.random() < 0.5 for _ in range(count)) for _ in range(2**most)}
        for choice in sorted(choices):
            missing = {at for at, there in zip(open_ones, choice, strict=True) if not there}
            for zeros in (False, True):
                changes = []
                for at, event in enumerate(recording.events[:end]):
                    if at not in missing:
                        changes.append((at, event))
                    elif zeros and isinstance(event, Change) and event.kind == "write":
                        changes.append((-at - 1, Change(event.of, "write", at=event.at, data=bytes(len(event.data)))))
                key = tuple(at for at, event in changes if isinstance(event, Change))
                if key not in seen:
                    seen.add(key)
                    yield tree_after(recording, [event for _, event in changes])
