"""Runs other projects' programs from PyPI on packed checkpoints: `make ecosystem`.

Each file of programs/ is one program. The first line of its docstring says what must happen, "Packages:" lists what pip
installs for it, "Group:" names its environment (default "main"). Packages that conflict are in different groups. An environment
has lowbit as a wheel, and sees the packages of the virtual environment that --bin names.

If a program fails or its packages cannot be installed, the others still run. The result is a table and its changes from the
committed one. The exit status is 1 if a program fails that passed before.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = ROOT / "docs" / "ecosystem.json"
LIMIT = 900  # seconds for a program
VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
PACKAGES = "import sys; print('\\n'.join(path for path in sys.path if path.endswith('-packages')))"
# No program may download a model or send telemetry.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "ANONYMIZED_TELEMETRY": "false", "HAYSTACK_TELEMETRY_ENABLED": "False", "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


PAGE = """# Programs that work

Programs of other projects that load, run or train packed checkpoints, each with the version that was tried. No program below
imports lowbit, except where a quantized model is made in the program itself: an installed lowbit registers itself with
transformers, peft and ExecuTorch ([how](internals/files.md)). {passed} of {all} programs pass.

`make ecosystem` runs them and says what changed since this table; `make ecosystem DOC=1` writes it. A job runs them every week
with the newest versions. Each program is a file of `tests/ecosystem/programs`.

{table}"""


@dataclass(frozen=True)
class Program:
    name: str
    outcome: str  # expected result
    packages: tuple[str, ...]
    group: str

    @property
    def file(self) -> Path:
        return HERE / "programs" / f"{self.name}.py"


@dataclass
class Result:
    outcome: str
    versions: dict[str, str]
    result: str  # "passed", or what failed


def read(file: Path) -> Program:
    """Reads a program's header; raises ValueError if it differs from the module's docstring."""
    header = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    packages = re.findall(r"[^\s,]+", " ".join(re.findall(r"^Packages: (.+)$", header, re.M)))
    group = re.search(r"^Group: (.+)$", header, re.M)
    if not packages:
        raise ValueError(f"{file.name} begins with {header!r}; expected a line with the expected result, and 'Packages: ...'")
    return Program(file.stem, header.splitlines()[0], tuple(packages), group[1] if group else "main")


def programs() -> list[Program]:
    """All programs, ordered by group."""
    found = [read(file) for file in sorted((HERE / "programs").glob("*.py"))]
    return sorted(found, key=lambda program: (program.group != "main", program.group, program.name))


def pins(newest: bool) -> dict[str, str]:
    """Requirements by package name, from the repository's files; without versions if the newest are requested."""
    lines = [
        line.split("#")[0].strip() for file in (ROOT, HERE) for line in (file / "requirements.txt").read_text().split("\n")
    ]
    found = {re.split("[=<>\\[]", line)[0]: line for line in lines if line}
    return {name: name if newest and name != "torch" else line for name, line in found.items()}


