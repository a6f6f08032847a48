"""bench/compare.py at a tiny size: structure and plausibility of its output, not its times."""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import lowbit
import numpy as np
import pytest

pytestmark = pytest.mark.first

BENCH = Path(__file__).parents[3] / "bench"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SHAPES = ((256, 512), (512, 256))


@pytest.fixture(scope="module")
def roofs(tmp_path_factory):
    """The program bench/roofs.cpp, built with the installed package's core."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed"
    program = tmp_path_factory.mktemp("roofs") / "roofs"
    core = Path(lowbit._C.__file__).parent
    command = [
        compiler,
        "-std=c++20",
        "-O2",
        "-pthread",
        BENCH / "roofs.cpp",
        "-o",
        program,
        f"-L{core}",
        "-llowbit",
        f"-Wl,-rpath,{core}",
    ]
    built = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return program


@pytest.fixture
def peers(monkeypatch):
    """Imports a module of bench/."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def run_compare(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, BENCH / "compare.py", *arguments]
    return subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def finished(roofs, tmp_path_factory):
    """A run with only torch: its output path without suffix, its printed text and its JSON."""
    output = tmp_path_factory.mktemp("bench") / "made" / "compare"
    process = run_compare(
        "--quick",
        "--rounds",
        1,
        "--rounds-of-several-rows",
        1,
        "--roofs",
        roofs,
        "--output",
        output,
        "--threads",
        1,
        "--libraries",
        "torch",
        "--sweep",
        "1,2,64",
        "--shapes",
        ",".join(f"{n}x{k}" for n, k in SHAPES),
    )
    assert process.returncode == 0, process.stderr
    return output, process.stdout, json.loads(output.with_suffix(".json").read_text())


@pytest.mark.more
def test_results_describe_the_run(finished):
    _, printed, results = finished
    assert results["complete"]
    machine = results["machine"]
    assert machine["cpu"] in printed and machine["isa"]["cpu"] and machine["cpus"] >= 1 and machine["memory_bytes"] > 1e8
    assert results["versions"]["torch"] and results["versions"]["lowbit"] == lowbit.__version__
    assert "compare.py" in results["command"] and results["date"].startswith("20")
    assert results["settings"]["threads"] == [1]


def test_roofs(finished):
    found = finished[2]["roofs"]
    assert found["read_gbs"].keys() == {"1"} and 0.01 < found["read_gbs"]["1"] < 10000
    if found["int8_isa"] is None:
        assert found["int8_gops"] is None
    else:
        assert found["int8_isa"] in lowbit.isa()["cpu"] and 0.1 < found["int8_gops"]["1"] < 100000


def test_every_contender_has_every_result(finished):
    results = finished[2]
    names = [spec["name"] for spec in results["contenders"]]
    assert {f"lowbit {bits} bits g{g}" for bits in range(2, 9) for g in (32, 128)} <= set(names)
    assert {"lowbit 1 bit g32", "lowbit 1 bit g128", "torch float32", "torch bfloat16"} <= set(names)
    missing = {entry["name"].split(",")[0] for entry in results["absent"]}
    found = {(row["contender"], row["n"], row["k"], row["m"]) for row in results["results"] if "rows" not in row["section"]}
    expected = {(name, n, k, m) for name in names if name not in missing for n, k in SHAPES for m in (1, 128)}
    assert not {name for name in missing if name.startswith(("lowbit", "torch float32", "torch bfloat16"))}
    assert expected <= found
    by_rows = {(row["contender"], row["m"]) for row in results["results"] if "rows" in row["section"]}
    assert by_rows == {
        (name, m) for name in ("lowbit 4 bits g128", "lowbit 4 bits g128 bf16", "torch bfloat16") for m in (1, 2, 64)
    }


