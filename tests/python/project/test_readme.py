"""Commands and code in README.md and the documents run, and names in them exist."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lowbit
import pytest
import typer.main
from command_line import LOWBIT, ROOT, TINY, shortened
from lowbit.cli.app import make_app

README = ROOT / "README.md"
DOCUMENTS = [
    *sorted({*ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"}),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
NOT_RUN = ("bench", "eval", "serve")  # take minutes or do not end: only their existence and options are checked


def python_lines(document: Path) -> list[str]:
    """Python blocks of a document, with empty lines in place of other lines, so that errors have the document's line
    numbers."""
    lines, inside = [], False
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return lines


def commands(document: Path) -> list[list[str]]:
    """Calls of `lowbit` in a document's indented blocks and shell fences, without comments."""
    lines = re.findall(r"^(?: {4})?lowbit [a-z].*$", document.read_text(encoding="utf-8"), re.M)
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture
def directory(tmp_path):
    """A directory in which the repository's examples have their relative paths. The language model has one of its five layers,
    because each takes seconds to export; test_llm_export.py uses two."""
    tiny = tmp_path / "examples" / "tiny_llama"
    tiny.mkdir(parents=True)
    for found in (*(ROOT / "examples").iterdir(), *TINY.iterdir()):
        place = tmp_path / found.relative_to(ROOT)
        if place not in (tiny, tiny / "model"):
            place.symlink_to(found)
    shortened(tiny / "model", 1)
    return tmp_path


def run(command: list, directory: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        list(map(str, command)),
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, f"{shlex.join(map(str, command))}\n{process.stdout}{process.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_are_taken(document):
    """Parsed by the command line but not run: commands, options, and values that can be checked without files."""
    group = typer.main.get_command(make_app())
    text = re.sub(r"\\\n *", " ", document.read_text(encoding="utf-8"))
    for line in re.findall(r"^ {4}(?:.* \| )?lowbit ([a-z].*)$", text, re.M):
        name, *arguments = shlex.split(line.split(" > ")[0], comments=True)
        assert name in group.commands, f"{document.name}: there is no lowbit {name}"
        try:
            group.commands[name].make_context(name, arguments)
        except Exception as error:  # click's exception, or that of the click inside newer versions of typer
            pytest.fail(f"{document.name}: lowbit {line}: {getattr(error, 'message', error)}")
    for name, rest in re.findall(r"`lowbit ([a-z-]+)([^`]*)`", text):
        if name in group.commands or "--" in rest:
            assert name in group.commands, f"{document.name}: there is no lowbit {name}"
            there = {
                option for parameter in group.commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rest)) <= there, f"{document.name}: lowbit {name}{rest}"


@pytest.mark.more
def test_python_of_the_readme_runs(executorch, directory):
    lines = python_lines(README)
    assert any(lines), "README.md has no block of Python"
    (directory / "readme.py").write_text("\n".join(lines))
    run([sys.executable, "readme.py"], directory)


@pytest.mark.more
def test_commands_of_the_readme_run(executorch, directory):
    found = commands(README)
    assert found, "README.md has no call of lowbit"
    for command in found:
        run([LOWBIT, *command, *(["--help"] if command[0] in NOT_RUN else [])], directory)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_documents_exist(document):
    """Also in parts of programs: blocks compile, and names from lowbit exist."""
    source = "\n".join(python_lines(document))
    compile(source, str(document), "exec")
    for name in sorted(set(re.findall(r"\blowbit(?:\.[A-Za-z_]\w*)+", source))):
        found, path = lowbit, "lowbit"
        for part in name.split(".")[1:]:
            path += f".{part}"
            try:
                found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
            except ImportError:
                pytest.fail(f"{document.name}: there is no {path}")
            if not hasattr(found, "__path__") and not isinstance(found, type(sys)):
                break  # an object of lowbit, whose attributes have other tests


def test_files_in_documents_exist():
    """By name; documents omit the directory of unique file names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = {Path(name).name for name in listed.split("\0")}
    others = {"program.h", "pyconfig.h", "my_kernels.cpp"}  # of ExecuTorch, of CPython, and of the reader of docs/vendor.md
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        named = set(re.findall(r"`(?:[\w./-]*/)?([\w-]+[.](?:cpp|c|h|py|sh|cmake))`", text))
        assert named <= there | others, document


def test_the_api_reference_has_every_public_name():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    there = set()
    for name, members in re.findall(r"^::: (lowbit[\w.]*)\n(?: +options:\n +members: \[([\w, ]+)\])?", pages, re.M):
        there |= {name, *(f"{name}.{member}" for member in filter(None, members.split(", ")))}
    llm, modules = importlib.import_module("lowbit.llm"), {"lowbit.nn", "lowbit.qat"}
    public = {f"lowbit.{name}" for name in (*lowbit.__all__, *lowbit._LAZY)} | {f"lowbit.llm.{name}" for name in llm.__all__}
    found = {"lowbit.llm." + name.rpartition(".")[2] for name in there if name.startswith("lowbit.exports.decoder_program.")}
    assert len(public) > 40 and public - there - found - modules == {"lowbit.cmake_prefix_path"}  # a string: docs/export.md
