"""Builds the programs of examples/cpp from the installed package, like a user, and runs them.

With LOWBIT_TEST_ARM_RUNNERS, a directory of such programs for Arm, the tests run those as well, under QEMU:
`make test-arm-runner`.
"""

import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from models import MAGIC

EXAMPLE = Path(__file__).parents[3] / "examples" / "cpp"
ARM_RUNNERS = os.environ.get("LOWBIT_TEST_ARM_RUNNERS")
QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu"]
KINDS = ["pte", "pt2"]
HERE = "here"
# Kind of file and CPU; there is no libtorch for Arm to build with. Results are tested on every CPU. Options, files and refusals
# use the same code on all Arm CPUs, and emulated calls are slow.
KINDS_AND_PROCESSORS = [(kind, HERE) for kind in KINDS]
KINDS_AND_CPUS = list(KINDS_AND_PROCESSORS)
if ARM_RUNNERS:
    KINDS_AND_PROCESSORS += [("pte", "cortex-a76")]
    KINDS_AND_CPUS += [("pte", "cortex-a76"), ("pte", "max,sve=off")]


@dataclass
class Runner:
    name: str
    command: list[str]
    cpu: str = HERE

    @property
    def kind(self) -> str:
        return "pt2" if "pt2" in self.name else "pte"

    def __call__(self, *arguments) -> subprocess.CompletedProcess:
        return subprocess.run([*self.command, *map(str, arguments)], capture_output=True, text=True, timeout=300)

    def refusal(self, *arguments) -> str:
        """The message of a refusal, with exit code 1 and no signal."""
        process = self(*arguments)
        assert process.returncode == 1, (process.returncode, process.stderr)
        assert re.search(rf"^{self.name}: .", process.stderr, re.M), process.stderr
        return process.stderr

    def libraries(self) -> set[str]:
        """The names of all shared libraries that it loads."""
        listing = subprocess.run(["ldd", self.command[-1]], capture_output=True, text=True, check=True).stdout
        assert "not found" not in listing
        return {line.split()[0].rsplit("/", 1)[-1] for line in listing.splitlines()}


def tool(name: str) -> str:
    """cmake and ninja of this Python's environment, if it has them."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def build(source: Path, directory: Path, *definitions: str) -> None:
    for command in (
        [tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-S", source, "-B", directory]
        + [f"-D{definition}" for definition in definitions],
        [tool("ninja"), "-C", directory],  # not through cmake: at the limit of time ninja itself must end
    ):
        process = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
        assert process.returncode == 0, process.stdout + process.stderr


def packed_bytes_altered(old: Path, new: Path, offset: int) -> None:
    """A copy of a file with a changed byte at `offset` in the header of each packed weight."""

    def alter(data: bytes) -> bytes:
        changed, at = bytearray(data), data.find(MAGIC)
        while at >= 0:
            changed[at + offset] ^= 0x11
            at = data.find(MAGIC, at + 1)
        return bytes(changed)

    if old.suffix == ".pte":
        new.write_bytes(alter(old.read_bytes()))
        assert new.read_bytes() != old.read_bytes()
        return
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w") as target:
        count = 0
        for name in source.namelist():
            data = source.read(name)
            count += data.count(MAGIC)
            target.writestr(name.replace(f"{old.stem}/", f"{new.stem}/", 1), alter(data))
        assert count > 0
