"""`lowbit bench --publish`: measurements, the pages of docs/perf, and refusals."""

import copy
import json
import os
import sys
from pathlib import Path

import lowbit
import pytest
import torch
from command_line import ROOT, document, error, invoke
from lowbit.machine.child import result_of
from lowbit.machine.memory import ReadBandwidth
from lowbit.tools import perf
from lowbit.tools.perf import energy, machine_facts, measure_speed, speed_page, start_cost
from lowbit.tools.perf.start_cost import until_first_output

pytestmark = pytest.mark.first
PAGES = ROOT / "docs" / "perf"
PUBLISHED = sorted(PAGES.glob("*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=[path.stem for path in PUBLISHED])
def test_published_pages_agree_with_their_figures(path):
    figures = json.loads(path.read_text(encoding="utf-8"))
    speed_page.check(figures)
    assert speed_page.name_of(figures) == path.stem
    assert speed_page.render(figures) == path.with_suffix(".md").read_text(encoding="utf-8")
    assert [row["bits"] for row in figures["kernels"]["widths"] if row["threads"] == 1] == list(range(1, 9))


def test_each_page_has_figures_and_a_place_in_the_navigation():
    assert PUBLISHED
    pages = {path.stem for path in PAGES.glob("*.md")} - {"README"}
    assert pages == {path.stem for path in PUBLISHED}
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in ("README", *pages):
        assert f" perf/{name}.md\n" in text


@pytest.fixture(scope="module")
def tiny():
    """A shape of a few kilobytes, and small layers."""
    from lowbit.llm import shapes

    with pytest.MonkeyPatch.context() as patch:
        kind, arguments = shapes._SHAPES["qwen3-0.6b"]
        sizes = {
            "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        patch.setitem(shapes._SHAPES, "tiny", (kind, arguments | sizes))
        patch.setattr(measure_speed, "_LAYER", (128, 96))
        patch.setattr(measure_speed, "_COPIES", 1 << 20)
        patch.setattr(measure_speed, "cache_bytes", lambda: None)
        patch.setattr(measure_speed, "_bandwidth", lambda: ReadBandwidth(4 << 20))
        patch.setattr(measure_speed, "_ROUNDS", 2)
        patch.setattr(measure_speed, "_PROMPT", 20)
        patch.setattr(measure_speed, "_NEW", 4)
        patch.setattr(measure_speed, "_STARTS", 1)
        patch.setattr(measure_speed, "_START_SECONDS", 1e9)
        threads = torch.get_num_threads()
        yield "tiny"
        torch.set_num_threads(threads)


def in_this_process(module, part, threads, budget, **_):
    """Replaces ``result_of``, because patches only work in this process."""
    arguments = int(threads), float(budget)
    try:
        return (measure_speed.kernels(*arguments) if part == "kernels" else measure_speed.model(part, *arguments)), ""
    except (measure_speed.NotReached, ValueError) as error:
        return None, str(error)


@pytest.fixture(scope="module")
def figures(tiny):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perf, "result_of", in_this_process)
        patch.setenv("PATH", "")
        parts = []
        result = perf.figures(2, 60.0, (tiny, "none"), parts.append)
        assert parts == ["kernels", "tiny", "none"]
        return result


def test_figures(figures):
    speed_page.check(figures)
    assert json.loads(json.dumps(figures)) == figures
    kernels = figures["kernels"]
    assert [(row["bits"], row["threads"]) for row in kernels["widths"]] == [(bits, n) for bits in range(1, 9) for n in (1, 2)]
    assert [roof["threads"] for roof in kernels["read_bandwidth"]] == [1, 2]
    for row in kernels["widths"]:
        packed = measure_speed._packed(row["bits"]).numel()
        assert row["gemv_gops"] / row["gemv_bytes_per_second"] == pytest.approx(2e-9 * 128 * 96 / packed)
        assert set(row["isas"]) <= set(figures["isa"]["active"])
    (model,) = figures["models"]
    (program,) = model["programs"]
    assert (model["shape"], model["prompt"], model["new"], program["version"]) == ("tiny", 20, 4, lowbit.__version__)
    assert program["program"] == "lowbit, eager" and program["bandwidth_share"] > 0
    assert model["start"] is None
    assert (model["joules_per_token"] is None) == (model["energy_counter"] is None) == bool(energy.sensors()[1])
    why = {each["what"]: each["why"] for each in figures["not_reached"]}
    assert why["llama.cpp"] == "its program llama-bench is not in PATH"
    assert why["none"].startswith("there is no shape 'none'")
    assert why["start of lowbit generate with tiny"].endswith("s were left; it may need 1000000000")
    absent = {row["isa"] for row in lowbit.kernels() if not row["supported"]}
    assert {what.removeprefix("kernels for ") for what in why if what.startswith("kernels for ")} == absent
    assert figures["versions"]["torch"] == torch.__version__ and figures["versions"]["compiler"].split()[0] in ("GCC", "Clang")


def test_the_page_shows_the_figures(figures):
    figures = copy.deepcopy(figures)
    figures["load"] |= {"busy": False, "before": 0.25}
    figures["machine"] |= {"cpu": "A|B <CPU>", "board": None, "cpus_allowed": 3}
    figures["isa"]["active"] = ["portable", "neon"]
    figures["kernels"]["widths"][0] |= {"gemv_bytes_per_second": 12.345e9, "gemv_share": 0.987, "gemm_gops": 1234.5}
    figures["models"][0]["programs"][0] |= {"prefill_tokens_per_second": 54.321, "decode_tokens_per_second": 0.0567}
    figures["models"][0] |= {"joules_per_token": 1.2345, "energy_counter": "RAPL package-0"}
    figures["models"][0]["start"] = {"seconds": 1.234, "cpu_seconds": 0.987, "memory_bytes": 180e6}
    text = speed_page.render(figures)
    assert speed_page.name_of(figures) == "a_b_cpu_neon_3_cpus"
    assert text.startswith("# A\\|B \\<CPU\\>, neon, 3 CPUs\n")
    assert "| 1 | 12.3 | 99 % |" in text and "| 1234 |" in text
    assert f"| lowbit, eager ({lowbit.__version__}) | 54.3 | 0.0567 |" in text
    assert "* none: there is no shape" in text
    assert "the first token after 1.23 s, with 0.987 s of CPU time and 180 MB of memory" in text
    assert "Energy: 1.23 J per token in decode (RAPL package-0)." in text
    assert "busy" not in text and "average 0.25 before" in text
    figures["load"]["busy"] = True
    assert "**The machine was busy with other work meanwhile**" in speed_page.render(figures)
    figures |= {"kernels": None, "models": []}
    speed_page.check(figures)
    text = speed_page.render(figures)
    assert "## Kernels" not in text and "## Models" not in text and "## Not reached" in text
    figures["machine"]["board"] = "Board 5 Rev 1.0"
    assert speed_page.name_of(figures) == "board_5_rev_1_0_neon_3_cpus"


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("schema",), 1, "figures.schema is 1; expected 2"),
        (("date",), 3, "figures.date is 3; expected str"),
        (("load", "busy"), 1, "figures.load.busy is 1; expected bool"),
        (("threads",), True, "figures.threads is True; expected int"),
        (("machine", "cpus"), 2.5, r"figures.machine.cpus is 2.5; expected int"),
        (("models", 0, "read_bandwidth"), float("inf"), r"figures.models\[0\].read_bandwidth is inf; expected a finite number"),
        (("kernels", "widths", 3, "gemm_gops"), -1.0, r"figures.kernels.widths\[3\].gemm_gops is -1.0; expected a finite"),
        (("not_reached",), {}, r"figures.not_reached is {}; expected a list"),
        (("isa",), {"active": []}, "figures.isa has active; expected the keys absent, active, cap"),
        (("isa", "more"), 1, "figures.isa has absent, active, cap, more; expected the keys absent, active, cap"),
        (("versions",), None, "figures.versions has None; expected the keys compiler"),
    ],
)  # fmt: skip
def test_invalid_figures(figures, path, value, message):
    wrong = copy.deepcopy(figures)
    *way, last = path
    at = wrong
    for step in way:
        at = at[step]
    at[last] = value
    with pytest.raises(ValueError, match=message):
        speed_page.check(wrong)


