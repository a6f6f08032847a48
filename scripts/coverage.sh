#!/bin/sh
# Measures the coverage of C++ lines, Python lines and Python branches by this machine's tests. Writes reports to DIRECTORY,
# prints totals and the files with the lowest coverage. Fails below fail_under in pyproject.toml.
#   scripts/coverage.sh BIN DIRECTORY     BIN: the bin directory of the virtual environment; JOBS: how many at once
# Registrations of operators (torch, ExecuTorch, Python) are tested from Python, and not counted in C++.
set -eu

bin=$1
directory=$2
jobs=${JOBS:-2}
build=build/test-coverage
rm -rf "$directory"
mkdir -p "$directory"

# Not optimized, because lines that the compiler moves or merges are counted incorrectly.
"$bin/cmake" --preset coverage -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
  -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)" >"$directory/build.log"
"$bin/cmake" --build --preset coverage -j "$jobs" >>"$directory/build.log" || { tail -n 30 "$directory/build.log"; exit 1; }
find "$build" -name '*.gcda' -delete
"$bin/ctest" --preset coverage -j "$jobs"
# gcov takes a line that ran ten billion times for an error; inner loops of the tests do that.
"$bin/gcovr" --root . --filter kernels/ --filter ops/ --gcov-ignore-parse-errors=negative_hits.warn \
  --gcov-suspicious-hits-threshold=0 -j "$jobs" \
  --json "$directory/cpp.gcovr.json" --json-summary "$directory/cpp.json" --html-details "$directory/cpp.html" \
  "$build" >"$directory/cpp.log" 2>&1 || { tail -n 30 "$directory/cpp.log"; exit 1; }

"$bin/python" -m pytest -n "$jobs" --dist loadfile --cov --cov-report= --cov-fail-under=0 tests/python
"$bin/python" -m coverage json -q --fail-under=0 -o "$directory/python.json"
"$bin/python" -m coverage html -q --fail-under=0 -d "$directory/python"
cp .coverage "$directory/python.coverage"

"$bin/python" - "$directory" <<'PYTHON'
import json
import sys
from pathlib import Path

directory = Path(sys.argv[1])
cpp = json.loads((directory / "cpp.json").read_text())
python = json.loads((directory / "python.json").read_text())
kinds = {
    "C++": [(file["filename"], file["line_covered"], file["line_total"]) for file in cpp["files"]],
    "Python": [(name, file["summary"]["covered_lines"], file["summary"]["num_statements"])
               for name, file in python["files"].items()],
}
for kind, files in kinds.items():
    files = [file for file in files if file[2] > 0]
    covered, total = sum(file[1] for file in files), sum(file[2] for file in files)
    print(f"{kind}: {covered} of {total} lines, {100 * covered / total:.1f} %")
    for name, covered, total in sorted(files, key=lambda file: file[1] / file[2])[:10]:
        print(f"  {100 * covered / total:5.1f} %  {total - covered:4} lines not run  {name}")
totals = python["totals"]
branches = f"{totals['covered_branches']} of {totals['num_branches']} branches"
print(f"Python: {branches}, {totals['percent_covered']:.1f} % with lines")
print(f"all of it: {directory}/cpp.html, {directory}/python/index.html")
PYTHON
# Fails below the floor, fail_under in pyproject.toml.
"$bin/python" -m coverage report --format=total
rm .coverage
