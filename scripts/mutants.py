"""Mutation testing: changes one place of a source at a time, and reports the changes that no test detects.

    make mutants                                        # a sample of all files
    .venv/bin/python scripts/mutants.py --sample 40 --seed 7 kernels/pack.cpp python/lowbit/packed/slices.py
    .venv/bin/python scripts/mutants.py --sample 0      # how many places there are
    .venv/bin/python scripts/mutants.py --at 120 kernels/pack.cpp

C++: a mutant is compiled with -O1, linked with the objects of build/test-host (`make build-test-host`), and run with the tests
of its file. Python: each mutant runs in a fork of a process that has already imported torch and transformers, which saves
seconds per mutant.

The same seed selects the same places. Mutants that do not compile are counted separately. So are mutants that take ten times as
long as the unchanged tests; a hang counts as detected.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "test-host"
TREE = ROOT / "build" / "mutants"  # a copy of the sources, in which one file is changed
MEMORY = 8 << 30  # bytes that a mutant may map


@dataclass(frozen=True)
class Place:
    """A range of characters, its replacement, and the name of the mutation."""

    begin: int
    end: int
    text: str
    kind: str

    def of(self, source: str) -> str:
        return source[: self.begin] + self.text + source[self.end :]


# Tests of each C++ file: a binary, its environment and arguments; for a header, also the sources to recompile. The tests of a
# file run until one fails, the fastest first.
FORMAT = ("format_tests",)
OPERATORS = ("operator_tests", "LOWBIT_ISA=avx2", "--gtest_filter=-*InChunks*:Attention*")
FUZZED = ("packed_fuzz", "3000", "1")


def rows(family: str) -> tuple[str, ...]:
    return "kernel_tests", "LOWBIT_TEST_ISA=portable", f"LOWBIT_TEST_FAMILY={family}", "LOWBIT_REQUIRE_ISA="


def operators(name: str) -> tuple[str, ...]:
    return "operator_tests", "LOWBIT_ISA=avx2", f"--gtest_filter={name}"


CHECKED = [f"ops/{name}.cpp" for name in ("linear", "experts", "embedding", "pack", "quantize", "repack", "splice")]
CPP: dict[str, tuple[list[tuple[str, ...]], list[str]]] = {
    "kernels/format.cpp": ([FORMAT, operators("Pack*:Splice*"), FUZZED], []),
    "kernels/header.cpp": ([FORMAT, FUZZED, ("library_tests",)], []),
    "kernels/library.cpp": ([("library_tests",)], []),
    "kernels/pack.cpp": ([FORMAT, operators("Pack*:Splice*:Quantize*")], []),
    "kernels/numeric.h": ([FORMAT], ["tests/cpp/numeric_test.cpp"]),
    "kernels/linear/portable.cpp": ([rows("linear")], []),
    "kernels/embedding/portable.cpp": ([rows("embedding")], []),
    "kernels/activation/portable.cpp": ([rows("quantize")], []),
    "ops/check.h": ([OPERATORS, ("isa_cap_tests", "LOWBIT_ISA=nonsense")], CHECKED),
    "ops/splice.cpp": ([operators("Splice*"), FUZZED], []),
    "ops/pack.cpp": ([operators("Pack*:Splice*"), ("library_tests",), FUZZED], []),
    "ops/embedding.cpp": ([operators("Embedding*"), FUZZED], []),
    "ops/experts.cpp": ([operators("LinearExperts*"), ("library_tests",), FUZZED], []),
    "ops/linear.cpp": ([operators("Linear*-*InChunks*"), ("library_tests",), FUZZED], []),
    "ops/quantize.cpp": ([operators("Quantize*")], []),
    "ops/repack.cpp": ([("library_tests",), FUZZED], []),
}

# Test files, or tests in a file.
PYTHON: dict[str, list[str]] = {
    "python/lowbit/files/config_json.py": ["test_checkpoint", "test_checkpoint_sources", "test_transformers"],
    "python/lowbit/files/elf.py": ["test_export::test_a_library_that_asks_for_an_executable_stack"],
    "python/lowbit/files/gguf_reader.py": [
        "test_importing_hostile::test_damaged_headers",
        "test_importing_hostile::test_the_least_alignment",
        "test_importing_hostile::test_every_truncation",
        "test_importing_hostile::test_a_long_header_is_refused",
        "test_importing_hostile::test_parts_of_different_models",
        "test_importing_odd::test_models_that_are_refused",
        "test_importing_gguf::test_a_split_file_from_any_of_its_parts",
        "test_importing_gguf::test_blocks_of_every_type",
        "test_export_gguf",
    ],
    "python/lowbit/files/io.py": ["test_safetensors_files", "test_importing_hostile::test_damaged_headers"],
    "python/lowbit/files/replace.py": ["test_replace", "test_checkpoint_targets", "test_export_gguf"],
    "python/lowbit/files/safetensors.py": [
        "test_safetensors_files",
        "test_checkpoint_sources",
        "test_checkpoint",
        "test_importing_directory",
    ],
    "python/lowbit/files/untrusted.py": [
        "test_untrusted",
        "test_checkpoint_sources",
        "test_importing_directory",
        "test_cli_errors",
    ],
    "python/lowbit/files/entries.py": ["test_checkpoint", "test_checkpoint_sources"],
    "python/lowbit/checkpoint/outputs.py": ["test_checkpoint", "test_checkpoint_sources", "test_importing_odd"],
    "python/lowbit/checkpoint/plan.py": ["test_checkpoint", "test_checkpoint_sources"],
    "python/lowbit/checkpoint/quantizing.py": ["test_checkpoint", "test_checkpoint_targets", "test_checkpoint_sources"],
    "python/lowbit/checkpoint/writing.py": ["test_checkpoint", "test_checkpoint_targets"],
    "python/lowbit/packed/matrix.py": [
        "test_errors::test_pack",
        "test_errors::test_packed_weights",
        "test_errors::test_experts",
        "test_errors::test_not_a_tensor_or_not_on_the_cpu",
        "test_modules::test_configs_check_themselves",
        "test_levels::test_pack_refuses",
        "test_levels::test_pack_and_back",
        "test_slices",
        "test_pack",
    ],
    "python/lowbit/packed/slices.py": ["test_slices"],
}


# --- Places in C++. ---

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*", "%": "/",
    "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=", "*=": "+=",
    "|=": "&=", "&=": "|=",
}  # fmt: skip
OPERATOR = re.compile(r"(?<=\s)(" + "|".join(sorted(map(re.escape, SWAPS), key=len, reverse=True)) + r")(?=\s)")
NUMBER = re.compile(r"(?<![\w.'])(0x[0-9a-fA-F]+|\d+)(?=[uUlL]*(?![\w.']))")
SHIFT = re.compile(r"\+\+|--")
# A call or an assignment on one line; not a declaration, which has a type before the name.
STATEMENT = re.compile(
    r"^[ \t]+((?!return\b|delete\b|throw\b)[\w:.\[\]]+(?:->[\w.\[\]]+)*(?:\(.*\)| [-+*|&^/]?= .*);)[ \t]*$", re.M
)
SKIPPED = re.compile(r"^\s*(#|static_assert|template|using|namespace)")


def without_text(source: str) -> str:
    """C++ with comments, strings and declarations replaced by blanks, at the same positions."""

    def blank(match: re.Match) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    source = re.sub(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""", blank, source, flags=re.S)
    return "".join(re.sub(r"[^\n]", " ", line) if SKIPPED.match(line) else line for line in source.splitlines(keepends=True))


