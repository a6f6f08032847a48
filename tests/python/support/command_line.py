"""Runs the command line for its tests: like a user, or in this process through the same entry point.

A new process takes seconds to import torch and transformers, so each command runs once in one; further cases run in this
process.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import typer.testing
from lowbit import llm
from lowbit.cli.app import make_app
from lowbit.llm.loading import TextStream, load_model, load_tokenizer

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "tiny_llama"
FLOAT = TINY / "model"
LOWBIT = Path(sys.executable).with_name("lowbit")
PROMPT = "Return the number of items"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as in conftest.py, because on a busy machine threads wait for each other

UNICODE = "Größe 東京 👩‍👩‍👧 שלום"
# Runs the program, and says at the end which libraries were imported.
PROGRAM = """
import atexit, sys
from lowbit_autoload.command import main
atexit.register(lambda: print(*sorted({"torch", "transformers"} & sys.modules.keys()), file=sys.stderr))
sys.argv[0] = "lowbit"
main()
"""


def run(*arguments, stdin: str | None = None, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs the installed `lowbit`."""
    return subprocess.run(
        [LOWBIT, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=900, cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"} | ONE_THREAD | environment,
    )  # fmt: skip


def invoke(*arguments, stdin: str | bytes | None = None):
    """The same in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        runner = typer.testing.CliRunner(env={"COLUMNS": None})  # set by pytest when it runs tests in parallel
        return runner.invoke(make_app(), [str(argument) for argument in arguments], input=stdin)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def document(result) -> dict:
    """The document that --json printed, with nothing else; its keys are those in docs/cli.md."""
    assert result.stdout.startswith("{") and result.stdout.endswith("}\n"), (result.stdout, result.stderr)
    return json.loads(result.stdout)


def section(command: str) -> str:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    return re.search(rf"^## {command}$(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def documented_keys(command: str) -> set[str]:
    keys = section(command).split("\nJSON: ")[1].split("\n\n")[0]
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", keys)))


def keys_in(value, depth: int = 0) -> set[str]:
    if isinstance(value, list):
        return set().union(*(keys_in(item, depth) for item in value), set())
    return set(value) if isinstance(value, dict) else set()


def text_of(generation: llm.Generation) -> str:
    tokenizer = load_tokenizer(FLOAT)
    stream = TextStream(tokenizer, tokenizer(PROMPT)["input_ids"])
    return "".join(map(stream.push, generation.tokens))


def broken(tmp_path: Path, **files) -> Path:
    """A copy of the float model with some files replaced, or removed if None."""
    target = tmp_path / "broken"
    shutil.copytree(FLOAT, target)
    for name, content in files.items():
        path = target / name.replace("__", ".")
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return target


def shortened(target: Path, layers: int) -> Path:
    """The float model with only its first layers, and its tokenizer, for tests that are slow per layer."""
    model = load_model(FLOAT)
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    model.save_pretrained(target)
    load_tokenizer(FLOAT).save_pretrained(target)
    return target


def config(**changes) -> str:
    return json.dumps(json.loads((FLOAT / "config.json").read_text()) | changes)


def error(result) -> str:
    """The only line on stderr of a failed command, without its prefix; stdout is empty."""
    assert result.exit_code == 1, (result.exit_code, result.stdout, result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1 and lines[0].startswith("lowbit: error: "), lines
    assert result.stdout == ""
    return lines[0].removeprefix("lowbit: error: ")
