"""`lowbit doctor` reports what works, and a remedy for what does not."""

import os
import shutil
import sys
import tempfile

import lowbit
import pytest
import torch
from command_line import document, documented_keys, invoke, keys_in, run
from lowbit.machine import memory
from lowbit.tools.doctor import checks, surfaces

COMPILER = "install a C++ compiler (Debian, Ubuntu: apt-get install g++), or name one in the environment variable CXX"
REMEDY = f"pip install executorch=={lowbit._C.executorch_version.partition('+')[0]}, which this lowbit was built for"


def hidden(tmp_path, line: str) -> dict[str, str]:
    """An environment in which every Python first runs this line."""
    (tmp_path / "sitecustomize.py").write_text(f"{line}\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.more
def test_without_compiler_and_executorch(tmp_path):
    environment = hidden(tmp_path, "import sys; sys.modules['executorch'] = None")
    (tmp_path / "bin").mkdir()
    result = run("doctor", "--json", PATH=str(tmp_path / "bin"), CXX="", **environment)
    assert result.returncode == 1, result.stderr
    said = document(result)
    assert set(said) | keys_in(said["surfaces"]) == documented_keys("doctor")
    found = {surface["name"]: surface for surface in said["surfaces"]}
    states = {name: surface["state"] for name, surface in found.items()}
    assert states == {
        "eager": "works", "torch.compile": "broken", ".pt2": "broken", ".pte": "missing", "C++": "broken",
        "language models": "works",
    }  # fmt: skip
    for name in ("torch.compile", ".pt2", "C++"):
        assert (found[name]["reason"], found[name]["remedy"]) == ("there is no C++ compiler", COMPILER)
    assert found[".pte"]["reason"] == "executorch is not installed"
    assert found[".pte"]["remedy"] == REMEDY
    assert found["eager"]["remedy"] is None and said["works"] is False
    assert said["read_bandwidth"] > 1e8 and 1 <= said["advised_threads"] <= said["cpus_allowed"]
    assert said["packages"]["torch"] == torch.__version__ and said["isa"] == lowbit.isa()
    running = {row["name"] for row in lowbit.kernels() if row["active"]}
    assert {name for names in said["kernels"].values() for name in names} == running
    assert {f"linear, {bits} bits" for bits in range(1, 9)} <= set(said["kernels"])


@pytest.mark.more
@pytest.mark.parametrize("name", ["torch.compile", ".pt2", ".pte", "C++"])
def test_installed_parts_work(name, executorch):
    if name != ".pte" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.fail("there is no C++ compiler; scripts/need.sh build installs it")
    tried = surfaces._try_here(name)
    assert (tried.state, tried.reason, tried.remedy) == ("works", None, None)


def test_the_page(monkeypatch):
    """The output and exit code for every state."""
    monkeypatch.setattr(checks, "read_bandwidth", lambda threads: None)
    monkeypatch.setattr(checks, "advised_threads", lambda: 1)
    monkeypatch.setattr(checks, "advice", lambda facts: [])  # depends on the load of the machine
    states = {
        "eager": surfaces.Surface("eager", "works", 0.25),
        ".pte": surfaces.Surface(".pte", "missing", 0.0, "executorch is not installed", "pip install it"),
    }
    monkeypatch.setattr(surfaces, "SURFACES", states)
    monkeypatch.setattr(surfaces, "try_surface", lambda name: states[name])
    well = invoke("doctor")
    assert well.exit_code == 0, (well.stderr, well.exception)
    lines = well.stdout.splitlines()
    assert lines[-1] == "Everything that is installed works."
    assert ".pte: executorch is not installed" in lines and "  remedy: pip install it" in lines
    assert ["eager", "works", "0.2"] in [line.split() for line in lines]
    assert [".pte", "not", "installed"] in [line.split() for line in lines]
    assert [line for line in lines if len(line) > 120] == []
    for isa in lowbit.isa()["active"][-1:]:
        assert any(line.startswith("linear ") and isa in line for line in lines)
    states[".pte"] = surfaces.Surface(".pte", "broken", 1.0, "it was built with 1.4", "build it again")
    ill = invoke("doctor")
    assert ill.exit_code == 1 and ill.stdout.splitlines()[-1] == ".pte does not work."
    assert ".pte: it was built with 1.4" in ill.stdout.splitlines()


def test_a_process_that_ends_or_hangs_is_a_finding(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)  # so that it is determined again
    late = surfaces.try_surface("eager", seconds=0.01)
    assert (late.state, late.reason) == ("broken", "it was not done after 0.01 seconds")
    assert late.remedy == f"the whole error: {os.path.basename(sys.executable)} -m lowbit.tools.doctor.surfaces 'eager'"
    for line, expected in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "its process ended by SIGILL"),
        ("import os; os.write(2, b'no libc: Error 7\\n'); os._exit(3)", "no libc: Error 7"),
        ("import os, tempfile; os.write(2, tempfile.mkdtemp(prefix='left').encode()); os._exit(3)", f"{temporary}/"),
    ):
        for name, value in hidden(tmp_path, line).items():
            monkeypatch.setenv(name, value)
        ended = surfaces.try_surface("eager")
        assert ended.state == "broken" and ended.reason.startswith(expected), ended.reason
        assert list(temporary.iterdir()) == []