def test_figures_follow_from_the_times(finished):
    results = finished[2]
    specs = {spec["name"]: spec for spec in results["contenders"]}
    for row in results["results"]:
        weights = row["n"] * row["k"]
        assert len(row["samples"]) == 1 and row["seconds"] == row["samples"][0] > 0
        assert row["weights_per_ns"] == pytest.approx(weights / row["seconds"] / 1e9)
        assert row["gops"] == pytest.approx(2 * row["m"] * weights / row["seconds"] / 1e9)
        moved = specs[row["contender"]]["bytes"][f"{row['n']}x{row['k']}"]
        if row["m"] == 1:
            (read,) = row["read_gbs"]
            assert row["share_of_bandwidth"] == pytest.approx(moved / row["seconds"] / (read * 1e9))
        else:
            assert row["share_of_bandwidth"] is None and row["read_gbs"] is None
    assert specs["torch bfloat16"]["bytes"]["256x512"] == 2 * 256 * 512
    for bits in (8, 4, 2):  # 16 bits of scale per group; the rest is the header and the panels' heads
        stored = 8 * specs[f"lowbit {bits} bits g32"]["bytes"]["256x512"] / (256 * 512)
        assert bits + 0.5 <= stored < bits + 1


def test_results_are_near_the_float_ones(finished):
    specs = {spec["name"]: spec["relative_error"] for spec in finished[2]["contenders"]}
    assert 0 < specs["torch float32"] < 1e-5 and 1e-4 < specs["torch bfloat16"] < 0.01
    errors = [specs[f"lowbit {bits} bits g32"] for bits in range(8, 1, -1)] + [specs["lowbit 1 bit g32"]]
    assert errors == sorted(errors) and 0.003 < errors[0] < 0.02 and 0.5 < errors[-1] < 0.7


def test_absent_peers_are_listed_with_a_reason(finished):
    output, printed, results = finished
    absent = {entry["name"]: entry["reason"] for entry in results["absent"]}
    assert absent["onnxruntime"] == absent["ggml"] == "left out by --libraries"
    document = output.with_suffix(".md").read_text()
    for name, reason in absent.items():
        assert reason and f"* {name}: {' '.join(reason.split())}\n" in document + "\n"
    assert document in printed


def test_document_and_plot(finished):
    output, _, results = finished
    document = output.with_suffix(".md").read_text()
    for spec in results["contenders"]:
        if spec["bytes"]:
            assert document.count(f"| {spec['name']} |") >= 3  # one row, 128 rows, errors
    assert "## By rows" in document and results["date"] in document and results["machine"]["cpu"] in document
    assert output.with_suffix(".png").read_bytes().startswith(PNG_SIGNATURE)