def closing(source: str, at: int) -> int:
    """Position where the bracket at `begin` closes."""
    depth = 0
    for i in range(at, len(source)):
        depth += (source[i] in "([{") - (source[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError("a bracket that is not closed")


def places_in_cpp(source: str) -> Iterator[Place]:
    code = without_text(source)
    for match in OPERATOR.finditer(code):
        yield Place(*match.span(), SWAPS[match[0]], "operator")
    for match in NUMBER.finditer(code):
        yield Place(*match.span(), str(int(match[0], 0) + 1), "constant")
    for match in re.finditer(r"\bif (?:constexpr )?\(", code):
        first, last = match.end(), closing(code, match.end() - 1)
        depth = 0
        for i in range(first, last):
            depth += (code[i] in "([{") - (code[i] in ")]}")
            if code[i] == ";" and depth == 0:
                first = i + 1
        yield Place(first, last, f"!({source[first:last].strip()})", "condition")
        yield Place(first, last, f"({source[first:last].strip()}) && false", "check")
    for match in STATEMENT.finditer(code):
        if match[1].count("(") == match[1].count(")") and match[1].count("{") == match[1].count("}"):
            yield Place(*match.span(1), ";", "statement")


# --- Places in Python. ---

SWAPS_OF_NODES: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"), ast.Mod: ("%", "+"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


def places_in_python(source: str) -> Iterator[Place]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        first = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return len(data[: first[0]].decode()), len(data[: first[1]].decode())

    def between(left: ast.AST, right: ast.AST, operator: ast.AST) -> Iterator[Place]:
        if type(operator) in SWAPS_OF_NODES:
            old, new = SWAPS_OF_NODES[type(operator)]
            first, last = span(left)[1], span(right)[0]
            found = re.search(r"(?<![\w])" + re.escape(old).replace(r"\ ", r"\s+"), source[first:last])
            if found:
                yield Place(first + found.start(), first + found.end(), new, "operator")

    tree = ast.parse(source)
    annotations = {id(inner) for node in ast.walk(tree) for name in ("annotation", "returns")
                   if getattr(node, name, None) is not None for inner in ast.walk(getattr(node, name))}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Compare):
            for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators):
                yield from between(left, right, operator)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Place(*span(node), str(node.value + 1), "constant")
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield Place(*span(node), str(not node.value), "constant")
        elif isinstance(node, ast.If | ast.IfExp):
            first, last = span(node.test)
            yield Place(first, last, f"(not ({source[first:last]}))", "condition")
        if (
            isinstance(node, ast.Raise)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            or isinstance(node, ast.AugAssign)
        ):
            yield Place(*span(node), "pass", "statement")