def test_a_failed_import_is_one_line():
    result = run("doctor", "--json", LOWBIT_ISA="nonsense")
    (line,) = result.stderr.splitlines()
    said = line.removeprefix("lowbit: error: ")
    assert result.returncode == 1 and said.startswith("LOWBIT_ISA is 'nonsense'; expected one of: portable, ")
    assert document(result) == {"error": {"type": "ImportError", "message": said}}


def test_wrong_results_are_found(monkeypatch, capsys):
    assert surfaces._try_here("eager").state == "works"
    right = lowbit.linear
    monkeypatch.setattr(lowbit, "linear", lambda x, packed, n: right(x, packed, n) + (lowbit.info(packed).bits == 3))
    tried = surfaces._try_here("eager")
    assert (tried.state, tried.reason) == ("broken", "linear layers with 3 bits give wrong results")
    monkeypatch.setattr(lowbit, "linear", lambda *arguments: {}["nothing"])
    tried = surfaces._try_here("eager")
    assert (tried.state, tried.reason) == ("broken", "KeyError: 'nothing'")
    assert "-m lowbit.tools.doctor.surfaces" in tried.remedy and "KeyError" in capsys.readouterr().err


def test_executorch_of_another_version(monkeypatch):
    def refuse():
        raise ImportError("lowbit was built with executorch 1.4.0; found 1.5.1")

    monkeypatch.setattr("lowbit.executorch.register", refuse)
    tried = surfaces._try_here(".pte")
    assert tried.state == "broken" and "built with executorch 1.4.0" in tried.reason
    assert tried.remedy == REMEDY
    monkeypatch.setattr(surfaces._C, "executorch_version", "")
    assert surfaces._executorch().endswith("then build lowbit again in a checkout, with `pip install .`")


def test_missing_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(lowbit, "cmake_prefix_path", str(tmp_path))
    tried = surfaces._try_here("C++")
    assert tried.state == "broken" and tried.reason == f"there are no headers in {tmp_path}"
    (tmp_path / "include").mkdir()
    tried = surfaces._try_here("C++")
    assert tried.state == "broken" and "does not compile against lowbit" in tried.reason
    assert "operators.h" in tried.reason


def test_advice():
    facts = {
        "isa": {"cap": None, "active": ["portable", "neon"]}, "huge_pages": "madvise", "threads": 4,
        "advised_threads": 4,
    }  # fmt: skip
    assert checks.advice(facts) == []
    for changed, said in (
        ({"isa": {"cap": "neon", "active": ["portable", "neon"]}}, "LOWBIT_ISA=neon caps the instruction sets"),
        ({"isa": {"cap": None, "active": ["portable"]}}, "portable C++ runs"),
        ({"huge_pages": "never"}, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
        ({"advised_threads": 2}, "torch.set_num_threads(2)"),
    ):
        (sentence,) = checks.advice(facts | changed)
        assert said in sentence


def test_huge_page_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path)
    assert memory.huge_page_setting() is None
    for text, setting in (("always [madvise] never\n", "madvise"), ("always madvise [never]\n", "never"), ("", None)):
        (tmp_path / "enabled").write_text(text)
        assert memory.huge_page_setting() == setting


def test_bandwidth_without_memory(monkeypatch):
    monkeypatch.setattr(checks.os, "sysconf", lambda name: 0)
    assert checks.read_bandwidth(1) is None