def test_missing_libraries_are_absent(peers, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found, absent, _ = peers("peers.onnxruntime_peers").contenders()
    assert not found and "make bench-peers" in absent[0].reason
    ggml = peers("peers.ggml_peers")
    monkeypatch.setattr(ggml, "LIBRARIES", tmp_path)
    found, absent, _ = ggml.contenders()
    assert not found and "make bench-peers" in absent[0].reason


@pytest.mark.parametrize("module, packages", [("peers.onnxruntime_peers", ("onnx", "onnxruntime")), ("peers.ggml_peers", ())])
def test_installed_peers_compute_the_product(peers, module, packages):
    contender = peers("peers.contender")
    library = contender.Library(module, [1])
    if not library.contenders:
        assert all(entry.reason for entry in library.absent)
        pytest.skip(f"a peer of the benchmark is not installed: {library.absent[0].reason}")
    limit = peers("compare_report").limit
    for spec in library.describe()["specs"]:
        made = library.prepare(spec["name"], 256, 512, 8, 1)
        assert 0 < made["relative_error"] <= limit(spec), spec["name"]
        assert (spec["bits"] * 256 * 512 / 8 if spec["bits"] != 2 else 1.6 * 256 * 512 / 8) < made["bytes"] < 256 * 512 * 1.2
        assert library.time(spec["name"], 2, 1, False, 0.0) > 0


@pytest.mark.parametrize("group_size", [32, 128])
def test_kleidi_computes_the_product(peers, group_size):
    # Only timed on Arm, but torch can compute it everywhere.
    problem = peers("peers.contender").Problem.make(256, 512, 8)
    runner = peers("peers.torch_peers").kleidi_contender(group_size).make(problem, lambda size: 1, [1])
    for m, output in ((1, runner.one(1, 1)), (8, runner.all(8, 1))):
        assert 0.05 < problem.relative_error(m, output) < 0.2


def test_wrong_results_are_reported(peers):
    report = peers("compare_report")
    specs = [
        {"name": str(error), "bits": 4, "error_limit": None, "relative_error": error} for error in (0.1, 0.5, math.nan, None)
    ]
    assert [line.split(":")[0] for line in report.wrong({"contenders": specs})] == ["0.5", "nan"]
    problem = peers("peers.contender").Problem.make(512, 256, 4)
    right = problem.x[:4] @ np.tile(problem.rows, (2, 1)).T
    assert problem.relative_error(4, right) < 1e-6
    assert problem.relative_error(4, np.roll(right, 1, axis=1)) > 1
    assert math.isnan(problem.relative_error(4, right * math.nan))
    with pytest.raises(ValueError, match=r"shape \[4, 256\]; expected \[4, 512\]"):
        problem.relative_error(4, right[:, :256])


def test_a_library_that_dies_is_reported(peers, monkeypatch, tmp_path):
    (tmp_path / "dying_peers.py").write_text(
        "import os, signal\n"
        "from peers.contender import Contender, Spec\n"
        "def make(problem, copies, threads):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def contenders():\n"
        "    return [Contender(Spec('dies', 'none', 8, None, ''), make)], [], {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    compare = peers("compare")
    process = compare.Process("dying_peers", [1])
    assert [spec["name"] for spec in process.description["specs"]] == ["dies"]
    for _ in range(2):  # the second call finds the process dead
        with pytest.raises(compare.Failed, match="ended by signal 9"):
            process.call(60, "prepare", "dies", 256, 256, 8, 1)
    process.end()


DYING = """
import os, signal
import numpy as np
from peers.contender import Contender, Runner, Spec
class Product(Runner):
    def __init__(self, problem, copies, dies_at):
        self.problem, self.dies_at, self.bytes = problem, dies_at, 4 * problem.n * problem.k
        copies(self.bytes)
    def one(self, m, threads):
        if m == self.dies_at:
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.problem.x[:m] @ self.problem.repeat(self.problem.rows).T
    all = one
def contender(name, dies_at=0):
    make = lambda problem, copies, threads: Product(problem, copies, dies_at)
    return Contender(Spec(name, "none", 32, None, ""), make)
def contenders():
    return [contender("first"), contender("dies when prepared", 8), contender("dies when timed", 128),
            contender("last")], [], {}
"""


def test_a_contender_that_dies_leaves_the_others(peers, monkeypatch, tmp_path):
    (tmp_path / "dying_contenders.py").write_text(DYING)
    monkeypatch.syspath_prepend(str(tmp_path))
    compare = peers("compare")
    monkeypatch.setattr(compare, "MODULES", {"torch": "dying_contenders"})
    monkeypatch.setattr(sys, "argv", ["compare.py", "--roofs", sys.executable, "--quick", "--threads", "1"])
    comparison = compare.Comparison(compare.parse())
    comparison.start()
    comparison.roofs = types.SimpleNamespace(read_gbs=lambda threads: 1.0, end=lambda: None)
    names = ["first", "dies when prepared", "dies when timed", "last"]
    for n in (64, 96):
        comparison.run(compare.Section(f"{n} x 64", n, 64, (1, 128), {1: 2, 128: 2}, names))
    comparison.end()
    samples = {(name, n, m): len(found) for (_, name, n, _, m, _), found in comparison.samples.items()}
    whole = {(name, n, m): 2 for name in ("first", "last") for n in (64, 96) for m in (1, 128)}
    assert samples == whole | {("dies when timed", 64, 1): 1}  # in the first round
    reason = "its process ended by signal 11"
    assert comparison.results["absent"] == [
        {"name": "dies when prepared, 64 x 64", "reason": reason},
        {"name": "dies when timed, 64 x 64, 128 rows", "reason": reason},
    ]


TILE_CONFIG = """0000000000001000 <multiply>:
    1000:\tvpxor  %xmm0,%xmm0,%xmm0
    1004:\tvmovdqa64 %zmm0,0xc0(%rsp)
    1008:\tmovb   $0x1,0xc0(%rsp)
{stores}    1010:\tldtilecfg 0xc0(%rsp)
"""


@pytest.mark.parametrize(
    "stores, is_whole",
    [
        ("", False),  # GCC 12's
        ("    100c:\tmov    %rdx,0x80(%rsp)\n", False),
        ("    100c:\tmov    %rdx,0xf0(%rsp)\n", True),
        ("    100a:\tvmovdqa 0x0(%rip),%xmm0        # 1 <x>\n    100c:\tvmovdqa %xmm0,0xf0(%rsp)\n", True),
        ("    100c:\tmovw   $0x808,0xf0(%rsp)\n", True),
    ],
)
def test_an_unwritten_tile_configuration_is_detected(stores, is_whole):
    process = subprocess.run(
        [sys.executable, BENCH.parent / "scripts" / "check_tile_config.py", "library.so"],
        input=TILE_CONFIG.format(stores=stores), capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == (0 if is_whole else 1), process.stderr
    assert is_whole == ("library.so: multiply loads an AMX tile configuration" not in process.stderr)


@pytest.mark.more
def test_an_interrupted_run_keeps_its_results(roofs, tmp_path):
    output = tmp_path / "compare"
    command = [
        sys.executable,
        BENCH / "compare.py",
        "--quick",
        "--rounds",
        "1000000",
        "--roofs",
        roofs,
        "--output",
        output,
        "--threads",
        "1",
        "--libraries",
        "torch",
        "--shapes",
        "256x256",
    ]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "round 3 of" in line:
                process.terminate()
                break
        printed, errors = process.communicate(timeout=300)
    assert process.returncode == 1 and "interrupted" in printed, errors
    results = json.loads(output.with_suffix(".json").read_text())
    assert not results["complete"] and "**Not complete" in output.with_suffix(".md").read_text()
    found = {row["contender"]: row for row in results["results"] if row["m"] == 1}
    assert len(found["lowbit 4 bits g32"]["samples"]) >= 2 and found["torch float32"]["seconds"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--libraries", "ggml"), "must include torch"),
        (("--libraries", "torch,nothing"), "unknown libraries: nothing"),
        (("--shapes", "100x256"), "--shapes"),
        (("--rounds", "0"), "must be 1 or more"),
        (("--roofs", "nowhere/roofs"), "nowhere/roofs does not exist"),
    ],
)
def test_wrong_options(peers, roofs, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", list(map(str, ["compare.py", "--roofs", roofs, *arguments])))
    with pytest.raises(SystemExit) as end:
        peers("compare").main()
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_roofs_refuses_nonsense(roofs):
    for arguments in (["x"], ["0"], ["--mebibytes"]):
        process = subprocess.run([roofs, *arguments], check=False, capture_output=True, text=True, timeout=60)
        assert process.returncode == 2 and "expected" in process.stderr


def test_a_run_replaces_the_part_of_its_own_kind_of_cpu(peers, finished, tmp_path, monkeypatch):
    report = peers("compare_report")
    monkeypatch.setattr(report, "draw", lambda results, path: path.write_bytes(PNG_SIGNATURE))
    runs = []
    for cpu, date in (("Xeon Q", "2001"), ("EPYC P", "2002"), ("Xeon Q", "2003")):
        machine = finished[2]["machine"] | {"cpu": cpu, "isa": {"cpu": ["portable", "x"], "active": ["x"], "cap": None}}
        runs.append(finished[2] | {"machine": machine, "date": date})
    first, second, third = (report.write_document(results, tmp_path / "bench") for results in runs)
    assert [path.name for path in first] == ["bench.json", "bench.md", "bench_xeon_q_x.png"]
    assert second[2].name == "bench_epyc_p_x.png" and third == first and first[2].exists() and second[2].exists()
    kinds = json.loads((tmp_path / "bench.json").read_text())
    assert {kind: results["date"] for kind, results in kinds.items()} == {"EPYC P, x": "2002", "Xeon Q, x": "2003"}
    text = (tmp_path / "bench.md").read_text()
    assert text == report.document(kinds)
    assert [line for line in text.splitlines() if line.startswith(("# ", "## "))] == [
        "# Speed of layers",
        "## EPYC P, x",
        "## Xeon Q, x",
    ]
    assert text.count("2001") == 0 and text.count("### Roofs") == 2


def test_the_committed_document_is_that_of_its_data(peers):
    docs = BENCH.parent / "docs"
    kinds = json.loads((docs / "bench.json").read_text(encoding="utf-8"))
    assert (docs / "bench.md").read_text(encoding="utf-8") == peers("compare_report").document(kinds)