def places_in(file: str) -> tuple[str, list[Place]]:
    source = (ROOT / file).read_text(encoding="utf-8")
    found = places_in_python(source) if file.endswith(".py") else places_in_cpp(source)
    return source, sorted(found, key=lambda place: (place.begin, place.end, place.text))


# --- Running. ---


def limited(seconds: float):
    """Runs in a child before its program: limits memory and CPU time, makes a process group."""

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return prepare


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Cpp:
    """Compiles and runs mutants of C++ files, in a copy of the sources."""

    def __init__(self) -> None:
        cmake = (BUILD / "CMakeCache.txt").read_text(encoding="utf-8")
        ninja = re.search(r"^CMAKE_MAKE_PROGRAM:\w+=(.*)$", cmake, re.M)[1]
        database = subprocess.run([ninja, "-C", BUILD, "-t", "compdb"], capture_output=True, text=True, check=True)
        self.commands: dict[tuple[str, str], list[str]] = {}  # of an object, by its target and source
        for entry in json.loads(database.stdout):
            target = re.search(r"CMakeFiles/([\w.]+)\.dir/", entry.get("output", ""))
            if target and entry["file"].endswith(".cpp"):
                source = str((BUILD / entry["file"]).resolve().relative_to(ROOT))
                self.commands[target[1], source] = self._command(entry["command"], source, entry["output"])
        self.objects = {key: BUILD / command[-1] for key, command in self.commands.items()}
        self.seconds: dict[tuple[str, ...], float] = {}
        for directory in ("kernels", "ops", "plan", "tests/cpp", "examples/vendor_kernel"):
            shutil.copytree(ROOT / directory, TREE / directory, dirs_exist_ok=True)

    @staticmethod
    def _command(line: str, source: str, output: str) -> list[str]:
        words = shlex.split(line)
        words = words[next(i for i, word in enumerate(words) if not word.endswith("ccache")) :]
        kept = [word for i, word in enumerate(words) if not (word in ("-o", "-c", "-MF", "-MT", "-MD", "-O3") or (
            i and words[i - 1] in ("-o", "-c", "-MF", "-MT")))]  # fmt: skip
        return [*kept, "-O1", "-c", str(TREE / source), "-o", output]

    def compile(self, key: tuple[str, str]) -> Path | None:
        target = TREE / "objects" / (key[0] + "." + key[1].replace("/", "_") + ".o")
        target.parent.mkdir(exist_ok=True)
        done = subprocess.run([*self.commands[key][:-1], target], cwd=BUILD, capture_output=True, text=True)
        return target if done.returncode == 0 else None

    def link(self, binary: str, changed: dict[tuple[str, str], Path]) -> Path:
        parts = [changed.get(key, path) for key, path in self.objects.items() if key[0] in ("lowbit", "test_support", binary)]
        target = TREE / binary
        compiler = next(iter(self.commands.values()))[0]
        gtest = BUILD / "tests" / "cpp" / "libgtest.a"
        subprocess.run([compiler, "-o", target, *parts, gtest, "-ldl", "-lpthread"], check=True)
        return target

    def run(self, test: tuple[str, ...], program: Path) -> bool:
        """Whether the test passes."""
        environment = dict(word.split("=", 1) for word in test[1:] if re.match(r"[A-Z_]+=", word))
        arguments = [word for word in test[1:] if not re.match(r"[A-Z_]+=", word)]
        before = cpu_of_children()
        try:
            done = subprocess.run([program, *arguments, *(["--gtest_fail_fast"] if test[0] != "packed_fuzz" else [])],
                                  env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  preexec_fn=limited(10 * self.seconds.get(test, 60)), timeout=1800)  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        if test not in self.seconds:
            self.seconds[test] = 0.5 + cpu_of_children() - before
        return done.returncode == 0

    def check(self, file: str) -> None:
        """Checks that the tests pass without a mutant, and measures their time as the limit for mutants."""
        if self.outcome(file, (ROOT / file).read_text(encoding="utf-8")) != "survived":
            sys.exit(f"mutants: the tests of {file} fail without a mutant: {CPP[file][0]}")

    def outcome(self, file: str, text: str) -> str:
        tests, sources = CPP[file]
        (TREE / file).write_text(text, encoding="utf-8")
        try:
            changed = {}
            for key in self.commands:
                if key[1] not in (sources or [file]) or key[0] not in ("lowbit", *(test[0] for test in tests)):
                    continue
                compiled = self.compile(key)
                if compiled is None:
                    return "no program"
                changed[key] = compiled
            for test in tests:
                if not self.run(test, self.link(test[0], changed)):
                    return "killed"
            return "survived"
        finally:
            shutil.copyfile(ROOT / file, TREE / file)


