"""The package logs, and prints nothing by itself."""

import ast
from pathlib import Path

import lowbit

PACKAGE = Path(lowbit.__file__).parent
# Programs may print: the command line, and processes that report to their parent.
PROGRAMS = ("cli/", "serve/grammar_trial.py", "tools/doctor/surfaces.py", "__main__.py")


def test_without_configured_logging_a_program_logs_nothing(fork_python):
    process = fork_python("import logging, lowbit; logging.getLogger('lowbit.module').warning('not shown')")
    assert process.returncode == 0 and process.stderr == "", process.stderr


def prints(path: Path) -> list[int]:
    """Lines that print or write to a standard stream."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_print = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        if is_print or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr")):
            found.append(node.lineno)
    return found


def test_only_programs_print():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    assert prints(files["cli/output.py"])
    assert {name: prints(path) for name, path in files.items() if not name.startswith(PROGRAMS) and prints(path)} == {}