# A fake llama-bench that checks the file and returns results for the requested tests.
PEER = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
file = open(options["-m"], "rb").read(4096)
assert file.startswith(b"GGUF") and b"tokenizer.ggml.model" in file and b"tokenizer.ggml.tokens" not in file
assert (options["-t"], options["-r"], options["-o"]) == ("1", "1", "json")
about = {{"build_number": 77, "build_commit": "abc"}}
print(json.dumps([
    about | {{"n_prompt": int(options["-p"]), "n_gen": 0, "avg_ts": 100.0}},
    about | {{"n_prompt": 0, "n_gen": int(options["-n"]), "avg_ts": 10.0}},
]))
"""


def put_peer(directory: Path, text: str) -> None:
    (directory / "llama-bench").write_text(text)
    (directory / "llama-bench").chmod(0o755)


def test_compared_with_llama_cpp(tiny, tmp_path, monkeypatch):
    put_peer(tmp_path, PEER.format(python=sys.executable))
    monkeypatch.setenv("PATH", str(tmp_path))
    said = measure_speed.model(tiny, 1, 60.0)
    # Few machines have a counter, and the budget is too short for the start.
    assert {each["what"] for each in said["not_reached"]} <= {"energy", "start of lowbit generate with tiny"}
    ours, theirs = said["programs"]
    assert ours["program"] == "lowbit, eager"
    assert theirs == {
        "program": "llama.cpp, Q4_0", "version": "build 77 (abc)", "bandwidth_share": None,
        "prefill_tokens_per_second": 100.0, "decode_tokens_per_second": 10.0,
    }  # fmt: skip
    put_peer(tmp_path, "#!/bin/sh\nexec /bin/sleep 60\n")
    with pytest.raises(measure_speed.NotReached, match="llama-bench was not done after 1 s, all of the time that was left"):
        measure_speed._run_peer(str(tmp_path / "llama-bench"), tmp_path / "model.gguf", 1, 0.1)
    for text, why in (
        ("#!/bin/sh\necho error: no backend >&2\nexit 1\n", "llama-bench failed: error: no backend"),
        ("#!/bin/sh\necho []\n", "llama-bench printed other figures than its JSON of two tests: []"),
    ):
        put_peer(tmp_path, text)
        said = measure_speed.model(tiny, 1, 60.0)
        assert [program["program"] for program in said["programs"]] == ["lowbit, eager"]
        assert {"what": "tiny in llama.cpp, Q4_0", "why": why} in said["not_reached"]


def test_a_model_that_does_not_fit(tiny, monkeypatch):
    monkeypatch.setattr(measure_speed, "free_memory", lambda: 10_000_000)
    with pytest.raises(measure_speed.NotReached, match="it needs about 700 MB of memory, and 10.0 MB are free"):
        measure_speed.model(tiny, 1, 60.0)


def test_failed_measurements_have_a_reason(tmp_path):
    document, reason = result_of("lowbit.tools.perf.measure_speed", "gpt-5", "1", "5", seconds=120)
    assert document is None and "there is no shape 'gpt-5'" in reason
    document, reason = result_of("lowbit.tools.perf.measure_speed", "kernels", "1", "5", seconds=0.01)
    assert document is None and reason == "it was not done after 0.01 seconds"


def test_rounds_end_with_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measure_speed.time, "perf_counter", lambda: now[0])
    clock = measure_speed.Clock(10.0)
    now[0] = 4.0
    clock.start_rounds()
    assert clock.again(0)
    now[0] = 6.9
    assert clock.again(1)  # 2.9 seconds each
    now[0] = 7.1
    assert not clock.again(1)
    now[0] = 99.0
    assert clock.again(0)  # one round in any case


@pytest.mark.parametrize(
    "load, seconds, busy",
    [
        (0.1, (0.0, 0.0), False),
        (3.0, (0.0, 0.0), True),
        (0.1, (1000.0, 0.0), True),
        (0.1, (0.0, 1000.0), True),
        (None, None, False),
    ],
)
def test_whether_others_were_busy(monkeypatch, load, seconds, busy):
    measured = iter([(0.0, 0.0), seconds] if seconds else [None, None])
    monkeypatch.setattr(machine_facts, "_system_seconds", lambda: next(measured))
    monkeypatch.setattr(machine_facts, "_load", lambda: load)
    with machine_facts.watched() as found:
        pass
    assert found["busy"] is busy and found["before"] == load
    assert (found["others_cpus"] is None) == (seconds is None)


def test_publish(figures, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(perf, "figures", lambda threads, progress: asked.append(threads) or copy.deepcopy(figures))
    monkeypatch.chdir(tmp_path)
    said = document(invoke("bench", "--publish", "--threads", 2, "--json"))  # docs/perf, the default
    assert asked == [2]
    name = speed_page.name_of(figures)
    assert said == {
        "page": f"docs/perf/{name}.md", "figures": f"docs/perf/{name}.json", "busy": figures["load"]["busy"],
        "not_reached": figures["not_reached"],
    }  # fmt: skip
    assert json.loads(Path(said["figures"]).read_text()) == figures
    assert Path(said["page"]).read_text() == speed_page.render(figures)
    figures = figures | {"date": "2030-01-01"}
    result = invoke("bench", "--publish", "docs/perf")
    assert f"written: docs/perf/{name}.md, docs/perf/{name}.json" in result.stdout
    assert "on 2030-01-01" in Path(said["page"]).read_text()  # replaces the page of the same machine
    assert sorted(os.listdir("docs/perf")) == [f"{name}.json", f"{name}.md"]
    (tmp_path / "file").touch()
    before = len(asked)
    assert "file is a file; expected a directory" in error(invoke("bench", "--publish", "file"))
    assert "cannot be written" in error(invoke("bench", "--publish", "/proc"))
    assert len(asked) == before  # detected before anything is measured


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("qwen3-0.6b", "--publish"), "'qwen3-0.6b'; --publish measures models of its own"),
        (("--publish", "x", "--bits", 3), "--bits: it has no effect with --publish"),
        (("--publish", "--mode", "eager"), "--mode: it has no effect with --publish"),
        (("--publish", "--rounds", 1), "--rounds: it has no effect with --publish"),
        ((), "expected a model or a shape, or --publish"),
    ],
)
def test_publish_with_invalid_options(arguments, said):
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert not Path("x").exists()


def put(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


RAPL = {
    "powercap/intel-rapl/enabled": 1,
    "powercap/intel-rapl:0/name": "package-0", "powercap/intel-rapl:0/energy_uj": 900_000,
    "powercap/intel-rapl:0/max_energy_range_uj": 999_999,
    "powercap/intel-rapl:0:0/name": "core", "powercap/intel-rapl:0:0/energy_uj": 5,
    "powercap/intel-rapl:0:1/name": "dram", "powercap/intel-rapl:0:1/energy_uj": 100,
    "powercap/intel-rapl:0:1/max_energy_range_uj": 999_999,
    "powercap/intel-rapl:1/name": "psys", "powercap/intel-rapl:1/energy_uj": 7,
}  # fmt: skip
GPU = {"hwmon/hwmon0/name": "amdgpu", "hwmon/hwmon0/power1_average": 30_000_000}
AMD = {
    "hwmon/hwmon1/name": "amd_energy",
    "hwmon/hwmon1/energy1_label": "Ecore000", "hwmon/hwmon1/energy1_input": 3,
    "hwmon/hwmon1/energy9_label": "Esocket0", "hwmon/hwmon1/energy9_input": 5_000_000,
}  # fmt: skip
BOARD = {
    "hwmon/hwmon2/name": "ina3221",
    "hwmon/hwmon2/power1_label": "VDD_CPU", "hwmon/hwmon2/power1_input": 1_000_000,
    "hwmon/hwmon2/power2_label": "VDD_IN", "hwmon/hwmon2/power2_input": 4_000_000,
}  # fmt: skip


@pytest.mark.parametrize(
    "files, names",
    [
        (RAPL | AMD | GPU, ["RAPL package-0", "RAPL dram"]),
        (AMD | GPU | BOARD, ["amd_energy Esocket0"]),
        (GPU | BOARD, ["ina3221 VDD_IN"]),
        ({"hwmon/hwmon2/name": "ina219", "hwmon/hwmon2/power1_input": 2_000_000}, ["ina219"]),
    ],
)
def test_energy_sensors(tmp_path, files, names):
    put(tmp_path, files)
    found, reason = energy.sensors(tmp_path)
    assert ([sensor.name for sensor in found], reason) == (names, "")


def test_energy_of_counters(tmp_path):
    put(tmp_path, RAPL)
    with energy.Meter(energy.sensors(tmp_path)[0]) as meter:
        put(tmp_path, {"powercap/intel-rapl:0/energy_uj": 400_000, "powercap/intel-rapl:0:1/energy_uj": 300_100})
    assert meter.joules == 0.5 + 0.3  # the package's counter has begun again


def test_energy_of_power(tmp_path, monkeypatch):
    """Power is added up over the time of the samples, here a second each."""
    put(tmp_path, BOARD)
    seconds = iter(range(100))
    monkeypatch.setattr(energy.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(energy, "_SAMPLE_SECONDS", 0.001)
    with energy.Meter(energy.sensors(tmp_path)[0]) as meter:
        pass
    assert meter.joules == 4.0 * (next(seconds) - 1)


@pytest.mark.parametrize(
    "files, why",
    [
        ({}, "this machine has no counter of energy and no power sensor that is known"),
        (GPU, "this machine has no counter of energy"),
        (RAPL | {"powercap/intel-rapl:0:1/energy_uj": "none"}, "RAPL package-0 cannot be read"),
    ],
)
def test_no_energy(tmp_path, files, why):
    put(tmp_path, files)
    found, reason = energy.sensors(tmp_path)
    assert not found and reason.startswith(why)


def test_a_counter_for_root_only(tmp_path, monkeypatch):
    def denied(sensor):
        raise PermissionError

    put(tmp_path, RAPL)
    monkeypatch.setattr(energy.Sensor, "read", denied)
    assert energy.sensors(tmp_path) == ([], "RAPL package-0 can only be read by root")


@pytest.mark.more
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="by /proc")
def test_the_start_of_generate(tiny, tmp_path, monkeypatch):
    from lowbit.llm import random_model

    monkeypatch.setattr(measure_speed, "_START_SECONDS", 1.0)
    with pytest.raises(measure_speed.NotReached, match="LOWBIT_PLAN is 0, which switches plans off"):
        measure_speed._start(torch.nn.Module(), 96, tmp_path / "model", 1, measure_speed.Clock(3600.0))
    monkeypatch.setenv("LOWBIT_PLAN", "1")  # conftest.py has 0
    weights = random_model(tiny, lowbit.LinearConfig(4, 32), lowbit.EmbeddingConfig(4, 32))
    cost = measure_speed._start(weights, 96, tmp_path / "model", 1, measure_speed.Clock(3600.0))
    assert cost.keys() == {"seconds", "cpu_seconds", "memory_bytes"} and min(cost.values()) > 0
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(RuntimeError, match="wrote nothing: "):
        until_first_output([sys.executable, "-c", start_cost.LOWBIT, "generate", str(tmp_path / "model"), "--prompt", "1"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="by /proc")
def test_cost_until_the_first_output():
    program = "import sys, time; x = b'x' * 50_000_000; sys.stdout.write('a'); sys.stdout.flush(); time.sleep(600)"
    cost = until_first_output([sys.executable, "-c", program])
    assert cost.keys() == {"seconds", "cpu_seconds", "memory_bytes"} and cost["memory_bytes"] > 50_000_000
    with pytest.raises(RuntimeError, match="wrote nothing: .*no module of this name"):
        until_first_output([sys.executable, "-c", "raise SystemExit('no module of this name')"])