class Python:
    """Runs the mutants of Python files, each in a fork of this process."""

    def __init__(self) -> None:
        # torch would import lowbit by itself, but each fork must import its own copy.
        os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        sys.path.insert(0, str(ROOT / "tests" / "python"))
        import numpy  # noqa: F401
        import pytest  # noqa: F401
        import safetensors.torch  # noqa: F401
        import torch
        import transformers  # noqa: F401

        torch.set_num_threads(1)  # a fork has only one thread
        from transformers.models.llama import modeling_llama  # noqa: F401

        assert "lowbit" not in sys.modules
        self.seconds: dict[str, float] = {}

    def check(self, file: str) -> None:
        before = cpu_of_children()
        if self.outcome(file, (ROOT / file).read_text(encoding="utf-8")) != "survived":
            sys.exit(f"mutants: the tests of {file} fail without a mutant: {PYTHON[file]}")
        self.seconds[file] = 1 + cpu_of_children() - before

    def outcome(self, file: str, text: str) -> str:
        try:
            compile(text, file, "exec")
        except (SyntaxError, ValueError):
            return "no program"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = self._run(file, text)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        return "survived" if status == 0 else "killed"

    def _run(self, file: str, text: str) -> int:
        import importlib.util

        import pytest

        os.setpgid(0, 0)
        os.chdir(ROOT)
        del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
        sink = os.open(os.devnull if not os.environ.get("MUTANTS_SHOW") else "/dev/stderr", os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        limited(10 * self.seconds.get(file, 200) + resource.getrusage(resource.RUSAGE_SELF).ru_utime)()
        signal.alarm(1800)
        copy = TREE / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        module = ".".join(Path(file).relative_to("python").with_suffix("").parts).removesuffix(".__init__")

        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                return importlib.util.spec_from_file_location(name, copy) if name == module else None

        sys.meta_path.insert(0, Finder)
        importlib.import_module(module)
        assert sys.modules[module].__file__ == str(copy)
        tests = [str(ROOT / "tests" / "python" / re.sub(r"^\w+", r"\g<0>.py", name)) for name in PYTHON[file]]
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=[*CPP, *PYTHON], help="files that the driver knows; default: all")
    parser.add_argument("--sample", type=int, default=20, help="mutants per file (default 20); 0: only count the places")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at", type=int, help="all mutants of this line, and no others")
    options = parser.parse_args()
    unknown = [file for file in options.files if file not in CPP and file not in PYTHON]
    if unknown:
        parser.error(f"no tests are listed for {', '.join(unknown)}; expected some of {', '.join([*CPP, *PYTHON])}")
    runners: dict[bool, Cpp | Python] = {}
    total: dict[str, int] = {}
    for file in options.files:
        source, places = places_in(file)
        chosen = random.Random(f"{options.seed} {file}").sample(places, min(options.sample, len(places)))
        if options.at:
            chosen = [place for place in places if source.count("\n", 0, place.begin) + 1 == options.at]
        counts = {"places": len(places), "mutants": 0, "killed": 0, "survived": 0, "no program": 0}
        if options.sample or options.at:
            runner = runners.setdefault(file in PYTHON, Python() if file in PYTHON else Cpp())
            runner.check(file)
        for place in sorted(chosen, key=lambda place: place.begin) if options.sample or options.at else ():
            outcome = runner.outcome(file, place.of(source))
            counts[outcome] += 1
            counts["mutants"] += outcome != "no program"
            if outcome == "survived" or options.at:
                line = source.count("\n", 0, place.begin) + 1
                old = re.sub(r"\s+", " ", source[place.begin : place.end])
                whole = source.splitlines()[line - 1].strip()
                print(f"  {outcome}: {file}:{line}: {place.kind}: {old!r} -> {place.text!r} in: {whole}", flush=True)
        print(f"{file}: " + ", ".join(f"{count} {what}" for what, count in counts.items()), flush=True)
        total = {what: total.get(what, 0) + count for what, count in counts.items()}
    print("all: " + ", ".join(f"{count} {what}" for what, count in total.items()))


if __name__ == "__main__":
    main()
