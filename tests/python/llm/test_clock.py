"""Stopped or jumping clocks and other file times change only figures of speed."""

import ast
import itertools
import os
import re
import time

import pytest
from command_line import FLOAT, PROMPT, ROOT, document, invoke
from gguf_files import write_model
from lowbit.importing.cache import cache_of, import_to_cache, is_current
from transformers import LlamaConfig, LlamaForCausalLM

CLOCKS = {
    "stands": lambda: itertools.repeat(5.0),
    "runs backwards": lambda: itertools.count(1e9, -0.25),
    "jumps": lambda: itertools.cycle([0.0, 1e9, -1e9, 3.0]),
}


@pytest.fixture
def clock(monkeypatch):
    """Sets the clock of this process."""

    def use(name: str) -> None:
        times = CLOCKS[name]()
        monkeypatch.setattr(time, "perf_counter", lambda: next(times))

    return use


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.more
def test_commands_give_the_same_results_with_any_clock(tmp_path, clock):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Return"}\n{"prompt": "The list"}\n')
    text = tmp_path / "text.txt"
    text.write_text("Return the number of items in the list.\n" * 8)

    def outcome(name: str) -> list:
        target = tmp_path / name.replace(" ", "-")
        results = [
            invoke("quantize", FLOAT, target, "--bits", 4, "--json"),
            invoke("generate", target, "--prompt", PROMPT, "--max-new-tokens", 6, "--json"),
            invoke("generate", target, "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 4, "--json"),
            invoke("generate", target, "--prompt", PROMPT, "--max-new-tokens", 3),
            invoke("eval", target, "--text", text, "--json"),
        ]
        for result in results:
            assert result.exit_code == 0, (name, result.stderr)
        documents = [document(result) for result in results if result.stdout.startswith("{")]
        told = [value for each in documents for value in kept(each)]
        return [*told, results[3].stdout, files_of(target)]

    def kept(value) -> list:
        """The numbers and texts of a document that do not depend on time, place or memory."""
        if isinstance(value, dict):
            left = [value[key] for key in value if not re.search("second|rate|memory|model|target|path|output", key)]
            return [item for each in left for item in kept(each)]
        return [item for each in value for item in kept(each)] if isinstance(value, list) else [value]

    expected = outcome("as it is")
    for name in CLOCKS:
        clock(name)
        assert outcome(name) == expected, name


def test_a_file_of_any_time_is_imported_once(tmp_path):
    file = tmp_path / "m.gguf"
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    write_model(file, LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)), "Q8_0")
    future = time.time_ns() + 10 * 365 * 86400 * 10**9
    before = {}
    for when in (future, 1, 0, future - 10**9):
        os.utime(file, ns=(when, when))
        assert not is_current(file)  # file times differ from those at the import, later or earlier
        import_to_cache(file)
        written = {name: data for name, data in files_of(cache_of(file)).items() if name != "lowbit_import.json"}
        assert is_current(file) and written == (before or written)
        before = written
        # The import itself may have any time.
        for path in cache_of(file).iterdir():
            os.utime(path, ns=(1, 1))
        assert is_current(file)


def test_only_one_clock_is_read():
    """Only clocks that cannot be set are read: `time.perf_counter`, and a thread's CPU time. C++ reads none. The server's
    answers, the prefix files and a machine's page have a date."""
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None)]
                # Templates may ask for the date; the others write a given time as a date.
                dated = path.parent.name == "perf" or path.name in ("template_environment.py", "messages.py", "cached.py")
                assert "datetime" not in names or dated, path
            if isinstance(node, ast.ImportFrom):
                assert node.module != "time", path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                dated = (path.parent.name, node.attr) == ("serve", "time") or (path.name, node.attr) == (
                    "prefixes.py",
                    "time_ns",
                )
                assert node.attr in ("perf_counter", "thread_time", "sleep") or dated, path
    clocks = re.compile(r"\b(chrono|clock_gettime|gettimeofday|clock|time|times|ftime)\b\s*(\(|>|::)")
    for directory in ("kernels", "ops", "plan"):
        for path in (ROOT / directory).rglob("*.*"):
            code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
            assert not clocks.search(code) or path.name in ("read_bandwidth.h", "run.cpp"), path  # which measure time
