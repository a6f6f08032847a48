"""The runner of `make ecosystem`: program headers, reports of failures and changes, the committed table."""

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("ecosystem_run", ROOT / "tests" / "ecosystem" / "run.py")
run = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def test_programs_rely_on_registration_by_itself():
    """A program that imports lowbit gives the reason in its header."""
    found = run.programs()
    assert len(found) == len({program.name for program in found}) >= 3
    for program in found:
        source = program.file.read_text(encoding="utf-8")
        assert ("lowbit" in imported(program.file)) == ("\nImports lowbit: " in source), program.name
        assert "given" in imported(program.file) and program.outcome.endswith("."), program.name
    assert "lowbit" not in imported(ROOT / "tests" / "ecosystem" / "given.py")


def test_every_package_is_pinned():
    pinned = run.pins(newest=False)
    for program in run.programs():
        for package in program.packages:
            assert "==" in pinned.get(package.split("[")[0], ""), (program.name, package)
    newest = run.pins(newest=True)
    assert newest["peft"] == "peft" and newest["torch"] == pinned["torch"]


@pytest.mark.parametrize("text", ["", '"""No packages."""', "import torch"])
def test_a_header_with_too_small_sizes(tmp_path, text):
    (tmp_path / "some.py").write_text(text)
    with pytest.raises(ValueError, match="some.py begins with .*; expected a line with the expected result, and 'Packages"):
        run.read(tmp_path / "some.py")


@pytest.mark.parametrize(
    "output, expected",
    [
        ("", "nothing was written"),
        ("x\nValueError: found 3\nshutting down\n", "ValueError: found 3"),
        ("ImportError: 1\nOSError: /opt/deep/lib.so is missing", "OSError: lib.so is missing"),
        ("ERROR: No matching distribution found for x==9", "ERROR: No matching distribution found for x==9"),
        ("Segmentation fault", "Segmentation fault"),
    ],
)
def test_the_reason_of_a_failure(output, expected):
    assert run.reason(output) == expected


def test_changes():
    def row(result, **versions):
        return run.Result("A text.", versions, result)

    before = {"a": row("passed", x="1"), "b": row("passed", y="1"), "c": row("passed"), "same": row("passed", z="1")}
    after = {"a": row("failed: OSError", x="2"), "b": row("passed", y="1.1"), "d": row("passed"), "same": row("passed", z="1")}
    assert run.changes(before, after) == [
        "a: passed -> failed: OSError", "c: gone", "d: new, passed", "a: x 1 -> 2", "b: y 1 -> 1.1"
    ]  # fmt: skip
    assert run.changes(before, before) == []


def test_a_program_runs_without_its_folder_on_the_path(tmp_path):
    """A program may have the name of the package that it imports."""
    environment = run.Environment.__new__(run.Environment)
    environment.directory, environment.python, environment.models = tmp_path, Path(sys.executable), tmp_path
    (tmp_path / "json.py").write_text("import json, os\nprint(json.dumps(os.environ['LOWBIT_ECOSYSTEM']))")
    assert environment.run(tmp_path / "json.py", tmp_path) == (0, json.dumps(str(tmp_path)) + "\n")
    (tmp_path / "wrong.py").write_text("raise ValueError('found 3; expected 4')")
    status, output = environment.run(tmp_path / "wrong.py", tmp_path)
    assert status == 1 and run.reason(output) == "ValueError: found 3; expected 4"
