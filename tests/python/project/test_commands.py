"""Commands for developers: `make help`, targets in documents, CMake presets, the table of emulated CPUs."""

import json
import os
import re
import subprocess

import pytest
from makefiles import ROOT, TEXT, rules
from runners import tool

PRESETS = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))
EMULATED = ROOT / "scripts" / "emulated.sh"
RUNS = sorted(set(re.findall(r"^((?:test-arm|test-kleidiai|phones|soak|emulated/)\S*) +\S+ ", EMULATED.read_text(), re.M)))


def test_help_lists_the_common_targets():
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    targets = [line.split()[0] for line in shown[:-1]]
    assert 12 <= len(targets) <= 18 and {"demo", "test", "lint", "clean"} <= set(targets) <= set(rules())
    assert len(targets) == len(set(targets)) and all(len(line) <= 100 for line in shown)
    assert shown[-1].startswith("All others")
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n\n")[1]
    assert sorted(re.findall(r"^    make ([\w-]+)", guide, re.M)) == sorted(targets)


def test_documents_and_workflows_name_targets_that_exist():
    documents = [ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml")]
    documents += [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    documents = [path for path in documents if path.name != "CHANGELOG.md"]
    command = r"(?:^ +(?:- run: )?|`|^|[#;] )make ((?:[A-Z_]+=\S+ |-o \S+ )*[a-z][a-z0-9-]*(?: [a-z]+-[a-z0-9-]+)*)(?![\w/-])"
    found = {}
    for path in documents:
        for words in re.findall(command, path.read_text(encoding="utf-8"), re.M):
            for word in re.sub(r"-o \S+|[A-Z_]+=\S+", "", words).split():
                found.setdefault(word, path.name)
    assert len(found) > 50
    assert {word: name for word, name in found.items() if word not in rules()} == {}


def test_the_table_of_tests_names_existing_files():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `.*", guide.split("## Where the tests are")[1].split("\n## ")[0], re.M)
    names = [name for line in table for name in re.findall(r"`([\w./]+)`", line)]
    package, tests = ROOT / "python" / "lowbit", ROOT / "tests" / "python"
    assert [name for name in names if not (ROOT / name).exists() and not (package / name).exists()] == []
    modules = [path for path in package.iterdir() if path.is_dir() or path.suffix == ".py"]
    entries = {path.name for path in modules if not path.name.startswith("__") and not (tests / path.name).is_dir()}
    assert "nn.py" in entries and entries <= {name.strip("/").split("/")[-1] for name in names}


def test_presets_are_those_that_the_makefiles_use():
    shown = subprocess.run([tool("cmake"), "--list-presets=all"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    text = TEXT + (ROOT / "scripts" / "coverage.sh").read_text(encoding="utf-8")
    used = set(re.findall(r"preset[, ]([a-z][\w-]*(?:\$\(CLANG\))?)", text)) | {"roofs"}  # $(call build-bench,roofs)
    used = {name.replace("$(CLANG)", version) for name in used for version in ("19", "16")}
    kinds = {kind: {preset["name"] for preset in PRESETS[kind + "Presets"]} for kind in ("configure", "build", "test")}
    assert used == {name for names in kinds.values() for name in names} - {
        preset["name"] for kind in kinds for preset in PRESETS[kind + "Presets"] if preset.get("hidden")
    }
    assert kinds["build"] - kinds["configure"] == {"roofs", "tsan"}  # parts of bench and host


def test_rows_of_emulated_cpus_belong_to_targets():
    emulated = set(re.findall(r"^(?:test-\S+|soak)(?: test-\S+)*(?=:(?:[^\n]*\n\t)[^\n]*(?:\n\t[^\n]*)*EMULATED)", TEXT, re.M))
    targets = {target for line in emulated for target in line.split()} - {"test-android", "test-android-like"}
    assert targets | {"phones"} == {run for run in RUNS if "/" not in run}
    assert "test-arm-sme2" in targets and "emulated/amx" in RUNS


@pytest.mark.parametrize("run", [run for run in RUNS if "/" not in run and "python" not in run])
def test_a_row_of_emulated_cpus_sets_its_variables(run, tmp_path):
    """A fake ctest writes its settings and options; a failing one ends the run."""
    ctest = tmp_path / "ctest"
    ctest.write_text(
        '#!/bin/sh\necho "CPU=$QEMU_CPU" "PAGES=${QEMU_PAGESIZE-}" "$LOWBIT_REQUIRE_ISA" "${PATH%%:*}" "$@"\nexit $STATUS\n'
    )
    ctest.chmod(0o755)

    def ran(status: str) -> subprocess.CompletedProcess:
        settings = {**os.environ, "CTEST": str(ctest), "STATUS": status, "LOWBIT_REQUIRE_ISA": "any"}
        return subprocess.run([EMULATED, run, "built"], env=settings, capture_output=True, text=True)

    rows = [line.split()[1:] for line in EMULATED.read_text().splitlines() if line.split()[:1] == [run]]
    done = ran("0")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("==")]
    assert done.returncode == 0 and len(lines) == len(rows) and not done.stderr
    for line, (cpu, isas, *tests) in zip(lines, rows, strict=True):
        assert line.startswith(f"CPU={cpu} ") and f" {isas.replace('-', 'any')} " in line and " --test-dir built" in line
        assert ("/build/arm-emulator " in line) == ("QEMU=new" in tests)
        pages = {"@PHONE": "16384", "QEMU_PAGESIZE=65536": "65536"}.get(tests[0] if tests else "", "")
        assert f" PAGES={pages} " in line and not re.search("[@=]", line.split("--test-dir built")[1])
        assert line.endswith(tests[-1]) if tests and "@" not in tests[-1] else True
    failed = ran("3")
    assert failed.returncode == 3 and failed.stdout.count("CPU=") == 1


def test_an_unknown_run_is_refused():
    done = subprocess.run([EMULATED, "test-riscv"], capture_output=True, text=True)
    assert done.returncode == 1 and "there is no run 'test-riscv' in the table" in done.stderr