class Environment:
    """A virtual environment of a group."""

    def __init__(self, directory: Path, base: Path, wheel: Path, newest: bool, reuse: bool):
        self.directory, self.pins, self.newest = directory, pins(newest), newest
        self.python, self.models = directory / "venv" / "bin" / "python", directory / "models"
        if reuse and (self.models / "expected.pt").exists():
            return
        if not self.python.exists():
            subprocess.run([base, "-m", "venv", directory / "venv"], check=True)
            # The environment's own packages come first. Plain paths, so that the links of an editable lowbit are not followed.
            paths = subprocess.run([base, "-c", PACKAGES], check=True, capture_output=True, text=True).stdout
            (own,) = directory.glob("venv/lib/python*/site-packages")
            (own / "base.pth").write_text(paths)
        self.pip("--force-reinstall", "--no-deps", wheel).check_returncode()
        self.run(HERE / "prepare.py", directory, check=True)

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        constraints = self.directory / "constraints.txt"
        kept = self.pins.values() if not self.newest else [self.pins["torch"]]
        constraints.write_text("\n".join(kept) + "\n")
        command = [self.python, "-m", "pip", "install", "-q", "--no-compile", "-c", constraints]
        return subprocess.run([*command, *arguments], capture_output=True, text=True)

    def install(self, packages: tuple[str, ...]) -> str:
        """Installs packages; returns an error message, or nothing."""
        done = self.pip(*(["--upgrade"] if self.newest else []), *(self.pins.get(name, name) for name in packages))
        return reason(done.stderr) if done.returncode else ""

    def versions(self, packages: tuple[str, ...]) -> dict[str, str]:
        names = [package.split("[")[0] for package in packages]
        done = subprocess.run([self.python, "-c", VERSIONS, *names], capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def run(self, file: Path, directory: Path, check: bool = False) -> tuple[int, str]:
        """Runs a program; returns the exit status and all output."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= ENVIRONMENT | {"PYTHONPATH": str(HERE), "LOWBIT_ECOSYSTEM": str(self.models)}
        environment |= {"HF_HOME": str(self.directory / "cache"), "PATH": f"{self.python.parent}:{os.environ['PATH']}"}
        # -P, because a program may have the name of the package that it imports.
        try:
            done = subprocess.run(
                [self.python, "-P", file], cwd=directory, env=environment, timeout=LIMIT, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return 124, f"{(late.output or b'').decode(errors='replace')}\nTimeout: no result in {LIMIT} s"
        if check and done.returncode:
            sys.exit(f"{done.stdout}\n{file.name} failed: nothing to run the programs on")
        return done.returncode, done.stdout


def reason(output: str) -> str:
    """The line of the output with the error: the last one that looks like an exception, or else the last one."""
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()] or ["nothing was written"]
    errors = [line for line in lines if re.match(r"([\w.]*(Error|Exception|Interrupt|Timeout)|ERROR)\b", line)]
    return re.sub(r"(/[\w.+-]+){2,}/", "", (errors or lines)[-1])[:160]


def attempt(program: Program, environment: Environment, logs: Path) -> Result:
    failure = environment.install(program.packages)
    log = failure
    if not failure:
        with tempfile.TemporaryDirectory() as directory:
            status, log = environment.run(program.file, Path(directory))
        failure = reason(log) if status else ""
    (logs / f"{program.name}.log").write_text(log)
    return Result(program.outcome, environment.versions(program.packages), f"failed: {failure}" if failure else "passed")


def changes(before: dict[str, Result], after: dict[str, Result]) -> list[str]:
    """Lines about differences, changed results first."""
    found, versions = [], []
    for name in sorted(before | after):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            found.append(f"{name}: {f'new, {new.result}' if new else 'gone'}")
            continue
        if old.result != new.result:
            found.append(f"{name}: {old.result} -> {new.result}")
        for package in sorted(old.versions | new.versions):
            pair = [each.versions.get(package, "none") for each in (old, new)]
            if pair[0] != pair[1]:
                versions.append(f"{name}: {package} {pair[0]} -> {pair[1]}")
    return found + versions


def load(file: Path) -> dict[str, Result]:
    return {name: Result(**row) for name, row in json.loads(file.read_text()).items()} if file.exists() else {}


def table(results: dict[str, Result]) -> str:
    lines = ["| Program | Versions | Expected result | Result |", "|---|---|---|---|"]
    for name, row in results.items():
        versions = ", ".join(f"{package} {version}" for package, version in row.versions.items()) or "none installed"
        cells = (cell.replace("|", "\\|") for cell in (f"`{name}`", versions, row.outcome, row.result))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(results: dict[str, Result]) -> None:
    """Writes the committed table: rows for the next comparison, and the page of the documentation."""
    results = dict(sorted(results.items()))
    TABLE.write_text(json.dumps({name: asdict(row) for name, row in results.items()}, indent=1) + "\n")
    passed = sum(row.result == "passed" for row in results.values())
    TABLE.with_suffix(".md").write_text(PAGE.format(passed=passed, all=len(results), table=table(results)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs other projects' programs on packed checkpoints.")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="of the environment with torch and others")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "ecosystem", help="for environments and results")
    parser.add_argument("--only", help="names of programs, with commas")
    parser.add_argument("--reuse", action="store_true", help="the last run's wheel, environments and models as they are")
    parser.add_argument("--newest", action="store_true", help="the newest version of each package, not the pinned one")
    parser.add_argument("--write", action="store_true", help=f"also write the table to {TABLE.parent.name}/")
    options = parser.parse_args()

    wanted = programs()
    if options.only:
        names = options.only.split(",")
        if unknown := set(names) - {program.name for program in wanted}:
            parser.error(f"--only names {sorted(unknown)}; expected some of {[program.name for program in wanted]}")
        wanted = [program for program in wanted if program.name in names]
    directory: Path = options.directory.resolve()
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if not options.reuse or not (directory / "wheel").exists():
        shutil.rmtree(directory / "wheel", ignore_errors=True)
        command = [options.python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", directory / "wheel"]
        subprocess.run([*command, ROOT], check=True)
    (wheel,) = (directory / "wheel").glob("*.whl")

    results: dict[str, Result] = {}
    environments: dict[str, Environment] = {}
    for program in wanted:
        if program.group not in environments:
            made = (directory / program.group, options.python, wheel, options.newest, options.reuse)
            environments[program.group] = Environment(*made)
        results[program.name] = attempt(program, environments[program.group], logs)
        print(f"{program.name}: {results[program.name].result}", flush=True)

    before = load(TABLE)
    if options.only:
        before = {name: row for name, row in before.items() if name in results}
    changed = changes(before, results)
    text = f"{table(results)}\nChanged since the last table:\n\n" + ("\n".join(f"* {line}" for line in changed) or "nothing")
    (directory / "table.md").write_text(text + "\n")
    if options.write:
        write(load(TABLE) | results if options.only else results)
    print(f"\n{text}")
    broken = [name for name, row in results.items() if row.result != "passed" and before.get(name, row).result == "passed"]
    sys.exit(f"passed before, and no longer: {', '.join(broken)}" if broken else 0)


if __name__ == "__main__":
    main()
